"""Layers whose first axis is not the batch: OPT folds axes, DeBERTa-v2 shares rows, and other models are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2ForSequenceClassification, OPTForCausalLM
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from dpoptim.clipping import check_example_independence, clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from tests.clipping.models import CASES, EXAMPLES, Case, case, deberta, squares
from tests.clipping.one_at_a_time import assert_exact

ODD = [name for name in CASES if "OPT" in name or "DeBERTa" in name or "Deberta" in name]
ONE_OF_EACH = ["OPTForCausalLM", "DebertaV2ForSequenceClassification", "LoRA on DeBERTa"]


def check(made: Case, batch: Any = None, examples: int = EXAMPLES) -> None:
    assert_exact(made.model, made.loss_fn, made.batch if batch is None else batch, examples)


@pytest.mark.parametrize("name", ODD)
def test_axes_of_equal_length(name):
    """Four examples of four tokens, and four rows in DeBERTa's table: no shape identifies an axis."""
    made = case(name)
    if "OPT" not in name:
        for module in made.model.modules():
            if isinstance(module, DebertaV2Encoder | DisentangledSelfAttention):
                module.position_buckets = 2
            if isinstance(module, DisentangledSelfAttention):
                module.pos_ebd_size = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the check must succeed
        check(made, {key: value[:4, :4] for key, value in made.batch.items()}, examples=4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_examples_do_not_mix(name):
    made = case(name)
    check_example_independence(made.model, made.loss_fn, made.batch)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("OPTForCausalLM", "layers.1.fc1"),
        ("OPTForCausalLM", "layers.0.final_layer_norm.bias"),
        ("OPTForCausalLM", "embed_positions"),
        ("OPTForCausalLM", "q_proj"),
        ("DebertaV2ForSequenceClassification", "rel_embeddings"),
        ("DebertaV2ForSequenceClassification", "encoder.LayerNorm"),
        ("DebertaV2ForSequenceClassification", "layer.0.attention.self.key_proj"),
        ("DebertaV2ForSequenceClassification", "layer.1.output"),
        ("DebertaV2ForMaskedLM", "pos_query_proj.weight"),
        ("DebertaV2ForMaskedLM, later head", "word_embeddings"),
        ("DebertaV2ForMaskedLM, later head", "lm_head.bias"),
        ("DebertaV2ForMaskedLM, later head", "lm_head.dense"),
    ],
)
def test_only_some_parameters_are_trained(name, trained):
    made = case(name)
    for parameter, value in made.model.named_parameters():
        value.requires_grad_(trained in parameter)
    check(made)


@pytest.mark.parametrize(("kinds", "share"), [(["c2p"], False), (["p2c"], True), ([], False)])
def test_one_direction_of_relative_attention(kinds, share):
    torch.manual_seed(0)
    made = deberta("DebertaV2ForSequenceClassification", share_att_key=share)
    for module in made.model.double().modules():
        if isinstance(module, DisentangledSelfAttention):
            module.pos_att_type = kinds
    check(made)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("OPTForCausalLM", True),
        ("DebertaV2ForSequenceClassification", False),  # reentrant ones fail there without an engine too
        ("LoRA on DeBERTa", True),
    ],
)
def test_activation_checkpoints(name, reentrant):
    made = case(name)
    model: Any = made.model.train()
    plain, _ = clipped_sum(model, made.loss_fn, made.batch, clip_norm=0.5)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant or name.startswith("LoRA"):
        model.enable_input_require_grads()
    saved, _ = clipped_sum(model, made.loss_fn, made.batch, clip_norm=0.5)
    for parameter, total in plain.items():
        torch.testing.assert_close(saved[parameter], total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_dropout(name):
    """For equal random numbers, the unclipped sum equals the slope of the summed loss."""
    made = case(name)
    for module in made.model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if isinstance(module, OPTDecoderLayer):
            module.dropout = 0.3
    sums = ClippedSums(made.model, clip_norm=1e9)
    sums.engine.attach()
    direction = {n: torch.randn_like(p) for n, p in made.model.named_parameters() if p.requires_grad}
    for n, module in made.model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and f"{n}.weight" in direction:
            direction[f"{n}.weight"][module.padding_idx] = 0  # no gradient where it is looked up

    def loss(step: float) -> Tensor:
        with torch.no_grad():
            for n, p in made.model.named_parameters():
                if n in direction:
                    p.add_(direction[n], alpha=step)
        torch.manual_seed(0)
        return made.loss_fn(made.model, made.batch).sum()

    small = 1e-6
    loss(0.0)  # the first call runs the check
    slope = float((loss(small) - loss(-2 * small)).detach()) / (2 * small)
    loss(small).backward()
    found = sum(float((total * direction[n]).sum()) for n, total in sums.take()[0].items())
    assert found == pytest.approx(slope, rel=1e-5)


def test_outputs_and_caches_are_filled_once():
    made = case("OPTForCausalLM")
    model: Any = made.model
    model.set_attn_implementation("eager")
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    for _ in range(2):
        output = model(input_ids=made.batch["input_ids"], output_attentions=True, output_hidden_states=True)
        assert len(output.attentions) == 2
        assert len(output.hidden_states) == 3
        assert output.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_logits_equal_those_without_an_engine(name):
    made = case(name)
    inputs = {key: made.batch[key] for key in ("input_ids", "attention_mask")}
    own = made.model(**inputs).logits
    ClippedSums(made.model, clip_norm=1.0).engine.attach()
    torch.testing.assert_close(made.model(**inputs).logits, own, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(made.model(**inputs).logits, own)


class TestRefusals:
    @pytest.mark.parametrize("positions", [3, EXAMPLES])
    @pytest.mark.parametrize("examples_first", [False, True])
    def test_folds_of_unknown_modules(self, positions, examples_first):
        """Even in the right order: the engine cannot see which rows belong to which example."""

        class Folds(nn.Module):
            def __init__(self):
                super().__init__()
                self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                x = self.enter(x)
                ordered = x if examples_first else x.transpose(0, 1)
                y = self.leave(ordered.reshape(-1, 4)).view_as(ordered)
                return y if examples_first else y.transpose(0, 1)

        with pytest.raises(ValueError, match=rf"layer 'leave' got an input of shape \({positions * EXAMPLES}, 4\)"):
            clipped_sum(Folds(), squares, torch.randn(EXAMPLES, positions, 4))

    def test_custom_decoder_layer_with_positions_first(self):
        class PositionsFirst(OPTDecoderLayer):
            def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
                turned = hidden_states.transpose(0, 1)
                flat = self.fc2(self.fc1(turned.reshape(-1, turned.shape[-1])))
                return hidden_states + flat.view_as(turned).transpose(0, 1)

        made = case("OPTForCausalLM")
        model: Any = made.model
        model.model.decoder.layers[1] = PositionsFirst(model.config, layer_idx=1).double()
        with pytest.raises(ValueError, match=r"layers\.1\.fc1' got an input of shape \(45, 16\) while the batch has 5"):
            clipped_sum(model, made.loss_fn, made.batch)

    def test_different_version_of_the_decoder_layer(self, monkeypatch):
        def forward(self, hidden_states, **kwargs):
            turned = hidden_states.transpose(0, 1)
            return turned.reshape(-1, turned.shape[-1]).view_as(turned).transpose(0, 1)

        monkeypatch.setattr(OPTDecoderLayer, "forward", forward)
        made = case("OPTForCausalLM")
        with pytest.raises(ValueError, match=r"layers\.0' \(OPTDecoderLayer\) does not compute what its rule does"):
            clipped_sum(made.model, made.loss_fn, made.batch)
        for name, parameter in made.model.named_parameters():
            parameter.requires_grad_(".layers." not in name)
        check(made)

    @pytest.mark.parametrize(
        ("kind", "method", "layer"),
        [
            (DisentangledSelfAttention, "disentangled_attention_bias", r"layer\.0\.attention\.self"),
            (DebertaV2Encoder, "get_rel_embedding", r"deberta\.encoder"),
        ],
    )
    def test_different_version_of_deberta(self, monkeypatch, kind, method, layer):
        own = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda self, *args: 1.1 * own(self, *args))
        made = case("DebertaV2ForSequenceClassification")
        with pytest.raises(ValueError, match=rf"{layer}' \({kind.__name__}\) does not compute what its rule does"):
            clipped_sum(made.model, made.loss_fn, made.batch)
        for module in made.model.modules():
            assert not {"forward", "disentangled_attention_bias", "get_rel_embedding"} & module.__dict__.keys()

    def test_table_used_outside_its_layer(self):
        made = case("DebertaV2ForSequenceClassification")

        def loss_fn(model: DebertaV2ForSequenceClassification, batch: dict[str, Tensor]) -> Tensor:
            return made.loss_fn(model, batch) + model.deberta.encoder.rel_embeddings.weight.square().sum()

        with pytest.raises(ValueError, match=r"'deberta.encoder.rel_embeddings.weight' was used outside the layer"):
            clipped_sum(made.model, loss_fn, made.batch)

    def test_examples_folded_before_the_model(self):
        """Flattened pairs give twice as many rows as losses."""
        made = case("OPTForCausalLM")

        def loss_fn(model: OPTForCausalLM, ids: Tensor) -> Tensor:
            logits = model(input_ids=ids.flatten(0, 1)).logits
            return logits.square().mean((1, 2)).view(len(ids), 2).sum(1)

        with pytest.raises(ValueError, match=r"10 .*5|5 .*10"):
            clipped_sum(made.model, loss_fn, torch.randint(0, 61, (EXAMPLES, 2, 4)))
