"""What one client holds in the form that its owner has it: tensors, arrays, tuples or dictionaries of them, by row."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from d2pfed.errors import ConfigError
from d2pfed.learning.task import Examples

EVALUATED_ROWS = 1000  # at once, where the data have no batches of their own

Tree = Any  # a tensor, or a tuple or dictionary of trees: torch has no type for it


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Inputs and targets with one row per example; targets are None where the data are no pairs.

    Without rows the inputs may be None: an empty data set does not say what its rows would be.
    """

    inputs: Tree
    labels: Tree = None

    def __post_init__(self) -> None:
        lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves((self.inputs, self.labels))}
        if len(lengths) > 1 or -1 in lengths:
            shapes = [tuple(leaf.shape) for leaf in leaves((self.inputs, self.labels))]
            raise ConfigError(f"inputs and targets must have as many rows, got shapes {shapes}")

    def __len__(self) -> int:
        first = next(leaves((self.inputs, self.labels)), None)
        return 0 if first is None else len(first)

    @property
    def batch(self) -> Tree:
        """The rows as a step function takes them: a pair, or the whole where there are no targets."""
        return self.inputs if self.labels is None else (self.inputs, self.labels)

    def take(self, rows: NDArray[np.int64]) -> "Rows":
        """Return the given rows, copied."""
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return self._each(lambda leaf: leaf[index.to(leaf.device)])

    def between(self, start: int, end: int) -> "Rows":
        """Return the rows from `start` to `end`."""
        return self._each(lambda leaf: leaf[start:end])

    def to(self, device: torch.device) -> "Rows":
        """Return the rows on a device."""
        return self._each(lambda leaf: leaf.to(device))

    def examples(self) -> Examples | None:
        """Return the rows as one tensor of inputs and one of labels; None if they are something else."""
        inputs, labels = self.inputs, self.labels
        if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            return None
        return Examples(inputs, labels) if inputs.ndim > 1 else None

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Rows":
        return Rows(mapped(change, self.inputs), mapped(change, self.labels))


def rows_of(data: object, owner: str) -> Rows:
    """Return all rows of a data set; `owner` is who holds it, for the error that refuses it."""
    return joined(tuple(batches_of(data, owner)))


def batches_of(data: object, owner: str) -> Iterator[Rows]:
    """Yield a data set in batches: a pair, a Dataset, a DataLoader, or None for no data."""
    if data is None:
        return
    if isinstance(data, Examples):
        data = data.inputs, data.labels
    if isinstance(data, Rows):
        yield from _cut(data)
    elif _is_pair(data):
        inputs, targets = cast("tuple[Tree, Tree]", data)
        yield from _cut(Rows(_tensors(inputs), _targets(targets)))
    elif isinstance(data, (DataLoader, IterableDataset)):
        batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=EVALUATED_ROWS)
        yield from (_paired(batch) for batch in batches)
    elif isinstance(data, Dataset) or (isinstance(data, Sequence) and not isinstance(data, str)):
        items: Any = data  # a Dataset has a length only by convention
        for start in range(0, len(items), EVALUATED_ROWS):
            chosen = range(start, min(start + EVALUATED_ROWS, len(items)))
            yield _paired(default_collate([items[at] for at in chosen]))
    else:
        raise ConfigError(
            f"{owner} must hold a pair of tensors or arrays, a torch Dataset or a DataLoader, "
            f"got {type(data).__name__}"
        )


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several batches as one."""
    some = [part for part in parts if len(part)]
    if not some:
        return parts[0] if parts else Rows(None)
    if len(some) == 1:
        return some[0]
    inputs = concatenated([part.inputs for part in some])
    return Rows(inputs, None if some[0].labels is None else concatenated([part.labels for part in some]))


def concatenated(trees: Sequence[Tree]) -> Tree:
    """Return trees of one form as one, row after row."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {name: concatenated([tree[name] for tree in trees]) for name in first}
    return tuple(concatenated(parts) for parts in zip(*trees, strict=True))


def mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Return a tree with each tensor changed."""
    if tree is None:
        return None
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: mapped(change, part) for name, part in tree.items()}
    return tuple(mapped(change, part) for part in tree)


def leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif tree is not None:
        parts: Iterable[Tree] = tree.values() if isinstance(tree, Mapping) else tree
        for part in parts:
            yield from leaves(part)


def _cut(rows: Rows) -> Iterator[Rows]:
    if len(rows) <= EVALUATED_ROWS:
        yield rows
        return
    for start in range(0, len(rows), EVALUATED_ROWS):
        yield rows.between(start, start + EVALUATED_ROWS)


def _paired(batch: Tree) -> Rows:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return Rows(_tensors(batch[0]), _targets(batch[1]))
    return Rows(_tensors(batch))


def _is_pair(data: Any) -> bool:  # noqa: ANN401 - whatever a user gives
    """Tell inputs and targets from a list of two examples: a list is a pair only of whole tensors or arrays."""
    if isinstance(data, tuple) and len(data) == 2:
        return all(_is_tree(part) for part in data)
    return isinstance(data, list) and len(data) == 2 and all(hasattr(part, "ndim") and part.ndim for part in data)


def _is_tree(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_tree(part) for part in value.values())
    if isinstance(value, (tuple, list)):
        return all(_is_tree(part) for part in value)
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _tensors(tree: Tree) -> Tree:
    """Return a tree of tensors; arrays of double precision become torch's default, as its modules are."""
    if isinstance(tree, Mapping):
        return {str(name): _tensors(part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_tensors(part) for part in tree)
    if isinstance(tree, torch.Tensor):
        return tree
    if not isinstance(tree, np.ndarray):
        raise ConfigError(f"a batch must be made of tensors and arrays, got {type(tree).__name__}")
    try:
        found = torch.from_numpy(np.ascontiguousarray(tree))
    except TypeError:
        raise ConfigError(f"arrays must hold numbers, got the type {tree.dtype}") from None
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


def _targets(tree: Tree) -> Tree:
    """Return targets as tensors; whole numbers become int64, as torch's losses take classes."""
    found = _tensors(tree)
    small = (torch.uint8, torch.int8, torch.int16, torch.int32)
    return mapped(lambda leaf: leaf.to(torch.int64) if leaf.dtype in small else leaf, found)
