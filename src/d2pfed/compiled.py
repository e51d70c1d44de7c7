"""How kernels are compiled: to machine code that runs without the interpreter's lock, kept on disk if possible."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Compile on the first call; a later process finds the code beside the module or in the user's cache."""
    try:
        kernel = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither place can be written, as in a locked-down container: compile in each process
        kernel = njit(nogil=True, error_model="numpy")(function)
    return cast("Kernel", kernel)
