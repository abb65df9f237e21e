"""T5, mT5, UMT5 and MPNet: relative distances look up a table of biases, which are added to all attention scores.

The look-up has no batch axis. Here each example looks up the table separately, [examples, heads, queries, keys], so
that the engine sees its gradient. If the table is frozen, as in LoRA, the module's own forward runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dpoptim.clipping.layers.hugging_face.rewritten import check_same
from dpoptim.clipping.layers.rule import GradientSink, any_trainable
from dpoptim.validation.temporary_changes import replaced


def t5_attention(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `T5Attention` and its copies in mT5 and UMT5; in T5 only the first layer has a table."""
    return _with_biases_for_each("compute_bias", sink, name, module, args, kwargs)


def mpnet_encoder(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `MPNetEncoder`."""
    return _with_biases_for_each("compute_position_bias", sink, name, module, args, kwargs)


def _with_biases_for_each(
    method: str, sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the module's own forward with a `method` that returns the biases of each example."""
    forward = partial(type(module).forward, module, *args, **kwargs)
    table = getattr(module, "relative_attention_bias", None)
    if table is None or not any_trainable(table):
        return forward()
    hidden = args[0] if args else kwargs["hidden_states"]
    if sink.recording:
        hidden = sink.expand_to_batch(hidden, name)
    own = partial(getattr(type(module), method), module)

    def biases(*given: Any, **options: Any) -> Tensor:
        asked: list[Tensor] = []

        def look_up(ids: Tensor) -> Tensor:
            asked.append(ids)
            return table.weight.new_zeros(*ids.shape, table.weight.shape[1])

        with replaced(table, forward=look_up):
            own(*given, **options)
        if len(asked) != 1 or asked[0].ndim != 2:
            raise ValueError(f"layer '{name}' got custom positions. Leave them to the model, or freeze their table")

        def of_each(examples: int) -> Tensor:  # [examples, heads, queries, keys]
            looked_up: Tensor = table(asked[0].expand(examples, -1, -1))
            return looked_up.permute(0, 3, 1, 2)

        if sink.recording:
            check_same(sink, name, module, lambda: of_each(1), lambda: own(*given, **options)[:1])
        return of_each(len(hidden))

    with replaced(module, **{method: biases}):
        return forward()
