"""What one batch is, what is refused, and how copies of an attached model behave."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from dpoptim.clipping import check_example_independence, clipped_sum, public_data
from dpoptim.clipping import clipped_sums as clipping
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import Engine, PhysicalBatch
from tests.clipping.models import Checkpointed, Tied, case, squares


def attached(model: nn.Module, **options) -> ClippedSums:
    sums = ClippedSums(model, clip_norm=options.pop("clip_norm", 0.7), **options)
    sums.engine.attach()
    return sums


def _prefixed(name: str, message: str) -> str:
    return f"{name}: {message}"


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=tolerance, atol=tolerance, msg=partial(_prefixed, name))


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(12, 4, dtype=torch.float64)


class TestOneBatch:
    @pytest.mark.parametrize("size", [1, 2, 5, 12])
    def test_micro_batches_of_any_size_give_the_same_sum(self, mlp, x, size):
        expected, _ = clipped_sum(mlp, squares, x, clip_norm=0.7)
        sums = attached(mlp)
        for part in x.split(size):
            squares(mlp, part).sum().backward()
        assert_same(sums.take()[0], expected)

    def test_two_forwards_then_two_backwards_are_two_batches(self, mlp, x):
        """Both have six examples. If they were merged, pairs of examples would share one norm."""
        expected, _ = clipped_sum(mlp, squares, x, clip_norm=0.7)
        sums = attached(mlp)
        first, second = squares(mlp, x[:6]).sum(), squares(mlp, x[6:]).sum()
        first.backward()
        second.backward()
        assert_same(sums.take()[0], expected)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_two_forwards_with_checkpoints(self, reentrant):
        torch.manual_seed(0)
        model, x = (
            Checkpointed(reentrant).double(),
            torch.randn(8, 3, 6, dtype=torch.float64, requires_grad=True),
        )
        expected, _ = clipped_sum(model, squares, x, clip_norm=0.7)
        sums = attached(model)
        first, second = squares(model, x[:4]).sum(), squares(model, x[4:]).sum()
        first.backward()
        second.backward()
        assert_same(sums.take()[0], expected)

    def test_two_calls_in_one_backward_are_one_batch(self, mlp, x):
        """A loss over pairs: both calls of the model belong to the same example."""

        def pair_loss(model: nn.Module, pair: Tensor) -> Tensor:
            return (model(pair[:, 0]) * model(pair[:, 1])).sum(1)

        pairs = x.view(6, 2, 4)
        norms = []
        for pair in pairs:
            copied = copy.deepcopy(mlp)
            pair_loss(copied, pair[None]).sum().backward()
            norms.append(sum(float(p.grad.square().sum()) for p in copied.parameters()) ** 0.5)
        check_example_independence(mlp, pair_loss, pairs)
        _, found = clipped_sum(mlp, pair_loss, pairs)
        torch.testing.assert_close(found, torch.tensor(norms, dtype=torch.float64))

    def test_two_backwards_of_one_call_are_one_batch(self, mlp, x):
        expected, _ = clipped_sum(mlp, lambda m, x: m(x).square().sum(1), x, clip_norm=0.7)
        sums = attached(mlp)
        output = mlp(x)
        output[:, :1].square().sum().backward(retain_graph=True)
        output[:, 1:].square().sum().backward()
        assert_same(sums.take()[0], expected)

    def test_layers_without_a_call_of_the_model(self, mlp, x):
        """A loop calls the parts of a container one by one."""
        expected, _ = clipped_sum(mlp, lambda m, x: m(x).square().sum(1), x, clip_norm=0.7)
        check_example_independence(mlp, lambda _, x: mlp[2](mlp[1](mlp[0](x))).square().sum(1), x)
        sums = attached(mlp)
        for part in x.split(6):
            mlp[2](mlp[1](mlp[0](part))).square().sum().backward()
        assert_same(sums.take()[0], expected)

    def test_mean_loss(self, mlp, x):
        expected, norms = clipped_sum(mlp, squares, x, clip_norm=0.7)
        sums = attached(mlp, mean_loss=True)
        squares(mlp, x).mean().backward()
        sums.engine.flush()
        torch.testing.assert_close(torch.cat(sums.norms), norms)
        assert_same(sums.take()[0], expected)

    def test_evaluation_in_between_changes_nothing(self, mlp, x):
        expected, _ = clipped_sum(mlp, squares, x, clip_norm=0.7)
        sums = attached(mlp)
        squares(mlp, x[:6]).sum().backward()
        with torch.no_grad():
            mlp(x[:3])
        mlp(x[:2])  # with gradients, but never differentiated
        squares(mlp, x[6:]).sum().backward()
        assert_same(sums.take()[0], expected)
        assert all(float(total.abs().sum()) == 0 for total in sums.take()[0].values())


class TestSquares:
    @pytest.mark.parametrize("name", ["linear 3-D", "tied", "cnn", "bare parameters", "embedding", "layer norm"])
    def test_sum_of_squares_of_clipped_gradients(self, name):
        made = case(name)
        sums = attached(made.model, squares=True, clip_norm=0.5)
        made.loss_fn(made.model, made.batch).sum().backward()
        total, squared = sums.take()
        assert squared is not None
        expected = {n: torch.zeros_like(t) for n, t in total.items()}
        for j in range(len(made.batch)):
            own, _ = clipped_sum(made.model, made.loss_fn, made.batch[j : j + 1], clip_norm=0.5)
            expected = {n: expected[n] + own[n].square() for n in expected}
        assert_same(squared, expected, 1e-10)


class TestRefusals:
    def test_batch_norm_in_training(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm2d\).*GroupNorm"):
            attached(model)

    def test_batch_norm_put_back_in_training_mode(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
        attached(model)
        model(torch.randn(2, 1, 5, 5))
        model.train()
        with pytest.raises(ValueError, match=r"BatchNorm2d.*mixes examples"):
            model(torch.randn(2, 1, 5, 5))
        with torch.no_grad(), pytest.raises(ValueError, match=r"BatchNorm2d.*mixes examples"):
            model(torch.randn(2, 1, 5, 5))  # would add the private batch to its running mean

    @pytest.mark.parametrize(
        ("layer", "words"),
        [
            (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "running statistics"),
            (nn.Embedding(4, 3, max_norm=1.0), "max_norm"),
            (nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
            (nn.EmbeddingBag(4, 3), "bags"),
            (
                nn.utils.spectral_norm(nn.Linear(3, 3)),
                r"\(SpectralNorm\).*use torch\.nn\.utils\.parametrizations\.spectral_norm",
            ),
            (
                prune.random_unstructured(nn.Conv1d(3, 3, 1), "bias", 1),
                r"\(RandomUnst.*utils\.prune\.remove, or freeze",
            ),
        ],
        ids=["instance norm", "max_norm", "frequency", "bag", "spectral norm", "pruned"],
    )
    def test_layers_that_mix(self, layer, words):
        with pytest.raises(ValueError, match=words):
            attached(nn.Sequential(layer))

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
    def test_weight_norm_as_a_hook(self):
        layer = nn.utils.weight_norm(nn.Linear(3, 3))
        with pytest.raises(
            ValueError, match=r"layer '0' \(Linear\).*\(WeightNorm\).*parametrizations\.weight_norm, or freeze"
        ):
            attached(nn.Sequential(layer))
        layer.requires_grad_(False)
        attached(nn.Sequential(layer, nn.Linear(3, 2)))

    @pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
    def test_lists_of_parameters(self, kind):
        class Owner(nn.Module):
            def __init__(self, **own):
                super().__init__()
                weight = nn.Parameter(torch.randn(4, 4))
                self.weights = kind([weight] if kind is nn.ParameterList else {"a": weight})
                for name, value in own.items():
                    setattr(self, name, value)

            def forward(self, x):
                return x @ next(iter(self.weights.parameters()))

        with pytest.raises(ValueError, match=rf"parameters of 'weights' \({kind.__name__}\).*self\.w0 = nn\.Parameter"):
            attached(Owner())
        beside = Owner(own=nn.Parameter(torch.zeros(1)))  # the generic rule covers the list of a module with parameters
        clipped_sum(beside, squares, torch.randn(3, 4))

    def test_complex_parameters(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.cfloat))
        with pytest.raises(ValueError, match=r"layer '1' \(Linear\) has complex parameters"):
            attached(model)

    def test_loss_that_is_not_a_vector(self, mlp, x):
        with pytest.raises(ValueError, match="one loss per example"):
            clipped_sum(mlp, lambda m, x: m(x).sum(), x)
        with pytest.raises(ValueError, match="one loss per example"):
            clipped_sum(mlp, lambda m, x: m(x), x)

    def test_wrong_number_of_losses(self, mlp, x):
        with pytest.raises(ValueError, match="one loss per example, got 36 for 12 examples"):
            clipped_sum(mlp, lambda m, x: m(x).flatten(), x)

    def test_flattened_batch_axis(self):
        class Flattens(nn.Module):
            def __init__(self):
                super().__init__()
                self.enter = nn.Linear(4, 4)
                self.leave = nn.Linear(4, 4)

            def forward(self, x):
                return self.leave(self.enter(x).flatten(0, 1)).view_as(x)

        with pytest.raises(ValueError, match=r"layer 'leave' got an input of shape \(15, 4\) while the batch has 5"):
            clipped_sum(Flattens(), squares, torch.randn(5, 3, 4))

    def test_axis_that_only_happens_to_match_the_batch(self):
        """Ids are [positions, positions], with as many positions as examples."""

        class RelativePositions(nn.Module):
            def __init__(self):
                super().__init__()
                self.enter, self.table = nn.Linear(4, 4), nn.Embedding(9, 1)

            def forward(self, x):
                where = torch.arange(x.shape[1])
                bias = self.table(where[:, None] - where[None] + 4)[..., 0]
                return torch.softmax(bias, -1) @ self.enter(x)

        model = RelativePositions()
        with pytest.raises(ValueError, match=r"layer 'table' got an input of shape \(5, 5\) while the batch has 4"):
            clipped_sum(model, squares, torch.randn(5, 5, 4))
        with pytest.raises(ValueError, match=r"layer 'table' got an input of shape \(4, 4\) while the batch has 5"):
            clipped_sum(model, squares, torch.randn(5, 4, 4))
        model.table.requires_grad_(False)
        clipped_sum(model, squares, torch.randn(5, 5, 4))

    def test_the_check_restores_random_generators(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        x = torch.randn(6, 4)
        torch.manual_seed(0)
        expected = model(x).detach()
        attached(model)
        torch.manual_seed(0)
        assert torch.equal(model(x).detach(), expected)

    def test_scalar_loss_of_the_model(self):
        made = case("BertForMaskedLM")
        attached(made.model)
        with pytest.raises(ValueError, match="without labels"):
            made.model(input_ids=made.batch["input_ids"], labels=made.batch["labels"])

    def test_weight_used_outside_its_layer(self):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(7, 4)

            def forward(self, ids):
                return F.linear(self.table(ids), self.table.weight)

        model = Functional()
        attached(model)
        with pytest.raises(ValueError, match=r"'table.weight' was used outside the layer"):
            squares(model, torch.randint(0, 7, (3, 5))).sum().backward()
        assert model.table.weight.grad is None

    def test_layer_replaced_later(self, mlp, x):
        attached(mlp)
        mlp[2] = nn.Linear(6, 3).double()
        with pytest.raises(ValueError, match="was replaced after the optimizer was created"):
            squares(mlp, x).sum().backward()

    def test_parameter_replaced_later(self, mlp, x):
        attached(mlp)
        mlp[0].weight = nn.Parameter(mlp[0].weight.detach().clone())
        with pytest.raises(ValueError, match="was replaced after the optimizer was created"):
            squares(mlp, x).sum().backward()

    def test_parameter_unfrozen_later(self, mlp, x):
        mlp[0].requires_grad_(False)
        attached(mlp)
        mlp[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"used outside|unfrozen"):
            squares(mlp, x).sum().backward()

    def test_module_without_a_rule_that_mixes_examples(self):
        class Centres(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return (x - x.mean(0)) * self.gain

        with pytest.raises(ValueError, match=r"Centres.*mixes"):
            clipped_sum(nn.Sequential(nn.Linear(4, 4), Centres()), squares, torch.randn(5, 4))

    @pytest.mark.parametrize(
        "kind", [nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1)], ids=["linear", "norm", "conv"]
    )
    def test_gradient_of_a_gradient(self, kind):
        """No rule sees what a gradient penalty adds to a layer's gradient."""
        attached(kind)
        inputs = torch.randn(5, 4, 4, requires_grad=True)
        for losses in (squares(kind, inputs), kind(inputs).flatten(1).sum(1)):  # the second has a constant gradient
            with pytest.raises(ValueError, match="gradients of gradients"):
                torch.autograd.grad(losses.sum(), inputs, create_graph=True)

    def test_nothing_to_train(self, mlp):
        with pytest.raises(ValueError, match="requires_grad"):
            attached(mlp.requires_grad_(False))

    @pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
    def test_clip_norm(self, mlp, x, clip_norm):
        with pytest.raises(ValueError, match="clip_norm"):
            clipped_sum(mlp, squares, x, clip_norm=clip_norm)

    def test_scale_of_the_wrong_shape(self, mlp, x):
        scale = {name: torch.ones_like(p) for name, p in mlp.named_parameters()}
        with pytest.raises(ValueError, match=r"scale\['2.bias'\] must be a tensor of the parameter's shape"):
            clipped_sum(mlp, squares, x, scale={n: s for n, s in scale.items() if n != "2.bias"})
        with pytest.raises(ValueError, match=r"scale\['2.bias'\] must be a tensor of the parameter's shape"):
            clipped_sum(mlp, squares, x, scale={**scale, "2.bias": torch.ones(1)})


class TestExamplesDoNotMix:
    def test_passes(self, mlp, x):
        check_example_independence(mlp, squares, x)
        made = case("BertForMaskedLM")
        check_example_independence(made.model, made.loss_fn, made.batch)

    def test_swapped_axes(self, mlp):
        """There are as many positions as examples, so only the gradients show it."""

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            return model(x.transpose(0, 1)).square().sum((0, 2))

        with pytest.raises(ValueError, match="layer '0' got an input of shape"):
            check_example_independence(mlp, loss_fn, torch.randn(5, 5, 4, dtype=torch.float64))

    def test_layer_that_knows_its_batch_axis(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=False))
        with pytest.raises(ValueError, match=r"layer '1' got an input of shape \(5, 4, 4\) while the batch has 4"):
            clipped_sum(model, lambda m, x: m(x)[0].square().sum((0, 2)), torch.randn(5, 5, 4))

    def test_loss_normalised_over_the_batch(self, mlp, x):
        with pytest.raises(ValueError, match="examples mix"):
            check_example_independence(mlp, lambda m, x: m(x).square().sum(1) / m(x).square().sum(), x)

    def test_inputs_mixed_before_any_layer(self, mlp, x):
        """No layer runs before the mean, so only the losses show it."""
        with pytest.raises(ValueError, match="examples mix: output 0 of loss_fn"):
            check_example_independence(mlp, lambda m, x: m(x - x.mean(0, keepdim=True)).square().sum(1), x)

    @pytest.mark.parametrize(
        ("hook", "mixes"),
        [
            (lambda g: g / g.norm(), True),
            (lambda g: g - g.mean(0), True),
            (lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-12), False),
            (lambda g: g.clamp(-0.1, 0.1), False),
        ],
    )
    def test_gradients_mixed_by_a_hook(self, x, hook, mixes):
        class Hooked(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                hidden = self[1](self[0](x))
                if hidden.requires_grad:
                    hidden.register_hook(hook)
                return self[2](hidden)

        model = Hooked(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 2)).double()
        before = torch.get_rng_state()
        if mixes:
            with pytest.raises(ValueError, match="examples mix"):
                check_example_independence(model, squares, x)
        else:
            check_example_independence(model, squares, x)
        assert (torch.get_rng_state() == before).all()


def test_compiled_model_gives_the_same_sums(mlp, x):
    expected, _ = clipped_sum(mlp, squares, x, clip_norm=0.7)
    compiled = cast(nn.Module, torch.compile(mlp, backend="aot_eager"))
    sums = attached(mlp)
    for part in x.split(6):
        squares(compiled, part).sum().backward()
    assert_same(sums.take()[0], expected)


def test_an_error_while_summing_drops_the_sums(mlp, x, monkeypatch):
    sums = attached(mlp)
    squares(mlp, x).sum().backward()
    whole = clipping._Accumulator.add_sum
    calls = []

    def fails_late(self, name, gradients, weights):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory")
        whole(self, name, gradients, weights)

    monkeypatch.setattr(clipping._Accumulator, "add_sum", fails_late)
    with pytest.raises(MemoryError):
        sums.take()
    monkeypatch.undo()
    assert all(float(total.abs().sum()) == 0 for total in sums.take()[0].values())


class TestCopies:
    def test_copies_and_pickles_run_without_the_engine(self, mlp, x):
        attached(mlp)
        copied = copy.deepcopy(mlp)
        with torch.no_grad():
            copied[0].weight.zero_()
            copied[0].bias.zero_()
        assert not torch.equal(copied(x), mlp(x))
        copied(x).sum().backward()
        assert copied[2].weight.grad is not None
        file = io.BytesIO()
        torch.save(mlp, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(x), mlp(x))

    def test_state_dict_is_unchanged(self):
        model = Tied()
        keys = list(model.state_dict())
        attached(model)
        assert list(model.state_dict()) == keys

    def test_public_gradients_may_arrive_in_a_different_thread(self, mlp, x):
        """As on a GPU, where the context of the caller is not that of the backward."""
        ClippedSums(mlp, clip_norm=1.0).engine.attach()
        with public_data():
            loss = squares(mlp, x).sum()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
        assert all(parameter.grad is not None for parameter in mlp.parameters())
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="outside the layer"):
            pool.submit(F.linear(x, next(mlp.parameters())).sum().backward).result()

    def test_public_data_has_ordinary_gradients(self, mlp, x):
        sums = attached(mlp)
        with public_data():
            gradients = torch.autograd.grad(squares(mlp, x).sum(), list(mlp.parameters()))
        reference = copy.deepcopy(mlp)
        squares(reference, x).sum().backward()
        for found, p in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(found, p.grad)
        assert all(float(total.abs().sum()) == 0 for total in sums.take()[0].values())

    def test_clipped_sum_keeps_the_sums_of_an_optimizer(self, mlp, x):
        sums = attached(mlp)
        squares(mlp, x).sum().backward()
        expected, _ = clipped_sum(mlp, squares, x, clip_norm=0.7)
        assert sums.engine.attached
        assert_same(sums.take()[0], expected)


def test_an_engine_that_cannot_attach_keeps_the_previous_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    kept: list[PhysicalBatch] = []
    previous = Engine(model, kept.append)
    previous.attach()
    model[1] = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="BatchNorm"):
        Engine(model, kept.append).attach()
    assert previous.attached
    model[1] = nn.ReLU()
    model(torch.randn(5, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.LayerNorm(6), (4, 6)),
        (nn.Linear(6, 3), (6,)),
        (nn.Linear(6, 3), (2, 4, 6)),
        (nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)), (2, 4)),
        (nn.Embedding(9, 4), (5,)),
    ],
    ids=["norm", "linear", "linear 4-D", "conv", "embedding"],
)
def test_an_empty_batch(model, shape):
    inputs = torch.zeros(0, *shape, dtype=torch.long if isinstance(model, nn.Embedding) else torch.float32)
    sums, norms = clipped_sum(model, lambda m, x: m(x).flatten(1).sum(1), inputs, clip_norm=1.0)
    assert norms.shape == (0,)
    assert not any(total.any() for total in sums.values())


def test_an_empty_batch_of_a_module_without_a_rule():
    with pytest.raises(ValueError, match=r"got an empty batch\. Skip forward and backward for an empty sample"):
        clipped_sum(nn.PReLU(), lambda m, x: m(x).sum(1), torch.zeros(0, 4), clip_norm=1.0)


def test_detaching_an_old_engine_keeps_the_new_one():
    model = nn.Linear(3, 2)
    first, second = attached(model), attached(model)
    first.engine.detach()
    assert second.engine.attached
    model(torch.randn(5, 3)).sum().backward()
    assert second.take()[0]["weight"].any()
    second.engine.detach()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    ("module", "scale"), [("gemma", 3.0), ("gemma2", 3.0), ("gemma3", 3.0), ("bart", 3.0), ("mbart", 3.0)]
)
def test_scaled_embeddings_of_transformers(module, scale):
    """Our rule matches every copy of that class."""
    transformers = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    (kind,) = {value for name, value in vars(transformers).items() if name.endswith("ScaledWordEmbedding")}
    torch.manual_seed(0)
    model = nn.Sequential(kind(7, 4, padding_idx=None, embed_scale=scale), nn.Linear(4, 2))
    ids = torch.randint(0, 7, (5, 3))
    losses = model(ids).square().sum((1, 2))
    expected = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    sums, _ = clipped_sum(model, lambda model, ids: model(ids).square().sum((1, 2)), ids, clip_norm=1e6)
    for number, total in enumerate(sums.values()):
        torch.testing.assert_close(total, torch.stack([each[number] for each in expected]).sum(0))
