"""A model's named arrays as one flat vector and back, and the model as the bytes that masks are bound to."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from d2pfed import canonical
from d2pfed.codec import FloatVector
from d2pfed.errors import ConfigError, PeerError
from d2pfed.wire import pack_integer

_TYPES = ("float16", "float32", "float64")
_PARAMS = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of a model."""

    name: str
    shape: tuple[int, ...]
    type: str

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise ConfigError(
                f"array {self.name!r} must be of {', '.join(_TYPES)}, got {self.type}: counters and other buffers are "
                f"no parameters; keep them on the clients and out of the arrays"
            )
        if any(length < 0 for length in self.shape):
            raise ConfigError(f"array {self.name!r} must have lengths of at least 0, got {self.shape}")

    @staticmethod
    def of(name: str, array: Array) -> "Entry":
        """Return what a named array looks like."""
        return Entry(name, tuple(array.shape), array.dtype)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrays of a model, in the order in which they lie in the flat vector."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.dimension:
            raise ConfigError("a model must have at least one parameter, got none")

    @staticmethod
    def of(arrays: ArrayRecord) -> "Layout":
        """Return the layout of a model's arrays."""
        return Layout(tuple(Entry.of(name, array) for name, array in arrays.items()))

    @staticmethod
    def decode(text: str) -> "Layout":
        """Return the layout that has exactly this canonical text."""
        layout = canonical.decode(text, {"Layout": Layout, "Entry": Entry})
        if not isinstance(layout, Layout):
            raise PeerError("a layout was expected")
        return layout

    def encode(self) -> str:
        """Return the canonical text."""
        return canonical.encode(self)

    @property
    def dimension(self) -> int:
        """How many parameters there are."""
        return sum(entry.size for entry in self.entries)

    def flatten(self, arrays: ArrayRecord) -> FloatVector:
        """Return the layout's parameters as one vector; refuse arrays that lack one or have it in another shape.

        Arrays of other names are left out: what a client freezes, or counts, stays with it.
        """
        named = {entry.name: arrays[entry.name] for entry in self.entries if entry.name in arrays}
        found = tuple(Entry.of(name, array) for name, array in named.items())
        if found != self.entries:
            raise ConfigError(f"the arrays must be {_names(self.entries)}, got {_names(found)}")
        return np.concatenate([array.numpy().ravel().astype(np.float32) for array in named.values()])

    def unflatten(self, params: FloatVector) -> ArrayRecord:
        """Return the named arrays of a flat vector."""
        ends = np.cumsum([entry.size for entry in self.entries])[:-1]
        parts = zip(self.entries, np.split(params, ends), strict=True)
        return ArrayRecord(
            {entry.name: Array(part.reshape(entry.shape).astype(entry.type)) for entry, part in parts}
        )


def encode_model(params: FloatVector, config: Mapping[str, object]) -> bytes:
    """Return the round's parameters and training configuration as the bytes that all clients must see alike."""
    try:
        text = json.dumps(dict(config), sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a training configuration must hold numbers, texts and lists of them: {error}"
        ) from error
    return pack_integer(len(text), 4) + text + params.astype(_PARAMS).tobytes()


def decode_model(data: bytes, layout: Layout) -> tuple[FloatVector, ConfigRecord]:
    """Return the parameters and the training configuration of a round."""
    size = int.from_bytes(data[:4], "little")
    text, params = data[4 : 4 + size], data[4 + size :]
    if len(text) != size or len(params) != layout.dimension * _PARAMS.itemsize:
        raise PeerError(f"a model of {layout.dimension} parameters was expected, got {len(params)} bytes")
    try:
        config = ConfigRecord(json.loads(text))
    except (TypeError, ValueError, RecursionError):
        raise PeerError("a model's training configuration must be a flat JSON object") from None
    return np.frombuffer(params, _PARAMS).astype(np.float32), config


def _names(entries: tuple[Entry, ...]) -> str:
    return ", ".join(f"{entry.name} {entry.shape} {entry.type}" for entry in entries) or "none of them"
