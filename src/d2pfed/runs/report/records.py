"""JSON from a file, field by field with the type that is expected; anything else is refused by file and name."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from d2pfed.errors import ConfigError

_LARGEST = 1 << 53  # up to here a float holds every whole number


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object, and where it stood."""

    where: str
    values: dict[str, object] = field(repr=False)

    @staticmethod
    def parse(where: str, text: str) -> "Record":
        """Return the object that a text is."""
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is damaged: it is not JSON") from None
        return Record.of(where, plain)

    @staticmethod
    def of(where: str, plain: object) -> "Record":
        """Return an object that was read already."""
        if not isinstance(plain, dict):
            raise ConfigError(f"{where} is damaged: it must be an object, got {type(plain).__name__}")
        return Record(where, plain)

    def value(self, name: str) -> object:
        """Return a field, whatever it is."""
        if name not in self.values:
            raise ConfigError(f"{self.where} is damaged: it has no `{name}`")
        return self.values[name]

    def number(self, name: str) -> float:
        """Return a number, which may be infinite."""
        value = self.value(name)
        if not isinstance(value, float) and not _is_whole(value):
            raise self._wrong(name, "a number", value)
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """Return a number, or None for null."""
        return None if self.value(name) is None else self.number(name)

    def whole(self, name: str) -> int:
        """Return a whole number."""
        value = self.value(name)
        if not _is_whole(value):
            raise self._wrong(name, "a whole number of at most 2^53", value)
        return value

    def whole_or_none(self, name: str) -> int | None:
        """Return a whole number, or None for null."""
        return None if self.value(name) is None else self.whole(name)

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def record(self, name: str) -> "Record":
        """Return an object within this one."""
        return Record.of(f"{self.where}, {name}", self.value(name))

    def records(self, name: str) -> tuple["Record", ...]:
        """Return a list of objects."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return tuple(Record.of(f"{self.where}, {name}", item) for item in value)

    def _wrong(self, name: str, kind: str, value: object) -> ConfigError:
        return ConfigError(f"{self.where} is damaged: `{name}` must be {kind}, got {str(value)[:40]}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST


def read_text(path: Path) -> str:
    """Return a file's text."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: a run has it once it has ended or was interrupted") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is damaged: it is not text") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
