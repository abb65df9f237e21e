"""The engine records per-example gradients in one ordinary forward and backward of an unmodified model.

`Engine.attach` routes the forward of every module with a trainable parameter through its layer rule. The rule's
autograd function returns the input gradient and records the factors of the per-example weight gradient; autograd
computes no weight gradient. The next forward or `flush` closes the physical batch and hands it to `on_batch`.
Everything in one backward, or from one call of the model, is one batch.

The first real batch of each call signature is checked by value: examples must not mix. The check also shows which
layers receive examples on their first axis, and which receive one row that all examples share. A layer that later runs
differently, or outside a checked call, is refused. A call of a part (`self.bert(...)`) is checked too.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpoptim.clipping.gradient_factors import GradientFactors
from dpoptim.clipping.layers import choose_rules
from dpoptim.clipping.layers.rule import Layer, Recorder
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.data.shards import ParameterSlots, Shards, fsdp_modules
from dpoptim.kernels.norms import full_precision, wide_dtype
from dpoptim.validation.changed_state import StateChangeGuard
from dpoptim.validation.example_independence import Arguments, ExampleMixingError
from dpoptim.validation.loss_reduction import AVERAGED, is_averaging
from dpoptim.validation.model_check import BatchAxisError, CheckedLoss, LayerAxes, ModelCheck, refuse_scalars
from dpoptim.validation.refused_layers import refuse_mixing

_ENGINE = "_dpoptim_engine"
_WATCHED_DEPTH = 3  # parts further below the model are not watched: hooks on every small module would cost time
_REMEMBERED_CALLS = 4096
_public: ContextVar[bool] = ContextVar("dpoptim_public_data", default=False)
_public_contexts: list[object] = []  # of all threads
_losses_checked: weakref.WeakKeyDictionary[nn.Module, CheckedLoss] = weakref.WeakKeyDictionary()
"""Models whose loss has passed a check, which engines read in `attach`."""


@contextlib.contextmanager
def public_data() -> Iterator[None]:
    """Run the model on PUBLIC data, as if no private engine were attached.

    Gradients taken in this context are neither clipped nor noised, and no guarantee covers them.
    """
    token = _public.set(True)
    _public_contexts.append(token)
    try:
        yield
    finally:
        _public_contexts.remove(token)
        _public.reset(token)


class UncheckedLossError(ExampleMixingError):
    """Only a check of the whole loss can show that examples do not mix."""


class LayerCall(NamedTuple):
    """One call of a layer: the call of the model, and the backward in which an activation checkpoint recomputed it."""

    model_call: int | None
    recomputed_in: int | None


@dataclass
class PhysicalBatch:
    """The gradients of the examples that went through the model at the same time, by parameter."""

    gradients: dict[str, ParameterGradients] = field(default_factory=dict)
    examples: int = 0
    extra_memory: int = 0  # bytes left for gradients that are larger than their factors
    calls: set[int] = field(default_factory=set)
    backwards: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)  # backwards that are still running, or failed
    last: tuple[LayerCall, int] | None = None  # what was recorded last, and in which backward
    add_ready: Callable[[], None] | None = None  # adds what a graph has clipped and summed, in place of gradients

    @property
    def is_open(self) -> bool:
        """Whether examples have been differentiated."""
        return bool(self.gradients) or self.add_ready is not None

    def enter(self, call: LayerCall, backward: int) -> None:
        """Record that a layer call arrived in a backward; torch reports when the backward ends."""
        if backward not in self.backwards:
            self.unfinished.add(backward)
            Variable._execution_engine.queue_callback(partial(self.unfinished.discard, backward))
        self.backwards |= {backward} if call.recomputed_in is None else {backward, call.recomputed_in}
        self.last = (call, backward)

    def has_failed(self) -> bool:
        """Return whether its backward failed; raise if a second backward ran on the rest of its graph."""
        failed = self.unfinished if torch._C._current_graph_task_id() == -1 else set()
        if failed and failed != self.backwards:
            raise ValueError("a backward failed and a second one ran through the same call; call the model again first")
        return bool(failed)


class Engine:
    """Records the per-example gradients of `model`'s trainable parameters; `on_batch` receives each physical batch."""

    def __init__(
        self,
        model: nn.Module,
        on_batch: Callable[[PhysicalBatch], None],
        *,
        extra_memory: int = 0,
        allow_mixing: bool = False,
        shards: Shards | None = None,
        may_average: bool = False,
    ) -> None:
        self.shards = shards
        self._all_parameters = list(model.named_parameters())
        # Held, so that no other tensor gets their ids: the parameters, and whole ones that FSDP puts in their place.
        self._guarded = [(p, name) for name, p in self._all_parameters if p.requires_grad]
        self.names = {id(p): name for p, name in self._guarded}
        self.modules = list(model.modules())
        if not self.names:
            raise ValueError("model has no parameter with requires_grad=True; unfreeze what you want to train")
        self.on_batch = on_batch
        self.model = model
        self.extra_memory = extra_memory
        self.allow_mixing = allow_mixing
        self.batch = self._new_batch()
        self.examples: int | None = None  # in the running forward
        self.call: int | None = None  # number of the running call of the model or of a part
        self._called: nn.Module | None = None
        self._calls = 0
        self._closed_calls: dict[int, None] = {}
        self._checked: dict[nn.Module, list[Any]] = {}  # signatures of calls that passed the check
        self._seen = LayerAxes()
        self._loss_is_checked = False
        self._may_average = may_average  # the losses of a batch
        self.runs_plain = False
        self.buffers = StateChangeGuard(model)
        self._handles: list[RemovableHandle] = []
        self.layers: dict[nn.Module, Layer] = {}
        self._slots = None if shards is None else ParameterSlots(model, shards.shapes)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())  # copies and pickles of the model (averaged weights, a checkpoint) have no engine

    # -- attaching -------------------------------------------------------------------------------------------------

    def attach(self) -> Engine | None:
        """Route the model's layers through this engine; return the engine that this one replaces."""
        previous = self.model.__dict__.get(_ENGINE)
        if previous is not None:
            previous.flush()
            previous._leave_forwards()
        try:
            handles, layers = refuse_mixing(self.model), choose_rules(self.model)
        except ValueError:  # the previous engine stays attached
            if previous is not None:
                previous._take_forwards()
            raise
        if previous is not None:
            previous.detach()
        self._handles, self.layers = handles, layers
        self.model.__dict__[_ENGINE] = self
        self._take_forwards()
        for parameter, name in self._guarded:
            self._guard(parameter, name)
        if self.shards is not None:
            guard_whole = _Hooks(self).guard_whole
            self._handles += [group.register_forward_pre_hook(guard_whole) for group in fsdp_modules(self.model)]
        self._handles += self._watch_calls()
        self._loss_is_checked = False
        if (found := _losses_checked.get(self.model)) is not None:
            self._rely_on(found)
        return previous

    def detach(self) -> None:
        """Restore the model's own forward, unless another engine is attached, and drop the open batch."""
        if self.attached:
            del self.model.__dict__[_ENGINE]
        self._leave_forwards()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.layers = {}
        self.discard()

    def _take_forwards(self) -> None:
        _keep_compilers_out(_PrivateForward, "__call__")  # a compiled backward would not call `record`
        for module, layer in self.layers.items():
            module.__dict__["forward"] = _PrivateForward(self, module, layer)

    def _leave_forwards(self) -> None:
        for module in self.layers:
            forward = module.__dict__.get("forward")
            if isinstance(forward, _PrivateForward) and forward.engine is self:
                del module.__dict__["forward"]

    def _watch_calls(self) -> Iterator[RemovableHandle]:
        """Watch calls of the model and of its larger parts that hold layers; the outermost call counts."""
        _keep_compilers_out(_Hooks, "begin", "end", "guard_whole")
        hooks = _Hooks(self)
        # Members of a list are called by the module that holds them.
        lists = tuple(f"{name}." for name, module in self.model.named_modules() if isinstance(module, nn.ModuleList))
        for name, module in self.model.named_modules():
            is_near = name.count(".") < _WATCHED_DEPTH and not name.startswith(lists)
            is_part = is_near and module not in self.layers and any(m in self.layers for m in module.modules())
            if module is self.model or is_part:
                is_first = self.shards is not None  # before FSDP replaces parameters
                yield module.register_forward_pre_hook(hooks.begin, with_kwargs=True, prepend=is_first)
                yield module.register_forward_hook(hooks.end, always_call=True)

    def _model_check(self) -> ModelCheck:
        return ModelCheck(self, self.buffers, allow_mixing=self.allow_mixing)

    @property
    def attached(self) -> bool:
        return self.model.__dict__.get(_ENGINE) is self

    # -- the forward -----------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        return torch.is_grad_enabled() and not self.runs_plain and not _public.get()

    @property
    def checking(self) -> bool:
        """Whether a check of any model is running; gradients that arrive now do not belong to a real batch."""
        return ModelCheck.running is not None

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_whole = module is self.model
        nested = self._called not in (None, module) and not is_whole  # an interrupted call begins again
        if nested or not self.recording or self.checking:
            return
        if not is_whole and torch._C._current_graph_task_id() != -1:
            return  # an activation checkpoint recomputes a part
        if self.batch.is_open and (not is_whole or self.batch.add_ready is not None):
            self.flush()  # before the call begins, because it may run the model
        self._called = module
        self.buffers.begin(restart=is_whole and not self.batch.is_open)
        for name, parameter in self._all_parameters:
            if parameter.requires_grad != (id(parameter) in self.names):
                change = "unfrozen" if parameter.requires_grad else "frozen (and would get noise)"
                raise ValueError(
                    f"parameter '{name}' was {change} after the optimizer was created; create the optimizer last"
                )
        if self._calls % 32 == 0 and self._was_replaced():
            raise ValueError("a layer was replaced after the optimizer was created; create the optimizer last")
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
        if module is not self._called or not self.recording or self.checking:
            return
        self._called = self.call = None
        self.buffers.look()
        refuse_scalars(module, output)

    def guard_whole_parameters(self) -> None:
        """Name and guard the whole parameters that FSDP has put in place of sharded ones, whether used or not."""
        assert self._slots is not None  # only models of FSDP have this hook
        for parameter, name in self._slots.unsharded(check=self.recording):
            if id(parameter) not in self.names:
                self.names[id(parameter)] = name
                self._guarded.append((parameter, name))
                self._guard(parameter, name)

    def _guard(self, parameter: nn.Parameter, name: str) -> None:
        self._handles.append(parameter.register_hook(partial(self._refuse_unseen_gradient, name)))

    def _was_replaced(self) -> bool:
        """Return whether a parameter or module was replaced, other than by FSDP itself."""
        if self._slots is not None:
            return self._slots.have_changed(self.model)
        return list(map(id, self.model.parameters())) != [id(p) for _, p in self._all_parameters]

    def _check_call(self, module: nn.Module, arguments: Arguments) -> None:
        """Check that examples do not mix, once per call signature."""

        def needs_check() -> bool:
            return (arguments.examples or 0) > 1 and self._signature(arguments) not in self._checked.get(module, [])

        if self.shards is not None:
            given = pytree.tree_unflatten(arguments.leaves, arguments.structure)
            for call in self.shards.calls_to_check(given, needs_check, device=next(self.model.parameters()).device):
                self._check_first_call(module, Arguments.of(call, type(module).__name__))
        elif needs_check():
            self._check_first_call(module, arguments)

    def _check_first_call(self, module: nn.Module, arguments: Arguments) -> None:
        signature, checked = self._signature(arguments), self._checked.setdefault(module, [])
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError("an unchecked call cannot be captured; run it once without a graph")
        name = type(module).__name__
        call: Callable[..., Any] = module._call_impl  # with hooks, but never compiled

        def run(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            output = call(*given[0], **given[1])
            refuse_scalars(module, output)
            return output

        check = self._model_check()
        is_conclusive = check.check(name, run, arguments)
        self._seen.update(check.seen)
        if is_conclusive and not check.has_gradients:
            self._need_checked_loss(f"nothing that {name} returns depends on a trained parameter")
        if is_conclusive:
            checked.append(signature)

    def _signature(self, arguments: Arguments) -> Any:
        return [part.training for part in self.modules], arguments.structure, arguments.signature()

    def check_losses(self, losses: Callable[[Any], Tensor], batch: Any, *, lasting: bool) -> CheckedLoss | None:
        """Check that examples do not mix in the model and its loss; return None if the batch cannot show mixing.

        This engine relies on the result; with `lasting`, so does every engine that attaches to the model later. Calls
        of the model are checked all the same: a loss may be 0 here, and hide an output that mixes examples.
        """
        arguments = Arguments.of(batch, "loss_fn")
        if (arguments.examples or 0) < 2:
            return None

        def run(given: Any) -> Tensor:
            found, rows = losses(given), Arguments.of(given, "loss_fn").examples
            if len(found) != rows:
                raise ValueError(f"loss_fn must return one loss per example, got {len(found)} for {rows} examples")
            return found

        if lasting:
            _losses_checked.pop(self.model, None)  # an earlier result no longer holds if this check fails
        check = self._model_check()
        self.buffers.begin(restart=True)
        is_conclusive = check.check("loss_fn", run, arguments)
        self.buffers.look()
        self.buffers.check(waiting=False)
        if not is_conclusive:
            return None
        found = CheckedLoss(check.seen, check.factor_bytes)
        self._rely_on(found)
        if lasting:
            _losses_checked[self.model] = found
        return found

    def _rely_on(self, found: CheckedLoss) -> None:
        self._loss_is_checked = True
        self._seen.update(found.seen)

    def expand_to_batch(self, tensor: Tensor, layer: str, *, has_labels: bool = False) -> Tensor:
        """Return the tensor with the batch as first axis; shared rows are expanded."""
        if tensor.ndim == 0:
            raise ValueError(f"layer '{layer}' got a scalar; private layers need the batch as the first axis")
        if ModelCheck.running is not None:
            return ModelCheck.running.expand_to_batch(self, tensor, layer)
        is_recomputed = torch._C._current_graph_task_id() != -1
        if self.batch.is_open and not is_recomputed:
            self.flush()
        self.buffers.begin(restart=False)  # a loop may call single layers
        is_bare = self.call is None and not is_recomputed
        may_follow_call = has_labels and tensor.requires_grad and self.examples is not None
        if is_bare and self.examples != 1 and not may_follow_call:
            self._need_checked_loss(f"layer '{layer}' ran outside a call of {type(self.model).__name__}")
        if self.examples is None:
            self.examples = tensor.shape[0]
        found = layer, tensor.ndim
        if tensor.shape[0] == self.examples:
            if self.examples > 1 and not is_bare and found not in self._seen.examples:
                raise ValueError(
                    f"layer '{layer}' did not run when {type(self.model).__name__} was checked, or had different axes. "
                    "Run the same layers in every call, or first run dpoptim.check_example_independence on such a batch"
                )
            return tensor
        if tensor.shape[0] == 1 and found in self._seen.shared:
            return tensor.expand(self.examples, *tensor.shape[1:])
        raise BatchAxisError(layer, tensor.shape, self.examples)

    def _need_checked_loss(self, what: str) -> None:
        """Refuse what the check of calls cannot see, unless the whole loss was checked."""
        if not self._loss_is_checked and not self.allow_mixing:
            self.discard()
            raise UncheckedLossError(
                f"{what}, so examples might mix unnoticed. Call the model itself, model(...), once per "
                "backward, or first run dpoptim.check_example_independence(model, loss_fn, batch)"
            )

    def axes_of(self, layer: str, leaves: list[Any]) -> tuple[int | None, ...] | None:
        """Return the axes of the examples in a layer's arguments, from the check; None if no such call was seen."""
        key = layer, tuple(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves)
        return self._seen.axes.get(key) or None

    def recorder(self) -> Recorder:
        """Return the function that records gradients of the running layer call."""
        inside = torch._C._current_graph_task_id()
        return partial(self.record, LayerCall(model_call=self.call, recomputed_in=None if inside == -1 else inside))

    # -- the backward ----------------------------------------------------------------------------------------------

    def record(self, call: LayerCall, parameter: nn.Parameter, factors: GradientFactors) -> None:
        """Record a parameter's gradient; layer functions call it during backward, once per use of the parameter."""
        if id(parameter) not in self.names:
            self._refuse("a parameter was replaced after the optimizer was created; create the optimizer last")
        name = self.names[id(parameter)]
        if ModelCheck.running is not None:
            ModelCheck.running.record(self, name, factors)
            return
        batch = self._batch_of(call, torch._C._current_graph_task_id())
        gradients = batch.gradients.get(name)
        if gradients is None:
            gradients = batch.gradients[name] = ParameterGradients(parameter.shape, wide_dtype(parameter.dtype))
        examples = factors[0].shape[0]  # faster than len()
        if batch.examples and examples != batch.examples:
            self._refuse(
                f"the gradient of '{name}' has {examples} examples where other layers have {batch.examples} in "
                "the same backward; run one backward per call of the model"
            )
        batch.examples = examples
        if not self._may_average and examples > 1:
            if is_averaging():
                self._refuse(AVERAGED)
            self._may_average = True  # looked at once
        batch.extra_memory -= gradients.add(factors, batch.extra_memory)

    def _batch_of(self, call: LayerCall, backward: int) -> PhysicalBatch:
        """Return the physical batch of a layer call: the open one, or a new one after closing it."""
        batch = self.batch
        if batch.last == (call, backward):
            return batch
        if call.model_call in self._closed_calls:
            self._refuse(
                "a later forward or step closed the batch of this backward, so its examples would count twice. Add up "
                "the losses of a call and run one backward"
            )
        if batch.is_open and not (call.model_call in batch.calls or {backward, call.recomputed_in} & batch.backwards):
            if call.recomputed_in is not None:
                self._refuse("reentrant checkpoints hide their examples here; use checkpoint(..., use_reentrant=False)")
            self.flush()
            self.buffers.begin(restart=True)
            batch = self.batch
        batch.enter(call, backward)
        if call.model_call is not None:
            batch.calls.add(call.model_call)
            if len(batch.calls) > 1:
                self._need_checked_loss(f"two calls of {type(self.model).__name__} share one backward")
        return batch

    def _refuse_unseen_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Refuse a gradient that reaches a parameter outside its layer rule: it would be neither clipped nor noised."""
        if gradient is not None and not _public_contexts:  # a GPU's backward has its own thread, and its own `_public`
            self._refuse(
                f"parameter '{name}' was used outside the layer that owns it, as in F.linear(x, layer.weight). Call "
                "the layer itself or freeze the parameter; public data goes inside `with dpoptim.public_data():`"
            )

    def _refuse(self, why: str) -> NoReturn:
        self.discard()
        raise ValueError(why)

    def _new_batch(self) -> PhysicalBatch:
        return PhysicalBatch(extra_memory=self.extra_memory)

    def flush(self) -> None:
        """Close the physical batch and hand it to `on_batch`."""
        batch, self.batch = self.batch, self._new_batch()
        self._closed_calls.update(dict.fromkeys(batch.calls))
        while len(self._closed_calls) > _REMEMBERED_CALLS:
            del self._closed_calls[next(iter(self._closed_calls))]
        self.buffers.check(waiting=batch.is_open)
        if batch.is_open and not batch.has_failed():
            for name, gradients in batch.gradients.items():
                if gradients.was_overwritten:
                    raise ValueError(
                        f"an input that '{name}' needs was changed in place after backward. Call optimizer.step() "
                        "before a buffer is reused, or copy the batch"
                    )
            with torch.no_grad(), full_precision(next(self.model.parameters()).device.type):
                self.on_batch(batch)
        if self.call is None:
            self.examples = None

    def end_step(self) -> None:
        """Close the batch, and forget a forward that was interrupted."""
        self._called = self.call = None
        self.flush()

    def discard(self) -> None:
        """Drop the open physical batch."""
        self.batch = self._new_batch()
        self.examples = None


@functools.cache
def _keep_compilers_out(cls: type, *methods: str) -> None:
    """Make torch.compile leave these methods alone; a decorator would import the compiler, which takes seconds."""
    for name in methods:
        setattr(cls, name, torch.compiler.disable(getattr(cls, name)))


@dataclass
class _Hooks:
    """Reports calls to an engine. A copied model has no engine, because copies of engines are None."""

    engine: Engine | None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.engine is not None:
            self.engine.begin_call(module, args, kwargs)

    def guard_whole(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.engine is not None:
            self.engine.guard_whole_parameters()

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.engine is not None:
            self.engine.end_call(module, output)


class _PrivateForward:
    """Runs a module's forward through an engine. Copies and pickles of it are the module's own forward."""

    def __init__(self, engine: Engine, module: nn.Module, layer: Layer) -> None:
        self.engine, self.module, self.layer = engine, module, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if ModelCheck.running is not None and not self.engine.runs_plain:
            ModelCheck.running.see(self.engine, self.layer.name, self.module, (args, kwargs))
        if self.engine.recording or (self.layer.rewrites and self._is_first_run_of_checkpoint()):
            return self.layer.rule(self.engine, self.layer.name, self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _is_first_run_of_checkpoint(self) -> bool:
        """Whether a reentrant activation checkpoint may be running the layer: its first run has no gradients."""
        return not torch.is_grad_enabled() and (self.engine.call is not None or self.engine.checking)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


def sink_of(module: nn.Module, inputs: Tensor) -> tuple[Engine | None, str]:
    """Return the engine that a module's gradients go to, and the module's name there; None if they are ordinary."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, _PrivateForward) or not forward.engine.recording:
        return None, ""
    if ModelCheck.running is not None:
        ModelCheck.running.see(forward.engine, forward.layer.name, module, (inputs,))
    return forward.engine, forward.layer.name
