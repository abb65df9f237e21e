"""Sample the continuations of prompts, each a function of (seed, row, prompt)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.integrations.chats import stop_ids
from dpoptim.integrations.optional import require


def uniforms(seed: int, row: int, count: int) -> np.ndarray:
    """The random numbers of a row, one per token; a larger count only adds to them."""
    key = np.array([seed, row], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """One token per row, [rows, 1], by inverting the distribution function at a uniform number, [rows, 1].

    `top_p` keeps the most probable tokens that together have this probability; temperature 0 takes the most probable.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = (logits.float() / temperature).softmax(-1).double()
    if top_p == 1:
        return _inverted(probabilities, uniform)
    ranked, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0.0
    return tokens.gather(-1, _inverted(ranked, uniform))


def _inverted(probabilities: Tensor, uniform: Tensor) -> Tensor:
    sums = probabilities.cumsum(-1)
    places = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    return places.clamp(max=probabilities.shape[-1] - 1)


class Sampler:
    """Continues prompts with a causal language model until a stop token or for `max_new_tokens`."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, seed: int, max_new_tokens: int, temperature: float, top_p: float
    ) -> None:
        transformers = require("transformers", "generating texts")
        self._model: Any = model
        self._vocabulary, self._stops = len(tokenizer), stop_ids(tokenizer)
        self._seed, self._most = seed, max_new_tokens
        self._shape = {"temperature": temperature, "top_p": top_p}
        self._pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._model.generation_config = transformers.GenerationConfig(  # not the model's own temperature and penalties
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=self._stops or None, pad_token_id=self._pad
        )

    def __call__(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
        """The new tokens of each row, without the stop token; there is at least one."""
        device = next(self._model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        mask = (torch.arange(width, device=device) >= starts[:, None]).long()
        uniform = torch.from_numpy(np.stack([uniforms(self._seed, row, self._most) for row in rows])).to(device)

        def choose(known: Tensor, logits: Tensor) -> Tensor:
            place = known.shape[1] - width
            logits[:, self._vocabulary :] = -torch.inf  # a model may have more embeddings than there are tokens
            if place == 0:
                logits[:, self._stops] = -torch.inf
            chosen = draw(logits, uniform[:, place : place + 1], **self._shape)
            return torch.full_like(logits, -torch.inf).scatter_(1, chosen, 0.0)

        with torch.inference_mode():
            found = self._model.generate(input_ids=ids, attention_mask=mask, logits_processor=[choose])
        return [self._before_stop(row) for row in found[:, width:].tolist()]

    def _before_stop(self, tokens: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(tokens) if token in self._stops), len(tokens))
        return tokens[:end]
