"""Does what a model returns for one example hang on that example's rows of every layer, and on no others?

A layer whose input has one row that all examples share gets a row for each of them, and a forward that takes the first
of these, or their mean, gives the gradients of all examples to a few rows. So does a forward that sorts its batch, or
takes its mean. Shapes do not show it. So a call is run again on a few of its examples, and differentiated from the
output of one of them: gradients must be 0 in the rows of all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping.gradient_factors import Dense, Form, Outer
from dpoptim.clipping.probe import Trial, same_randomness, warn_unless_checked
from dpoptim.clipping.trials import trying

FEW = 16  # examples that are run; kernels are compiled anew for numbers that 16 does not divide


class RowsApart:
    """Tries calls of `model` or of its parts."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._touched: dict[str, Tensor] | None = None  # by parameter: the rows with a gradient

    def see(self, name: str, form: Form) -> None:
        """One use of a parameter in a trial, of this model or of another."""
        if self._touched is None:
            return
        if isinstance(form, Outer):  # either factor may be the one that holds the gradient
            touched = (_is_something(form.left) & _is_something(form.right)).any(1)
        else:
            touched = _is_something((form.grads if isinstance(form, Dense) else form.values).flatten(1))
        before = self._touched.get(name)
        self._touched[name] = touched if before is None or len(before) != len(touched) else before | touched

    def try_call(self, module: nn.Module, leaves: list[Any], structure: Any, trial: Trial, few: int) -> None:
        """Warn where an example's output hangs on rows of others. What cannot be run is left to the call itself."""
        self._touched = {}
        try:
            # What is saved stays out of the checkpoint that the call may lie in.
            own_graph = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
            with trying(), torch.enable_grad(), same_randomness(leaves), own_graph:
                mixed = self._mixed(module, leaves, structure, trial, few)
        except Exception:  # whatever the module says to such a batch, or torch to its backward
            mixed = None
        finally:
            self._touched = None
        if mixed is not None:
            warn_unless_checked(
                self._model,
                ("rows", type(module), mixed),
                f"what {type(module).__name__} returns for one example hangs on the rows of others in the layer of "
                f"'{mixed}': a row that all examples share and that is taken by its index or averaged, a batch that is "
                "sorted, or statistics of the batch; clipping then does not bound what one example adds",
            )

    def _mixed(self, module: nn.Module, leaves: list[Any], structure: Any, trial: Trial, few: int) -> str | None:
        """The first parameter where rows of other examples have a gradient."""
        own = [_cut(leaf, few if short else None) for leaf, short in zip(leaves, trial.shortened, strict=True)]
        args, kwargs = pytree.tree_unflatten(own, structure)
        output = module(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
                   if isinstance(leaf, Tensor)]  # fmt: skip
        pairs = [(tensor, axis) for tensor, axis in zip(tensors, trial.outputs, strict=True)
                 if axis is not None and tensor.requires_grad]  # fmt: skip
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for row in dict.fromkeys((0, few // 2, few - 1)) if pairs else ():
            self._touched = {}
            directions = []
            for tensor, axis in pairs:
                direction = torch.zeros_like(tensor)
                direction.select(axis, row).normal_()
                directions.append(direction)
            torch.autograd.grad(
                [tensor for tensor, _ in pairs], parameters, directions, retain_graph=True, allow_unused=True
            )
            for name, touched in self._touched.items():
                others = touched.clone()
                others[row] = False
                if len(touched) == few and others.any():
                    return name
        return None


def _is_something(vectors: Tensor) -> Tensor:
    """Where a vector, along the last axis, is not 0; what is not finite says nothing."""
    return ((vectors != 0) & vectors.isfinite()).any(-1)


def _cut(leaf: Any, few: int | None) -> Any:
    """A copy of a tensor's first rows, cut off from whatever it was made of."""
    if not isinstance(leaf, Tensor):
        return leaf
    own = (leaf if few is None else leaf[:few]).detach().clone()
    return own.requires_grad_(leaf.requires_grad)
