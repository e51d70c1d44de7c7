"""The run directory: one run's settings, plan, ledger, checkpoint, metrics and model, and the lock on them."""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget, Ledger, read_budget
from d2pfed.plan import Plan
from d2pfed.randomness import KEY_BYTES, Entropy
from d2pfed.training import ServerState

_NAME_BYTES = 8


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
        try:
            path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                lock = undo.enter_context((path / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                run = RunDirectory(path, undo.pop_all())
        except BlockingIOError:
            raise ConfigError(f"another process is working on the run in {path}") from None
        except OSError as error:
            raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error
        try:
            run._require_settings(settings)
        except BaseException:
            run.close()
            raise
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process work on this run."""
        self._closing.close()

    def _require_settings(self, settings: str) -> None:
        file = self.path / "settings.json"
        if not file.exists():
            self.replace("settings.json", settings.encode())
            return
        begun = file.read_text()
        if begun != settings:
            changed = _differences(json.loads(begun), json.loads(settings))
            raise ConfigError(
                f"the run in {self.path} was begun with other settings: {changed}; choose another --name"
            )

    def identity(self) -> Identity:
        """Return what tells this run from all others and draws its cohorts: made once, and kept when it is resumed."""
        file = self.path / "identity"
        if not file.exists():
            draft = self.path / ".identity.new"
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(Entropy.system().stream().bytes(_NAME_BYTES + KEY_BYTES))
                opened.flush()
                os.fsync(opened.fileno())
            draft.replace(file)
        content = file.read_bytes()
        if len(content) != _NAME_BYTES + KEY_BYTES:
            raise ConfigError(f"{file} must have {_NAME_BYTES + KEY_BYTES} bytes, got {len(content)}")
        return Identity(content[:_NAME_BYTES].hex(), Entropy(content[_NAME_BYTES:], is_replayed=False))

    def replace(self, name: str, content: bytes) -> None:
        """Write a file so that a crash leaves the old one or the new one, never a part."""
        temporary = self.path / f".{name}.new"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / name)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep the state after a round."""
        state = checkpoint.state
        arrays = {name: getattr(state, name) for name in ("params", "velocity", "second", "average")}
        self.replace(
            "checkpoint.safetensors", save(arrays, {"rounds": str(state.rounds), "ledger": checkpoint.head})
        )

    def load(self) -> Checkpoint | None:
        """Return the last state that was kept, if any."""
        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, "numpy") as stored:
                arrays = {name: stored.get_tensor(name) for name in ("params", "velocity", "second", "average")}
                notes = stored.metadata()
                state = ServerState(int(notes["rounds"]), **arrays)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{file} is not a checkpoint: {error}") from error
        return Checkpoint(state, notes["ledger"])

    def append(self, record: Mapping[str, object]) -> None:
        """Add a round's metrics."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def keep_metrics(self, rounds: int) -> None:
        """Forget the metrics of later rounds, whose state was not kept."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        whole = [line for line in lines if line.endswith("}")]  # a crash may have cut the last one
        kept = [line for line in whole if json.loads(line)["round"] <= rounds]
        self.replace("metrics.jsonl", "".join(line + "\n" for line in kept).encode())


def open_ledger(path: Path, plan: Plan) -> Ledger:
    """Open the population's ledger, or create one with this plan's promise for a budget; the caller closes it."""
    budget = Budget(plan.epsilon, plan.delta, plan.against, plan.participations)
    if not path.exists():
        return Ledger.create(path, budget, budget.measure)
    found = read_budget(path)
    if replace(found, epsilon=budget.epsilon) != budget:
        raise ConfigError(f"the ledger {path} has the budget {found}, this plan needs one like {budget}")
    return Ledger.open(path, found.measure)


def _differences(old: object, new: object, where: str = "") -> str:
    """Name the fields in which two settings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(set(old) | set(new))
        return ", ".join(
            _differences(old.get(n), new.get(n), f"{where}.{n}".strip("."))
            for n in names
            if old.get(n) != new.get(n)
        )
    return f"{where} was {json.dumps(old)}, now {json.dumps(new)}"
