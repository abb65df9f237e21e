"""Models, batches and losses of the benchmarks.

The models are Hugging Face's BERT, GPT-2, Llama and ViT, and a ResNet-50 with GroupNorm. Opacus rejects BERT, GPT-2 and
ViT or measures wrong norms (tied weights, bare parameters, position ids without the batch axis, GPT-2's Conv1D). It
trains `Substitute` instead: the same sizes, untied, in layers that it supports. Llama is not compared with Opacus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from dpoptim.integrations.losses import BatchLosses

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its batch and per-example losses.

    Attributes:
        plain_loss: The usual loss, from stored logits.
        loss: The same with dpoptim's fused cross-entropy.
        peer_model, peer_loss: The model that Opacus trains; None where Opacus is not compared.
        compiled_micro_batch: The examples per compiled call; None for all.
        captured_micro_batch: The examples per captured call, in place of activation checkpoints; None for all.
        together: Whether all methods fit into memory at the same time.
        note: How the model of Opacus differs.
        needs: The packages that the model needs.
    """

    name: str
    device: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    plain_loss: Loss
    loss: Loss
    peer_model: Callable[[], nn.Module] | None = None
    peer_loss: Loss | None = None
    compiled_micro_batch: int | None = None
    captured_micro_batch: int | None = None
    together: bool = True
    note: str = ""
    needs: tuple[str, ...] = ("transformers",)


def flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss per example, from stored logits; flattened, because a class axis in the middle is slow."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Block(nn.Module):
    """Attention and a feed-forward layer, with norms before them (GPT-2, ViT) or after (BERT)."""

    def __init__(self, width: int, heads: int, inner: int, *, causal: bool, norm_first: bool, lora: int) -> None:
        super().__init__()
        self.heads, self.causal, self.norm_first = heads, causal, norm_first
        self.into = nn.Linear(width, 3 * width)
        self.down = nn.Linear(width, lora, bias=False) if lora else None
        self.up = nn.Linear(lora, 3 * width, bias=False) if lora else None
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, hidden: Tensor) -> Tensor:
        mixed = self.into(hidden)
        if self.down is not None and self.up is not None:
            mixed = mixed + self.up(self.down(hidden))
        query, key, value = mixed.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
        )

    def feed_forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(hidden)))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm_first:
            hidden = hidden + self.attention(self.norm1(hidden))
            return hidden + self.feed_forward(self.norm2(hidden))
        hidden = self.norm1(hidden + self.attention(hidden))
        return self.norm2(hidden + self.feed_forward(hidden))


class Substitute(nn.Module):
    """A transformer with the sizes of BERT, GPT-2 or ViT, in layers that Opacus supports.

    The decoder is untied; the class token and the token types are embeddings, and position ids have the batch axis.
    """

    def __init__(
        self, kind: str, *, width: int, layers: int, heads: int, inner: int, positions: int, outputs: int, lora: int = 0
    ) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = nn.Conv2d(3, width, 16, 16) if kind == "vit" else nn.Embedding(outputs, width)
        self.types = None if kind == "gpt2" else nn.Embedding(2 if kind == "bert" else 1, width)
        self.places = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, inner, causal=kind == "gpt2", norm_first=kind != "bert", lora=lora)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) if kind == "bert" else None
        self.decoder = nn.Linear(width, outputs, bias=kind != "gpt2")
        if lora:
            self.requires_grad_(False)
            for block in self.blocks:
                block.down.requires_grad_(True)
                block.up.requires_grad_(True)

    def forward(self, inputs: Tensor, masked: Tensor | None = None) -> Tensor:
        hidden = self.tokens(inputs)
        if self.kind == "vit":
            first = self.types(torch.zeros(len(inputs), 1, dtype=torch.long, device=inputs.device))
            hidden = torch.cat([first, hidden.flatten(2).transpose(1, 2)], 1)
        elif self.types is not None:
            hidden = hidden + self.types(torch.zeros_like(inputs))
        hidden = hidden + self.places(torch.arange(hidden.shape[1], device=inputs.device).repeat(len(inputs), 1))
        if self.head is not None and masked is not None:
            hidden = self.blocks(self.norm(hidden))
            chosen = hidden.gather(1, masked[..., None].expand(-1, -1, hidden.shape[-1]))
            return self.decoder(self.head(chosen))
        hidden = self.norm(self.blocks(hidden))
        return self.decoder(hidden[:, 0] if self.kind == "vit" else hidden)


def peer_text_loss(model: Any, batch: Batch) -> Tensor:
    return flat_cross_entropy(model(*batch[:-1]), batch[-1])


class MaskedLM(nn.Module):
    """BERT that applies its head to the masked positions only."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.bert = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        hidden = self.bert.bert(ids).last_hidden_state
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.bert.cls.predictions.transform(chosen)


def masked_batch(examples: int, positions: int, masked: int, vocabulary: int, device: str) -> Batch:
    generator = seeded()
    ids = torch.randint(104, vocabulary, (examples, positions), generator=generator)
    places = torch.rand(examples, positions, generator=generator).argsort(1)[:, :masked]
    labels = ids.gather(1, places)
    return ids.scatter(1, places, 103).to(device), places.to(device), labels.to(device)


def masked_lm(
    device: str, examples: int, positions: int, *, width: int = 128, vocabulary: int = 30522, name: str = "BERT"
) -> Case:
    """Return a BERT with two layers that predicts 15 % of its positions."""
    heads, longest = max(1, width // 64), max(512, positions)

    def model() -> nn.Module:
        return MaskedLM(
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=longest,
            vocab_size=vocabulary,
        )

    def plain(model: Any, batch: Batch) -> Tensor:
        return flat_cross_entropy(model.bert.cls.predictions.decoder(model(batch[0], batch[1])), batch[2])

    def fused(model: Any, batch: Batch) -> Tensor:
        hidden = model(batch[0], batch[1])
        return dpoptim.linear_cross_entropy(model.bert.cls.predictions.decoder, hidden, batch[2]).mean(1)

    masked = round(0.15 * positions)
    logits = examples * masked * vocabulary
    return Case(
        name=f"{name} {examples}x{positions}",
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        model=model,
        batch=lambda: masked_batch(examples, positions, masked, vocabulary, device),
        plain_loss=plain,
        loss=fused,
        peer_model=lambda: Substitute(
            "bert", width=width, layers=2, heads=heads, inner=4 * width, positions=longest, outputs=vocabulary
        ),
        peer_loss=peer_text_loss,
        # Inductor's indices are 32-bit, so it fails on 2**31 logits or more.
        compiled_micro_batch=256 if logits >= 2**31 else None,
        together=logits < 2**31,
        note="untied",
    )


def bert_tiny(device: str, examples: int, positions: int) -> Case:
    return masked_lm(device, examples, positions, name="BERT-Tiny")


def gpt2(device: str, examples: int, positions: int, *, lora: bool = False) -> Case:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        made = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        if lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True)
            return get_peft_model(made, config).base_model.model
        return made

    def batch() -> Batch:
        ids = torch.randint(0, 50257, (examples, positions + 1), generator=seeded()).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def plain(model: Any, batch: Batch) -> Tensor:
        return flat_cross_entropy(model(batch[0]).logits, batch[1])

    def fused(model: Any, batch: Batch) -> Tensor:
        hidden = model.transformer(batch[0]).last_hidden_state
        return dpoptim.linear_cross_entropy(model.lm_head, hidden, batch[1]).mean(1)

    sizes = {"width": 768, "layers": 12, "heads": 12, "inner": 3072, "positions": 1024, "outputs": 50257}
    return Case(
        name=f"GPT-2 {examples}x{positions}" + (" LoRA r=16" if lora else ""),
        device=device,
        dtype=torch.bfloat16,
        model=model,
        batch=batch,
        plain_loss=plain,
        loss=fused,
        peer_model=lambda: Substitute("gpt2", **sizes, lora=16 if lora else 0),
        peer_loss=peer_text_loss,
        note="Linear for Conv1D" if lora else "untied",
        needs=("transformers", "peft") if lora else ("transformers",),
    )


LLAMAS = {  # 1,213,302,784 and 8,030,261,248 parameters; the second has the sizes of Llama 3
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128},
}


def llama(
    device: str, size: str, examples: int, positions: int, *, lora: bool = False, checkpointed: bool = False
) -> Case:
    """Return a Llama that predicts the next token; "plain" uses the loss that the model itself computes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    fused = BatchLosses(task="causal-lm", targets_only=True)  # what PrivateTrainer chooses for this model

    def model() -> nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, **LLAMAS[size])
        with torch.device(device):  # on a CPU, making billions of weights takes minutes
            made = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if checkpointed:
                made.gradient_checkpointing_enable({"use_reentrant": False})
            if lora:
                from peft import LoraConfig, get_peft_model

                made = get_peft_model(made, LoraConfig(r=16, task_type="CAUSAL_LM"))
        return made.train()

    def batch() -> Batch:
        return (torch.randint(0, LLAMAS[size]["vocab_size"], (examples, positions), generator=seeded()).to(device),)

    kind = f"Llama {size}" + (" LoRA" if lora else "") + (" checkpointed" if checkpointed else "")
    return Case(
        name=f"{kind} {examples}x{positions}",
        device=device,
        dtype=dtype,
        model=model,
        batch=batch,
        plain_loss=lambda model, batch: model(input_ids=batch[0], labels=batch[0], use_cache=False).loss,
        loss=lambda model, batch: fused(model, {"input_ids": batch[0], "labels": batch[0]}),
        needs=("transformers", "peft") if lora else ("transformers",),
        captured_micro_batch=4 if checkpointed and not lora else None,
    )


def vit(device: str, examples: int) -> Case:
    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(num_labels=100))

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).logits.float(), batch[1], reduction="none")

    return Case(
        name=f"ViT-B/16 {examples}",
        device=device,
        dtype=torch.bfloat16,
        model=model,
        batch=lambda: images(examples, 100, device),
        plain_loss=loss,
        loss=loss,
        peer_model=lambda: Substitute("vit", width=768, layers=12, heads=12, inner=3072, positions=197, outputs=100),
        peer_loss=image_loss,
        note="class token and positions as embeddings",
    )


def images(examples: int, labels: int, device: str) -> Batch:
    generator = seeded()
    pixels = torch.randn(examples, 3, 224, 224, generator=generator).to(device, torch.bfloat16)
    return pixels, torch.randint(0, labels, (examples,), generator=generator).to(device)


def image_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut, each with GroupNorm."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = conv_norm(inputs, width, 1, 1)
        self.middle = conv_norm(width, width, 3, stride)
        self.wide = conv_norm(width, 4 * width, 1, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else conv_norm(inputs, 4 * width, 1, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = F.relu(self.middle(F.relu(self.narrow(hidden))))
        return F.relu(self.wide(inside) + self.shortcut(hidden))


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(32, outputs))


def resnet50() -> nn.Module:
    """Return a ResNet-50 with GroupNorm, because BatchNorm would mix examples."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def resnet(device: str, examples: int) -> Case:
    return Case(
        name=f"ResNet-50 GN {examples}",
        device=device,
        dtype=torch.bfloat16,
        model=resnet50,
        batch=lambda: images(examples, 1000, device),
        plain_loss=image_loss,
        loss=image_loss,
        peer_model=resnet50,
        peer_loss=image_loss,
        needs=(),
    )


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [bert_tiny("cpu", 32, 128)]
    return [
        bert_tiny("cuda", 2048, 512),
        bert_tiny("cuda", 256, 512),
        gpt2("cuda", 32, 1024),
        gpt2("cuda", 8, 1024),
        gpt2("cuda", 256, 128),
        gpt2("cuda", 32, 1024, lora=True),
        vit("cuda", 256),
        resnet("cuda", 128),
    ]
