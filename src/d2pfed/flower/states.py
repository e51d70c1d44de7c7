"""What a client keeps of an attempt between two requests, on its own disk: single-use secrets."""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.private_files import locked, make_directory, read_file, replace_file, sync_directory
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.wire import Reader, pack_integer, pack_text

_log = logging.getLogger("d2pfed.flower")

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class Saved:
    """A client's half of an attempt between two requests: single-use, and of no use after `expires`."""

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
    def decode(data: bytes) -> "Saved":
        """Read the bytes that were kept; refuse damage, and what an earlier start of the machine has left."""
        if data[:_CHECKSUM_BYTES] != digest("saved", data[_CHECKSUM_BYTES:]):
            raise PeerError("a saved phase is damaged")
        reader = Reader(memoryview(data)[_CHECKSUM_BYTES:])
        begun, expires = reader.integer(8) / 1000, reader.integer(8) / 1000
        if reader.text() != boot():
            raise PeerError("a saved phase is from before the machine was started")
        return Saved(reader.text(), reader.take(reader.integer(4)), begun, expires, reader.rest())

    def require_current(self) -> None:
        """Refuse an attempt whose time is over, by a clock that may have been set back."""
        if not self.begun <= time.time() <= self.expires:
            raise PeerError(f"this attempt was over {time.time() - self.expires:.0f} s ago")


class States:
    """The files of attempts that are under way, readable by their owner alone."""

    def __init__(self, home: Path) -> None:
        self._states = home / "states"
        make_directory(self._states)

    def sweep(self, over: Callable[[Saved], bool] = lambda _saved: False) -> None:
        """Erase what no attempt may use any more: what is damaged, over, or left by a crash. Each by itself."""
        with locked(self._states / "lock"):
            for file in self._states.iterdir():
                if file.name != "lock" and not self._is_useful(file, over):
                    _erase(file)
            sync_directory(self._states)

    def save(self, session: bytes, saved: Saved) -> None:
        """Keep an attempt until its next request."""
        with locked(self._states / "lock"):
            replace_file(self._state_file(session), saved.encode())

    def take(self, session: bytes) -> Saved:
        """Return what was kept for a session, once: it is gone from the disk before this returns.

        Guarantee: two requests never continue from the same secrets, in whatever processes they are answered and
        whatever crashes in between. Checked: test_flower_states.py::test_saved_secrets_are_used_once.
        """
        file = self._state_file(session)
        with locked(self._states / "lock"):
            data = read_file(file)
            if data is None:
                raise PeerError("this client has no part in that session, or has answered this request")
            file.unlink()
            sync_directory(self._states)
        saved = Saved.decode(data)
        saved.require_current()
        return saved

    def _is_useful(self, file: Path, over: Callable[[Saved], bool]) -> bool:
        try:
            saved = Saved.decode(read_file(file) or b"")
            saved.require_current()
        except (PeerError, ConfigError) as error:
            _log.warning("%s is erased: %s", file.name, error)
            return False
        return file.suffix == ".state" and not over(saved)

    def _state_file(self, session: bytes) -> Path:
        return self._states / f"{session.hex()}.state"


def _erase(file: Path) -> None:
    """Remove what does not belong here; what cannot be removed blocks nothing, its owner is told."""
    try:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        _log.error("%s cannot be erased (%s): remove it", file, error.strerror)


def boot() -> str:
    """Return what tells this start of the machine from the ones before; empty where the system does not say."""
    try:
        return _BOOT_FILE.read_text().strip()
    except OSError:
        return ""
