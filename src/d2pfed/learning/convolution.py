"""Convolutional networks of color images by hand: client after client, without autograd, channels last in memory.

Small networks spend as much time in autograd's records and in copies between memory layouts as in arithmetic. Pooling
before the ReLU gives the same numbers with less work. Of images with one channel torch's own convolution loses the
layout, and vmap is as fast.
"""

from dataclasses import dataclass

import torch
from torch import nn

from d2pfed.learning.local_settings import LocalTraining, Optimizer
from d2pfed.learning.local_training import Steps
from d2pfed.learning.model import Model, Params
from d2pfed.learning.task import Examples
from d2pfed.numerics.ring import IntVector

_aten = torch.ops.aten
_LAST = torch.channels_last
_NOT_TRANSPOSED = False, [0, 0], 1  # not a transposed convolution; its output padding; one group
_WHOLE_SQUARES = [0, 0], [1, 1], False  # padding, dilation and rounding up of a pool

TensorList = list[torch.Tensor]  # in the order of the parameters


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionalNetwork:
    """A model that is `(Conv2d, ReLU, MaxPool2d)+, Flatten, Linear, (ReLU, Linear)*`."""

    model: Model
    convolutions: tuple[nn.Conv2d, ...]
    pools: tuple[int, ...]  # the side of the squares over which each one's outputs are pooled
    classes: int

    @staticmethod
    def of(model: Model) -> "ConvolutionalNetwork | None":
        """Recognize such a model; all its parameters must be trained, with biases, in float32, by cross entropy."""
        layers = model.plain_layers
        kinds = [type(layer) for layer in layers]
        flat = kinds.index(nn.Flatten) if nn.Flatten in kinds else 0
        wanted = [*[nn.Conv2d, nn.ReLU, nn.MaxPool2d] * (flat // 3), nn.Flatten, nn.Linear]
        wanted += [nn.ReLU, nn.Linear] * ((len(layers) - flat) // 2 - 1)
        trained = [at for at, kind in enumerate(kinds) if kind in (nn.Conv2d, nn.Linear)]
        names = tuple(f"{at}.{part}" for at in trained for part in ("weight", "bias"))
        if not flat or kinds != wanted or model.names != names:
            return None
        convolutions = tuple(layer for layer in layers if isinstance(layer, nn.Conv2d))
        flatten, last = layers[flat], layers[-1]
        is_plain = all(each.in_channels > 1 and each.groups == 1 for each in convolutions) and all(
            each.padding_mode == "zeros" and not isinstance(each.padding, str) for each in convolutions
        )
        is_whole = isinstance(flatten, nn.Flatten) and (flatten.start_dim, flatten.end_dim) == (1, -1)
        pools = []
        for pool in (layer for layer in layers if isinstance(layer, nn.MaxPool2d)):
            kernel, stride = (of if isinstance(of, tuple) else (of, of) for of in (pool.kernel_size, pool.stride))
            is_whole &= pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not pool.ceil_mode
            is_plain &= not pool.return_indices and kernel == stride and kernel[0] == kernel[1]
            pools.append(kernel[0])
        if not is_plain or not is_whole or not isinstance(last, nn.Linear):
            return None
        return ConvolutionalNetwork(model, convolutions, tuple(pools), last.out_features)

    def train(self, params: Params, examples: Examples, schedule: IntVector, local: LocalTraining) -> Params:
        """Return the update of one client."""
        values = [
            value.contiguous(memory_format=_LAST) if value.ndim == 4 else value
            for value in self.model.unflatten(params).values()
        ]
        inputs = examples.inputs.contiguous(memory_format=_LAST)
        is_adam = local.optimizer is Optimizer.ADAM
        steps = torch.optim.Adam(values, lr=local.lr, fused=True) if is_adam else Steps(local, values)
        with torch.no_grad():
            for line in schedule:
                rows = torch.from_numpy(line[line >= 0])
                found = self._gradients(values, inputs[rows], examples.labels[rows])
                if isinstance(steps, Steps):
                    steps.take(values, found)
                    continue
                # One pass over memory where `Steps` takes six: of a million parameters that is a third of the time.
                for value, gradient in zip(values, found, strict=True):
                    layout = _LAST if value.ndim == 4 else torch.contiguous_format
                    value.grad = gradient.contiguous(memory_format=layout)  # the kernel reads memory in one order
                steps.step()
        return self.model.flatten(dict(zip(self.model.names, values, strict=True))) - params

    def _gradients(self, values: TensorList, inputs: torch.Tensor, labels: torch.Tensor) -> TensorList:
        entering, before_pools = [inputs], []
        shapes = [(each.stride, each.padding, each.dilation, *_NOT_TRANSPOSED) for each in self.convolutions]
        for at, side in enumerate(self.pools):
            outputs = _aten.convolution(entering[-1], *values[2 * at : 2 * at + 2], *shapes[at])
            pooled, places = _aten.max_pool2d_with_indices(outputs, [side, side])
            before_pools.append((outputs, places))
            entering.append(pooled.relu_())
        linear, inner = values[2 * len(shapes) :], [entering[-1].flatten(1)]
        for weight, bias in zip(linear[:-2:2], linear[1:-2:2], strict=True):
            inner.append(torch.addmm(bias, inner[-1], weight.t()).relu_())
        slope = torch.addmm(linear[-1], inner[-1], linear[-2].t()).softmax(-1)
        slope[torch.arange(len(labels)), labels] -= 1
        slope /= len(labels)
        found: TensorList = []
        for at in reversed(range(len(inner))):
            found = [slope.t() @ inner[at], slope.sum(0), *found]
            slope = slope @ linear[2 * at]
            slope = _aten.threshold_backward(slope, inner[at], 0) if at else slope.view(entering[-1].shape)
        for at in reversed(range(len(shapes))):
            (outputs, places), square, weight = before_pools[at], [self.pools[at]] * 2, values[2 * at]
            slope = _aten.threshold_backward(slope.contiguous(memory_format=_LAST), entering[at + 1], 0)
            slope = _aten.max_pool2d_with_indices_backward(slope, outputs, square, square, *_WHOLE_SQUARES, places)
            slope, *own = _aten.convolution_backward(
                slope, entering[at], weight, [len(weight)], *shapes[at], [at > 0, True, True]
            )
            found = own + found
        return found
