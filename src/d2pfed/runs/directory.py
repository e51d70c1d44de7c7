"""The run directory: one run's settings, plan, ledger, checkpoint, metrics and model, and the lock on them."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from d2pfed.errors import ConfigError, DamagedFile, LedgerError
from d2pfed.ledger import Head, Ledger, read_budget
from d2pfed.ledger.files import opened_for_lines, remove_drafts, replace_file, software_digest, sync_directory
from d2pfed.numerics.randomness import KEY_BYTES, Entropy, digest
from d2pfed.plan import Plan
from d2pfed.round import run_plan
from d2pfed.training import ServerState

_NAME_BYTES, _INODE_BYTES = 8, 8
_ARRAYS = ("params", "velocity", "second", "average")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after some rounds, and the ledger's head that went with it."""

    state: ServerState
    head: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A run's own name, and the secret from which its cohorts are drawn."""

    name: str
    cohorts: Entropy


class RunDirectory:
    """One run's files. Whoever has it open is the only one; whatever it replaces is whole, old or new."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        self.path = path
        self._closing = closing

    @staticmethod
    def open(path: Path, settings: str) -> "RunDirectory":
        """Open a run, new or begun with the same settings; refuse other settings and a second process."""
        file = path / "settings.json"
        with ExitStack() as undo:
            try:
                # Each folder is entered in its parent for good: with it a run's ledger would go.
                missing = [folder for folder in (path, *path.parents) if not folder.exists()]
                path.mkdir(parents=True, exist_ok=True)
                for folder in reversed(missing):
                    sync_directory(folder.parent)
                lock = undo.enter_context(opened_for_lines(path / "lock"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is working on the run in {path}") from None
            except OSError as error:
                raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error
            except ValueError:
                raise ConfigError(f"a run directory cannot have a null character, got {str(path)!r}") from None
            run = RunDirectory(path, undo)
            remove_drafts(path)
            if not file.exists():
                if (path / "identity").exists():
                    raise DamagedFile(f"{file} is missing: what the run was begun with is unknown")
                run.replace(file.name, settings.encode())
            with _explained(file):
                begun = file.read_text("utf-8")
            if begun != settings:
                try:
                    changed = _differences(json.loads(begun), json.loads(settings))
                except (ValueError, RecursionError) as error:
                    raise DamagedFile(f"{file} is damaged: {error}") from error
                raise ConfigError(
                    f"the run in {path} was begun with other settings: {changed}; choose another name"
                )
            return RunDirectory(path, undo.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process work on this run."""
        self._closing.close()

    def identity(self) -> Identity:
        """Return what tells this run from all others and draws its cohorts: made once, and kept when it is resumed.

        A copy elsewhere is refused: it would draw the cohorts of the original, and spend what that one has spent.
        """
        file = self.path / "identity"
        with _explained(file):
            if not file.exists():
                draft = self.path / ".identity.new"
                draft.unlink(missing_ok=True)
                descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with os.fdopen(descriptor, "wb") as opened:
                    opened.write(Entropy.system().stream().bytes(_NAME_BYTES + KEY_BYTES))
                    opened.write(os.fstat(descriptor).st_ino.to_bytes(_INODE_BYTES, "little"))
                    opened.write(os.fsencode(file.resolve()))
                    opened.flush()
                    os.fsync(descriptor)
                draft.replace(file)
                sync_directory(self.path)
            with file.open("rb") as stored:
                content, inode = stored.read(), os.fstat(stored.fileno()).st_ino
        least = _NAME_BYTES + KEY_BYTES + _INODE_BYTES
        if len(content) <= least:
            raise DamagedFile(f"{file} is damaged: it must have more than {least} bytes, got {len(content)}")
        born = int.from_bytes(content[_NAME_BYTES + KEY_BYTES : least], "little")
        place = os.fsencode(file.resolve())
        # A file system may number its files again, and a directory may be moved; a copy has neither of the two.
        if inode != born and content[least:] != place:
            raise ConfigError(f"{self.path} is a copy of a run's directory: only the one where it began can go on")
        secret = content[_NAME_BYTES : _NAME_BYTES + KEY_BYTES]
        return Identity(content[:_NAME_BYTES].hex(), Entropy(secret, is_replayed=False))

    def replace(self, name: str, content: bytes) -> None:
        """Write a file so that a crash leaves the old one or the new one, never a part."""
        with _explained(self.path / name):
            replace_file(self.path / name, content, mode=0o666)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep the state after a round."""
        state = checkpoint.state
        notes = {"rounds": str(state.rounds), "ledger": checkpoint.head, "checksum": _checksum(checkpoint)}
        if state.clip is not None:
            notes["clip"] = state.clip.hex()
        arrays = {name: getattr(state, name) for name in _ARRAYS}
        self.replace("checkpoint.safetensors", save(arrays, notes))

    def load(self) -> Checkpoint | None:
        """Return the last state that was kept, if any."""
        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, "numpy") as stored:
                arrays = {name: stored.get_tensor(name) for name in _ARRAYS}
                notes = stored.metadata()
                clip = float.fromhex(notes["clip"]) if "clip" in notes else None
                state = ServerState(int(notes["rounds"]), **arrays, clip=clip)
                checkpoint = Checkpoint(state, notes["ledger"])
                intact = notes["checksum"] == _checksum(checkpoint)
        except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
            raise DamagedFile(f"{file} is not a checkpoint: {error}") from error
        if not intact:
            raise DamagedFile(f"{file} is damaged: its checksum is not that of its content")
        return checkpoint

    def note(self, head: Head) -> None:
        """Keep the ledger's last row as this run has seen it: an older ledger will be refused."""
        self.replace("seen", head.encode().encode())

    def seen(self) -> Head | None:
        """Return the ledger's row that was kept last; None before the run has begun."""
        file = self.path / "seen"
        if not file.exists():
            return None
        try:
            with _explained(file):
                return Head.decode(file.read_text("utf-8"))
        except LedgerError as error:
            raise DamagedFile(f"{file} is damaged: {error}") from error

    def append(self, record: str) -> None:
        """Add the line of a round, on the disk when this returns."""
        file = self.path / "metrics.jsonl"
        is_new = not file.exists()
        with _explained(file):
            with opened_for_lines(file) as opened:
                opened.write(record + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            if is_new:
                sync_directory(self.path)

    def keep_metrics(self, rounds: int) -> None:
        """Forget the metrics of later rounds, whose state was not kept, and lines that a crash or a hand has torn."""
        file = self.path / "metrics.jsonl"
        with _explained(file):
            lines = file.read_bytes().decode(errors="replace").splitlines() if file.exists() else []
        kept = {}
        for line in lines:
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                number = record.get("round") if isinstance(record, dict) else None
                if isinstance(number, int) and 1 <= number <= rounds:
                    kept[number] = line
        self.replace("metrics.jsonl", "".join(kept[number] + "\n" for number in sorted(kept)).encode())


def open_ledger(
    directory: RunDirectory,
    plan: Plan,
    run: str,
    shared: Path | None,
    last: Checkpoint | None,
    *,
    repeatable: bool,
) -> Ledger:
    """Open the ledger of a run and charge it there, or find it charged; the caller closes it.

    `shared` is a ledger that other runs over these clients draw on too; None: the directory's own, which is made with
    this plan's guarantee for a budget when the run begins. `last` is the directory's checkpoint; `repeatable` says that
    the run's noise follows from a seed.

    Guarantee: the run is within its own guarantee and its ledger's budget, and this directory is the only one that has
    carried it on. Checked: test_run.py.
    """
    charge, seen = run_plan(plan), directory.seen()
    path = directory.path / "ledger.sqlite" if shared is None else shared
    if path.exists():
        budget = read_budget(path)
        budget.require_like(charge)
        book = Ledger.open(path)
    elif shared is not None:
        raise ConfigError(f"there is no ledger at {path}: `d2pfed ledger create` makes one")
    elif seen is not None or last is not None:
        raise LedgerError(f"the ledger of the run in {directory.path} is gone, and what was spent with it")
    else:
        budget = charge.budget
        book = Ledger.create(path, budget)
    with ExitStack() as undo:
        undo.callback(book.close)
        for head in (seen, None if last is None else Head.decode(last.head)):
            if head is not None:
                book.require_head(head)
        if seen is None and budget != charge.budget:
            charge.require_guarantee()
        owner = directory.identity().name
        book.begin(run, owner, charge, software=software_digest(), repeatable=repeatable)
        book.require_own(run, seen, 0 if last is None else last.state.rounds)
        directory.note(book.head())
        undo.pop_all()
    return book


def _checksum(checkpoint: Checkpoint) -> str:
    state = checkpoint.state
    arrays = [getattr(state, name) for name in _ARRAYS]
    parts = [part for array in arrays for part in (str(array.dtype), str(array.shape), array.tobytes())]
    clip = () if state.clip is None else (state.clip.hex(),)
    return digest("d2pfed checkpoint", state.rounds, checkpoint.head, *parts, *clip).hex()


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot use {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DamagedFile(f"{file} is damaged: it is not text") from None


def _differences(old: object, new: object, where: str = "") -> str:
    """Name the fields in which two settings differ, with both values."""
    # A float of a canonical text as people read it.
    old, new = (
        float.fromhex(each["is"]) if isinstance(each, dict) and each.get("") == "float" else each
        for each in (old, new)
    )
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(set(old) | set(new))
        return ", ".join(
            _differences(old.get(n), new.get(n), f"{where}.{n}".strip("."))
            for n in names
            if old.get(n) != new.get(n)
        )
    return f"{where} was {json.dumps(old)}, now {json.dumps(new)}"
