"""Graphs of the kernels on a GPU; Triton's interpreter replays tapes instead of graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import linear_cross_entropy
from tests.clipping.captured_loops import VARIANTS, batches_of, losses_of, model_of, plan_of, seen_by
from tests.clipping.tape import tape_graphs
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton

pytestmark = [pytest.mark.gpu, needs_triton]

DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def tapes_or_graphs(monkeypatch):
    if IS_INTERPRETED:
        tape_graphs(monkeypatch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Bert(nn.Module):
    """A masked language model whose head is tied to its table."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertForMaskedLM(config)

    def forward(self, ids: Tensor, attends: Tensor, labels: Tensor) -> Tensor:
        head = self.bert.cls.predictions
        hidden = self.bert.bert(ids, attention_mask=attends[:, None, None]).last_hidden_state
        return linear_cross_entropy(head.decoder, head.transform(hidden), labels).sum(1)


def texts(count: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts of several lengths with repeated tokens and a few masked places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (count, width), generator=generator)
    attends = torch.arange(width) < torch.randint(1, width + 1, (count, 1), generator=generator)
    chosen = attends & (torch.rand(count, width, generator=generator) < 0.4)
    return ids.to(DEVICE), attends.to(DEVICE), torch.where(chosen, ids, -100).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["flat", "scaled", "in turns", "squares"])
def test_graphs_add_the_same_sums_as_uncaptured_batches(variant, dtype):
    """Full and partial batches of three widths, with memory allocated and freed in between."""
    sizes = [(4, 8), (4, 8), (4, 5), (3, 8), (4, 5), (4, 11), (2, 5), (4, 11), (4, 8), (1, 8), (4, 5)]
    sizes = [(4, 8), (3, 8)] if IS_INTERPRETED else sizes * 3
    found = []
    for is_captured in (False, True):
        model = Bert().to(DEVICE, dtype)
        plan, key = plan_of(len(sizes), batch_size=4, noise_multiplier=0.01), dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = VARIANTS[variant](model, plan, lr=1e-3, key=key, run_id="run", external_batches=True)
        run, released = optimizer.captured(model, pad_to_multiple=4), seen_by(optimizer)
        for seed, (count, width) in enumerate(sizes):
            batch = texts(count, width, seed)
            if is_captured:
                run(*batch)
                if DEVICE == "cuda":
                    torch.full((1 << 22,), float("nan"), device=DEVICE)  # where something was that is needed no more
                    torch.cuda.empty_cache()
            else:
                model(*batch).sum().backward()
            optimizer.step()
        assert bool(run.graphs) == (is_captured and variant != "squares")
        assert all(shape.can_be_captured and shape.runs_once for shape in run._shapes.values())
        found.append((released, optimizer.mechanism.counts_not_private))
    rounding = 1e-4 if dtype == torch.float32 else 0.05
    for step, (ordinary, own) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert float((own - ordinary).norm() / ordinary.norm()) <= rounding, step
    if dtype == torch.float32:
        assert found[0][1] == found[1][1]


def test_padding_rows_add_nothing_for_any_content():
    """The sums of an earlier batch were not finite."""
    model = model_of().to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(noise_multiplier=1e-9), lr=0.0, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=8)
    seen = seen_by(optimizer)
    (first, second, third, last) = batches_of((8, 4), (8, 4), (8, 4), (5, 4))
    third[0][5:] = float("nan")
    for x, y in (first, second, third, last):
        run(x.to(DEVICE), y.to(DEVICE))
        optimizer.step()
    assert run.graphs == len(run._shapes)
    assert optimizer.mechanism.counts_not_private.nonfinite == 3
    assert optimizer.mechanism.counts_not_private.examples == 29
    x, y = last
    losses_of(model)(x.to(DEVICE), y.to(DEVICE)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(seen[3], seen[4], rtol=1e-5, atol=1e-7)
    assert float(seen[3].norm()) > 0


def test_dropout_is_redrawn_at_every_replay():
    model = nn.Sequential(model_of(), nn.Dropout(0.5)).to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(noise_multiplier=1e-9), lr=0.0, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=8)
    ((x, y),) = batches_of((8, 4))
    found = []
    for _ in range(5):
        found.append(run(x.to(DEVICE), y.to(DEVICE)).cpu())
        optimizer.step()
    assert run.graphs == len(run._shapes)
    assert len({tuple(losses.tolist()) for losses in found}) == 5
    torch.manual_seed(3)
    first = run(x.to(DEVICE), y.to(DEVICE)).cpu()
    torch.manual_seed(3)
    assert torch.equal(run(x.to(DEVICE), y.to(DEVICE)).cpu(), first)


@pytest.mark.skipif(IS_INTERPRETED, reason="dropout on a CPU draws on the host")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_mask", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_replay_repeats_the_bits_of_the_first_run(kind, has_mask, precision):
    """A resumed run repeats its steps, whichever of its shapes have a graph."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 512}
    if kind == "gpt2":
        config = transformers.GPT2Config(**sizes, n_layer=2, n_embd=128, n_head=4, n_positions=64)
        model: Any = transformers.GPT2LMHeadModel(config).to(DEVICE)
    else:
        config = transformers.BertConfig(**sizes, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
        model = transformers.BertForMaskedLM(config).to(DEVICE)
    model.train()
    optimizer = dpoptim.scale_then_privatize(model, plan_of(6, noise_multiplier=1.0), lr=0.0, external_batches=True)

    def losses(ids: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().mT, ids, reduction="none").mean(1)

    run, found = optimizer.captured(losses, pad_to_multiple=8), []
    ids = torch.randint(0, 512, (7, 48), device=DEVICE)
    mask = (torch.arange(48, device=DEVICE) < torch.randint(20, 48, (7, 1), device=DEVICE)).long() if has_mask else None
    for _ in range(4):
        torch.manual_seed(5)
        each = run(ids, mask)
        found.append([each, *(vector.clone() for vector in run._workspace.new_sums().vectors)])
        optimizer.mechanism._sums.engine.discard()  # the scale stays the same
    assert run.graphs == 1
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))
    assert float(found[0][1].norm()) > 0


@pytest.mark.skipif(IS_INTERPRETED, reason="dropout on a CPU draws on the host")
def test_a_model_that_draws_on_the_host_is_not_captured():
    class SkipsLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model_of()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * (1 + (torch.rand(()) < 0.5))

    model = SkipsLayers().to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(), lr=0.0, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=8)
    x, y = (t.to(DEVICE) for t in batches_of((8, 4))[0])
    found = set()
    for _ in range(12):
        found.add(float(run(x, y)[0]))
        optimizer.step()
    assert run.graphs == 0
    assert len(found) == 2


@pytest.mark.skipif(IS_INTERPRETED, reason="tapes take what a graph does not")
def test_batches_that_cannot_be_captured_run_uncaptured_with_dropout_too():
    """A loss that waits for the device: what a failed capture leaves behind must not break the next one."""
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(model_of(), nn.Dropout(0.5)).to(DEVICE)
        plan, key = plan_of(noise_multiplier=1e-9), dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, key=key, run_id="run", external_batches=True)

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            each = losses_of(model)(x, y)
            assert float(each.detach().sum()) > 0
            return each

        run = optimizer.captured(losses, pad_to_multiple=8)
        seen = seen_by(optimizer)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(5):
                torch.manual_seed(step)
                x, y = (t.to(DEVICE) for t in batches_of((8, 4))[0])
                if is_captured:
                    run(x, y)
                else:
                    losses(x, y).sum().backward()
                optimizer.step()
        told = [w for w in warned if "could not be captured" in str(w.message)]
        assert len(told) == is_captured
        found.append(torch.stack(seen))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter takes a minute for it")
def test_a_graph_outlives_the_tables_of_others():
    """The kernels' tables are cached, and more shapes follow than the caches hold."""
    model = model_of().to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(400, noise_multiplier=1e-9), lr=0.0, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=8)
    seen = seen_by(optimizer)
    x, y = (t.to(DEVICE) for t in batches_of((8, 4))[0])
    for _ in range(3):
        run(x, y)
        optimizer.step()
    assert run.graphs == len(run._shapes)
    for count in range(1, 301):
        losses_of(model)(
            x[:1].repeat(count % 40 + 1, 1 + count // 40, 1), y[:1].repeat(count % 40 + 1)
        ).sum().backward()
        optimizer.mechanism._sums.engine.flush()
        optimizer.mechanism._sums.clear_sums()
        optimizer.mechanism._at_last_release = optimizer.mechanism._sums.examples
        torch.cuda.empty_cache()
        torch.full((1 << 16,), -1, dtype=torch.int64, device=DEVICE)
    run(x, y)
    optimizer.step()
    torch.testing.assert_close(seen[-1], seen[2], rtol=1e-6, atol=1e-8)


def wide_run(batch_size: int) -> tuple[dpoptim.PrivateOptimizer, Any, list[Tensor]]:
    """A loop whose device is still busy long after a call has returned, and what it releases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(DEVICE)
    optimizer = dpoptim.dp_sgd(
        model,
        plan_of(10, num_examples=4096, batch_size=batch_size, noise_multiplier=1e-9),
        lr=0.0,
        external_batches=True,
    )
    run = optimizer.captured(lambda x: model(x).square().mean((1, 2)), pad_to_multiple=256)
    return optimizer, run, seen_by(optimizer)


@pytest.mark.skipif(IS_INTERPRETED, reason="a CPU copies at once")
def test_loop_may_refill_its_pinned_buffer_immediately():
    optimizer, run, seen = wide_run(1024)
    parts = [torch.randn(256, 32, 2048) for _ in range(4)]
    buffer = torch.empty_like(parts[0]).pin_memory()
    for waits in (True, True, True, False):
        for part in parts:
            buffer.copy_(part)
            run(buffer)
            if waits:
                torch.cuda.synchronize()
        optimizer.step()
    assert run.graphs == len(run._shapes)
    torch.testing.assert_close(seen[3], seen[2], rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(IS_INTERPRETED, reason="a CPU has one stream")
def test_batches_may_run_on_a_different_stream_than_the_step():
    optimizer, run, seen = wide_run(512)
    parts = [torch.randn(256, 32, 2048, device=DEVICE) for _ in range(2)]
    torch.cuda.synchronize()
    own, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for stream in (own, own, own, other):
        for part in parts:
            with torch.cuda.stream(stream):
                run(part)
        optimizer.step()
    assert run.graphs == len(run._shapes)
    torch.testing.assert_close(seen[3], seen[2], rtol=1e-4, atol=1e-7)
