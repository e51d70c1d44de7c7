"""The ledger's file, rows in SQLite that are on the disk before `append` returns, and the lock of its one server."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger.files import sync_directory as sync_path  # a file is synced in the same way
from d2pfed.ledger.rows import Head, Key, Row, RowKind

APPLICATION = 0x44325046  # "D2PF" in the header of the file
SCHEMA = 2

# A commit in WAL with synchronous=FULL has been synced when it returns; with NORMAL a power cut may take it back.
SETTINGS = ("journal_mode=WAL", "synchronous=FULL", "fullfsync=ON", "trusted_schema=OFF")
DURABLE = {"journal_mode": "wal", "synchronous": 2}

_TABLE = """
CREATE TABLE entry (
    seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, kind TEXT NOT NULL, run TEXT, round INTEGER, attempt INTEGER,
    body TEXT NOT NULL, epsilon TEXT NOT NULL, hash BLOB NOT NULL, UNIQUE (run, round, attempt, kind))
"""
_COMPANIONS = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside a database
_COLUMNS = "seq, epoch, kind, run, round, attempt, body, epsilon, hash"


class Store:
    """An open ledger file; any failure to read or write it is a `LedgerError`.

    Opened for writing, its settings are durable; however it is opened, every page is checked.
    """

    def __init__(self, path: Path, mode: str = "rw") -> None:
        require_file(path)
        with explained(path), ExitStack() as undo:
            connection = _connect(path, mode)
            undo.callback(connection.close)
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION:
                raise LedgerError(f"ledger {path}: the file is not a ledger")
            if schema != SCHEMA:
                raise LedgerError(
                    f"ledger {path}: its format is {schema}, and this version of d2pfed reads {SCHEMA}"
                )
            if mode == "rw":
                _set_up(connection)
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise LedgerError(f"ledger {path}: damaged: {verdict}")
            undo.pop_all()
        self._path = path
        self._connection = connection
        self._identity: tuple[tuple[int, int], ...] | None = None

    @staticmethod
    def create(path: Path, first: Row) -> None:
        """Make a ledger file that holds one row; it appears under its name complete or not at all.

        The caller holds the lock. A file left by a creation that was cut short is made again: nobody ever used it.
        """
        for suffix in ("", *_COMPANIONS):  # the log of a ledger that is gone would be played into the new one
            if Path(f"{path}{suffix}").exists():
                raise LedgerError(f"ledger {path}: {path.name}{suffix} already exists")
        draft = path.with_name(path.name + ".draft")
        with explained(path):
            for suffix in ("", *_COMPANIONS):
                Path(f"{draft}{suffix}").unlink(missing_ok=True)
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it lists who took part
            connection = _connect(draft, "rw")
            try:
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={SCHEMA}")
                connection.execute(_TABLE)
                _insert(connection, first)
                connection.execute("COMMIT")
                _set_up(connection)  # only now: the first row is in the file itself, and no log has to follow it
            finally:
                connection.close()
            sync_path(draft)
            draft.rename(path)
            sync_path(path.parent)

    @staticmethod
    def read(path: Path) -> "Store":
        """Open a ledger for reading, while another process may be writing it."""
        try:
            return Store(path, "ro")
        except LedgerError:
            require_file(path)
            # SQLite wants to create an index of the log, even to read where there is no log: on read-only media it
            # cannot. If a writer did appear meanwhile, the chain of hashes shows whatever was read half-written.
            if os.access(path.parent, os.W_OK) or Path(f"{path}-wal").exists():
                raise
            return Store(path, "ro&immutable=1")

    def close(self) -> None:
        """Release the file; the write-ahead log is folded in if this was the last user."""
        with explained(self._path):
            self._connection.close()

    def rows(self, first: int = 0) -> Iterator[Row]:
        """Yield all rows from the given number on, as of one moment."""
        with explained(self._path):
            query = f"SELECT {_COLUMNS} FROM entry WHERE seq >= ? ORDER BY seq"  # noqa: S608 - a constant
            yield from map(_decode_row, self._connection.execute(query, (first,)))

    def append(self, row: Row, head: Head) -> None:
        """Add a row after the given head, on the disk when this returns.

        Guarantee: if it returns, the row survives a crash of the process or the machine; if another server has
        written since `head`, it is refused. Checked: test_ledger_crashes.py, test_ledger_races.py.
        """
        with explained(self._path), self._connection:  # committed at its end, rolled back after an error
            self._connection.execute("BEGIN IMMEDIATE")
            query = "SELECT seq, epoch, hash FROM entry ORDER BY seq DESC LIMIT 1"
            last = self._connection.execute(query).fetchone()
            if last is None or (last[0], last[2]) != (head.seq, head.hash):
                written = "no rows" if last is None else f"row {last[0]} of epoch {last[1]}"
                raise LedgerError(f"ledger {self._path}: another server took over: found {written}")
            _insert(self._connection, row)
        # Rows written to files that were moved or deleted under us would not be found again.
        with explained(self._path):
            stats = [os.stat(f"{self._path}{suffix}") for suffix in ("", "-wal")]  # noqa: PTH116 - for each row
        identity = tuple((stat.st_dev, stat.st_ino) for stat in stats)
        if self._identity not in (None, identity):
            raise LedgerError(f"ledger {self._path}: the file was replaced while it was open")
        self._identity = identity


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failure of the file system or of SQLite into the one error that names the ledger."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"ledger {path}: {error}") from error


def require_file(path: Path) -> None:
    """Refuse if there is no such file; a path that cannot be, such as one that is too long, is none."""
    if not os.path.isfile(path):  # noqa: PTH113 - pathlib's raises then
        raise LedgerError(f"ledger {path}: there is no such file")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)


def _set_up(connection: sqlite3.Connection) -> None:
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    for name, wanted in DURABLE.items():
        (value,) = connection.execute(f"PRAGMA {name}").fetchone()
        if value != wanted:
            raise LedgerError(f"a row must survive a power cut: {name} must be {wanted}, got {value}")


def _insert(connection: sqlite3.Connection, row: Row) -> None:
    place = (None, None, None) if row.key is None else (row.key.run, row.key.round, row.key.attempt)
    values = (row.seq, row.epoch, row.kind.value, *place, row.body, float(row.epsilon).hex(), row.hash)
    connection.execute(f"INSERT INTO entry ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)  # noqa: S608


_KINDS = {kind.value: kind for kind in RowKind}


def _decode_row(fields: tuple[object, ...]) -> Row:
    place: tuple[str, int, int] | None = None
    match fields:
        case (int(seq), int(epoch), str(kind), None, None, None, str(body), str(epsilon), bytes(row_hash)):
            pass
        case (int(seq), int(epoch), str(kind), str(run), int(n), int(m), str(body), str(epsilon), bytes(row_hash)):
            place = run, n, m
        case _:
            raise LedgerError(f"row {fields[0]}: a field has the wrong type")
    try:
        key, spent = None if place is None else _key(*place), _decode_epsilon(epsilon)
        return Row(seq=seq, epoch=epoch, kind=_KINDS[kind], key=key, body=body, epsilon=spent, hash=row_hash)
    except KeyError:
        raise LedgerError(f"row {seq}: {kind!r} is no kind of row") from None
    except (ValueError, OverflowError, ConfigError) as error:
        raise LedgerError(f"row {seq}: {error}") from error


@lru_cache(64)  # it changes only where a run begins
def _decode_epsilon(text: str) -> float:
    epsilon = float.fromhex(text)
    if epsilon.hex() != text:
        raise ValueError(f"epsilon is not in canonical form, got {text!r}")
    return epsilon


_key = lru_cache(2)(Key)  # an attempt's rows mostly follow one another


def take_lock(path: Path, *, wait: bool = False) -> int:
    """Take the OS lock on a file beside the ledger, or refuse (or wait) if it is held.

    It is held until the descriptor is closed or the process ends, however it ends.
    """
    sidecar = path.with_name(path.name + ".lock")
    while True:
        with explained(path), ExitStack() as undo:
            descriptor = os.open(sidecar, os.O_RDWR | os.O_CREAT, 0o600)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise LedgerError(f"ledger {path}: another server has it open") from None
            try:
                is_current = os.path.samestat(os.fstat(descriptor), sidecar.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:  # otherwise it was replaced, and what we hold excludes nobody
                undo.pop_all()
                return descriptor


def replace_lock(path: Path) -> int:
    """Take a new lock in place of the one that is held: the holder of the old one no longer excludes anybody."""
    sidecar = path.with_name(path.name + ".lock")
    fresh = sidecar.with_name(f"{sidecar.name}.{os.getpid()}")
    with explained(path), ExitStack() as undo:
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
        undo.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(sidecar)  # locked before it has its name, so nobody can come in between
        undo.pop_all()
    return descriptor
