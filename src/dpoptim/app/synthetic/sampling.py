"""Sample the continuations of prompts, each a function of (seed, row, prompt)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.integrations.chats import stop_ids
from dpoptim.integrations.optional import require

_COLD = 1e-6  # temperatures below take the most probable token, as 0 does: they would overflow
_RANKED = 1024  # tokens that are ranked first; a full sort of the vocabulary takes several times as long


def uniforms(seed: int, row: int, count: int) -> np.ndarray:
    """The random numbers of a row, one per token; a larger count only adds to them."""
    key = np.array([seed % 2**64, row], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """One token per row, [rows, 1], by inverting the distribution function at a uniform number, [rows, 1].

    `top_p` keeps the most probable tokens that together have this probability; temperature 0 takes the most probable.
    """
    if temperature < _COLD:
        return logits.argmax(-1, keepdim=True)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        probabilities = probabilities.where(probabilities >= _least_kept(probabilities, top_p), 0.0)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)


def _least_kept(probabilities: Tensor, top_p: float) -> Tensor:
    """The least of the largest probabilities that together reach `top_p`, [rows, 1]."""
    ranked = probabilities.topk(min(_RANKED, probabilities.shape[-1])).values
    if bool((ranked.sum(-1) < top_p).any()):
        ranked = probabilities.sort(dim=-1, descending=True).values
    kept = (ranked.cumsum(-1, dtype=torch.float64) - ranked < top_p).sum(-1, keepdim=True)
    return ranked.gather(-1, kept - 1)


class Sampler:
    """Continues prompts with a causal language model until a stop token or for `max_new_tokens`."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, seed: int, max_new_tokens: int, temperature: float, top_p: float
    ) -> None:
        transformers = require("transformers", "generating texts")
        self._model: Any = model
        self._device = next(model.parameters()).device
        self._stops = stop_ids(tokenizer)
        self._seed, self._most = seed, max_new_tokens
        self._shape = {"temperature": temperature, "top_p": top_p}
        self._pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=True)
        self._is_blank = torch.tensor([not piece.strip() for piece in pieces], device=self._device)
        self._is_stop = torch.isin(torch.arange(len(tokenizer)), torch.tensor(self._stops)).to(self._device)
        self._model.generation_config = transformers.GenerationConfig(  # not the model's own temperature and penalties
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=self._stops or None, pad_token_id=self._pad
        )

    def __call__(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
        """The new tokens of each row, without the stop token; they are never blank."""
        width, vocabulary = max(map(len, prompts)), len(self._is_blank)
        padding = [width - len(prompt) for prompt in prompts]  # on the left
        ids = [[self._pad] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * count + [1] * (width - count) for count in padding]
        inputs = {"input_ids": ids, "attention_mask": mask}
        uniform = torch.from_numpy(np.stack([uniforms(self._seed, row, self._most) for row in rows])).to(self._device)

        def choose(known: Tensor, logits: Tensor) -> Tensor:
            place = known.shape[1] - width
            logits[:, vocabulary:] = -torch.inf  # a model may have more embeddings than there are tokens
            refused = self._is_stop if place < self._most - 1 else self._is_stop | self._is_blank
            is_blank = self._is_blank[known[:, width:]].all(1, keepdim=True)
            logits[:, :vocabulary].masked_fill_(is_blank & refused, -torch.inf)
            chosen = draw(logits, uniform[:, place : place + 1], **self._shape)
            return torch.full_like(logits, -torch.inf).scatter_(1, chosen, 0.0)

        with torch.inference_mode():
            moved = {name: torch.tensor(values, device=self._device) for name, values in inputs.items()}
            found = self._model.generate(**moved, logits_processor=[choose])
        return [self._before_stop(row) for row in found[:, width:].tolist()]

    def _before_stop(self, tokens: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(tokens) if token in self._stops), len(tokens))
        return tokens[:end]
