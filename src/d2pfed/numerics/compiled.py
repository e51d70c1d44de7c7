"""How kernels are compiled: to machine code that runs without the interpreter's lock, kept on disk if possible."""

from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile on the first call, which loads the compiler; the code is kept beside the module or in a cache."""
    return cast("Function", Kernel(function))


class Kernel:
    """A function that is compiled when it is first called, from Python or from another kernel."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._code: Callable[..., object] | None = None
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> object:  # noqa: ANN401 - a kernel's own types are those of its function
        """Run the compiled code."""
        return (self._code or self.code)(*arguments)

    @property
    def code(self) -> Callable[..., object]:
        """The function as numba compiles it."""
        if self._code is None:
            from numba import njit  # noqa: PLC0415 - slow to load

            _teach_numba_kernels()
            try:
                code = njit(nogil=True, error_model="numpy", cache=True)(self._function)
            except RuntimeError:  # neither place can be written, as in a locked-down container: in each process
                code = njit(nogil=True, error_model="numpy")(self._function)
            self._code = cast("Callable[..., object]", code)
        return self._code


def is_kept(function: Callable[..., object]) -> bool:
    """Tell whether machine code of a kernel, perhaps of an older version, is on the disk."""
    place = function.code.stats.cache_path if isinstance(function, Kernel) else None  # type: ignore[attr-defined]
    return place is not None and any(Path(place).glob(f"*.{function.__name__}-*.nbi"))


@cache
def _teach_numba_kernels() -> None:
    """Let compiled code that names a kernel call that kernel's compiled code."""
    from numba.extending import typeof_impl  # noqa: PLC0415 - slow to load

    @typeof_impl.register(Kernel)
    def type_of_kernel(kernel: Kernel, context: object) -> object:
        return typeof_impl(kernel.code, context)
