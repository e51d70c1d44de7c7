"""Data sets that a server must not tell apart: training that fails, numbers that are none, and updates of all sizes."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from d2pfed.accounting import Unit
from d2pfed.deploy.client import TrainArrays, WeightedArrays
from d2pfed.deploy.layout import NamedArrays
from d2pfed.numerics.ring import IntVector

MARK = "a value of the data 4711"  # in every error: no server may see it

Made = Callable[[int], TrainArrays]  # from the number of parameters to a training function


class Rows:
    """A silo's units, each with a vector, and what goes wrong with them."""

    def __init__(self, rows: np.ndarray, count: int | None = None, failing: BaseException | None = None) -> None:
        self.count = len(rows) if count is None else count
        self._rows, self._failing = rows, failing

    def gradients(self, chosen: IntVector) -> Iterator[np.ndarray]:
        if len(chosen):
            yield self._rows[chosen % len(self._rows)]
        if self._failing is not None:
            raise self._failing


def _raising(error: BaseException) -> Made:
    def train(_arrays: NamedArrays, _settings: Mapping[str, object]) -> NamedArrays:
        raise error

    return lambda _dimension: train


def _adding(value_of: Callable[[int], np.ndarray]) -> Made:
    def made(dimension: int) -> TrainArrays:
        return lambda arrays, _settings: {name: array + value_of(dimension) for name, array in arrays.items()}

    return made


def _returning(value: object) -> Made:
    return lambda _dimension: lambda _arrays, _settings: value


def _rows(value: float, kind: type = np.float32, **changes: object) -> Made:
    def made(dimension: int) -> TrainArrays:
        return lambda _arrays, _settings: Rows(np.full((1, dimension), value, kind), **changes)

    return made


def _deep(_arrays: NamedArrays, _settings: Mapping[str, object]) -> NamedArrays:
    return _deep(_arrays, _settings)


def _weighing(weight: float) -> Made:
    return lambda _dimension: lambda arrays, _settings: WeightedArrays(arrays, weight)


def _last(value: float) -> Callable[[int], np.ndarray]:
    def made(dimension: int) -> np.ndarray:
        vector = np.zeros(dimension, np.float32)
        vector[-1] = value
        return vector

    return made


_FAILING: dict[str, Made] = {
    "an error": _raising(ValueError(MARK)),
    "an exit": _raising(SystemExit(MARK)),
    "no memory": _raising(MemoryError(MARK)),
    "a deep recursion": lambda _dimension: _deep,
    "nothing": _returning(None),
    "a text": _returning(MARK),
}
# Those that add nothing but noise, and those that do: the server sees the same of all.
SILENT = {
    Unit.CLIENT: {
        "zeros": _adding(lambda dimension: np.zeros(dimension, np.float32)),
        "not a number": _adding(lambda dimension: np.full(dimension, np.nan, np.float32)),
        "infinity": _adding(_last(np.inf)),
        "another shape": _returning({"params": np.zeros((3, 3), np.float32)}),
        "another name": _returning({MARK: np.zeros(3, np.float32)}),
        "another type": lambda dimension: lambda _arrays, _settings: {"params": np.ones(dimension, np.int64)},
        "units": _rows(1.0),
        **_FAILING,
    },
    Unit.RECORD: {
        "zeros": _rows(0.0),
        "not a number": _rows(np.nan),
        "no records": _rows(1.0, count=0),
        "fewer than none": _rows(1.0, count=-1),
        "another type": _rows(1.0, np.int64),
        "a late error": _rows(1.0, failing=ValueError(MARK)),
        "arrays": _adding(lambda dimension: np.ones(dimension, np.float32)),
        **_FAILING,
    },
}
ILLS = {
    Unit.CLIENT: SILENT[Unit.CLIENT]
    | {
        "a negative last number": _adding(_last(-1.0)),
        "a weight": _weighing(1.0),
        "a negative weight": _weighing(-1.0),
        "a small update": _adding(lambda dimension: np.full(dimension, 1e-9, np.float32)),
        "a huge update": _adding(lambda dimension: np.full(dimension, 1e30, np.float32)),
    },
    Unit.RECORD: SILENT[Unit.RECORD] | {"a small record": _rows(1e-9), "a huge record": _rows(1e30)},
}
