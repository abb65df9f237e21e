"""One table of models, each with its loss and a batch, that every test of clipped sums runs over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

EXAMPLES = 5


@dataclass(frozen=True)
class Case:
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Any


def squares(model: nn.Module, batch: Any) -> Tensor:
    """One loss per example that is not linear in the outputs."""
    output = model(batch)
    output = output if isinstance(output, Tensor) else output[0]
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype, device=output.device).view_as(output[0])
    return (weights * output.tanh()).flatten(1).sum(1) + 0.1 * output.flatten(1).square().sum(1)


def _inputs(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, dtype=torch.float64)


def _ids(high: int, *shape: int) -> Tensor:
    ids = torch.randint(0, high, (EXAMPLES, *shape))
    ids[:, : shape[0] // 2] = ids[:, shape[0] // 2 : 2 * (shape[0] // 2)]  # ids that repeat within an example
    return ids


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = torch.ones(x.shape[1 if self.batch_first else 0], x.shape[1 if self.batch_first else 0]).triu(1).bool()
        y = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return y if self.batch_first else y.transpose(0, 1)


class CrossAttention(nn.Module):
    """Keys from a different input, padding, returned weights; a different key width uses the generic rule."""

    def __init__(self, key_width: int = 8) -> None:
        super().__init__()
        self.enter, self.keys = nn.Linear(6, 8), nn.Linear(6, key_width)
        self.attention = nn.MultiheadAttention(8, 2, kdim=key_width, vdim=key_width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x[:, 1:])
        padding = torch.zeros(keys.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        y, weights = self.attention(self.enter(x), keys, keys, key_padding_mask=padding)
        return torch.cat([y, weights], dim=-1)


class Bias(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class BareParameters(nn.Module):
    """Bare parameters around layers that have a rule, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.inner(x) * self.gain


class Tied(nn.Module):
    """One table as embedding and as decoder, as in a language model; the decoder is also called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, padding_idx=0)  # tables of up to 16 rows take a simpler path
        self.mix = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 20)
        self.decoder.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.mix(self.table(ids)).tanh()
        return self.decoder(hidden) + self.decoder(hidden.flip(1))


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x + self.layer(x).tanh())
        return x


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class UnusedAndFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.bias_only = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.bias_only.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias_only(self.frozen(self.used(x)))


class KeywordCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(input=self.layer(input=x))


class SharedPositions(nn.Module):
    """Position ids with a batch axis of 1, as in stock Hugging Face models."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.scale_of_position, self.leave = (
            nn.Embedding(7, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        where = self.positions(torch.arange(x.shape[1])[None])
        return self.leave(x * self.scale_of_position(where) + where)


def _bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return _language_model(model)


def _vit(**call: bool) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=6, patch_size=2,
            num_channels=2, num_labels=3,
        )
    )  # fmt: skip
    return Case(model, lambda m, x: m(x, **call).logits.square().sum(1), _inputs(2, 6, 6))


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=20,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return _language_model(model)


def _gemma() -> Case:
    """A tied table whose looked-up rows are multiplied by a number."""
    from transformers import GemmaConfig, GemmaForCausalLM

    model = GemmaForCausalLM(
        GemmaConfig(
            vocab_size=61, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=4, max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip
    return _language_model(model)


def _opt(kind: str, **options: Any) -> Case:
    """Its decoder layers fold examples and positions into one axis."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, dropout=0.0,
        max_position_embeddings=20, num_labels=3, **options,
    )  # fmt: skip
    return _of_kind(getattr(transformers, kind)(config))


def deberta(kind: str, **options: Any) -> Case:
    """One table of relative positions goes through the projections of every layer as a batch of one."""
    import transformers

    config = transformers.DebertaV2Config(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=20, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_dropout=0.0, num_labels=3, **options,
    )  # fmt: skip
    return _of_kind(getattr(transformers, kind)(config))


_V3: dict[str, Any] = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}


def _of_kind(model: nn.Module) -> Case:
    made = _language_model(model)
    for name, parameter in model.named_parameters():
        if "bias" in name:  # zeros would hide what is added twice or not at all
            nn.init.normal_(parameter, std=0.3)
    if not type(model).__name__.endswith("SequenceClassification"):
        return made

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["labels"][:, 0] % 3, reduction="none")

    return Case(model, loss_fn, made.batch)


def _lora(case: Case, targets: list[str], **options: Any) -> Case:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(case.model, LoraConfig(r=3, lora_alpha=6, target_modules=targets, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would leave lora_A without a gradient
            nn.init.normal_(parameter, std=0.3)
    return Case(model, case.loss_fn, case.batch)


def _language_model(model: nn.Module) -> Case:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)

    mask = torch.ones(EXAMPLES, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return Case(model, loss_fn, {"input_ids": _ids(61, 9), "attention_mask": mask, "labels": _ids(61, 9)})


def _attention_that_trains_only_its_output() -> Case:
    layer = Attention(batch_first=True)
    layer.attention.in_proj_weight.requires_grad_(False)
    layer.attention.in_proj_bias.requires_grad_(False)
    return Case(layer, squares, _inputs(7, 6))


def _normalized_attention() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    weight_norm(layer.linear1)
    weight_norm(layer.self_attn.out_proj)
    return Case(layer, squares, _inputs(7, 8))


CASES: dict[str, Callable[[], Case]] = {
    "linear 2-D": lambda: Case(nn.Linear(6, 4), squares, _inputs(6)),
    "linear 3-D": lambda: Case(nn.Linear(6, 4), squares, _inputs(7, 6)),
    "linear 4-D": lambda: Case(nn.Linear(6, 4), squares, _inputs(2, 3, 6)),
    "linear many positions": lambda: Case(nn.Linear(40, 50), squares, _inputs(3, 40)),
    "mlp with in-place activations": lambda: Case(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Linear(8, 2)),
        squares,
        _inputs(6),
    ),
    "embedding": lambda: Case(nn.Embedding(20, 5), squares, _ids(9, 6)),  # more than 16 rows, as in `Tied`
    "embedding with padding_idx": lambda: Case(nn.Embedding(9, 5, padding_idx=3), squares, _ids(9, 6)),
    "embedding 3-D ids": lambda: Case(nn.Embedding(9, 5), squares, _ids(9, 4, 3)),
    "layer norm": lambda: Case(nn.LayerNorm(6), squares, _inputs(7, 6)),
    "layer norm over two axes": lambda: Case(nn.LayerNorm((7, 6)), squares, _inputs(7, 6)),
    "layer norm 2-D": lambda: Case(nn.LayerNorm(6), squares, _inputs(6)),
    "rms norm": lambda: Case(nn.RMSNorm(6), squares, _inputs(7, 6)),
    "group norm": lambda: Case(nn.GroupNorm(2, 6), squares, _inputs(6, 4, 3)),
    "instance norm": lambda: Case(nn.InstanceNorm1d(6, affine=True), squares, _inputs(6, 5)),
    "batch norm in eval": lambda: Case(nn.BatchNorm2d(3).eval(), squares, _inputs(3, 4, 4)),
    "conv1d": lambda: Case(nn.Conv1d(4, 6, 3, padding=1, stride=2), squares, _inputs(4, 9)),
    "conv2d": lambda: Case(nn.Conv2d(4, 6, 3, padding=1), squares, _inputs(4, 5, 6)),
    "conv2d patches": lambda: Case(nn.Conv2d(3, 4, 2, stride=2), squares, _inputs(3, 5, 6)),
    "conv2d of one, stride": lambda: Case(nn.Conv2d(3, 4, 1, stride=2), squares, _inputs(3, 5, 6)),
    "conv2d groups, dilation": lambda: Case(nn.Conv2d(4, 6, 3, groups=2, dilation=2), squares, _inputs(4, 8, 7)),
    "conv2d same, even kernel": lambda: Case(nn.Conv2d(2, 3, 4, padding="same"), squares, _inputs(2, 6, 5)),
    "conv2d circular": lambda: Case(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), squares, _inputs(2, 6, 5)),
    "conv3d": lambda: Case(nn.Conv3d(2, 3, 2), squares, _inputs(2, 3, 4, 3)),
    "conv transpose": lambda: Case(nn.ConvTranspose2d(2, 3, 3, stride=2), squares, _inputs(2, 4, 3)),
    "cnn": lambda: Case(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        squares,
        _inputs(1, 8, 8),
    ),
    "attention": lambda: Case(Attention(batch_first=True), squares, _inputs(7, 6)),
    "attention, positions first": lambda: Case(Attention(batch_first=False), squares, _inputs(7, 6)),
    "attention, as many positions as examples": lambda: Case(
        Attention(batch_first=True), squares, _inputs(EXAMPLES, 6)
    ),
    "cross attention": lambda: Case(CrossAttention(), squares, _inputs(7, 6)),
    "cross attention, different key width": lambda: Case(CrossAttention(key_width=4), squares, _inputs(7, 6)),
    "transformer encoder": lambda: Case(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), squares, _inputs(7, 8)
    ),
    "lstm": lambda: Case(nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True), squares, _inputs(7, 4)),
    "lstm with projection": lambda: Case(nn.LSTM(4, 6, proj_size=3, batch_first=True), squares, _inputs(7, 4)),
    "gru": lambda: Case(nn.GRU(4, 6, batch_first=True, bias=False), squares, _inputs(7, 4)),
    "rnn": lambda: Case(nn.RNN(4, 6, nonlinearity="relu", batch_first=True), squares, _inputs(7, 4)),
    "weight norm": lambda: Case(
        nn.Sequential(weight_norm(nn.Conv1d(4, 6, 3)), nn.Tanh(), weight_norm(nn.Linear(7, 3))), squares, _inputs(4, 9)
    ),
    "spectral norm in eval": lambda: Case(spectral_norm(nn.Linear(6, 4, bias=False)).eval(), squares, _inputs(7, 6)),
    "orthogonal": lambda: Case(nn.Sequential(orthogonal(nn.Linear(6, 6)), nn.Tanh()), squares, _inputs(7, 6)),
    "attention with weight norm inside": _normalized_attention,
    "bias only": lambda: Case(nn.Sequential(Bias(6), nn.Tanh()), squares, _inputs(7, 6)),
    "bare parameters": lambda: Case(BareParameters(), squares, _inputs(7, 4)),
    "tied": lambda: Case(Tied(), squares, _ids(11, 6)),
    "layer called three times": lambda: Case(SharedLayer(), squares, _inputs(7, 6)),
    "activation checkpoints": lambda: Case(Checkpointed(reentrant=False), squares, _inputs(7, 6)),
    "reentrant checkpoints": lambda: Case(Checkpointed(reentrant=True), squares, _inputs(7, 6)),
    "unused and frozen": lambda: Case(UnusedAndFrozen(), squares, _inputs(7, 6)),
    "keyword calls": lambda: Case(KeywordCalls(), squares, _inputs(7, 6)),
    "shared positions": lambda: Case(SharedPositions(), squares, _inputs(7, 6)),
    "BertForMaskedLM": _bert,
    "ViTForImageClassification": _vit,
    "ViT, positions interpolated": lambda: _vit(interpolate_pos_encoding=True),
    "GPT2LMHeadModel": _gpt2,
    "GemmaForCausalLM": _gemma,
    "OPTForCausalLM": lambda: _opt("OPTForCausalLM"),
    "OPTForSequenceClassification, norms behind": lambda: _opt(
        "OPTForSequenceClassification", do_layer_norm_before=False, word_embed_proj_dim=12
    ),
    "DebertaV2ForMaskedLM": lambda: deberta("DebertaV2ForMaskedLM"),
    "DebertaV2ForMaskedLM, later head": lambda: deberta("DebertaV2ForMaskedLM", legacy=False, **_V3),
    "DebertaV2ForSequenceClassification": lambda: deberta(
        "DebertaV2ForSequenceClassification", conv_kernel_size=3, **_V3
    ),
    "LoRA on GPT-2": lambda: _lora(_gpt2(), ["c_attn", "c_proj"], fan_in_fan_out=True),
    "LoRA on OPT": lambda: _lora(_opt("OPTForCausalLM"), ["q_proj", "v_proj", "fc1", "fc2"]),
    "LoRA on DeBERTa": lambda: _lora(
        deberta("DebertaV2ForSequenceClassification", **_V3), ["query_proj", "value_proj"], task_type="SEQ_CLS"
    ),
    "in-place activations over positions": lambda: Case(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.SiLU(inplace=True)),
        squares,
        _inputs(7, 6),
    ),
    "attention that trains only its output": _attention_that_trains_only_its_output,
}


def case(name: str, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(sum(map(ord, name)))
    made = CASES[name]()
    made.model.to(dtype)
    batch = made.batch.to(dtype) if isinstance(made.batch, Tensor) and made.batch.is_floating_point() else made.batch
    return Case(made.model, made.loss_fn, batch)
