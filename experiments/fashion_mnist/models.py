"""The models: a CNN, a small ViT, and a linear model on scattering features. Opacus and dpoptim train the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


def cnn() -> nn.Module:
    """Return two convolutions with group norm and tanh, and a hidden layer; 26,106 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.GroupNorm(4, 16), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.GroupNorm(8, 32), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Block(nn.Module):
    """Attention and a feed-forward layer, with norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.into(self.norm1(hidden)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.narrow(F.gelu(self.wide(self.norm2(hidden))))


class ViT(nn.Module):
    """Patches of 4 × 4, two blocks, and the mean over patches. Positions are an embedding, which Opacus supports."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(16, width)
        self.places = nn.Embedding(49, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.patches(F.unfold(pixels, 4, stride=4).transpose(1, 2))
        places = torch.arange(49, device=pixels.device).repeat(len(pixels), 1)  # Opacus's ghost clipping needs copies
        return self.head(self.norm(self.blocks(hidden + self.places(places))).mean(1))


def linear() -> nn.Module:
    """Return a linear model of 81 × 49 features."""
    return nn.Linear(81 * 49, CLASSES)


SCALES, ANGLES, SIZE, KEPT = 2, 8, 32, 7  # of the wavelets; images are padded to 32 × 32, and 7 × 7 places are kept


def scattering(pixels: Tensor) -> Tensor:
    """Return the scattering features of images [images, 1, 28, 28]: [images, 81 · 49], normalised by image.

    Order 0 is the blurred image, order 1 the blurred modulus of its wavelet transform, and order 2 that of the modulus
    at a coarser scale. Nothing is learned, so nothing is spent.
    """
    wavelets, blur = _filters(pixels.device.type)
    padded = F.pad(pixels[:, 0], (2, 2, 2, 2), mode="reflect")

    def transformed(signals: Tensor, scale: int) -> Tensor:
        """The modulus of the wavelet transform at all angles, with one more axis before the last two."""
        return torch.fft.ifft2(torch.fft.fft2(signals).unsqueeze(-3) * wavelets[scale]).abs()

    first = [transformed(padded, scale) for scale in range(SCALES)]
    second = [
        transformed(first[scale], coarser).flatten(1, 2)
        for scale in range(SCALES) for coarser in range(scale + 1, SCALES)
    ]  # fmt: skip
    every = [padded[:, None], *first, *second]
    return F.group_norm(torch.cat([blur @ signals @ blur.T for signals in every], 1), 27).flatten(1)


@lru_cache
def _filters(device: str) -> tuple[Tensor, Tensor]:
    """Morlet wavelets [scales, angles, SIZE, SIZE] as Fourier transforms, and a Gaussian blur [KEPT, SIZE]."""
    axis = torch.fft.fftfreq(SIZE, 1 / SIZE, dtype=torch.float64)
    down, right = torch.meshgrid(axis, axis, indexing="ij")

    def morlet(scale: int, angle: float) -> Tensor:
        width, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / ANGLES
        along, across = (math.cos(angle) * x + math.sin(angle) * y for x, y in ((right, down), (down, -right)))
        window = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
        wave = window * torch.exp(1j * frequency * along)
        return torch.fft.fft2(wave - window * (wave.sum() / window.sum())) / window.sum()  # a wavelet's sum is 0

    wavelets = torch.stack(
        [torch.stack([morlet(scale, math.pi * k / ANGLES) for k in range(ANGLES)]) for scale in range(SCALES)]
    )
    places = (SIZE - 1) / 2 + 4 * (torch.arange(KEPT) - (KEPT - 1) / 2)
    distances = places[:, None] - torch.arange(SIZE)
    blur = torch.exp(-((distances / (0.8 * 2 ** (SCALES - 1))) ** 2) / 2)
    return wavelets.to(device, torch.complex64), (blur / blur.sum(1, keepdim=True)).to(device)


@dataclass(frozen=True)
class Model:
    """A model and what it reads."""

    label: str
    make: Callable[[], nn.Module]
    features: Callable[[Tensor], Tensor] = lambda pixels: pixels


MODELS = {
    "cnn": Model("CNN with group norm and tanh", cnn),
    "vit": Model("small ViT", ViT),
    "scattering": Model("scattering features and a linear model", linear, scattering),
}
