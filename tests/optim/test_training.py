"""The loop of the contract: plan, loader, optimizer, statement; micro-batches, empty batches, restarts, real models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
RUN: Any = {"key": KEY, "run_id": "the run"}
DRAWS = KEY.for_run("loader the run")


def dataset(examples: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(examples, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    return TensorDataset(x, y)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).double()


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(**changes) -> dpoptim.PrivacyPlan:
    settings = dict(num_examples=60, batch_size=6, steps=12, clip_norm=0.5, noise_multiplier=0.8)
    return dpoptim.PrivacyPlan(**{**settings, **changes})


def train(the_plan: dpoptim.PrivacyPlan, make=dpoptim.scale_then_privatize, **loader_options) -> Tensor:
    model = mlp()
    loader = dpoptim.private_loader(dataset(), the_plan, **RUN, **loader_options)
    optimizer = make(model, the_plan, lr=1e-2, **RUN)
    for batch in loader:
        losses(model, batch).sum().backward()
        optimizer.step()
    assert optimizer.mechanism.step == the_plan.steps
    return torch.cat([p.detach().flatten() for p in model.parameters()])


MAKERS = {
    "scale_then_privatize": dpoptim.scale_then_privatize,
    "independent_moments": dpoptim.independent_moments,
    "joint_moments": dpoptim.joint_moments,
    "dp_sgd": dpoptim.dp_sgd,
}


@pytest.mark.parametrize(
    ("make", "sampling", "size"),
    [
        ("scale_then_privatize", dpoptim.Shuffled(), 4),
        ("scale_then_privatize", dpoptim.Poisson(), 1),
        ("independent_moments", dpoptim.Shuffled(), 2),
        ("independent_moments", dpoptim.Poisson(), 4),
        ("joint_moments", dpoptim.Poisson(), 2),
        ("dp_sgd", dpoptim.Shuffled(), 1),
        ("dp_sgd", dpoptim.Poisson(), 100),
    ],
)
def test_micro_batches_of_any_size_take_the_same_steps(sampling, size, make):
    whole = train(plan(sampling=sampling), MAKERS[make])
    parts = train(plan(sampling=sampling), MAKERS[make], micro_batch_size=size)
    assert float((whole - parts).norm() / whole.norm()) <= 1e-12


def test_empty_batches_take_noise_steps():
    """At a rate of 1/60 most batches are empty. The loader yields a stand-in for them, which must not count."""
    sparse = plan(sampling=dpoptim.Poisson(), batch_size=1, steps=40)
    drawn = [len(sparse.sampling.indices(DRAWS, t, num_examples=60, batch_size=1)) for t in range(40)]
    assert 0 in drawn
    found = train(sparse)
    model = mlp()
    optimizer = dpoptim.scale_then_privatize(model, sparse.replace(), lr=1e-2, external_batches=True, **RUN)
    x, y = dataset().tensors
    for t in range(40):
        chosen = sparse.sampling.indices(DRAWS, t, num_examples=60, batch_size=1)
        if len(chosen):
            losses(model, [x[chosen], y[chosen]]).sum().backward()
        optimizer.step()
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_a_run_depends_only_on_its_key():
    assert torch.equal(train(plan()), train(plan()))
    model = mlp()
    optimizer = dpoptim.scale_then_privatize(model, plan(), lr=1e-2)
    other = dpoptim.scale_then_privatize(mlp(), plan(), lr=1e-2)
    assert optimizer.key != other.key


def test_an_interrupted_run_resumes_bit_for_bit():
    the_plan = plan(noise=dpoptim.BandedToeplitz(bands=3))
    whole = train(the_plan)
    model = mlp()
    loader = dpoptim.private_loader(dataset(), the_plan, **RUN)
    optimizer = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2, **RUN)
    for t, batch in enumerate(loader):
        losses(model, batch).sum().backward()
        optimizer.step()
        if t == 6:
            break
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    del loader, optimizer
    fresh = mlp()
    fresh.load_state_dict(saved["model"])
    loader = dpoptim.private_loader(dataset(), the_plan, **RUN)
    loader.load_state_dict(saved["loader"])
    optimizer = dpoptim.scale_then_privatize(fresh, the_plan, lr=1e-2, **RUN)
    optimizer.load_state_dict(saved["optimizer"])
    for batch in loader:
        losses(fresh, batch).sum().backward()
        optimizer.step()
    assert torch.equal(torch.cat([p.detach().flatten() for p in fresh.parameters()]), whole)


def test_a_scheduler_advances_once_per_logical_step():
    the_plan, model = plan(), mlp()
    loader = dpoptim.private_loader(dataset(), the_plan, **RUN, micro_batch_size=4)
    optimizer = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=the_plan.steps)
    for batch in loader:
        losses(model, batch).sum().backward()
        optimizer.step()
        if loader.step_ends:
            scheduler.step()
    assert scheduler.last_epoch == the_plan.steps == optimizer.mechanism.step


class TestMisuseIsCaught:
    def run(self, misuse, **options) -> None:
        the_plan = plan()
        model = mlp()
        loader = dpoptim.private_loader(dataset(), the_plan, **RUN, **options)
        optimizer = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2, **RUN)
        misuse(model, loader, optimizer)

    def test_a_batch_used_twice(self):
        def misuse(model, loader, optimizer):
            batch = next(iter(loader))
            losses(model, batch).sum().backward()
            losses(model, batch).sum().backward()
            with pytest.raises(ValueError, match="the number of differentiated examples is not the"):
                optimizer.step()

        self.run(misuse)

    def test_a_batch_that_was_never_stepped(self):
        def misuse(model, loader, optimizer):
            batches = iter(loader)
            losses(model, next(batches)).sum().backward()
            with pytest.raises(ValueError, match=r"before optimizer.step\(\) was called"):
                next(batches)

        self.run(misuse)

    def test_two_steps_for_one_batch(self):
        def misuse(model, loader, optimizer):
            losses(model, next(iter(loader))).sum().backward()
            optimizer.step()
            with pytest.raises(ValueError, match="called twice for one batch"):
                optimizer.step()

        self.run(misuse)

    def test_a_loader_with_a_different_plan_object(self):
        """For example one created before calibration: its stand-in for an empty batch would count as an example."""
        model, other = mlp(), plan(noise_multiplier=None)
        loader = dpoptim.private_loader(dataset(), other, **RUN)
        optimizer = dpoptim.scale_then_privatize(model, other.replace(noise_multiplier=0.8), lr=1e-2)
        losses(model, next(iter(loader))).sum().backward()
        with pytest.raises(ValueError, match="a different plan object"):
            optimizer.step()

    def test_a_missing_loader_is_warned_about_once(self):
        model = mlp()
        optimizer = dpoptim.scale_then_privatize(model, plan(), lr=1e-2)
        with pytest.warns(UserWarning, match="external_batches=True"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    def test_two_optimizers_with_one_plan_and_one_loader(self):
        def misuse(model, loader, optimizer):
            second = mlp()
            newer = dpoptim.dp_sgd(second, loader.plan, lr=1e-2)
            batch = next(iter(loader))
            losses(second, batch).sum().backward()
            newer.step()
            losses(model, batch).sum().backward()
            with pytest.raises(ValueError, match="a newer optimizer was created with this plan object"):
                optimizer.step()

        self.run(misuse)

    def test_input_buffer_overwritten_before_the_step(self):
        """Only where factors are kept until the step."""
        the_plan, model = plan(), mlp()
        optimizer = dpoptim.dp_sgd(model, the_plan, lr=1e-2, external_batches=True, clipping_memory=0)
        x, y = (tensor[:6].clone() for tensor in dataset().tensors)
        losses(model, [x, y]).sum().backward()
        x.copy_(dataset().tensors[0][6:12])
        with pytest.raises(ValueError, match="changed in place after backward"):
            optimizer.step()

    def test_a_run_resumed_with_a_different_sampling_key(self):
        """Keeping only the optimizer's key is not enough if the loader had its own."""
        the_plan, model = plan(), mlp()
        loader = dpoptim.private_loader(dataset(), the_plan)
        optimizer = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2)
        losses(model, next(iter(loader))).sum().backward()
        optimizer.step()
        saved, key = optimizer.state_dict(), optimizer.key
        again = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2, key=key)
        again.load_state_dict(saved)
        other = dpoptim.private_loader(dataset(), the_plan, key=key, run_id="another", start_step=1)
        losses(model, next(iter(other))).sum().backward()
        with pytest.raises(ValueError, match="drawn with a key or run_id that is not the run's"):
            again.step()

    def test_parameters_frozen_after_the_optimizer_was_created(self):
        model = mlp()
        dpoptim.dp_sgd(model, plan(), lr=1e-2)
        model[0].requires_grad_(False)
        with pytest.raises(ValueError, match=r"'0.weight' was frozen \(and would get noise\)"):
            model(dataset().tensors[0])

    def test_loader_and_optimizer_at_different_steps(self):
        def misuse(model, loader, optimizer):
            losses(model, next(iter(loader))).sum().backward()
            with pytest.raises(ValueError, match="the loader is at step 3 and the optimizer at step 0"):
                optimizer.step()

        self.run(misuse, start_step=3)

    def test_an_interrupted_logical_batch_does_not_count(self):
        def misuse(model, loader, optimizer):
            losses(model, next(iter(loader))).sum().backward()
            optimizer.step()  # two of six examples
            for batch in loader:
                losses(model, batch).sum().backward()
                optimizer.step()
            whole = train(plan())
            found = torch.cat([p.detach().flatten() for p in model.parameters()])
            torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)

        self.run(misuse, micro_batch_size=2)


@pytest.mark.parametrize(
    ("kind", "make"),
    [("bert", dpoptim.scale_then_privatize), pytest.param("gpt2", dpoptim.joint_moments, marks=pytest.mark.slow)],
)
def test_stock_language_models_train_in_four_changed_lines(kind, make):
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if kind == "bert":
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=12,
        )  # fmt: skip
        model: nn.Module = BertForMaskedLM(config)
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0)
        )
    model.train()
    texts = torch.randint(0, 4, (400, 10), generator=torch.Generator().manual_seed(1))

    def loss_per_example(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    before = float(loss_per_example(model.eval(), texts).mean().detach())
    model.train()
    the_plan = dpoptim.PrivacyPlan(
        num_examples=400, batch_size=100, steps=40, clip_norm=1.0, sampling=dpoptim.Poisson()
    ).calibrate(epsilon=8.0, delta=1e-4)
    loader = dpoptim.private_loader(TensorDataset(texts), the_plan, **RUN)
    optimizer = make(model, the_plan, lr=2e-2, **RUN)
    for (batch,) in loader:
        loss_per_example(model, batch).sum().backward()
        optimizer.step()
    optimizer.detach()
    after = float(loss_per_example(model.eval(), texts).mean().detach())
    assert after < before - 0.5
    statement = the_plan.statement()
    assert statement.startswith("Differentially private: epsilon = 8.0000 at delta = 0.0001")
    assert "zero-out" in statement.lower()
