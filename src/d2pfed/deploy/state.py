"""What a client keeps in its directory between requests: the runs it has accepted, and the phase of each attempt."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from d2pfed.accounting import is_amplified
from d2pfed.deploy.layout import Layout, NamedArrays
from d2pfed.errors import ConfigError, D2PFedError, PeerError
from d2pfed.ledger.files import (
    FileError,
    keep_newest,
    locked,
    make_directory,
    read_file,
    replace_file,
    sync_directory,
)
from d2pfed.ledger.keystore import boot
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan
from d2pfed.secagg.wire import Reader, pack_integer, pack_text

_log = logging.getLogger("d2pfed.deploy")

# A server that announces run after run, or leaves attempt after attempt, fills no disk.
MAX_RUNS = 10_000
MAX_RUNS_BYTES = 1 << 28
MAX_PHASES = 64
MAX_BLOBS = 2

_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The terms that a run was announced with, and that this client has accepted."""

    plan: str  # canonical texts
    layout: str
    first_draw: int
    roster: bytes  # digest of the roster that it goes by; empty where nobody is enrolled
    allowed: bytes  # digest of the policy that has allowed the plan, which takes long to work out
    app: str = ""  # that it was announced to, where the client tells them apart


class AcceptedRuns:
    """The runs of one client, one file each."""

    def __init__(self, directory: Path) -> None:
        self._runs = directory / "runs"
        make_directory(self._runs)

    def accept(self, run: str, terms: RunTerms, begun: Mapping[str, int] = MappingProxyType({})) -> None:
        """Keep the terms of a run, new or under a newer roster; `begun`: where this client's log has runs last."""
        fields = {"plan": terms.plan, "layout": terms.layout, "first_draw": terms.first_draw}
        fields |= {"roster": terms.roster.hex(), "allowed": terms.allowed.hex(), "app": terms.app}
        text = json.dumps(fields)
        with locked(self._runs / "lock"):
            before = self._read(run)
            if before is None:
                # Forget runs, as far as one more needs it: first those in which nothing was begun, then the idle ones.
                places = {self.file(run): place for run, place in begun.items()}
                found = {file: file.stat() for file in self._runs.iterdir() if file.suffix == ".json"}
                count, total = len(found) + 1, len(text) + sum(each.st_size for each in found.values())
                for file in sorted(found, key=lambda file: (places.get(file, -1), found[file].st_mtime_ns)):
                    if count <= MAX_RUNS and total <= MAX_RUNS_BYTES:
                        break
                    file.unlink()
                    count, total = count - 1, total - found[file].st_size
            elif (before.plan, before.layout) != (terms.plan, terms.layout):  # it would be another run
                raise PeerError(f"run {run} was announced with another plan or layout before")
            elif before.app != terms.app:
                raise PeerError(f"run {run} was announced to an app other than {terms.app or 'this one'}")
            elif before.roster == terms.roster and before.first_draw != terms.first_draw:
                raise PeerError(
                    f"a run's first draw under one roster is {before.first_draw}, got {terms.first_draw}"
                )
            if before != terms:
                replace_file(self.file(run), f"{digest('d2pfed run terms', text).hex()}\n{text}".encode())

    def terms(self, run: str) -> RunTerms:
        """Return the terms of a run."""
        found = self._read(run)
        if found is None:
            raise PeerError(f"run {run} was never announced to this client")
        return found

    def _read(self, run: str) -> RunTerms | None:
        data = read_file(self.file(run))
        if data is None:
            return None
        checksum, _, text = data.decode(errors="replace").partition("\n")
        if checksum != digest("d2pfed run terms", text).hex():
            _log.warning("%s is damaged and ignored: its run must be announced again", self.file(run))
            return None
        found = json.loads(text)
        roster, allowed = bytes.fromhex(found["roster"]), bytes.fromhex(found["allowed"])
        return RunTerms(found["plan"], found["layout"], found["first_draw"], roster, allowed, found.get("app", ""))

    def file(self, run: str) -> Path:
        """Return where the terms of a run are kept."""
        return self._runs / f"{digest('run', run).hex()}.json"


@dataclass(frozen=True, slots=True)
class SavedPhase:
    """One phase of a client's attempt, saved between two requests: single-use, and invalid after `expires`."""

    run: str
    invitation: bytes
    begun: float  # by the wall clock, since another process goes on with it
    expires: float
    state: bytes = field(repr=False)

    def encode(self) -> bytes:
        """Return the bytes that are kept, with the machine's start that they belong to."""
        times = pack_integer(int(self.begun * 1000), 8) + pack_integer(int(self.expires * 1000), 8)
        names = pack_text(boot()) + pack_text(self.run)
        body = times + names + pack_integer(len(self.invitation), 4) + self.invitation + self.state
        return digest("saved", body) + body

    @staticmethod
    def decode(data: bytes) -> "SavedPhase":
        """Read the bytes that were kept; refuse damage, what an earlier start has left, and what is over."""
        if data[:_CHECKSUM_BYTES] != digest("saved", data[_CHECKSUM_BYTES:]):
            raise PeerError("a saved phase is damaged")
        reader = Reader(memoryview(data)[_CHECKSUM_BYTES:])
        begun, expires = reader.integer(8) / 1000, reader.integer(8) / 1000
        if reader.text() != boot():
            raise PeerError("a saved phase is from before the machine restarted")
        if not begun <= time.time() <= expires:  # by a clock that may have been set back
            raise PeerError(f"this attempt expired {time.time() - expires:.0f} s ago")
        return SavedPhase(reader.text(), reader.take(reader.integer(4)), begun, expires, reader.rest())


class SavedPhases:
    """The files of attempts that are under way, readable by their owner alone."""

    def __init__(self, directory: Path) -> None:
        self._states = directory / "states"
        make_directory(self._states)

    def sweep(self, over: Callable[[SavedPhase], bool] = lambda _saved: False) -> None:
        """Erase what no attempt may use any more: what is damaged, over, or left by a crash. Each by itself."""
        with locked(self._states / "lock"):
            for file in self._states.iterdir():
                if file.name == "lock":
                    continue
                try:
                    if not over(SavedPhase.decode(read_file(file) or b"")) and file.suffix == ".state":
                        continue
                except (PeerError, ConfigError) as error:
                    _log.warning("%s is erased: %s", file.name, error)
                try:
                    if file.is_dir() and not file.is_symlink():
                        shutil.rmtree(file)
                    else:
                        file.unlink(missing_ok=True)
                except OSError as error:  # blocks nothing
                    _log.error("%s cannot be erased (%s): remove it", file, error.strerror)
            sync_directory(self._states)

    def save(self, session: bytes, saved: SavedPhase) -> None:
        """Keep an attempt until its next request, and forget the oldest if there are too many."""
        with locked(self._states / "lock"):
            replace_file(self._states / f"{session.hex()}.state", saved.encode())
            keep_newest(self._states, MAX_PHASES)

    def take(self, session: bytes) -> SavedPhase:
        """Return what was kept for a session, once: it is gone from the disk before this returns.

        Guarantee: two requests never continue from the same secrets, in whatever processes they are answered and
        whatever crashes in between. Checked: test_flower_client_state.py::test_saved_secrets_are_used_once.
        """
        file = self._states / f"{session.hex()}.state"
        with locked(self._states / "lock"):
            data = read_file(file)
            if data is None:
                raise PeerError(
                    "this client has no saved phase for that session, or has already answered this request"
                )
            file.unlink()
            sync_directory(self._states)
        return SavedPhase.decode(data)


@dataclass(frozen=True, slots=True)
class Blobs:
    """The latest models that a client was sent, by their SHA-256: losing them costs a transfer, and no more."""

    directory: Path

    def find(self, digest: bytes) -> bytes | None:
        """Return the bytes of a digest, if they are here and undamaged."""
        with suppress(FileError):
            data = read_file(self.directory / "blobs" / digest.hex())
            return data if data is not None and sha256(data).digest() == digest else None
        return None

    def keep(self, digest: bytes, data: bytes) -> None:
        """Keep the bytes of a digest, and forget the oldest."""
        folder = self.directory / "blobs"
        try:
            make_directory(folder)
            with locked(folder / "lock"):
                replace_file(folder / digest.hex(), data)
                keep_newest(folder, MAX_BLOBS)
        except (FileError, OSError) as error:
            _log.warning("a model was not stored, and must be sent again when it is needed: %s", error)


MOST_RUNS = 64  # whose arrays are kept: those of a run that is over are of no use


def may_outlive_rounds(plan: Plan) -> bool:
    """Return whether a client may train from what earlier rounds have left with it.

    Where cohorts hide who takes part, its vector would tell others in which rounds it was.
    Proof: theory.md#state. Checked: test_flower_local_arrays.py::test_behind_drawn_cohorts_no_client_keeps_a_state.
    """
    return plan.batches is None and not is_amplified(plan.sampling)


@dataclass(frozen=True, slots=True)
class LocalArrays:
    """A client's own arrays of one run, such as the statistics of batch norms: they get no noise and do not leave.

    Checked: test_flower_local_arrays.py::test_statistics_stay_with_their_client.
    """

    directory: Path
    run: str
    plan: Plan

    def load(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return the arrays as this client has left them, or as they are before the first round."""
        arrays = layout.initial_local()
        if not arrays or not may_outlive_rounds(self.plan):
            return arrays
        try:
            kept = load(read_file(self._file) or save({}))
        except (SafetensorError, D2PFedError, OSError, ValueError) as error:
            _log.warning("the local arrays of a run are reset to their values before its first round: %s", error)
            return arrays
        return arrays | _fitting(layout, kept)

    def keep(self, layout: Layout, trained: NamedArrays) -> None:
        """Keep what training has made of them, where it may be kept."""
        if not may_outlive_rounds(self.plan):
            return
        found, before = _fitting(layout, trained), self.load(layout)
        if any(not np.array_equal(found[name], before[name]) for name in found):
            make_directory(self._file.parent)
            with locked(self.directory / "local.lock"):
                replace_file(self._file, save(found))
                keep_newest(self._file.parent, MOST_RUNS)

    @property
    def _file(self) -> Path:
        return self.directory / "local" / digest("d2pfed local arrays", self.run).hex()[:32]


def _fitting(layout: Layout, arrays: NamedArrays) -> dict[str, np.ndarray]:
    """Return those of these arrays that stay local and have their shape and type."""
    found = {}
    for local in layout.local or ():
        array = arrays.get(local.name)
        if array is not None and (tuple(array.shape), array.dtype.name) == (local.shape, local.type):
            found[local.name] = np.asarray(array, order="C")
    return found
