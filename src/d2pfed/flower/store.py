"""What a client keeps between two requests, on its own disk: agreed runs, single-use secrets, its own ledger."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from d2pfed.accounting import Release
from d2pfed.errors import BudgetExceeded, ConfigError, PeerError
from d2pfed.flower.envelope import Introduction
from d2pfed.flower.layout import Layout
from d2pfed.ledger import Budget, Ledger, read_budget, read_rows
from d2pfed.plan import Plan, decode_plan
from d2pfed.randomness import digest
from d2pfed.secagg import decode_invitation
from d2pfed.wire import Reader, pack_integer


@dataclass(frozen=True, slots=True)
class Agreed:
    """A run that this client has been introduced to and has accepted."""

    plan: Plan
    layout: Layout


@dataclass(frozen=True, slots=True)
class Saved:
    """A client's half of an attempt between two requests: single-use, and of no use after `expires`."""

    invitation: bytes
    begun: float  # by the wall clock, since another process goes on with it
    expires: float
    state: bytes

    def encode(self) -> bytes:
        """Return the bytes that are kept."""
        times = pack_integer(int(self.begun * 1000), 8) + pack_integer(int(self.expires * 1000), 8)
        return times + pack_integer(len(self.invitation), 4) + self.invitation + self.state

    @staticmethod
    def decode(data: bytes) -> "Saved":
        """Read the bytes that were kept."""
        reader = Reader(memoryview(data))
        begun, expires = reader.integer(8) / 1000, reader.integer(8) / 1000
        return Saved(reader.take(reader.integer(4)), begun, expires, reader.rest())


class Store:
    """The files of one client, readable by their owner alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        for folder in (path, path / "states", path / "runs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def agree(self, introduction: Introduction, check: Callable[[Agreed], None]) -> Agreed:
        """Keep what a run is about when it is new and passes the check; refuse a known run with another plan."""
        file = self._run_file(introduction.run, "agreed")
        text = f"{introduction.plan}\n{introduction.layout}"
        agreed = _agreed(introduction)
        with _locked(file):
            if not file.exists():
                check(agreed)
                _write(file, text.encode())
            elif file.read_text() != text:
                raise PeerError(f"run {introduction.run} was introduced with another plan or layout before")
        return agreed

    def agreed(self, run: str) -> Agreed:
        """Return what was agreed about a run."""
        try:
            plan, layout = self._run_file(run, "agreed").read_text().split("\n")
        except FileNotFoundError:
            raise PeerError(f"run {run} was never introduced to this client") from None
        return _agreed(Introduction(run, plan, layout))

    def begin(self, run: str, number: int, attempt: int) -> None:
        """Note that an attempt begins; refuse any that is not later than all that have begun.

        Guarantee: no attempt begins twice, so its keys and noise are used for one session, and a stale or repeated
        invitation gets no answer. Checked: test_flower_client.py::test_an_invitation_is_answered_once.
        """
        file = self._run_file(run, "begun")
        with _locked(file):
            last = file.read_text() if file.exists() else "-1 -1"
            if (number, attempt) <= tuple(int(part) for part in last.split()):
                raise PeerError(f"round {number}, attempt {attempt} of run {run} is stale: {last} has begun here")
            _write(file, f"{number} {attempt}".encode())

    def forget(self, run: str) -> None:
        """Remove the secrets of earlier attempts of a run, and of all attempts of which the time is over."""
        for file in (self._path / "states").glob("*.state"):
            saved = Saved.decode(file.read_bytes())
            if time.time() > saved.expires or decode_invitation(saved.invitation).run == run:
                file.unlink(missing_ok=True)

    def save(self, session: bytes, saved: Saved) -> None:
        """Keep an attempt until its next request."""
        _write(self._state_file(session), saved.encode())

    def take(self, session: bytes) -> Saved:
        """Return what was kept for a session, once: whoever renames the file has it, nobody else ever will.

        Guarantee: two requests never continue from the same secrets, in whatever processes they are answered.
        Checked: test_flower_client.py::test_saved_secrets_are_used_once.
        """
        file = self._state_file(session)
        taken = file.with_suffix(f".taken-{os.getpid()}-{time.monotonic_ns()}")
        try:
            file.rename(taken)
        except FileNotFoundError:
            raise PeerError("this client has no part in that session, or has answered this request") from None
        try:
            saved = Saved.decode(taken.read_bytes())
        finally:
            taken.unlink()
        if not saved.begun <= time.time() <= saved.expires:
            raise PeerError(f"this attempt was over {time.time() - saved.expires:.0f} s ago")
        return saved

    def _run_file(self, run: str, name: str) -> Path:
        return self._path / "runs" / f"{digest('run', run).hex()}.{name}"

    def _state_file(self, session: bytes) -> Path:
        return self._path / "states" / f"{session.hex()}.state"


class Account:
    """A client's own ledger: each vector that it sends counts, at the least noise that the plan allows."""

    def __init__(self, path: Path, budget: Budget) -> None:
        self._path = path
        self._budget = budget

    def require_room(self, plan: Plan) -> None:
        """Refuse a plan that may spend more against the server than this client has left."""
        with self._open(plan) as ledger:
            planned = [plan.release("", number, 0, (), plan.quorum) for number in range(plan.participations)]
            epsilon = self._budget.measure([*ledger.releases(), *planned])
        if epsilon > self._budget.epsilon:
            raise ConfigError(
                f"with this plan's {plan.participations} participations this client would spend epsilon {epsilon:.4g} "
                f"against the server, its budget is {self._budget.epsilon:g}"
            )

    def charge(self, plan: Plan, run: str, release: Release) -> int:
        """Record one more vector before it is made, and return how many were sent in this run before.

        A client whose budget is spent counts as one that has reached its cap: it sends zero and its noise.
        """
        with self._open(plan) as ledger:
            taken = sum(row.key is not None and row.key.run == run for row in read_rows(self._file(plan)))
            if taken >= plan.participations:
                return plan.participations
            try:
                ledger.reserve(run, release)
            except BudgetExceeded:
                return plan.participations
            return taken

    def _open(self, plan: Plan) -> Ledger:
        file, budget = self._file(plan), self._budget
        if file.exists():
            if (begun := read_budget(file)) != budget:
                raise ConfigError(f"this client's ledger was begun with {begun}, its settings now say {budget}")
            return Ledger.open_in_turn(file, budget.measure)
        return Ledger.create(file, budget, budget.measure)

    def _file(self, plan: Plan) -> Path:
        # Releases of different units or adjacencies do not add up, so each has its ledger.
        return self._path / f"ledger-{plan.unit}-{plan.adjacency}.sqlite"


def _agreed(introduction: Introduction) -> Agreed:
    return Agreed(decode_plan(introduction.plan), Layout.decode(introduction.layout))


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.with_suffix(file.suffix + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, content: bytes) -> None:
    """Write a file, readable by its owner alone, so that a crash leaves the old one or the new one."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
