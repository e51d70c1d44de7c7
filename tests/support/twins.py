"""A function of the package with one place of its source changed: the wrong twin that an attack succeeds against."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def twin(right: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return the function as it would be with `new` in the one place of `old`."""
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(old) == 1, f"{right.__qualname__} has {source.count(old)} times {old!r}"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), inspect.unwrap(right).__globals__, made)
    return made[right.__name__]
