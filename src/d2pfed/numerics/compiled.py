"""How kernels are compiled: to machine code that runs without the interpreter's lock, kept on disk if possible."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from types import FunctionType
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile on the first call; a later process finds the code beside the module or in the user's cache.

    Until then the compiler is not even loaded: it takes longer than most of what a client is asked for.
    """
    return cast("Kernel", _Kernel(cast("FunctionType", function)))


class _Kernel:
    """A kernel that waits for its first call."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> object:  # noqa: ANN401 - a kernel's own types are those of its function
        return self.code(*arguments)

    @cached_property
    def code(self) -> Callable[..., object]:
        """The compiled function, in place of the one that waits: compiled code calls compiled code only."""
        names = self._function.__globals__
        for name in self._function.__code__.co_names:
            if isinstance(called := names.get(name), _Kernel):
                names[name] = called.code
        code = _compile(self._function)
        if names.get(self._function.__name__) is self:
            names[self._function.__name__] = code
        return code


def _compile(function: FunctionType) -> Callable[..., object]:
    from numba import njit  # noqa: PLC0415 - slow to load

    try:
        code = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither place can be written, as in a locked-down container: compile in each process
        code = njit(nogil=True, error_model="numpy")(function)
    return cast("Callable[..., object]", code)
