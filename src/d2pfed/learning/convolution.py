"""Convolutional networks by hand: one client after the other, without autograd, channels last in memory.

Small networks spend as much time in autograd's records and in copies between memory layouts as in arithmetic. Pooling
before the ReLU gives the same numbers with less work. For images of one channel torch's own
convolution is slow and loses the layout: there the first convolution is a product with unfolded images.
"""

from dataclasses import dataclass

import torch
from torch import nn

from d2pfed.learning.local_training import LocalTraining, Optimizer, Steps
from d2pfed.learning.model import Model, Params
from d2pfed.learning.task import Examples, IntVector

_aten = torch.ops.aten
_LAST = torch.channels_last
_NOT_TRANSPOSED = False, [0, 0], 1  # not a transposed convolution; its output padding; one group
_WHOLE_SQUARES = [0, 0], [1, 1], False  # padding, dilation and rounding up of a pool

Slope = torch.Tensor  # of the loss, with respect to some layer's outputs or inputs
Found = list[torch.Tensor]  # gradients, in the order of the parameters


@dataclass(frozen=True, slots=True)
class _Block:
    """A convolution, and the side of the squares over which its outputs are pooled; 1 is no pool."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    pool: int


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionalNetwork:
    """A model that is `(Conv2d, ReLU, [MaxPool2d])+, Flatten, Linear, (ReLU, Linear)*`."""

    model: Model
    blocks: tuple[_Block, ...]
    classes: int

    @staticmethod
    def of(model: Model) -> "ConvolutionalNetwork | None":
        """Recognise such a model; all its parameters must be trained, with biases, in float32, by cross entropy."""
        module = model.module
        if type(module) is not nn.Sequential or not model.is_plain:
            return None
        layers = list(module)
        kinds = [type(layer) for layer in layers]
        last = layers[-1] if layers else None
        flat = kinds.index(nn.Flatten) if nn.Flatten in kinds else 0
        blocks = _blocks(layers[:flat])
        behind = [nn.Flatten, nn.Linear, *[nn.ReLU, nn.Linear] * ((len(layers) - flat) // 2 - 1)]
        if (
            not blocks
            or kinds[flat:] != behind
            or not isinstance(last, nn.Linear)
            or not _flattens_all(layers[flat])
        ):
            return None
        parameterised = [at for at, kind in enumerate(kinds) if kind in (nn.Conv2d, nn.Linear)]
        names = tuple(f"{at}.{part}" for at in parameterised for part in ("weight", "bias"))
        plain = all(value.dtype == torch.float32 for value in module.parameters())
        hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())  # noqa: SLF001
        return (
            None
            if model.names != names or not plain or hooked
            else ConvolutionalNetwork(model, blocks, last.out_features)
        )

    def can_train(self, examples: Examples) -> bool:
        """Tell whether examples are float32 images with known classes."""
        inputs, labels = examples.inputs, examples.labels
        if inputs.ndim != 4 or inputs.dtype != torch.float32 or labels.ndim != 1 or labels.dtype != torch.int64:
            return False
        return not len(labels) or bool(labels.min() >= 0 and labels.max() < self.classes)

    def train(self, params: Params, examples: Examples, schedule: IntVector, local: LocalTraining) -> Params:
        """Return the update of one client."""
        values = [
            value.contiguous(memory_format=_LAST) if value.ndim == 4 else value
            for value in self.model.unflatten(params).values()
        ]
        inputs = examples.inputs.contiguous(memory_format=_LAST)
        unfolded = _unfold(inputs, self.blocks[0], values[0])
        steps = _FusedAdam(local, values) if local.optimizer is Optimizer.ADAM else Steps(local, values)
        with torch.no_grad():
            for line in schedule:
                rows = torch.from_numpy(line[line >= 0])
                windows = None if unfolded is None else unfolded[rows]
                steps.take(values, self._gradients(values, inputs[rows], windows, examples.labels[rows]))
        return self.model.flatten(dict(zip(self.model.names, values, strict=True))) - params

    def _gradients(
        self, values: Found, inputs: torch.Tensor, windows: torch.Tensor | None, labels: torch.Tensor
    ) -> Found:
        entering, before_pools = [inputs], []
        for at, block in enumerate(self.blocks):
            weight, bias = values[2 * at : 2 * at + 2]
            if at == 0 and windows is not None:
                outputs = _convolve(windows, weight, bias)
            else:
                shape = block.stride, block.padding, block.dilation, *_NOT_TRANSPOSED
                outputs = _aten.convolution(entering[-1], weight, bias, *shape)
            pooled, places = (
                (outputs, outputs)
                if block.pool == 1
                else _aten.max_pool2d_with_indices(outputs, [block.pool, block.pool])
            )
            before_pools.append((outputs, places))
            entering.append(pooled.relu_())
        slope, found = _linear_gradients(values[2 * len(self.blocks) :], entering[-1].flatten(1), labels)
        slope = slope.view(entering[-1].shape)
        for at in reversed(range(len(self.blocks))):
            block = self.blocks[at]
            slope = _aten.threshold_backward(slope.contiguous(memory_format=_LAST), entering[at + 1], 0)
            if block.pool != 1:
                side = [block.pool, block.pool]
                slope = _aten.max_pool2d_with_indices_backward(
                    slope, before_pools[at][0], side, side, *_WHOLE_SQUARES, before_pools[at][1]
                )
            weight = values[2 * at]
            if at == 0 and windows is not None:
                return _convolution_gradients(slope, windows, weight) + found
            shape = block.stride, block.padding, block.dilation, *_NOT_TRANSPOSED
            slope, *own = _aten.convolution_backward(
                slope, entering[at], weight, [len(weight)], *shape, [at > 0, True, True]
            )
            found = own + found
        return found


class _FusedAdam:
    """Adam in one pass over memory, where torch's own steps take six: a million parameters make that a third."""

    def __init__(self, local: LocalTraining, values: Found) -> None:
        self._optimizer = torch.optim.Adam(values, lr=local.lr, fused=True)

    def take(self, values: Found, gradients: Found) -> None:
        """Change `values` in place by one step."""
        for value, gradient in zip(values, gradients, strict=True):
            layout = _LAST if value.ndim == 4 else torch.contiguous_format
            value.grad = gradient.contiguous(memory_format=layout)  # the kernel reads all memory in one order
        self._optimizer.step()


def _unfold(images: torch.Tensor, block: _Block, weight: torch.Tensor) -> torch.Tensor | None:
    """Return what a convolution of one channel reads: image, place in the window, row, column; None for more channels.

    It depends on no parameter, so it is found once for all steps.
    """
    if images.shape[1] != 1 or weight.shape[1] != 1:
        return None
    down, across = block.padding
    padded = nn.functional.pad(images[:, 0], (across, across, down, down))
    starts, taps = [], []
    for side, size, stride, dilation in zip(
        padded.shape[1:], weight.shape[2:], block.stride, block.dilation, strict=True
    ):
        taps.append(dilation * torch.arange(size))
        starts.append(torch.arange(0, side - dilation * (size - 1), stride))
    places = [
        tap[:, None] + start  # by place in the window and place of the output
        for tap, start in zip(taps, starts, strict=True)
    ]
    index = places[0][:, None, :, None] * padded.shape[2] + places[1][None, :, None, :]
    found = padded.flatten(1).index_select(1, index.flatten())
    return found.view(len(images), -1, *index.shape[2:])


def _convolve(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a convolution from what it reads, channels last."""
    taps = weight.flatten(1).t().expand(len(windows), -1, -1)
    products = torch.baddbmm(bias, windows.flatten(2).transpose(1, 2), taps)
    return products.view(len(windows), *windows.shape[2:], -1).permute(0, 3, 1, 2)


def _convolution_gradients(slope: Slope, windows: torch.Tensor, weight: torch.Tensor) -> Found:
    """Return the gradients of weight and bias."""
    slopes = slope.permute(0, 2, 3, 1).flatten(1, 2)
    return [torch.bmm(windows.flatten(2), slopes).sum(0).t().reshape(weight.shape), slopes.sum((0, 1))]


def _linear_gradients(values: Found, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Slope, Found]:
    """Return the loss's slope with respect to the inputs of the linear layers, and the layers' gradients."""
    entering = [inputs]
    for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
        entering.append(torch.addmm(bias, entering[-1], weight.t()).relu_())
    slope = torch.addmm(values[-1], entering[-1], values[-2].t()).softmax(-1)
    slope[torch.arange(len(labels)), labels] -= 1
    slope /= len(labels)
    found: Found = []
    for at in reversed(range(len(entering))):
        found = [slope.t() @ entering[at], slope.sum(0), *found]
        slope = slope @ values[2 * at]
        if at:
            slope = _aten.threshold_backward(slope, entering[at], 0)
    return slope, found


def _flattens_all(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)


def _blocks(layers: list[nn.Module]) -> tuple[_Block, ...]:
    """Read the convolutional part; nothing if a layer of it is not what can be done by hand."""
    blocks: list[_Block] = []
    rest = layers
    while rest:
        convolution, activation, pool = (*rest, None, None)[:3]
        if not isinstance(convolution, nn.Conv2d) or type(activation) is not nn.ReLU:
            return ()
        plain = type(convolution) is nn.Conv2d and convolution.groups == 1 and convolution.padding_mode == "zeros"
        side = _pool_side(pool) if isinstance(pool, nn.MaxPool2d) else 1
        if not plain or not side or isinstance(convolution.padding, str):
            return ()
        blocks.append(_Block(convolution.stride, convolution.padding, convolution.dilation, side))
        rest = rest[3 if isinstance(pool, nn.MaxPool2d) else 2 :]
    return tuple(blocks)


def _pool_side(pool: nn.MaxPool2d) -> int:
    """Return the side of a pool of squares that neither overlap nor leave the image; 0 for another one."""
    kernel, stride = (of if isinstance(of, tuple) else (of, of) for of in (pool.kernel_size, pool.stride))
    rest = (
        pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not (pool.ceil_mode or pool.return_indices)
    )
    rest = rest and type(pool) is nn.MaxPool2d
    return kernel[0] if rest and kernel == stride and kernel[0] == kernel[1] and kernel[0] > 1 else 0
