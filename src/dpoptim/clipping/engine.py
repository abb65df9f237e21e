"""The engine: an ordinary forward and ONE ordinary backward of an unmodified model, with per-example gradients kept.

`Engine.attach` gives every module that owns a trainable parameter a forward that runs through its layer rule. The
rule's autograd function returns the input gradient and keeps what the per-example weight gradient is made of; autograd
computes no weight gradient at all. Kept uses are collected into a physical batch; when the batch is over (at the
next forward or at `flush`) it is handed to `on_batch` and forgotten.

Which uses belong to the same examples is decided by the backward they arrive in: everything of one backward is one
batch, and so is everything of one call of the model. Two calls with two separate backwards are two micro-batches. A
call of a part of the model (`self.bert(...)` in a loop's own step) is tried and looked at as one of the model is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpoptim.clipping.calls import RecentCalls, keep_compilers_out, refuse_bare_forward, watch_calls
from dpoptim.clipping.gradient_factors import Form, choose_factors
from dpoptim.clipping.layers import choose_rules
from dpoptim.clipping.layers.rule import Layer, Use
from dpoptim.clipping.norms import ParameterGradients
from dpoptim.clipping.physical_batch import PhysicalBatch
from dpoptim.clipping.probe import BatchAxisError, BatchAxisProbe, warn_unless_checked
from dpoptim.clipping.rows_apart import FEW, RowsApart
from dpoptim.clipping.trials import is_trying
from dpoptim.kernels.norms import wide_dtype
from dpoptim.kernels.precision import full_precision
from dpoptim.validation.changed_state import StateChangeGuard
from dpoptim.validation.model_checks import refuse_mixing

_ENGINE = "_dpoptim_engine"
_public: ContextVar[bool] = ContextVar("dpoptim_public_data", default=False)


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


class Engine:
    """Keeps the per-example gradients of `model`'s trainable parameters; `on_batch` receives each physical batch."""

    def __init__(self, model: nn.Module, on_batch: Callable[[PhysicalBatch], None], *, extra_memory: int = 0) -> None:
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._all_parameters = list(model.named_parameters())
        if not self.names:
            raise ValueError("model has no parameter with requires_grad=True; unfreeze what is to be trained")
        self.on_batch = on_batch
        self.model = model
        self.extra_memory = extra_memory
        self.batch = self._new_batch()
        self.examples: int | None = None  # of the running forward
        self.call: int | None = None  # which call of the model, or of a part, is running; None outside of it
        self._called: nn.Module | None = None
        self.is_compiled = False  # what begins next
        self._calls = 0
        self._closed_calls = RecentCalls()
        self._first_calls = RecentCalls()  # whose input hangs on no other call
        self._told: set[str] = set()
        self.inside_generic = False
        self.probe = BatchAxisProbe(model)
        self.rows_apart = RowsApart(model)
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

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_whole = module is self.model
        nested = self._called not in (None, module) and not is_whole  # one that was interrupted begins anew
        if nested or not self.capturing or is_trying():
            return
        if not is_whole and torch._C._current_graph_task_id() != -1:
            return  # an activation checkpoint runs a part again
        if not is_whole:
            refuse_bare_forward(self.model)
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
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        examples = tensors[0].shape[0] if tensors else None
        if is_first := all(tensor.grad_fn is None for tensor in tensors):
            self._first_calls.add(self.call)
        if examples is None:
            self._tell(
                f"{type(module).__name__} was called with arguments that show no tensor (an object, a UserDict), so "
                "nothing shows that the first axis of every layer's input is the batch; pass tensors, lists or dicts",
            )
        self.examples = examples if is_whole or is_first or self.examples is None else self.examples
        is_new = self.probe.try_call(module, examples, leaves, structure, is_compiled=self.is_compiled)
        if examples is not None and is_new and torch._C._current_graph_task_id() == -1:
            if self.batch.is_open:
                self.flush()
                self.buffers.begin(anew=True)
            self._try_rows(module, leaves, structure, min(examples, FEW))

    def _try_rows(self, module: nn.Module, leaves: list[Any], structure: Any, few: int) -> None:
        """As a call of its own, which is closed: no gradient may come through it later."""
        own = self.call, self.examples
        self._calls += 1
        self.call, self.examples = self._calls, few
        try:
            self.rows_apart.try_call(module, leaves, structure, self.probe.trial, few)
        finally:
            self._closed_calls.add(self._calls)
            self.call, self.examples = own

    def end_call(self, module: nn.Module, output: Any) -> None:
        if module is not self._called or not self.capturing or is_trying():
            return
        self._called = self.call = None
        self.buffers.look()
        for leaf in pytree.tree_leaves(dict(output) if isinstance(output, dict) else output):
            if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad:
                raise ValueError(
                    f"{type(module).__name__} returned a scalar that needs a gradient, as a Hugging Face model "
                    "does when it is given `labels`: that loss is an average over the batch and mixes examples. Call "
                    "the model without labels and compute one loss an example (shape [examples]) from its logits."
                )

    def expand_to_batch(self, tensor: Tensor, layer: str, *, is_tied: bool = False) -> Tensor:
        """The tensor with the batch as its first axis: shared rows are expanded. `is_tied`: to labels, by two axes."""
        if self.batch.is_open and torch._C._current_graph_task_id() == -1:
            self.flush()
        self.buffers.begin(anew=False)  # where layers are called by themselves
        if tensor.ndim == 0:
            raise ValueError(f"layer '{layer}' got a scalar; private layers need the batch as the first axis")
        if tensor.shape[0] > 1 and torch._C._current_graph_task_id() == -1:
            self._look_at(tensor, layer, is_tied)
        if self.examples is None:
            self.examples = tensor.shape[0]
        if tensor.shape[0] == self.examples:
            return tensor
        trial = self.probe.trial_of_layer(in_call=self.call is not None)
        tried = trial.passed and (layer, tensor.ndim) in trial.shared
        shared = tried or (self.call is None and not tensor.is_floating_point())
        if tensor.shape[0] == 1 and shared:
            return tensor.expand(self.examples, *tensor.shape[1:])
        raise BatchAxisError(layer, tensor.shape, self.examples)

    def _look_at(self, tensor: Tensor, layer: str, is_tied: bool) -> None:
        """Warn of a layer that no trial has met as it comes now."""
        if self.call is None:
            others = () if is_tied else tensor.shape[1:-1]  # that might be the batch instead
            follows = self.probe.trial.passed and tensor.requires_grad and self.examples not in (None, *others)
            if not follows:  # on a part that was tried
                refuse_bare_forward(self.model)
                self._tell(
                    f"layer '{layer}' runs outside a call of {type(self.model).__name__} or of a larger part of it, so "
                    "nothing shows that the first axis of its input is the batch; call the model itself",
                )
            return
        trial, found = self.probe.trial, (layer, tensor.ndim)
        follows = tensor.requires_grad and found in trial.shared  # on shared rows, which a layer before has expanded
        if trial.passed and tensor.shape[0] == self.examples and found not in trial.met and not follows:
            self._tell(
                f"layer '{layer}' was not met, or with other axes, when {type(self.model).__name__} was tried on one "
                "example less, so nothing shows that the first axis of its input is the batch",
            )

    def axes_of(self, layer: str) -> tuple[bool, tuple[int | None, ...] | None]:
        """Whether the model was tried on one example less, and where the layer's arguments had the examples then."""
        trial = self.probe.trial_of_layer(in_call=self.call is not None)
        return trial.passed, trial.axes.get(layer)

    def _tell(self, line: str) -> None:
        if line not in self._told and not is_trying():
            self._told.add(line)
            warn_unless_checked(self.model, line, line)

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
        if is_trying():
            self.rows_apart.see(name, form)
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
            if len(self._first_calls.keys() & batch.calls) > 1:
                self._tell(
                    f"two calls of {type(self.model).__name__} meet in one backward: row j of each is taken for "
                    "example j, and where all examples share the rows of one of them (prototypes, prompts) clipping "
                    "bounds nothing",
                )
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


class _PrivateForward:
    """The forward of a module that runs through an engine. Copies and pickles of it are the module's own forward."""

    def __init__(self, engine: Engine, module: nn.Module, layer: Layer) -> None:
        self.engine, self.module, self.layer = engine, module, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine.capturing:
            return self.layer.rule(self.engine, self.layer.name, self.module, args, kwargs)
        if self.engine.probe.running:
            self.engine.probe.see(self.layer.name, self.module, args, kwargs)
        # In the probe, or first in a reentrant checkpoint:
        if self.layer.rewrites and self.engine.call is not None and not torch.is_grad_enabled():
            return self.layer.rule(self.engine, self.layer.name, self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


def sink_of(module: nn.Module, inputs: Tensor) -> tuple[Engine | None, str]:
    """The engine that a module's gradients go to now, and the module's name there; None where they are ordinary."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, _PrivateForward) and forward.engine.probe.running:
        forward.engine.probe.see(forward.layer.name, module, (inputs,), {})
    if not isinstance(forward, _PrivateForward) or not forward.engine.capturing:
        return None, ""
    return forward.engine, forward.layer.name
