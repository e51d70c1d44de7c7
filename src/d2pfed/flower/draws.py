"""The server's draws: its secret tree of seeds, and which draws are used up, by which run."""

import json
from dataclasses import dataclass
from pathlib import Path

from d2pfed.errors import ConfigError
from d2pfed.ledger.private_files import OTHERS_MAY_USE, create_file, locked, read_file, replace_file
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.secagg import Roster
from d2pfed.secagg.draws import MOST_DEPTH, DrawTree

DEPTH = 12  # 4,096 draws for all runs under one roster


@dataclass(frozen=True, slots=True)
class Committed:
    """What the server tells the authority of its tree: enough to hold it to it, too little to foresee a draw."""

    depth: int
    root: bytes

    def encode(self) -> str:
        """Return the text that the authority is given."""
        return f"{self.depth}:{self.root.hex()}"

    @staticmethod
    def decode(text: str) -> "Committed":
        """Read what the server has printed."""
        depth, _, root = text.partition(":")
        try:
            committed = Committed(int(depth[:4]), bytes.fromhex(root))
        except ValueError:
            committed = Committed(-1, b"")
        if not 0 <= committed.depth <= MOST_DEPTH or len(committed.root) != KEY_BYTES:
            raise ConfigError(
                f"draws are DEPTH:ROOT, a number and {2 * KEY_BYTES} hexadecimal digits, got {text[:80]!r}"
            )
        return committed


def make_draws(file: Path, depth: int = DEPTH) -> Committed:
    """Make a secret tree of draws in a file, and return what to tell the authority; never overwrites one."""
    if not 0 <= depth <= MOST_DEPTH:
        raise ConfigError(f"a tree of draws has a depth in [0, {MOST_DEPTH}], got {depth}")
    secret = Entropy.system().require_system()
    try:
        create_file(file, bytes([depth]) + secret.key)
    except FileExistsError:
        raise ConfigError(f"{file} holds draws already") from None
    tree = DrawTree(secret, depth)
    return Committed(tree.depth, tree.root)


class Draws:
    """A tree in its file, and beside it the record of what is used.

    Guarantee: a draw is noted as used, durably, before anyone is invited to it, and never serves two runs.
    Checked: test_flower_draws.py::test_no_draw_serves_two_runs.
    """

    def __init__(self, file: Path, roster: Roster) -> None:
        data = read_file(file, forbidden=OTHERS_MAY_USE)
        if data is None or len(data) != 1 + KEY_BYTES:
            raise ConfigError(f"{file} holds no draws; see `d2pfed roster draws`")
        self.tree = DrawTree(Entropy(data[1:], is_replayed=False), data[0])
        self._used = file.with_name(f"{file.name}.used")
        if (roster.depth, roster.root) != (self.tree.depth, self.tree.root):
            raise ConfigError(f"the roster {roster.serial} was signed for other draws than those in {file}")

    def reserve(self, run: str, count: int) -> int:
        """Return the first of a run's own draws, the same again when the run is resumed."""
        with locked(self._used.with_name(f"{self._used.name}.lock")):
            used = _decode(read_file(self._used))
            if run not in used:
                first = max((begin + size for begin, size in used.values()), default=0)
                if first + count > 1 << self.tree.depth:
                    raise ConfigError(
                        f"a run needs {count} draws, and {(1 << self.tree.depth) - first} are left under this roster: "
                        f"a new one is needed"
                    )
                used[run] = first, count
                replace_file(self._used, json.dumps(used).encode())
        first, size = used[run]
        if size != count:
            raise ConfigError(f"run {run} has {size} draws, and now asks for {count}")
        return first


def _decode(data: bytes | None) -> dict[str, tuple[int, int]]:
    if data is None:
        return {}
    try:
        return {str(run): (int(first), int(count)) for run, (first, count) in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the record of used draws is damaged: {error}") from None
