"""What the server must remember of a run beside its ledger: who cheated, and how much of a partition is used up."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.round import Masked
from d2pfed.runs.directory import RunDirectory
from d2pfed.secagg import Sum

_log = logging.getLogger("d2pfed.flower")


class Notes:
    """A file in the run's directory.

    A block of a partition is used up as soon as its vectors are asked for: under `once` nobody sends a second one.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        file = directory.path / "notes.json"
        try:
            found = json.loads(file.read_text() if file.exists() else '{"excluded": [], "block": 0}')
            self.excluded = frozenset(int(client) for client in found["excluded"])
            self.block = int(found["block"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged: {error}") from error

    def exclude(self, blamed: Iterable[int]) -> None:
        """Count clients as dropped out from now on."""
        new = frozenset(blamed) - self.excluded
        if new:
            _log.warning("clients %s have sent what cannot be an accident: they are not asked again", sorted(new))
            self.excluded |= new
            self._write()

    def use_block(self) -> None:
        """Go on with the next block of a partition."""
        self.block += 1
        self._write()

    def _write(self) -> None:
        text = json.dumps({"excluded": sorted(self.excluded), "block": self.block})
        self._directory.replace("notes.json", text.encode())


@dataclass(frozen=True, slots=True)
class Watched:
    """Masked vectors whose opening is watched for who is to blame."""

    masked: Masked
    notes: Notes

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose masked vector arrived."""
        return self.masked.survivors

    def unmask(self) -> Sum:
        """Open the sum."""
        try:
            opened = self.masked.unmask()
        except TooFewClients as lack:
            self.notes.exclude(lack.blamed)
            raise
        self.notes.exclude(opened.blamed)
        return opened
