"""Fashion-MNIST: read its files, split it, and keep what a model reads on the device."""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.fashion_mnist.models import MODELS
from experiments.framework import MissingInput

PACKAGE = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package puts the files."""
SYNTHETIC = "synthetic"
"""In place of a folder: made-up images."""
VALIDATION = 10_000
"""The search scores on the last 10,000 training images and trains on some of the others."""


class Images(NamedTuple):
    """What a model reads, with labels, on the device: training examples and those that are scored."""

    train: Tensor
    train_labels: Tensor
    scored: Tensor
    scored_labels: Tensor

    def batch(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """The training examples of these rows."""
        chosen = torch.tensor(rows, device=self.train.device)
        return self.train[chosen], self.train_labels[chosen]


class Rows(torch.utils.data.Dataset[int]):
    """The numbers 0 … count − 1, a batch at a time, because the images are already on the device."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


@lru_cache(maxsize=2)
def images_for(model: str, folder: str, device: str, *, num_examples: int, test: bool) -> Images:
    """The first `num_examples` training images, and the test images or else those for validation."""
    read = _synthetic if folder == SYNTHETIC else _read
    pixels, labels = read(folder, "train")
    scored, scored_labels = read(folder, "t10k") if test else (pixels[-VALIDATION:], labels[-VALIDATION:])

    def prepared(part: Tensor) -> Tensor:
        scaled = part.to(device).float()[:, None] / 127.5 - 1  # by no statistic of the data
        return torch.cat([MODELS[model].features(each) for each in scaled.split(1000)])

    first, first_labels = pixels[:num_examples], labels[:num_examples]
    return Images(prepared(first), first_labels.to(device), prepared(scored), scored_labels.to(device))


def check(folder: str) -> None:
    """Raise MissingInput if a file is missing."""
    missing = [name for part in ("train", "t10k") for name in _names(part) if not (Path(folder) / name).is_file()]
    if missing and folder != SYNTHETIC:
        raise MissingInput(
            f"fashion_mnist: {folder} has no {missing[0]}. Run `apt-get install dataset-fashion-mnist`, or give the "
            "folder of the four files with --data."
        )


def _names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"


def _read(folder: str, part: str) -> tuple[Tensor, Tensor]:
    """Pixels [images, 28, 28] and labels [images] of "train" or "t10k"."""
    pixels, labels = (read_idx(Path(folder) / name) for name in _names(part))
    return pixels, labels.long()


def read_idx(path: Path) -> Tensor:
    """Read an idx file of bytes: 0, 0, 8, the number of axes, their lengths in 4 bytes each, and the values."""
    content = gzip.decompress(path.read_bytes())
    lengths = np.frombuffer(content, ">i4", content[3], offset=4)
    if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * len(lengths) + lengths.prod():
        raise ValueError(f"{path} is not a whole idx file of bytes; copy it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * len(lengths)).reshape(lengths).copy())


def _synthetic(folder: str, part: str) -> tuple[Tensor, Tensor]:
    """200 noisy images, in which row 2k is bright if the class is k."""
    labels = torch.arange(200) % 10
    pixels = torch.randint(0, 100, (200, 28, 28), generator=torch.Generator().manual_seed(len(part)))
    pixels[torch.arange(200), 2 * labels] += 150
    return pixels.to(torch.uint8), labels
