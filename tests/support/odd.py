"""Odd values: of wrong types and shapes, not finite, huge, empty, used up; and good values with a part gone wrong."""

import datetime as dt
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset

from d2pfed.numerics.randomness import Stream


class UsersOwnError(Exception):
    """What a user's function raises."""


def raising(*_given: object, **_named: object) -> object:
    raise UsersOwnError("of the user's own")


HUGE = 10**400
FRAME = {"a": [1.0, math.nan], "b": ["x", None]}
CONSTANTS: tuple[object, ...] = (
    *(None, True, False, ..., 0, 1, -1, 2, 3, 2**31, 2**63, -(2**63), HUGE, -HUGE, 1j),
    *(0.0, -0.0, 0.5, -1.5, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *(Decimal("nan"), Decimal(1), Fraction(1, 3), Fraction(HUGE), np.float64("nan"), np.float16(1), np.int8(5)),
    *(np.uint64(2**64 - 1), "", "x", "auto", "server", "nan", "1", "é\n\t\0", "x" * 5000, "..", b"", b"\xff\x00"),
    *(
        Path("nowhere"),
        Path("folder"),
        Path("text"),
        Path("x" * 300),
        Path(),
        range(3),
        range(0),
        slice(1),
        object(),
    ),
    *(int, object, ValueError, Path, math, len, raising, lambda *_: None, dt.date(2020, 1, 1), pd.NA),
    *(pd.Timestamp("2020-01-01"), torch.nn.Linear, torch.device("meta"), torch.float16),
)
MADE: tuple[Callable[[], object], ...] = (  # anew for every case: some can be read only once, or be changed
    *(
        list,
        dict,
        set,
        tuple,
        frozenset,
        lambda: {1, 2},
        lambda: iter(()),
        lambda: iter([1, 2]),
        lambda: bytearray(3),
    ),
    *(lambda: (each for each in (1.0, 2.0)), lambda: (raising() for _ in range(2)), lambda: map(raising, "12x")),
    *(lambda: [None], lambda: ["a", "b"], lambda: [[]], lambda: [[1.0], [1.0, 2.0]], lambda: [math.nan, 1.0]),
    *(lambda: [1, "x", None], lambda: [{}, {}], lambda: [object(), object()], lambda: [HUGE, HUGE]),
    *(
        lambda: {"x": 1},
        lambda: {1: 2, None: 3},
        lambda: {"epsilon": math.nan},
        lambda: {"": []},
        lambda: {(): {}},
    ),
    *(lambda: np.zeros(0), lambda: np.zeros((0, 3)), lambda: np.zeros((3, 0)), lambda: np.ones((2, 2, 2, 2))),
    *(lambda: np.full(3, math.nan), lambda: np.array(["a", "b"]), lambda: np.array([None, {}], object)),
    *(
        lambda: np.array([1, "x"], object),
        lambda: np.array(3.0),
        lambda: np.array([1 + 2j]),
        lambda: np.ones(3, bool),
    ),
    *(lambda: np.array(["2020-01-01"], "datetime64[D]"), lambda: np.zeros(2, [("a", int)])),
    *(
        lambda: np.ma.masked_array([1, 2]),
        lambda: pd.Series([1.0, 2.0], index=[5, 7]),
        lambda: pd.Series(["a", None]),
    ),
    *(lambda: pd.DataFrame(FRAME), pd.DataFrame, lambda: pd.Series([], dtype=float)),
    *(lambda: pd.Categorical(["a"]), lambda: pd.Index([1, 2]), lambda: pd.Series([1, pd.NA], dtype="Int64")),
    *(lambda: torch.ones(3, dtype=torch.bfloat16), lambda: torch.ones(4, 3, dtype=torch.bfloat16)),
    *(lambda: torch.ones(0), lambda: torch.tensor(math.nan), lambda: torch.ones(2, 2, dtype=torch.complex64)),
    *(
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3, dtype=bool),
    ),
    *(lambda: torch.ones(2, device="meta"), lambda: torch.nn.Linear(3, 2), torch.nn.ReLU),
    *(
        lambda: [torch.ones(2), torch.ones(3)],
        lambda: (torch.ones(4, 3), torch.zeros(4)),
        lambda: (np.ones(3), "x"),
    ),
    *(lambda: TensorDataset(torch.ones(4, 3)), lambda: DataLoader([1, 2, 3])),
)


def odd(stream: Stream, good: object) -> object:
    """Return an odd value in the place of a good one: of any kind, or the good one with a part gone wrong."""
    if stream.below(3) and (found := damaged(stream, good)) is not good:
        return found
    at = stream.below(len(CONSTANTS) + len(MADE))
    return CONSTANTS[at] if at < len(CONSTANTS) else MADE[at - len(CONSTANTS)]()


def damaged(stream: Stream, good: object) -> object:
    """Return a value that is like a good one but for a part; the good one itself where it has no parts."""
    if isinstance(good, Mapping) and good:
        name = list(good)[stream.below(len(good))]
        kept = {each: value for each, value in good.items() if each != name}
        return (kept, kept | {name: odd(stream, good[name])}, good | {"no such name": 1})[stream.below(3)]
    if isinstance(good, (list, tuple)) and good:
        at = stream.below(len(good))
        parts = [odd(stream, each) if place == at else each for place, each in enumerate(good)]
        return type(good)((parts, good[:at], (*good, *good), list(reversed(good)))[stream.below(4)])
    if isinstance(good, (np.ndarray, torch.Tensor)) and good.ndim:
        return ARRAYS[stream.below(len(ARRAYS))](good)
    if isinstance(good, str) and good:
        return (good[:-1], good.upper(), good + "\0", good + " ", f"{good}, {good}")[stream.below(5)]
    if isinstance(good, (int, float)) and not isinstance(good, bool):
        return (-good, good * 1e300, good + 0.5, str(good), [good], np.float32(good))[stream.below(6)]
    return good


def _spoiled(values: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Return numbers of which the first is no number; what holds whole numbers has a huge one."""
    whole = "int" in str(values.dtype)
    found = values.clone() if isinstance(values, torch.Tensor) else values.copy()
    found[(0,) * values.ndim] = 2**30 if whole else math.nan
    return found


ARRAYS: tuple[Callable[[np.ndarray | torch.Tensor], object], ...] = (
    _spoiled,
    lambda values: values[:-1],
    lambda values: values[:0],
    lambda values: values[None],
    lambda values: values.reshape(-1),
    lambda values: values * 1j,
    lambda values: values.tolist(),
    lambda values: torch.as_tensor(values).to(torch.bfloat16),
    lambda values: np.asarray(values).astype(object),
    lambda values: np.asarray(values).astype(str),
    lambda values: np.asarray(values).astype(np.float64) * 1e300,
    lambda values: pd.DataFrame(np.asarray(values).reshape(len(values), -1)),
    lambda values: (each for each in values),
)
