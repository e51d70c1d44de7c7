"""One server per ledger: an OS lock beside the file."""

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from d2pfed.errors import LedgerError
from d2pfed.ledger.store import explained


class Lock:
    """An OS lock on a file beside the ledger, held until closed or the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def take(path: Path) -> "Lock":
        """Take the lock, or refuse at once if it is held."""
        return _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def wait(path: Path) -> "Lock":
        """Take the lock as soon as it is free."""
        return _locked(path, fcntl.LOCK_EX)

    @staticmethod
    def replace(path: Path) -> "Lock":
        """Take a new lock in place of the one that is held: whoever has the old one no longer excludes anybody."""
        sidecar = _sidecar(path)
        fresh = sidecar.with_name(f"{sidecar.name}.{os.getpid()}")
        with explained(path), ExitStack() as undo:
            descriptor = _opened(fresh)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(sidecar)  # locked before it has its name, so nobody can come in between
            undo.pop_all()
        return Lock(descriptor)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._descriptor)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _opened(sidecar: Path) -> int:
    return os.open(sidecar, os.O_RDWR | os.O_CREAT, 0o600)


def _locked(path: Path, operation: int) -> Lock:
    sidecar = _sidecar(path)
    while True:
        with explained(path), ExitStack() as undo:
            descriptor = _opened(sidecar)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError:
                raise LedgerError(f"ledger {path}: another server has it open") from None
            if _is_current(descriptor, sidecar):  # otherwise it was replaced, and what we hold excludes nobody
                undo.pop_all()
                return Lock(descriptor)


def _is_current(descriptor: int, sidecar: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), sidecar.stat())
    except FileNotFoundError:
        return False
