"""Graphs of the kernels: on a GPU as they are, and by Triton's interpreter with tapes in the place of graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.gradients import linear_cross_entropy
from dpoptim.optim import PrivateOptimizer
from tests.gradients.tape import tape_graphs
from tests.gradients.test_captured import VARIANTS, batches_of, losses_of, model_of, plan_of
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton

pytestmark = [pytest.mark.gpu, needs_triton]

DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    if IS_INTERPRETED:
        tape_graphs(monkeypatch)
    torch.backends.cuda.matmul.allow_tf32 = False


class Bert(nn.Module):
    """One with its head for masked tokens, whose table is tied to it."""

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


def seen_by(optimizer: PrivateOptimizer) -> list[Tensor]:
    """What it releases from now on, end to end."""
    released: list[Tensor] = []
    optimizer.observers.append(lambda r: released.append(torch.cat([g.flatten() for g in r.gradient.values()]).cpu()))
    return released


def texts(count: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of several lengths, with repeated tokens, and some places that are predicted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (count, width), generator=generator)
    attends = torch.arange(width) < torch.randint(1, width + 1, (count, 1), generator=generator)
    chosen = attends & (torch.rand(count, width, generator=generator) < 0.4)
    return ids.to(DEVICE), attends.to(DEVICE), torch.where(chosen, ids, -100).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_add_what_the_ordinary_way_adds(variant, dtype):
    """Full batches and others, of three widths, with memory that is taken and given back in between."""
    sizes = [(4, 8), (4, 8), (4, 5), (3, 8), (4, 5), (4, 11), (2, 5), (4, 11), (4, 8), (1, 8), (4, 5)]
    sizes = sizes[:5] if IS_INTERPRETED else sizes * 3
    found = []
    for is_captured in (False, True):
        model = Bert().to(DEVICE, dtype)
        plan, key = plan_of(len(sizes), batch_size=4, noise_multiplier=0.01), dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = VARIANTS[variant](model, plan, lr=1e-3, key=key, run_id="run", own_batches=True)
        run, released = optimizer.captured(model, together=4), seen_by(optimizer)
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
        graphs = [graph for graph in run._graphs.values() if graph is not None]
        assert len(graphs) == ((2 if IS_INTERPRETED else 3) if is_captured else 0)
        found.append((released, optimizer.release.counts_not_private))
    rounding = 1e-4 if dtype == torch.float32 else 0.05
    for step, (ordinary, own) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert float((own - ordinary).norm() / ordinary.norm()) <= rounding, step
    if dtype == torch.float32:
        assert found[0][1] == found[1][1]


def test_rows_that_fill_a_batch_up_add_nothing_whatever_they_hold():
    """Those of an earlier batch, which are not finite."""
    model = model_of().to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(noise_multiplier=1e-9), lr=0.0, own_batches=True)
    run = optimizer.captured(losses_of(model), together=8)
    seen = seen_by(optimizer)
    (first, second, third, last) = batches_of((8, 4), (8, 4), (8, 4), (5, 4))
    third[0][5:] = float("nan")
    for x, y in (first, second, third, last):
        run(x.to(DEVICE), y.to(DEVICE))
        optimizer.step()
    assert optimizer.release.counts_not_private.nonfinite == 3
    assert optimizer.release.counts_not_private.examples == 29
    x, y = last
    losses_of(model)(x.to(DEVICE), y.to(DEVICE)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(seen[3], seen[4], rtol=1e-5, atol=1e-7)
    assert float(seen[3].norm()) > 0


def test_dropout_is_drawn_anew_at_every_replay():
    model = nn.Sequential(model_of(), nn.Dropout(0.5)).to(DEVICE)
    optimizer = dpoptim.dp_sgd(model, plan_of(noise_multiplier=1e-9), lr=0.0, own_batches=True)
    run = optimizer.captured(losses_of(model), together=8)
    ((x, y),) = batches_of((8, 4))
    found = []
    for _ in range(5):
        found.append(run(x.to(DEVICE), y.to(DEVICE)).cpu())
        optimizer.step()
    assert len({tuple(losses.tolist()) for losses in found}) == 5
    torch.manual_seed(3)
    first = run(x.to(DEVICE), y.to(DEVICE)).cpu()
    torch.manual_seed(3)
    assert torch.equal(run(x.to(DEVICE), y.to(DEVICE)).cpu(), first)
