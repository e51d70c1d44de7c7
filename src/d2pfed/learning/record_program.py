"""The gradients of a chunk of records as one recorded program, whose products treat every record alike.

torch.func gives each record parameters of its own, so no layer can mix records. What it does for chunks of one shape is
recorded once and replayed without its interpreters. A library for linear algebra may sum in another order where a
matrix begins at another address modulo the width of its registers. Here the matrices of every record begin at
multiples of 64 bytes and have one shape, so each record is computed by the same instructions. Convolutions become such
products, of patches.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from d2pfed.learning.model import Model, Tensors
from d2pfed.learning.task import Examples, Tree, mapped

Program = Callable[[Tensors, Tensors, Examples], list[torch.Tensor]]  # from trained and fixed values and rows

_aten = torch.ops.aten
_ALIGNED = 64  # bytes: the widest registers there are
_VIEWS = _aten.expand.default, _aten.view.default, _aten._unsafe_view.default, _aten.detach.default  # noqa: SLF001
_PLAIN = 400  # multiplications, below which torch multiplies by a loop of its own, in one order


def single_gradients(model: Model, values: Tensors, fixed: Tensors, rows: Examples) -> list[torch.Tensor]:
    """Return the gradient of each row's loss, downhill, in the order of the model's names."""
    # Each record multiplies parameters of its own, frozen ones too; buffers are shared, so none can be written.
    frozen = {name for name, _ in model.module.named_parameters()} - set(model.names)
    own, kept = (
        {name: value.expand(len(rows), *value.shape) for name, value in some.items()}
        for some in (values, {name: fixed[name] for name in fixed if name in frozen})
    )
    buffers = {name: value for name, value in fixed.items() if name not in frozen}

    def gain(trained: Tensors, kept: Tensors, inputs: Tree, labels: Tree) -> torch.Tensor:
        one = mapped(lambda leaf: leaf.unsqueeze(0), inputs), mapped(lambda leaf: leaf.unsqueeze(0), labels)
        return -model.losses_of(model.training, trained | kept | buffers, *one).mean()

    axes = (0, 0, 0, None if rows.labels is None else 0)
    with by_products(recurrent=True), _Unfolded():
        found = torch.func.vmap(torch.func.grad(gain), in_dims=axes)(own, kept, rows.inputs, rows.labels)
    return [found[name] for name in model.names]


def recorded(model: Model, values: Tensors, fixed: Tensors, rows: Examples) -> Program:
    """Record `single_gradients` for rows of this shape; what the module reads from Python is read now."""
    names, others = list(values), list(fixed)
    sizes = len(names), len(names) + len(others)

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = iter(tensors[sizes[1] :])
        given = Examples(*(mapped(lambda _: next(leaves), tree) for tree in (rows.inputs, rows.labels)))
        own = dict(zip(names, tensors[: sizes[0]], strict=True))
        return single_gradients(model, own, dict(zip(others, tensors[sizes[0] : sizes[1]], strict=True)), given)

    program = make_fx(flat)(*values.values(), *fixed.values(), *rows.leaves)
    _shorten(program.graph)
    for node in program.graph.nodes:
        if node.target is _aten.bmm.default:
            node.target = product
    program.recompile()

    def replay(values: Tensors, fixed: Tensors, rows: Examples) -> list[torch.Tensor]:
        with torch.no_grad():
            found: list[torch.Tensor] = program(*values.values(), *fixed.values(), *rows.leaves)
        return found

    return replay


def _shorten(graph: Graph) -> None:
    """Take out what changes nothing, such as views of the same shape, and all that only the loss's value needs."""
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.nodes):  # noqa: SLF001
        return  # what is written in place may be seen through another node
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        value, first = node.meta["val"], node.args[0] if node.args else None
        before = first.meta.get("val") if isinstance(first, Node) else None
        if node.target is _aten.ones_like.default:  # needs a shape, and not the loss
            with graph.inserting_before(node):
                ones = graph.call_function(
                    _aten.ones.default, (value.shape,), {"dtype": value.dtype, "device": value.device}
                )
            ones.meta = node.meta
            node.replace_all_uses_with(ones)
        elif isinstance(before, torch.Tensor) and (value.shape, value.dtype) == (before.shape, before.dtype):
            is_factor_one = node.target in (_aten.mul.Scalar, _aten.div.Scalar) and node.args[1] == 1
            if is_factor_one or node.target in _VIEWS:
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code()


def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the product of each pair of matrices, computed alike wherever in the batch a pair is."""
    rows, inner, columns = *first.shape[1:], second.shape[2]
    if inner == 1:
        return (first * second).contiguous()
    if rows * inner * columns < _PLAIN:
        return torch.bmm(first, second)
    extra = -columns % (_ALIGNED // first.element_size())
    if rows * columns % (_ALIGNED // first.element_size()) == 0 or not extra:
        return torch.bmm(_aligned(first), _aligned(second))
    shared = second.stride(0) == 0  # parameters: one copy is enough
    wide = functional.pad(second[:1] if shared else second, (0, extra)).expand(len(second), -1, -1)
    return torch.bmm(_aligned(first), wide)[..., :columns].contiguous()


def _aligned(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices that each begin at a multiple of 64 bytes, or are one and the same."""
    step = _ALIGNED // matrices.element_size()
    stride, (down, right) = matrices.stride(0), matrices.stride()[1:]
    if stride == 0 or (stride % step == 0 and matrices.data_ptr() % _ALIGNED == 0):
        return matrices
    if down == 1 and right != 1:
        return _aligned(matrices.mT).mT
    size = math.prod(matrices.shape[1:])
    room = matrices.new_empty(len(matrices), size + -size % step)
    return room[:, :size].view(matrices.shape).copy_(matrices)


@contextmanager
def by_products(*, recurrent: bool) -> Iterator[None]:
    """Let attention, and recurrent layers if there are any, be made of products of matrices, which vmap takes."""
    before = torch._C._get_mkldnn_enabled()  # noqa: SLF001 - its context manager sets other flags too, and warns
    torch._C._set_mkldnn_enabled(before and not recurrent)  # noqa: SLF001 - it has layers of its own, for batches
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)  # noqa: SLF001


class _Unfolded(TorchFunctionMode):
    """Convolutions over one and two dimensions as products of their weights with patches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        by_patches = _convolution if func in (torch.conv1d, torch.conv2d) else func
        return by_patches(*args, **(kwargs or {}))


Sides = int | tuple[int, ...]


def _convolution(  # noqa: PLR0917 - as torch has it
    input: torch.Tensor,  # noqa: A002 - as torch has it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sides = 1,
    padding: Sides | str = 0,
    dilation: Sides = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return torch.conv2d of the same arguments, or torch.conv1d: a line is an image of one row."""
    if weight.ndim == 3:
        edges = padding if isinstance(padding, str) else (0, _pair(padding)[-1])
        steps, gaps = (1, _pair(stride)[-1]), (1, _pair(dilation)[-1])
        lines = _convolution(input.unsqueeze(-2), weight.unsqueeze(-2), bias, steps, edges, gaps, groups)
        return lines.squeeze(-2)
    single = input.ndim == 3
    images = input.unsqueeze(0) if single else input
    kernel, strides, spaces = weight.shape[2:], _pair(stride), _pair(dilation)
    reach = [gap * (side - 1) for gap, side in zip(spaces, kernel, strict=True)]
    if padding == "same":  # the odd one goes behind, as in torch
        images = functional.pad(images, (reach[1] // 2, -(-reach[1] // 2), reach[0] // 2, -(-reach[0] // 2)))
    borders = (0, 0) if isinstance(padding, str) else _pair(padding)
    sides = [
        (size + 2 * edge - far - 1) // step + 1
        for size, edge, far, step in zip(images.shape[2:], borders, reach, strides, strict=True)
    ]
    patches = functional.unfold(images, tuple(kernel), spaces, borders, strides)
    count, outputs = len(images), len(weight)
    each = weight.reshape(1, groups, outputs // groups, -1).expand(count, -1, -1, -1).flatten(0, 1)
    found = torch.bmm(each, patches.view(count * groups, -1, patches.shape[-1])).view(count, outputs, *sides)
    found = found if bias is None else found + bias[:, None, None]
    return found.squeeze(0) if single else found


def _pair(sides: Sides) -> tuple[int, ...]:
    return (sides, sides) if isinstance(sides, int) else tuple(sides) * (2 // len(sides))
