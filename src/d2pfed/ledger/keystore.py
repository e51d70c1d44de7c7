"""A file that must not outlive the machine's start: keys that a backup or another start could bring back are no keys.

It lies in a directory of a file system in memory, for its owner alone, and is bound to this start of the machine and
to the position of the client's log at its last write.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger import files
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import digest

_T = TypeVar("_T")

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS_FILE = Path("/proc/self/mountinfo")
MOST_FILES = 64  # of keys of different runs: a server that begins run after run fills no memory

KEYS_ON_DISK = "keys are on a disk (keys_on_disk = true): a backup of that directory voids the guarantee"


def boot() -> str:
    """Return what tells this start of the machine from the ones before; empty where the system does not say."""
    try:
        return _BOOT_FILE.read_text().strip()
    except OSError:
        return ""


def default_volatile() -> Path | None:
    """Return a directory in memory for this user's keys, where the system offers one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path("/dev/shm")  # noqa: S108 - our directory below it is made for its owner alone, and checked
    places = [*([Path(runtime) / "d2pfed"] if runtime else []), shared / f"d2pfed-{os.geteuid()}"]
    return next((place for place in places if place.parent.is_dir() and is_in_memory(place)), None)


def is_in_memory(directory: Path) -> bool:
    """Say whether a directory, or where it would be made, is on a file system in memory; Linux only."""
    try:
        lines = _MOUNTS_FILE.read_text().splitlines()
    except OSError:
        return False
    resolved, best, kind = directory.resolve(), -1, ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind in ("tmpfs", "ramfs")


def require_boot(found: str, now: str) -> None:
    """Refuse keys of another start of the machine: whatever it was restored from, they may have been used since."""
    if not now or found != now:
        raise ConfigError("standing keys are of another start of this machine")


def require_fits_log(position: Head, holds: Callable[[Head], bool]) -> None:
    """Refuse keys whose last write saw a log that this one does not continue."""
    if not holds(position):
        raise ConfigError(f"standing keys were written at row {position.seq}, which this log does not have")


class VolatileFile:
    """One secret value in a directory in memory; whatever does not fit this start and this log is erased.

    Guarantee: keys of another start of the machine, or of a log that was put back, are never used.
    Checked: test_keystore.py, test_standing_malicious.py (boot-bound, state-fits-log).
    """

    def __init__(self, directory: Path, name: str, *, keys_on_disk: bool = False) -> None:
        if not (keys_on_disk or is_in_memory(directory)):
            raise files.FileError(
                f"keys are kept in memory only, and {directory} is on a disk: name a directory on a tmpfs "
                f"(state = ...), or accept that a backup voids the guarantee (keys_on_disk = true)"
            )
        files.make_directory(directory)
        files.require_directory(directory, forbidden=files.OTHERS_MAY_USE)
        self._directory = directory
        self._file = directory / name
        self.refusal = ""  # why the last value was erased, for the client's own log

    def read(self, holds: Callable[[Head], bool]) -> bytes | None:
        """Return the value; None if there is none, or it did not fit and is now erased."""
        with self._locked():
            return self._read(holds)

    def write(self, content: bytes, position: Head) -> None:
        """Keep a value instead of the one before."""
        with self._locked():
            self._write(content, position)

    def update(
        self, holds: Callable[[Head], bool], change: Callable[[bytes], tuple[bytes, _T]], head: Callable[[], Head]
    ) -> _T:
        """Under the lock, replace the value by what `change` makes of it, and return what else it made."""
        with self._locked():
            found = self._read(holds)
            if found is None:
                raise ConfigError("standing keys are gone")
            content, result = change(found)
            self._write(content, head())
            return result

    def sweep(self, holds: Callable[[Head], bool], over: Callable[[bytes], bool]) -> None:
        """Erase all values in the directory that are over, or do not fit, or that newer ones leave no room for."""
        with self._locked():
            for file in self._directory.iterdir():
                if file.name == "lock":
                    continue
                try:
                    useful = not over(
                        _checked(files.read_file(file, forbidden=files.OTHERS_MAY_USE) or b"", holds)
                    )
                except (ConfigError, LedgerError):
                    useful = False
                if not useful:
                    file.unlink(missing_ok=True)
            files.keep_newest(self._directory, MOST_FILES)
            files.sync_directory(self._directory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock; what writers that were killed have left holds keys, and is erased first."""
        with files.locked(self._directory / "lock"):
            files.remove_drafts(self._directory)
            yield

    def _write(self, content: bytes, position: Head) -> None:
        if not (now := boot()):
            raise ConfigError("this system does not tell its starts apart: standing keys cannot be kept in files")
        body = f"{now} {position.encode()}\n".encode() + content
        files.replace_file(self._file, digest("d2pfed volatile", body) + body)

    def _read(self, holds: Callable[[Head], bool]) -> bytes | None:
        data = files.read_file(self._file, forbidden=files.OTHERS_MAY_USE)
        if data is None:
            return None
        try:
            return _checked(data, holds)
        except (ConfigError, LedgerError) as error:
            self.refusal = str(error)
            self._file.unlink(missing_ok=True)
            files.sync_directory(self._directory)
            return None


def _checked(data: bytes, holds: Callable[[Head], bool]) -> bytes:
    checksum, body = data[:32], data[32:]
    if checksum != digest("d2pfed volatile", body):
        raise ConfigError("the file is damaged")
    line, _, content = body.partition(b"\n")
    started, _, position = line.decode().partition(" ")
    require_boot(started, boot())
    require_fits_log(Head.decode(position), holds)
    return content
