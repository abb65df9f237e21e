"""T5, mT5, UMT5 and MPNet of transformers: a table of biases is looked up by how far two positions lie apart, which is
the same for all examples and has no batch axis, and what comes out is added to the attention scores of the batch.

Here each example looks the table up by itself, so that its own gradient is seen: [examples, heads, queries, keys], as
large as the scores that it is added to. Where the table is frozen, as in LoRA, the module's own forward runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dpoptim.clipping.layers.hugging_face.rewritten import check_same, replaced
from dpoptim.clipping.layers.rule import GradientSink, any_trainable


def t5_attention(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of `T5Attention` and of its likes in mT5 and UMT5; of T5's layers the first alone has a table."""
    return _with_biases_for_each("compute_bias", sink, name, module, args, kwargs)


def mpnet_encoder(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of `MPNetEncoder`."""
    return _with_biases_for_each("compute_position_bias", sink, name, module, args, kwargs)


def _with_biases_for_each(
    method: str, sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's own forward, whose `method` makes the biases of each example."""
    forward = partial(type(module).forward, module, *args, **kwargs)
    table = getattr(module, "relative_attention_bias", None)
    if table is None or not any_trainable(table):
        return forward()
    hidden = args[0] if args else kwargs["hidden_states"]
    if sink.capturing:
        hidden = sink.expand_to_batch(hidden, name)
    own = partial(getattr(type(module), method), module)

    def biases(*given: Any, **options: Any) -> Tensor:
        asked = _Asked(table)
        with replaced(module, relative_attention_bias=asked):
            own(*given, **options)
        if asked.ids is None or asked.ids.ndim != 2:
            raise ValueError(
                f"layer '{name}' got positions of its own, which its rule does not know; leave them to the model, or "
                "freeze 'relative_attention_bias'"
            )

        def of_each(examples: int) -> Tensor:  # [examples, heads, queries, keys]
            looked_up: Tensor = table(asked.ids.expand(examples, -1, -1))
            return looked_up.permute(0, 3, 1, 2)

        if sink.capturing:
            check_same(sink, name, module, lambda: of_each(1), lambda: own(*given, **options)[:1])
        return of_each(len(hidden))

    with replaced(module, **{method: biases}):
        return forward()


class _Asked:
    """Stands in for a table, and notes what it is asked for."""

    def __init__(self, table: Any) -> None:
        self.weight: Tensor = table.weight
        self.ids: Any = None

    def __call__(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return self.weight.new_zeros(*ids.shape, self.weight.shape[1])
