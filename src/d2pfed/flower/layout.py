"""A model's named arrays as one flat vector and back; model and task as the bytes that masks are bound to."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.secagg.wire import pack_integer

_TYPES = ("float16", "float32", "float64")
_PARAMS = np.dtype("<f4")
_MOST_PARAMS = 1 << 32
_MOST_NAME = 1 << 10
_MOST_ARRAYS = 1 << 14
_MOST_CHARACTERS = 1 << 21  # of a layout's text
_RUN_CONFIG = "d2pfed.run-config"  # in a task's configuration


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
        if len(self.name) > _MOST_NAME:
            raise ConfigError(f"an array's name must have at most {_MOST_NAME} characters, got {len(self.name)}")
        # Each length by itself first: a product of huge ones would be work.
        if len(self.shape) > 32 or any(not 0 <= length < _MOST_PARAMS for length in self.shape):
            raise ConfigError(f"array {self.name!r} must have at most 32 lengths, each in [0, {_MOST_PARAMS})")

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
        if len(self.entries) > _MOST_ARRAYS:
            raise ConfigError(f"a model must have at most {_MOST_ARRAYS} arrays, got {len(self.entries)}")
        if not 0 < self.dimension < _MOST_PARAMS:
            raise ConfigError(f"a model must have between 1 and {_MOST_PARAMS} parameters")
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise ConfigError("the arrays of a model must have names of their own")

    @staticmethod
    def of(arrays: ArrayRecord) -> "Layout":
        """Return the layout of a model's arrays."""
        return Layout(tuple(Entry.of(name, array) for name, array in arrays.items()))

    @staticmethod
    def decode(text: str) -> "Layout":
        """Return the layout that has exactly this canonical text."""
        layout = canonical.decode(text, {"Layout": Layout, "Entry": Entry}, most=_MOST_CHARACTERS)
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


def encode_task(
    layout: Layout, config: Mapping[str, object], run_config: Mapping[str, object] = MappingProxyType({})
) -> bytes:
    """Return all that decides what is trained, beside the parameters, as bytes that all clients must see alike.

    `run_config` is the configuration of the run, which clients get from the SuperLink and hold against this.
    """
    if _RUN_CONFIG in config:
        raise ConfigError(f"a training configuration must not have the name {_RUN_CONFIG}, which is ours")
    told = {**config, _RUN_CONFIG: dict(run_config)} if run_config else dict(config)
    try:
        text = json.dumps(told, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a training configuration must hold numbers, texts and lists of them: {error}"
        ) from error
    arrays = layout.encode().encode()
    return pack_integer(len(arrays), 4) + arrays + text


def decode_task(
    task: bytes, layout: Layout, run_config: Mapping[str, object] = MappingProxyType({})
) -> ConfigRecord:
    """Return the training configuration of a round; refuse a task for another layout than the one introduced.

    It is refused, too, where this client was given another configuration of the run than the task says.

    Guarantee: what a client trains is in the context of its masks, so clients that were told different names, shapes
    or settings do not cancel. Checked: test_flower_liar.py::test_other_names_for_other_clients_give_no_sum.
    """
    size = int.from_bytes(task[:4], "little")
    require_layout(task[4 : 4 + size], layout)
    try:
        config = json.loads(task[4 + size :])
        if isinstance(config, dict):
            require_run_config(config.pop(_RUN_CONFIG, {}), run_config)
            return ConfigRecord(config)
    except (TypeError, ValueError, RecursionError):
        pass
    raise PeerError("a training configuration must be a flat JSON object")


def require_layout(told: bytes, introduced: Layout) -> None:
    """Refuse to train other arrays than those this run was introduced with."""
    if told != introduced.encode().encode():
        raise PeerError("a task must be for the layout that the run was introduced with")


def require_run_config(told: object, given: Mapping[str, object]) -> None:
    """Refuse to train by another configuration of the run than all others: it is not in the context by itself."""
    if json.dumps(told, sort_keys=True) != json.dumps(dict(given), sort_keys=True):
        raise PeerError(
            "the configuration of the run must be that of the task: the server starts with "
            "run_config=context.run_config"
        )


def encode_model(params: FloatVector) -> bytes:
    """Return the round's parameters as the bytes that all clients must see alike."""
    return params.astype(_PARAMS).tobytes()


def decode_model(data: bytes, layout: Layout) -> FloatVector:
    """Return the parameters of a round."""
    if len(data) != layout.dimension * _PARAMS.itemsize:
        raise PeerError(f"a model of {layout.dimension} parameters was expected, got {len(data)} bytes")
    return np.frombuffer(data, _PARAMS).astype(np.float32)


def _names(entries: tuple[Entry, ...]) -> str:
    return ", ".join(f"{entry.name} {entry.shape} {entry.type}" for entry in entries) or "none of them"
