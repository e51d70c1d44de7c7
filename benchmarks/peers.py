"""What becomes of a peer that is absent or fails: a row that says so, and the benchmark goes on."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TypeVar

Result = TypeVar("Result")

IN_THE_EXTRA = {"flwr", "ray", "opendp"}
_APART = {
    "pfl",
    "opacus",
}  # scripts/bench installs them without what they ask for: pfl wants an older dp-accounting
_MOST_LETTERS = 200


class PeerCrash(Exception):  # noqa: N818 - the name of the event
    """A peer's process failed; the text says how."""


def attempt(needs: Sequence[str], run: Callable[[], Result]) -> tuple[Result | None, str]:
    """Run a peer and return its result and "", or None and one line that says why there is no result."""
    if missing := [name for name in needs if find_spec(name) is None]:
        return None, not_installed(missing)
    try:
        return run(), ""
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is a result of the benchmark
        return None, one_line(error)


def not_installed(names: Sequence[str]) -> str:
    """Say which modules are missing and what installs them."""
    if set(names) <= _APART:
        return "not installed: pip install --no-deps --requirement benchmarks/peers.txt"
    others = [name for name in names if name not in IN_THE_EXTRA]
    how = f"pip install {' '.join(others)}, in no extra of ours" if others else "pip install 'd2pfed[peers]'"
    return f"not installed: {how}"


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    text = " ".join(str(error).split())
    line = text if isinstance(error, PeerCrash) else f"{type(error).__name__}: {text}"
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 3]}..."
