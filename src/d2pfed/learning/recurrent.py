"""LSTM layers of many clients at once, whose weights' gradients are one product over all time steps.

torch.func.vmap takes torch's own LSTM apart: each time step then makes a gradient of all clients' weights and adds it
to the one before, which moves more memory than all else. Here both ways through a layer are written by hand.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

Pair = tuple[torch.Tensor, torch.Tensor]  # hidden states and cells
Vmapped = tuple[tuple[torch.Tensor, ...], tuple[int, ...]]


class OneProductLstm(TorchFunctionMode):
    """Lets vmap compute `torch.lstm` by `lstm`: not packed sequences, projections, dropout or mixed precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func is torch.lstm and len(args) == 9 and not kwargs and not isinstance(args[1], torch.Tensor):
            inputs, state, weights, has_bias, layers, dropout, is_training, both_ways, batch_first = args
            each = 4 if has_bias else 2
            is_plain = len(weights) == layers * (1 + both_ways) * each and not (dropout and is_training)
            is_mixed = torch.is_autocast_enabled(inputs.device.type) or inputs.dtype != weights[0].dtype
            if is_plain and inputs.ndim == 3 and not is_mixed:
                groups = [weights[at : at + each] for at in range(0, len(weights), each)]
                found = lstm(inputs.transpose(0, 1) if batch_first else inputs, state, groups, 1 + both_ways)
                return (found[0].transpose(0, 1) if batch_first else found[0], *found[1:])
        return func(*args, **(kwargs or {}))


def lstm(
    inputs: torch.Tensor, state: Pair, weights: Sequence[Sequence[torch.Tensor]], directions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs, last hidden states and last cells of layers with these weights; inputs begin with time."""
    hidden, cells = list[torch.Tensor](), list[torch.Tensor]()
    for layer in range(0, len(weights), directions):
        outputs = []
        for way in range(layer, layer + directions):
            of_inputs, of_hidden, *biases = weights[way]
            gates = (inputs.flip(0) if way > layer else inputs) @ of_inputs.t()
            gates = gates + (biases[0] + biases[1]) if biases else gates
            states, inner, *_ = _Layer.apply(gates, of_hidden, state[0][way], state[1][way])  # type: ignore[no-untyped-call]
            hidden.append(states[-1])
            cells.append(inner[-1])
            outputs.append(states.flip(0) if way > layer else states)
        inputs = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return inputs, torch.stack(hidden), torch.stack(cells)


def _with_clients(
    count: int, in_dims: Sequence[int | None], tensors: Sequence[torch.Tensor], timed: int
) -> list[torch.Tensor]:
    """Return tensors with the axis of clients behind that of time, which the first ones have, or in front."""
    places = [1 if at < timed else 0 for at in range(len(tensors))]
    return [
        each.unsqueeze(place).expand(*each.shape[:place], count, *each.shape[place:])
        if dim is None
        else each.movedim(dim, place)
        for each, dim, place in zip(tensors, in_dims, places, strict=True)
    ]


class _Layer(Function):
    """One direction of a layer: from what inputs add to the gates to hidden states, cells, their tanh, and gates.

    Gates are those of input, forgetting, cell and output, side by side as torch has them.
    """

    @staticmethod
    def forward(
        added: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Go through the time steps, with an axis of clients behind that of time."""
        gates, states = torch.empty_like(added), added.new_empty(len(added), *hidden.shape)
        cells, bounded, turned = torch.empty_like(states), torch.empty_like(states), weight.mT
        for now, own in enumerate(gates):
            i, f, g, o = torch.baddbmm(added[now], hidden, turned, out=own).chunk(4, -1)
            for gate in (i, f, o):
                gate.sigmoid_()
            g.tanh_()
            cell = torch.mul(f, cell, out=cells[now]).addcmul_(i, g)
            hidden = torch.mul(o, torch.tanh(cell, out=bounded[now]), out=states[now])
        return states, cells, bounded, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 - torch's
        """Keep what the way back needs."""
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, of_states: torch.Tensor, of_cells: torch.Tensor, *_: object) -> Any:  # noqa: ANN401 - torch's
        """Go back."""
        return _WayBack.apply(of_states, of_cells, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *tensors: torch.Tensor) -> Vmapped:  # noqa: ANN401 - torch's
        """Go through the layers of all clients."""
        return _Layer.apply(*_with_clients(info.batch_size, in_dims, tensors, 1)), (1, 1, 1, 1)  # type: ignore[no-untyped-call]


class _WayBack(Function):
    """From the slopes of hidden states and cells to those of a layer's inputs."""

    @staticmethod
    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Go back through the time steps."""
        of_states, of_cells, states, cells, bounded, gates, weight, hidden, cell = tensors
        slopes = torch.empty_like(gates)
        ahead, inner, half = torch.zeros_like(hidden), torch.zeros_like(cell), 2 * hidden.shape[-1]
        for now in range(len(states) - 1, -1, -1):
            i, f, g, o = gates[now].chunk(4, -1)
            of_input, of_forgetting, of_cell, of_output = slopes[now].chunk(4, -1)
            ahead = ahead + of_states[now]
            inner = (inner + of_cells[now]).addcmul_(ahead, o * (1 - bounded[now].square()))
            torch.mul(inner, g, out=of_input)
            torch.mul(inner, cells[now - 1] if now else cell, out=of_forgetting)
            torch.mul(inner, i, out=of_cell).mul_(1 - g.square())
            torch.mul(ahead, bounded[now], out=of_output).mul_(o * (1 - o))
            both = gates[now, ..., :half]
            slopes[now, ..., :half] *= both * (1 - both)
            ahead, inner = torch.bmm(slopes[now], weight), inner * f
        before = torch.cat((hidden.unsqueeze(0), states[:-1]))
        over_time = slopes.permute(1, 3, 0, 2).flatten(2) @ before.transpose(0, 1).flatten(1, 2)
        return slopes, over_time, ahead, inner

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 - torch's
        """Keep nothing: slopes of slopes are not computed."""

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:  # noqa: ANN401, ARG004 - torch's
        """Refuse."""
        raise RuntimeError("an LSTM of many clients at once has no second derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *tensors: torch.Tensor) -> Vmapped:  # noqa: ANN401 - torch's
        """Go back through the layers of all clients."""
        return _WayBack.apply(*_with_clients(info.batch_size, in_dims, tensors, 6)), (1, 0, 0, 0)  # type: ignore[no-untyped-call]
