"""Convolutional networks of color images by hand: client after client, without autograd, channels last in memory.

Small networks spend as much time in autograd's records and in copies between memory layouts as in arithmetic. Pooling
before the ReLU gives the same numbers with less work. Of images with one channel torch's own convolution loses the
layout, and vmap is as fast.
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

TensorList = list[torch.Tensor]  # in the order of the parameters


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
        """Recognize such a model; all its parameters must be trained, with biases, in float32, by cross entropy."""
        layers = model.plain_layers
        kinds = [type(layer) for layer in layers]
        flat = kinds.index(nn.Flatten) if nn.Flatten in kinds else 0
        blocks = _blocks(layers[:flat])
        behind = [nn.Flatten, nn.Linear, *[nn.ReLU, nn.Linear] * ((len(layers) - flat) // 2 - 1)]
        parameterized = [at for at, kind in enumerate(kinds) if kind in (nn.Conv2d, nn.Linear)]
        names = tuple(f"{at}.{part}" for at in parameterized for part in ("weight", "bias"))
        if not blocks or kinds[flat:] != behind or model.names != names:
            return None
        flatten, last = layers[flat], layers[-1]
        flattens_all = isinstance(flatten, nn.Flatten) and (flatten.start_dim, flatten.end_dim) == (1, -1)
        if not flattens_all or not isinstance(last, nn.Linear):
            return None
        return ConvolutionalNetwork(model, blocks, last.out_features)

    def can_train(self, examples: Examples) -> bool:
        """Tell whether examples are float32 images with known classes."""
        inputs = examples.inputs
        return inputs.ndim == 4 and inputs.dtype == torch.float32 and examples.has_classes(self.classes)

    def train(self, params: Params, examples: Examples, schedule: IntVector, local: LocalTraining) -> Params:
        """Return the update of one client."""
        values = [
            value.contiguous(memory_format=_LAST) if value.ndim == 4 else value
            for value in self.model.unflatten(params).values()
        ]
        inputs = examples.inputs.contiguous(memory_format=_LAST)
        steps = _FusedAdam(local, values) if local.optimizer is Optimizer.ADAM else Steps(local, values)
        with torch.no_grad():
            for line in schedule:
                rows = torch.from_numpy(line[line >= 0])
                steps.take(values, self._gradients(values, inputs[rows], examples.labels[rows]))
        return self.model.flatten(dict(zip(self.model.names, values, strict=True))) - params

    def _gradients(self, values: TensorList, inputs: torch.Tensor, labels: torch.Tensor) -> TensorList:
        entering, before_pools = [inputs], []
        shapes = [(block.stride, block.padding, block.dilation, *_NOT_TRANSPOSED) for block in self.blocks]
        for at, block in enumerate(self.blocks):
            outputs = _aten.convolution(entering[-1], *values[2 * at : 2 * at + 2], *shapes[at])
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
            slope = _aten.threshold_backward(slope.contiguous(memory_format=_LAST), entering[at + 1], 0)
            if self.blocks[at].pool != 1:
                side = [self.blocks[at].pool] * 2
                slope = _aten.max_pool2d_with_indices_backward(
                    slope, before_pools[at][0], side, side, *_WHOLE_SQUARES, before_pools[at][1]
                )
            weight = values[2 * at]
            slope, *own = _aten.convolution_backward(
                slope, entering[at], weight, [len(weight)], *shapes[at], [at > 0, True, True]
            )
            found = own + found
        return found


class _FusedAdam:
    """Adam in one pass over memory, where torch's own steps take six: a million parameters make that a third."""

    def __init__(self, local: LocalTraining, values: TensorList) -> None:
        self._optimizer = torch.optim.Adam(values, lr=local.lr, fused=True)

    def take(self, values: TensorList, gradients: TensorList) -> None:
        """Change `values` in place by one step."""
        for value, gradient in zip(values, gradients, strict=True):
            layout = _LAST if value.ndim == 4 else torch.contiguous_format
            value.grad = gradient.contiguous(memory_format=layout)  # the kernel reads all memory in one order
        self._optimizer.step()


def _linear_gradients(
    values: TensorList, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, TensorList]:
    """Return the loss's slope with respect to the inputs of the linear layers, and the layers' gradients."""
    entering = [inputs]
    for weight, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
        entering.append(torch.addmm(bias, entering[-1], weight.t()).relu_())
    slope = torch.addmm(values[-1], entering[-1], values[-2].t()).softmax(-1)
    slope[torch.arange(len(labels)), labels] -= 1
    slope /= len(labels)
    found: TensorList = []
    for at in reversed(range(len(entering))):
        found = [slope.t() @ entering[at], slope.sum(0), *found]
        slope = slope @ values[2 * at]
        if at:
            slope = _aten.threshold_backward(slope, entering[at], 0)
    return slope, found


def _blocks(layers: list[nn.Module]) -> tuple[_Block, ...]:
    """Read the convolutional part; nothing if a layer of it is not what can be done by hand."""
    blocks: list[_Block] = []
    rest = layers
    while rest:
        convolution, activation, pool = (*rest, None, None)[:3]
        if type(convolution) is not nn.Conv2d or type(activation) is not nn.ReLU or convolution.in_channels == 1:
            return ()
        plain = convolution.groups == 1 and convolution.padding_mode == "zeros"
        side = _pool_side(pool) if isinstance(pool, nn.MaxPool2d) else 1
        if not plain or not side or isinstance(convolution.padding, str):
            return ()
        blocks.append(_Block(convolution.stride, convolution.padding, convolution.dilation, side))
        rest = rest[3 if isinstance(pool, nn.MaxPool2d) else 2 :]
    return tuple(blocks)


def _pool_side(pool: nn.MaxPool2d) -> int:
    """Return the side of a pool of squares that neither overlap nor leave the image; 0 for another one."""
    kernel, stride = (of if isinstance(of, tuple) else (of, of) for of in (pool.kernel_size, pool.stride))
    is_whole = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and type(pool) is nn.MaxPool2d
    is_plain = is_whole and not (pool.ceil_mode or pool.return_indices)
    return kernel[0] if is_plain and kernel == stride and kernel[0] == kernel[1] and kernel[0] > 1 else 0
