"""`nn.LSTM`, `nn.GRU`, `nn.RNN`: the recurrence as linear layers, one use of the recurrent weight per position."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpoptim.clipping.layers.linear import apply_linear
from dpoptim.clipping.layers.rule import GradientSink

State = tuple[Tensor, ...]  # (h,) or, for an LSTM, (h, c); each [examples, size]


def recurrent(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for recurrent layers, with several layers, both directions, projections and dropout."""
    inputs = args[0] if args else kwargs["input"]
    states = args[1] if len(args) > 1 else kwargs.get("hx")
    if isinstance(inputs, PackedSequence):
        raise ValueError(f"layer '{name}' got a PackedSequence, which mixes examples. Pass a padded tensor")
    if inputs.ndim != 3:
        raise ValueError(f"layer '{name}' got an input of shape {tuple(inputs.shape)} without a batch axis; add one")
    inputs = sink.expand_to_batch(inputs if module.batch_first else inputs.transpose(0, 1), name)
    directions = 2 if module.bidirectional else 1
    initial = _initial_states(module, inputs, states, directions)
    final: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            output, last = _one_direction(sink, module, suffix, inputs, initial[len(final)], backwards=bool(direction))
            outputs.append(output)
            final.append(last)
        inputs = torch.cat(outputs, dim=-1)
        if module.dropout and layer < module.num_layers - 1:
            inputs = F.dropout(inputs, module.dropout, module.training)
    output = inputs if module.batch_first else inputs.transpose(0, 1)
    stacked = tuple(torch.stack(parts) for parts in zip(*final, strict=True))
    return output, stacked if isinstance(module, nn.LSTM) else stacked[0]


def _initial_states(module: Any, inputs: Tensor, states: Any, directions: int) -> list[State]:
    count = module.num_layers * directions
    if states is not None:
        parts = states if isinstance(module, nn.LSTM) else (states,)
        return [tuple(part[i] for part in parts) for i in range(count)]
    hidden = inputs.new_zeros(len(inputs), module.proj_size or module.hidden_size)
    cell = inputs.new_zeros(len(inputs), module.hidden_size)
    return [(hidden, cell) if isinstance(module, nn.LSTM) else (hidden,)] * count


def _one_direction(
    sink: GradientSink, module: Any, suffix: str, inputs: Tensor, state: State, *, backwards: bool
) -> tuple[Tensor, State]:
    def parameter(kind: str) -> nn.Parameter | None:
        return getattr(module, kind + suffix, None)

    weight_ih, weight_hh = getattr(module, "weight_ih" + suffix), getattr(module, "weight_hh" + suffix)
    projection = parameter("weight_hr")
    from_inputs = apply_linear(sink, inputs, weight_ih, parameter("bias_ih"))  # [examples, positions, gates]
    positions = range(inputs.shape[1])
    outputs: list[Tensor] = []
    for position in reversed(positions) if backwards else positions:
        from_state = apply_linear(sink, state[0], weight_hh, parameter("bias_hh"))
        state = _cell(module, from_inputs[:, position], from_state, state)
        if projection is not None:
            state = (apply_linear(sink, state[0], projection, None), *state[1:])
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state


def _cell(module: Any, from_inputs: Tensor, from_state: Tensor, state: State) -> State:
    if isinstance(module, nn.LSTM):
        enter, forget, new, leave = (from_inputs + from_state).chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(cell), cell
    if isinstance(module, nn.GRU):
        input_reset, input_update, input_new = from_inputs.chunk(3, dim=-1)
        state_reset, state_update, state_new = from_state.chunk(3, dim=-1)
        update = torch.sigmoid(input_update + state_update)
        new = torch.tanh(input_new + torch.sigmoid(input_reset + state_reset) * state_new)
        return ((1 - update) * new + update * state[0],)
    squash = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return (squash(from_inputs + from_state),)
