"""The engine: an ordinary forward and ONE ordinary backward of an unmodified model, with per-example gradients kept.

`Engine.attach` gives every module that owns a trainable parameter a forward that runs through its layer rule. The
rule's autograd function returns the input gradient and keeps what the per-example weight gradient is made of; autograd
computes no weight gradient at all. Kept uses are collected into a physical batch; when the batch is over (at the
next forward or at `flush`) it is handed to `on_batch` and forgotten.

Which uses belong to the same examples is decided by the backward they arrive in: everything of one backward is one
batch, and so is everything of one call of the model. Two calls with two separate backwards are two micro-batches.

The first real batch of each call signature is checked by value: examples must not mix. The check also shows which
layers get examples on their first axis, and which get one row that all examples share. A layer that runs in a
different way later, or outside of any checked call, is refused. A batch of one example has nothing to mix with, and
all its gradients belong to that example: it is not checked, and its layers must have one row. The same holds for a
call of a part of the model (`self.bert(...)` in a loop's own step).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpoptim.clipping.calls import (
    BatchAxisError,
    LayerCall,
    RecentCalls,
    SeenLayers,
    keep_compilers_out,
    watch_calls,
)
from dpoptim.clipping.gradient_factors import Form, choose_factors
from dpoptim.clipping.layers import choose_rules
from dpoptim.clipping.layers.rule import Layer, Use
from dpoptim.clipping.norms import ParameterGradients
from dpoptim.clipping.physical_batch import PhysicalBatch
from dpoptim.kernels.norms import wide_dtype
from dpoptim.kernels.precision import full_precision
from dpoptim.validation.changed_state import StateChangeGuard
from dpoptim.validation.example_independence import Arguments, ExampleMixingError, Gradients, check_independence
from dpoptim.validation.model_checks import refuse_mixing

_ENGINE = "_dpoptim_engine"
_public: ContextVar[bool] = ContextVar("dpoptim_public_data", default=False)
_losses_checked: weakref.WeakKeyDictionary[nn.Module, SeenLayers] = weakref.WeakKeyDictionary()
"""Models whose loss has passed `check_example_independence`, with what it showed."""


@contextlib.contextmanager
def public_data() -> Iterator[None]:
    """Inside this context the model runs and differentiates as if no private engine were attached.

    For PUBLIC data only: gradients taken here are neither clipped nor noised, and no guarantee covers them.
    """
    token = _public.set(True)
    try:
        yield
    finally:
        _public.reset(token)


class UncheckedLossError(ExampleMixingError):
    """Only a check of the whole loss can show that examples do not mix."""


class Engine:
    """Keeps the per-example gradients of `model`'s trainable parameters; `on_batch` receives each physical batch."""

    def __init__(
        self,
        model: nn.Module,
        on_batch: Callable[[PhysicalBatch], None],
        *,
        extra_memory: int = 0,
        allow_mixing: bool = False,
    ) -> None:
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._all_parameters = list(model.named_parameters())
        if not self.names:
            raise ValueError("model has no parameter with requires_grad=True; unfreeze what is to be trained")
        self.on_batch = on_batch
        self.model = model
        self.extra_memory = extra_memory
        self.allow_mixing = allow_mixing
        self.batch = self._new_batch()
        self.examples: int | None = None  # of the running forward
        self.call: int | None = None  # which call of the model, or of a part, is running; None outside of it
        self._called: nn.Module | None = None
        self._calls = 0
        self._closed_calls = RecentCalls()
        self._checked: dict[nn.Module, list[Any]] = {}  # signatures of calls that have passed the check
        self._seen = SeenLayers()
        self.inside_generic = False
        self.buffers = StateChangeGuard(model)
        self._handles: list[RemovableHandle] = []
        self.layers: dict[nn.Module, Layer] = {}

    # Copies and pickles of the model (an average of weights, a checkpoint) run without an engine.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())

    # -- attaching -------------------------------------------------------------------------------------------------

    def attach(self) -> Engine | None:
        """Route the model's layers through this engine; returns the engine that was attached before, now detached."""
        previous = self.model.__dict__.get(_ENGINE)
        if previous is not None:
            previous.flush()
            previous._leave_forwards()
        try:
            handles, layers = refuse_mixing(self.model), choose_rules(self.model)
        except ValueError:  # the engine that watches goes on watching
            if previous is not None:
                previous._take_forwards()
            raise
        if previous is not None:
            previous.detach()
        self._handles, self.layers = handles, layers
        self.model.__dict__[_ENGINE] = self
        self._take_forwards()
        for parameter in self.model.parameters():
            if id(parameter) in self.names:
                self._handles.append(parameter.register_hook(_UnseenGradientGuard(self, self.names[id(parameter)])))
        self._handles += watch_calls(self.model, self.layers, self)
        return previous

    def detach(self) -> None:
        """Give the model back its own forward, unless another engine watches it; what was kept is forgotten."""
        if self.attached:
            del self.model.__dict__[_ENGINE]
        self._leave_forwards()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.layers = {}
        self.discard()

    def _take_forwards(self) -> None:
        keep_compilers_out(_PrivateForward, "__call__")  # a compiled backward would not call `keep`
        for module, layer in self.layers.items():
            module.__dict__["forward"] = _PrivateForward(self, module, layer)

    def _leave_forwards(self) -> None:
        for module in self.layers:
            forward = module.__dict__.get("forward")
            if isinstance(forward, _PrivateForward) and forward.engine is self:
                del module.__dict__["forward"]

    @property
    def attached(self) -> bool:
        return self.model.__dict__.get(_ENGINE) is self

    # -- the forward -----------------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        return torch.is_grad_enabled() and not self.inside_generic and not _public.get()

    @property
    def checking(self) -> bool:
        """Whether a check runs, of this model or of another; nothing that arrives belongs to a real batch."""
        return _watch is not None

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_whole = module is self.model
        nested = self._called not in (None, module) and not is_whole  # an interrupted call begins again
        if nested or not self.capturing or self.checking:
            return
        if not is_whole and torch._C._current_graph_task_id() != -1:
            return  # an activation checkpoint runs a part again
        if self.batch.is_open and (not is_whole or self.batch.add_ready is not None):
            self.flush()  # before the call begins: what is ready may run the model
        self._called = module
        self.buffers.begin(anew=is_whole and not self.batch.is_open)
        for name, parameter in self._all_parameters:
            if parameter.requires_grad != (id(parameter) in self.names):
                change = "unfrozen" if parameter.requires_grad else "frozen (and would get noise)"
                raise ValueError(f"parameter '{name}' was {change} after the optimizer was made; make it last")
        if self._calls % 32 == 0 and list(map(id, self.model.parameters())) != [id(p) for _, p in self._all_parameters]:
            raise ValueError("a layer of the model was replaced after the optimizer was made; make the optimizer last")
        self._calls += 1
        self.call = self._calls
        arguments = Arguments.of((args, kwargs), type(module).__name__)
        if arguments.examples is None:
            raise ValueError(
                f"{type(module).__name__} was called without a tensor in its arguments (an object, a UserDict), so its "
                "examples cannot be found. Pass tensors, in lists, tuples or dicts"
            )
        self._check_call(module, arguments)
        self.examples = arguments.examples

    def end_call(self, module: nn.Module, output: Any) -> None:
        if module is not self._called or not self.capturing or self.checking:
            return
        self._called = self.call = None
        self.buffers.look()
        _refuse_scalars(module, output)

    def _check_call(self, module: nn.Module, arguments: Arguments) -> None:
        """Check that examples do not mix, once for each signature of a call."""
        if (arguments.examples or 0) < 2:
            return
        modes = [part.training for part in self.model.modules()]
        signature, checked = (modes, arguments.structure, arguments.signature()), self._checked.setdefault(module, [])
        if signature in checked:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError("a call that has not been checked cannot be captured; run it once as it is")
        name = type(module).__name__
        call: Callable[..., Any] = module._call_impl  # with hooks, but never compiled

        def run(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            output = call(*given[0], **given[1])
            _refuse_scalars(module, output)
            return output

        watch = _Watch(self)
        is_conclusive = watch.check(name, run, arguments)
        self._seen.update(watch.seen)
        if is_conclusive and not watch.has_gradients:
            self._need_checked_loss(f"nothing that {name} returns depends on a trained parameter")
        if is_conclusive:
            checked.append(signature)

    def check_losses(self, losses: Callable[[Any], Tensor], batch: Any) -> bool:
        """Check that examples do not mix in the model and its loss, a function of the batch.

        All engines of the model rely on it from now on. False if the batch shows nothing.
        """
        arguments = Arguments.of(batch, "loss_fn")
        if (arguments.examples or 0) < 2:
            return False

        def run(given: Any) -> Tensor:
            found, rows = losses(given), Arguments.of(given, "loss_fn").examples
            if len(found) != rows:
                raise ValueError(
                    f"loss_fn returned {len(found)} losses for a batch of {rows} examples. Return one loss per example"
                )
            return found

        _losses_checked.pop(self.model, None)
        watch = _Watch(self)
        self.buffers.begin(anew=True)
        is_conclusive = watch.check("loss_fn", run, arguments)
        self.buffers.look()
        self.buffers.check(waiting=False)
        if is_conclusive:
            _losses_checked[self.model] = watch.seen
        return is_conclusive

    @contextlib.contextmanager
    def checked_losses(self, losses: Callable[[Any], Tensor], batch: Any) -> Iterator[None]:
        """Inside, and nowhere else, the model counts as checked together with this loss."""
        before = _losses_checked.get(self.model)
        try:
            self.check_losses(losses, batch)
            yield
        finally:
            _losses_checked.pop(self.model, None)
            if before is not None:
                _losses_checked[self.model] = before

    def expand_to_batch(self, tensor: Tensor, layer: str, *, is_tied: bool = False) -> Tensor:
        """The tensor with the batch as its first axis: shared rows are expanded. `is_tied`: to labels, by two axes."""
        if tensor.ndim == 0:
            raise ValueError(f"layer '{layer}' got a scalar; private layers need the batch as the first axis")
        if _watch is not None:
            return _watch.expand_to_batch(self, tensor, layer)
        is_recomputed = torch._C._current_graph_task_id() != -1
        if self.batch.is_open and not is_recomputed:
            self.flush()
        self.buffers.begin(anew=False)  # where layers are called by themselves
        by_losses = _losses_checked.get(self.model, SeenLayers())
        is_bare = self.call is None and not is_recomputed
        if is_bare and self.examples != 1 and not (is_tied and tensor.requires_grad and self.examples is not None):
            self._need_checked_loss(f"layer '{layer}' ran outside a call of {type(self.model).__name__}")
        if self.examples is None:
            self.examples = tensor.shape[0]
        found = layer, tensor.ndim
        if tensor.shape[0] == self.examples:
            if self.examples > 1 and not is_bare and found not in self._seen.examples | by_losses.examples:
                raise ValueError(
                    f"layer '{layer}' did not run, or with other axes, when {type(self.model).__name__} was checked, "
                    "so nothing shows that the first axis of its input is the batch. Run the same layers in every "
                    "call, or let an argument that is True, False or None decide"
                )
            return tensor
        if tensor.shape[0] == 1 and found in self._seen.shared | by_losses.shared:
            return tensor.expand(self.examples, *tensor.shape[1:])
        raise BatchAxisError(layer, tensor.shape, self.examples)

    def _need_checked_loss(self, what: str) -> None:
        """Refuse what the check of calls cannot see, unless the loss was checked as a whole."""
        if self.model not in _losses_checked and not self.allow_mixing:
            self.discard()
            raise UncheckedLossError(
                f"{what}, so nothing shows that examples do not mix. Call the model itself, model(...), once per "
                "backward, or first run dpoptim.check_example_independence(model, loss_fn, batch)"
            )

    def axes_of(self, layer: str, leaves: list[Any]) -> tuple[int | None, ...] | None:
        """Where the arguments of a layer had the examples when it was checked; None if such a call was not seen."""
        key = layer, tuple(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves)
        return self._seen.axes.get(key) or _losses_checked.get(self.model, SeenLayers()).axes.get(key) or None

    def use(self) -> Use:
        """Where a layer call stands, to be handed to `keep` when its gradient arrives."""
        inside = torch._C._current_graph_task_id()
        return Use(call=self.call, recomputed_in=None if inside == -1 else inside)

    # -- the backward ----------------------------------------------------------------------------------------------

    def keep(self, parameter: nn.Parameter, form: Form, use: Use) -> None:
        """Called by the layer functions during backward, once for each use of a parameter."""
        if id(parameter) not in self.names:
            self.discard()
            raise ValueError("a parameter was replaced after the optimizer was made; make the optimizer last")
        name = self.names[id(parameter)]
        if _watch is not None:
            _watch.keep(self, name, form)
            return
        batch = self._batch_of(use, torch._C._current_graph_task_id())
        gradients = batch.gradients.get(name)
        if gradients is None:
            gradients = batch.gradients[name] = ParameterGradients(parameter.shape, wide_dtype(parameter.dtype))
        form, spent = choose_factors(form, parameter.shape, batch.extra_memory)
        batch.extra_memory -= spent
        if batch.examples and form.examples != batch.examples:
            examples = batch.examples
            self.discard()
            raise ValueError(
                f"the gradient of '{name}' has {form.examples} examples where other uses have {examples} in the "
                "same backward; run one backward for each call of the model"
            )
        batch.examples = form.examples
        gradients.add(form)

    def _batch_of(self, use: Use, backward: int) -> PhysicalBatch:
        """The physical batch that a use belongs to: the open one, or a new one after that is closed."""
        batch = self.batch
        if batch.last == (use, backward):
            return batch
        if use.call in self._closed_calls:
            self.discard()
            raise ValueError(
                "a backward came through a call of the model whose batch was closed by a later forward or step: its "
                "examples would count twice; add up the losses of one call and run one backward"
            )
        if batch.is_open and not (use.call in batch.calls or {backward, use.recomputed_in} & batch.backwards):
            if use.recomputed_in is not None:
                self.discard()
                raise ValueError(
                    "reentrant activation checkpoints were met in an order that hides which examples they belong to; "
                    "use checkpoint(..., use_reentrant=False)"
                )
            self.flush()
            self.buffers.begin(anew=True)
            batch = self.batch
        batch.enter(use, backward)
        if use.call is not None:
            batch.calls.add(use.call)
            if len(batch.calls) > 1:
                self._need_checked_loss(f"two calls of {type(self.model).__name__} meet in one backward")
        return batch

    def _new_batch(self) -> PhysicalBatch:
        return PhysicalBatch(extra_memory=self.extra_memory)

    def flush(self) -> None:
        """Close the physical batch: what was kept goes to `on_batch`."""
        batch, self.batch = self.batch, self._new_batch()
        self._closed_calls.add(*batch.calls)
        self.buffers.check(waiting=batch.is_open)
        if batch.is_open and not batch.has_failed():
            for name, gradients in batch.gradients.items():
                if gradients.was_overwritten:
                    raise ValueError(
                        f"an input that the gradient of '{name}' is made of was changed in place after backward (a "
                        "reused buffer?); call optimizer.step() before the next batch is written, or copy the batch"
                    )
            with torch.no_grad(), full_precision(next(self.model.parameters()).device.type):
                self.on_batch(batch)
        if self.call is None:
            self.examples = None

    def end_step(self) -> None:
        """Between steps nothing runs: a forward that was interrupted is over."""
        self._called = self.call = None
        self.flush()

    def discard(self) -> None:
        """Forget what was kept of the open physical batch."""
        self.batch = self._new_batch()
        self.examples = None


def _refuse_scalars(module: nn.Module, output: Any) -> None:
    for leaf in pytree.tree_leaves(dict(output) if isinstance(output, dict) else output):
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad:
            raise ValueError(
                f"{type(module).__name__} returned a scalar that needs a gradient, as a Hugging Face model does when "
                "it is given `labels`: that loss is an average over the batch and mixes examples. Call the model "
                "without labels and compute one loss per example (shape [examples]) from its logits."
            )


class _UnseenGradientGuard:
    """Raises when a gradient reaches a parameter outside its layer rule: it would be neither clipped nor noised."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or _public.get():
            return
        self.engine.discard()
        raise ValueError(
            f"parameter '{self.name}' was used outside the layer that owns it (for example F.linear(x, layer.weight)), "
            "where its per-example gradient cannot be seen; call the layer itself, or freeze the parameter. Public "
            "data goes inside `with dpoptim.public_data():`"
        )


class _Watch:
    """One check of a model: what its runs record in place of a real batch.

    The open batch, calls and gradients are left as they were. A buffer that the runs change is refused afterwards, as
    it would be without a check.

    There is one for all engines and threads, because a backward may pass through layers of another engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen, self.has_gradients = engine, SeenLayers(), False
        self._gradients: Gradients = []
        self._runs: list[tuple[int, list[LayerCall]]] = []  # how many examples, and what the layers got

    def check(self, name: str, run: Callable[[Any], Any], arguments: Arguments) -> bool:
        """Run the check; False if nothing could be seen. Differences are not raised where mixing is allowed."""
        global _watch
        engine = self.engine

        def run_on(given: Any) -> Any:
            self._runs.append((Arguments.of(given, name).examples or 0, []))
            return run(given)

        def compare_sizes() -> None:
            (other_count, others), (count, calls) = self._runs
            self.seen.add(calls, others, count, other_count)

        def check(given: Arguments) -> bool:
            self._runs.clear()
            return check_independence(name, run_on, self._take, given, after_two_sizes=compare_sizes)

        _watch = self
        try:
            with torch.compiler.set_stance("force_eager"):
                try:
                    return check(arguments)
                except (RuntimeError, IndexError):  # an argument that all share may be as long as the batch by chance
                    return check(arguments._replace(only_first=True))
        except ExampleMixingError:
            engine.buffers.look()
            engine.buffers.check(waiting=False)  # a tensor of the model that changed is named first
            if not engine.allow_mixing:
                raise
            return True
        finally:
            _watch = None

    def _take(self) -> Gradients:
        taken, self._gradients = self._gradients, []
        return taken

    def see(self, engine: Engine, layer: str, module: nn.Module, args: Any) -> None:
        """A layer is called."""
        if engine is self.engine and not engine.inside_generic:
            self._runs[-1][1].append(LayerCall.of(layer, module, args))

    def expand_to_batch(self, engine: Engine, tensor: Tensor, layer: str) -> Tensor:
        examples = self._runs[-1][0]
        if engine is not self.engine or tensor.shape[0] == examples:
            return tensor
        if tensor.shape[0] == 1:
            return tensor.expand(examples, *tensor.shape[1:])
        raise BatchAxisError(layer, tensor.shape, examples)

    def keep(self, engine: Engine, parameter: str, form: Form) -> None:
        if engine is self.engine:
            self.has_gradients = True
            self._gradients.append((parameter, form.sketch()))


_watch: _Watch | None = None


class _PrivateForward:
    """The forward of a module that runs through an engine. Copies and pickles of it are the module's own forward."""

    def __init__(self, engine: Engine, module: nn.Module, layer: Layer) -> None:
        self.engine, self.module, self.layer = engine, module, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _watch is not None:
            _watch.see(self.engine, self.layer.name, self.module, (args, kwargs))
        if self.engine.capturing:
            return self.layer.rule(self.engine, self.layer.name, self.module, args, kwargs)
        # First in a reentrant checkpoint:
        in_call = self.engine.call is not None or self.engine.checking
        if self.layer.rewrites and in_call and not torch.is_grad_enabled():
            return self.layer.rule(self.engine, self.layer.name, self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


def sink_of(module: nn.Module, inputs: Tensor) -> tuple[Engine | None, str]:
    """The engine that a module's gradients go to now, and the module's name there; None where they are ordinary."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, _PrivateForward) or not forward.engine.capturing:
        return None, ""
    if _watch is not None:
        _watch.see(forward.engine, forward.layer.name, module, (inputs,))
    return forward.engine, forward.layer.name
