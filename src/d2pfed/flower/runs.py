"""The runs that a client has agreed to, in files of its home: plan, layout and draws as they were introduced."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from d2pfed.errors import PeerError
from d2pfed.ledger.private_files import FileError, locked, make_directory, read_file, replace_file
from d2pfed.numerics.randomness import digest

_log = logging.getLogger("d2pfed.flower")

MOST_RUNS = 10_000  # a server that introduces run after run fills no disk


@dataclass(frozen=True, slots=True)
class Told:
    """What a run was introduced with."""

    plan: str  # canonical texts
    layout: str
    first_draw: int
    roster: bytes  # digest of the roster that it goes by; empty where nobody is enrolled
    allowed: bytes  # digest of the policy that has allowed the plan, which takes long to work out


class Runs:
    """The runs of one client, one file each."""

    def __init__(self, home: Path) -> None:
        self._runs = home / "runs"
        make_directory(self._runs)

    def agree(self, run: str, told: Told) -> None:
        """Keep what a run is about; a known run may come again under a newer roster, with nothing else changed."""
        fields = {"plan": told.plan, "layout": told.layout, "first_draw": told.first_draw}
        text = json.dumps({**fields, "roster": told.roster.hex(), "allowed": told.allowed.hex()})
        with locked(self._runs / "lock"):
            before = self._read(run)
            if before is None:
                self._require_room()
            else:
                require_same_plan(run, before, told)
                require_same_draws(before, told)
            if before != told:
                replace_file(self._file(run), f"{_checksum(text)}\n{text}".encode())

    def told(self, run: str) -> Told:
        """Return what a run was introduced with."""
        found = self._read(run)
        if found is None:
            raise PeerError(f"run {run} was never introduced to this client")
        return found

    def _read(self, run: str) -> Told | None:
        data = read_file(self._file(run))
        if data is None:
            return None
        checksum, _, text = data.decode(errors="replace").partition("\n")
        if checksum != _checksum(text):
            _log.warning("%s is damaged and left out: its run must be introduced again", self._file(run))
            return None
        found = json.loads(text)
        roster, allowed = bytes.fromhex(found["roster"]), bytes.fromhex(found["allowed"])
        return Told(found["plan"], found["layout"], found["first_draw"], roster, allowed)

    def _require_room(self) -> None:
        if sum(file.suffix == ".json" for file in self._runs.iterdir()) >= MOST_RUNS:
            raise FileError(f"{self._runs} holds {MOST_RUNS} runs already: remove those that are over")

    def _file(self, run: str) -> Path:
        return self._runs / f"{digest('run', run).hex()}.json"


def _checksum(text: str) -> str:
    return digest("told", text).hex()


def require_same_plan(run: str, before: Told, now: Told) -> None:
    """Refuse a known run with another plan or layout: it would be another run."""
    if (before.plan, before.layout) != (now.plan, now.layout):
        raise PeerError(f"run {run} was introduced with another plan or layout before")


def require_same_draws(before: Told, now: Told) -> None:
    """Refuse to move a run to other draws of the same roster: which cohorts it has was settled when it began."""
    if before.roster == now.roster and before.first_draw != now.first_draw:
        raise PeerError(f"a run's first draw under one roster is {before.first_draw}, got {now.first_draw}")
