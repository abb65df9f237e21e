"""Two small models for data without a pretrained one: "mlp" for rows of numbers, "small-cnn" for images."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

_WIDTHS = (128, 64)
_CHANNELS = (32, 64, 128)
CNN_IMAGE_SIZE = 32


class MLP(nn.Sequential):
    """Linear layers of 128 and 64 with ReLU between them, then one to the labels; takes [examples, columns].

    >>> sum(p.numel() for p in MLP(columns=4, num_labels=3).parameters())
    9091
    """

    def __init__(self, *, columns: int, num_labels: int) -> None:
        layers: list[nn.Module] = []
        for entering, leaving in zip((columns, *_WIDTHS), _WIDTHS, strict=False):
            layers += [nn.Linear(entering, leaving), nn.ReLU()]
        super().__init__(*layers, nn.Linear(_WIDTHS[-1], num_labels))


class SmallCNN(nn.Module):
    """Three 3×3 convolutions (32, 64, 128 channels) with GroupNorm and ReLU, each halved; their mean is classified.

    Takes `pixel_values` [examples, 3, height, width] of any size from 8 up. GroupNorm looks at one example alone, where
    BatchNorm would mix them.

    >>> import torch
    >>> SmallCNN(num_labels=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, *, num_labels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for entering, leaving in zip((3, *_CHANNELS), _CHANNELS, strict=False):
            layers += [
                nn.Conv2d(entering, leaving, 3, padding=1),
                nn.GroupNorm(8, leaving),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(_CHANNELS[-1], num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(pixel_values).mean((2, 3))))
