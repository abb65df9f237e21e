"""`ViTEmbeddings`: a class token before the patches, plus positions, both parameters of the module itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpoptim.clipping.layers.generic import PerExampleCopy, generic
from dpoptim.clipping.layers.rule import GradientSink


def vit_embeddings(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for unmasked images of the configured size; others use the generic rule."""
    pixels: Any = args[0] if args else kwargs.get("pixel_values")
    options = [*args[1:], *(value for key, value in kwargs.items() if key != "pixel_values")]
    fits = isinstance(pixels, Tensor) and tuple(pixels.shape[-2:]) == tuple(module.image_size)
    if not fits or any(option is not None and option is not False for option in options):
        return generic(sink, name, module, args, kwargs)
    pixels = sink.expand_to_batch(pixels, name)
    patches, record = module.patch_embeddings(pixels), sink.recorder()

    def copies(parameter: Tensor) -> Tensor:
        if not parameter.requires_grad:
            return parameter.expand(pixels.shape[0], -1, -1)
        return PerExampleCopy.apply(parameter, pixels.shape[0], record).squeeze(1)

    tokens = torch.cat([copies(module.cls_token), patches], dim=1)
    return module.dropout(tokens + copies(module.position_embeddings))
