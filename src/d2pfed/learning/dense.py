"""Multilayer perceptrons by hand: SGD or Adam of one client as one compiled call.

With batches of ten the time goes into moving weights between memory and cache, and into calls. The compiled loop has
no calls, keeps one client's weights in the cache, and adds a gradient to the weights in the pass that makes it. It
runs without the interpreter's lock and does not use torch, so torch's number of threads does not matter.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from d2pfed.learning.local_training import ADAM_DECAYS, ADAM_EPSILON
from d2pfed.learning.model import Model, Params
from d2pfed.learning.task import Examples, Floats
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.ring import IntVector as Ints

ONE_THREAD = 1 << 18  # multiplications in a product, up to which OpenBLAS starts no threads
_FIRST, _SECOND = (np.float32(1 - decay) for decay in ADAM_DECAYS)
_EPSILON = np.float32(ADAM_EPSILON)


def widths_of(model: Model) -> Ints | None:
    """Return the widths of `Flatten, Linear, (ReLU, Linear)*`, all trained, by cross entropy; None of another model."""
    module = model.module
    hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())  # noqa: SLF001
    is_float = all(value.dtype == torch.float32 for value in module.parameters())
    if type(module) is not nn.Sequential or not model.is_plain or hooked or not is_float:
        return None
    layers = list(module)
    count = len(layers) // 2
    kinds = [nn.Flatten, nn.Linear, *[nn.ReLU, nn.Linear] * (count - 1)]
    names = tuple(f"{2 * layer + 1}.{part}" for layer in range(count) for part in ("weight", "bias"))
    if [type(layer) for layer in layers] != kinds or model.names != names or layers[0].start_dim != 1:
        return None
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return np.array([linear[0].in_features, *(layer.out_features for layer in linear)])


@dataclass(slots=True)
class Moments:
    """What Adam remembers; training changes it."""

    mean: Floats
    square: Floats
    taken: int = 0  # steps


def train_dense(  # noqa: PLR0917 - a kernel's arrays, and what Adam remembers
    params: Params, widths: Ints, examples: Examples, schedule: Ints, lr: float, moments: Moments | None = None
) -> Params:
    """Return the update of one client on the mean cross entropy of each batch: by plain SGD, or Adam with moments."""
    inputs = examples.inputs.detach().reshape(len(examples), widths[0]).contiguous().numpy()
    blocks = np.zeros((2, schedule.shape[1] * widths.sum()), np.float32)  # the room that a step works in
    data = inputs, examples.labels.contiguous().numpy(), schedule, blocks, np.zeros(schedule.shape[1], np.int64)
    rates, roots = np.full((2, len(schedule)), lr, np.float32)
    memory, trained = np.zeros((0, 0), np.float32), params.copy()
    if moments is not None:
        steps = np.arange(moments.taken + 1, moments.taken + 1 + len(schedule), dtype=np.float64)
        first, second = (1 - decay**steps for decay in ADAM_DECAYS)
        rates, roots = (lr / first).astype(np.float32), (1 / np.sqrt(second)).astype(np.float32)
        memory = np.stack([np.zeros_like(params), moments.mean, moments.square])
    _train(trained, memory, widths, *data, rates, roots)
    if moments is not None:
        moments.mean, moments.square, moments.taken = memory[1], memory[2], moments.taken + len(schedule)
    trained -= params
    return trained


@compiled
def _add_product(slopes: Floats, entering: Floats, weight: Floats) -> None:
    """Add slopes.T @ entering to the weight, in one pass for each five rows of both."""
    count, outputs, inputs = len(entering), weight.shape[0], weight.shape[1]
    fives, pairs = count // 5 * 5, outputs // 2 * 2
    for r in range(0, fives, 5):
        x0, x1, x2, x3, x4 = entering[r], entering[r + 1], entering[r + 2], entering[r + 3], entering[r + 4]
        for j in range(0, pairs, 2):
            k = j + 1
            a0, a1, a2 = slopes[r, j], slopes[r + 1, j], slopes[r + 2, j]
            a3, a4 = slopes[r + 3, j], slopes[r + 4, j]
            b0, b1, b2 = slopes[r, k], slopes[r + 1, k], slopes[r + 2, k]
            b3, b4 = slopes[r + 3, k], slopes[r + 4, k]
            one, two = weight[j], weight[k]
            for i in range(inputs):
                one[i] += (a0 * x0[i] + a1 * x1[i]) + (a2 * x2[i] + a3 * x3[i]) + a4 * x4[i]
                two[i] += (b0 * x0[i] + b1 * x1[i]) + (b2 * x2[i] + b3 * x3[i]) + b4 * x4[i]
    for r in range(count):
        for j in range(pairs if r < fives else 0, outputs):
            slope = slopes[r, j]
            for i in range(inputs):
                weight[j, i] += slope * entering[r, i]


@compiled
def _forward(values: Floats, widths: Ints, entering: Floats, count: np.int64, batch: int) -> None:
    """Fill in what enters each layer, and the logits, behind the inputs: one block of (batch, width) each."""
    at, start = 0, 0
    for layer in range(len(widths) - 1):
        inputs, outputs = widths[layer], widths[layer + 1]
        weight = values[at : at + inputs * outputs].reshape(outputs, inputs)
        bias = values[at + inputs * outputs : at + (inputs + 1) * outputs]
        into = entering[start : start + count * inputs].reshape(count, inputs)
        start += batch * inputs
        out = entering[start : start + count * outputs].reshape(count, outputs)
        last = layer == len(widths) - 2
        step = max(1, ONE_THREAD // (count * inputs))
        for first in range(0, outputs, step):
            product = np.dot(weight[first : first + step], into.T)
            for j in range(len(product)):
                for r in range(count):
                    value = product[j, r] + bias[first + j]
                    out[r, first + j] = value if last or not value < 0 else np.float32(0)
        at += (inputs + 1) * outputs


@compiled
def _backward(  # noqa: PLR0917 - a kernel takes arrays, not objects
    values: Floats, target: Floats, widths: Ints, entering: Floats, slopes: Floats, count: np.int64, batch: int
) -> None:
    """Add the slopes of the logits, times what led to them, to the target, from the last layer to the first.

    The slopes have the blocks of `entering`; those of the logits are filled in, and carry the step's length. The
    target has the values' layout, and may be the values: a layer is read before it is changed.
    """
    at, start = len(values), len(entering)
    start -= batch * widths[-1]
    for layer in range(len(widths) - 2, -1, -1):
        inputs, outputs = widths[layer], widths[layer + 1]
        at -= (inputs + 1) * outputs
        weight = values[at : at + inputs * outputs].reshape(outputs, inputs)
        bias = target[at + inputs * outputs : at + (inputs + 1) * outputs]
        slope = slopes[start : start + count * outputs].reshape(count, outputs)
        start -= batch * inputs
        into = entering[start : start + count * inputs].reshape(count, inputs)
        if layer:
            before = slopes[start : start + count * inputs].reshape(count, inputs)
            for r in range(count):
                for i in range(inputs):
                    before[r, i] = np.float32(0)
                for j in range(outputs):
                    for i in range(inputs):
                        before[r, i] += slope[r, j] * weight[j, i]
                for i in range(inputs):
                    before[r, i] = before[r, i] if into[r, i] > 0 else np.float32(0)
        _add_product(slope, into, target[at : at + inputs * outputs].reshape(outputs, inputs))
        for r in range(count):
            for j in range(outputs):
                bias[j] += slope[r, j]


@compiled
def _train(  # noqa: PLR0917 - a kernel takes arrays, not objects
    values: Floats,
    memory: Floats,
    widths: Ints,
    inputs: Floats,
    labels: Ints,
    schedule: Ints,
    blocks: Floats,
    rows: Ints,
    rates: Floats,
    roots: Floats,
) -> None:
    """Train in place: by Adam if the memory has room for a gradient and both moments, which change, else by SGD.

    `blocks` and `rows` are room to work in. Slices are not assigned, nor arrays made: to compile the checks and errors
    of either takes seconds.
    """
    batch, width, classes = schedule.shape[1], widths[0], widths[-1]
    entering, slopes, is_adam = blocks[0], blocks[1], len(memory) > 0
    last = len(entering) - batch * classes
    target = memory[0] if is_adam else values
    for step in range(len(schedule)):
        rate, root = rates[step], roots[step]
        if is_adam:
            for i in range(len(target)):
                target[i] = np.float32(0)
        count = np.int64(0)  # a plain 0 would be a type of its own, for which all is compiled again
        for row in schedule[step]:
            if row >= 0:
                rows[count] = row
                for i in range(width):
                    entering[count * width + i] = inputs[row, i]
                count += 1
        _forward(values, widths, entering, count, batch)
        # The gradient of the batch's mean loss, times 1 or minus the rate, is added to the target.
        scale = (np.float32(1) if is_adam else -rate) / np.float32(count)
        for r in range(count):
            logits = entering[last + r * classes : last + (r + 1) * classes]
            slope = slopes[last + r * classes : last + (r + 1) * classes]
            top, total = logits[0], np.float32(0)
            for k in range(1, classes):
                top = max(top, logits[k])
            for k in range(classes):
                slope[k] = np.exp(logits[k] - top)
                total += slope[k]
            for k in range(classes):
                slope[k] *= scale / total
            slope[labels[rows[r]]] -= scale
        _backward(values, target, widths, entering, slopes, count, batch)
        if is_adam:
            mean, square = memory[1], memory[2]
            for i in range(len(target)):
                gradient = target[i]
                mean[i] += _FIRST * (gradient - mean[i])
                square[i] += _SECOND * (gradient * gradient - square[i])
                values[i] -= rate * mean[i] / (np.sqrt(square[i]) * root + _EPSILON)
