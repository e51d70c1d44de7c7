"""A model's named arrays as one flat vector and back; a task as the bytes that masks are bound to."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.secagg.wire import pack_integer

NamedArrays = Mapping[str, np.ndarray]  # a model's arrays by name

_TYPES = ("float16", "float32", "float64")
_LOCAL_TYPES = (*_TYPES, "int64", "int32", "uint8", "bool")
MOST_LOCAL_BYTES = 1 << 19
_MOST_PARAMS = 1 << 32
_MOST_NAME = 1 << 10
_MOST_ARRAYS = 1 << 14
_MOST_CHARACTERS = 1 << 21  # of a layout's text
_RUN_CONFIG = "d2pfed.run-config"  # in a task's configuration


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a model."""

    name: str
    shape: tuple[int, ...]
    type: str

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise ConfigError(
                f"array {self.name!r} must be of {', '.join(_TYPES)}, got {self.type}: counters and other buffers are "
                f"not parameters: leave them out of the arrays, they stay on the clients"
            )
        if len(self.name) > _MOST_NAME:
            raise ConfigError(f"an array's name must have at most {_MOST_NAME} characters, got {len(self.name)}")
        # Each length by itself first: a product of huge ones would be work.
        if len(self.shape) > 32 or any(not 0 <= length < _MOST_PARAMS for length in self.shape):
            raise ConfigError(f"array {self.name!r} must have at most 32 lengths, each in [0, {_MOST_PARAMS})")


@dataclass(frozen=True, slots=True)
class LocalArray:
    """An array that each client keeps to itself, such as a batch norm's statistics, and its value before round 1."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: bytes

    def __post_init__(self) -> None:
        if self.type not in _LOCAL_TYPES:
            raise ConfigError(f"array {self.name!r} must be of {', '.join(_LOCAL_TYPES)}, got {self.type}")
        if len(self.name) > _MOST_NAME or len(self.data) > MOST_LOCAL_BYTES or len(self.shape) > 32:
            raise ConfigError(
                f"an array that stays with its client must have at most {MOST_LOCAL_BYTES:,} bytes, got "
                f"{len(self.data):,} in {self.name[:80]!r}: send only what is trained, and load it with strict=False"
            )
        if (
            any(not 0 <= length < _MOST_PARAMS for length in self.shape)
            or len(self.data) != math.prod(self.shape) * np.dtype(self.type).itemsize
        ):
            raise ConfigError(
                f"array {self.name!r} must have as many bytes as its shape needs, got {len(self.data)}"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrays of a model: those that are trained, as they lie in the flat vector, and those that stay local."""

    entries: tuple[ArraySpec, ...]
    local: tuple[LocalArray, ...] | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)

    def __post_init__(self) -> None:
        names = [*(entry.name for entry in self.entries), *(array.name for array in self.local or ())]
        if len(names) > _MOST_ARRAYS:
            raise ConfigError(f"a model must have at most {_MOST_ARRAYS} arrays, got {len(names)}")
        if not 0 < self.dimension < _MOST_PARAMS:
            raise ConfigError(f"a model must have between 1 and {_MOST_PARAMS} parameters")
        if sum(len(array.data) for array in self.local or ()) > MOST_LOCAL_BYTES:
            raise ConfigError(
                f"a model must have at most {MOST_LOCAL_BYTES:,} bytes in the arrays that stay local: send only what "
                f"is trained, and load it with strict=False"
            )
        if len(set(names)) != len(names):
            raise ConfigError("the arrays of a model must have distinct names")

    @staticmethod
    def of(arrays: NamedArrays, trained: Collection[str] | None = None) -> "Layout":
        """Return the layout of a model's arrays, of which those of other names than `trained` stay local."""
        names = arrays.keys() if trained is None else set(trained)
        if missing := sorted(set(names) - arrays.keys()):
            raise ConfigError(f"the arrays must include all trained parameters, {missing[0]!r} is missing")
        shapes = {name: (name, tuple(array.shape), array.dtype.name) for name, array in arrays.items()}
        trained_arrays = tuple(ArraySpec(*shape) for name, shape in shapes.items() if name in names)
        local = tuple(
            LocalArray(*shape, arrays[name].tobytes()) for name, shape in shapes.items() if name not in names
        )
        return Layout(trained_arrays, local or None)

    @staticmethod
    def decode(text: str) -> "Layout":
        """Return the layout that has exactly this canonical text."""
        return canonical.decode(text, _LAYOUT_TYPES, Layout, most=_MOST_CHARACTERS)

    def encode(self) -> str:
        """Return the canonical text."""
        return canonical.encode(self)

    @property
    def dimension(self) -> int:
        """How many parameters there are."""
        return sum(math.prod(entry.shape) for entry in self.entries)

    def flatten(self, arrays: NamedArrays) -> FloatVector:
        """Return the layout's parameters as one vector; arrays of other names stay with the client."""
        named = {entry.name: arrays[entry.name] for entry in self.entries if entry.name in arrays}
        found = tuple(ArraySpec(name, tuple(array.shape), array.dtype.name) for name, array in named.items())
        if found != self.entries:
            wanted, got = (
                ", ".join(f"{entry.name} {entry.shape} {entry.type}" for entry in entries) or "none of them"
                for entries in (self.entries, found)
            )
            raise ConfigError(f"the arrays must be {wanted}, got {got}")
        return np.concatenate([array.ravel().astype(np.float32) for array in named.values()])

    def initial_local(self) -> dict[str, np.ndarray]:
        """Return the arrays that stay local as they are before the first round."""
        return {
            array.name: np.frombuffer(array.data, array.type).reshape(array.shape).copy()
            for array in self.local or ()
        }

    def unflatten(self, params: FloatVector) -> dict[str, np.ndarray]:
        """Return the named arrays of a flat vector."""
        ends = np.cumsum([math.prod(entry.shape) for entry in self.entries])[:-1]
        parts = zip(self.entries, np.split(params, ends), strict=True)
        return {entry.name: part.reshape(entry.shape).astype(entry.type) for entry, part in parts}


_LAYOUT_TYPES = {"Layout": Layout, "ArraySpec": ArraySpec, "LocalArray": LocalArray}


def encode_task(
    layout: Layout, config: Mapping[str, object], run_config: Mapping[str, object] = MappingProxyType({})
) -> bytes:
    """Return all that decides what is trained, beside the parameters, as bytes that all clients must see alike."""
    if _RUN_CONFIG in config:
        raise ConfigError(f"a training configuration must not have the reserved name {_RUN_CONFIG}")
    settings = {**config, _RUN_CONFIG: dict(run_config)} if run_config else dict(config)
    try:
        text = json.dumps(settings, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a training configuration must hold numbers, texts and lists of them: {error}"
        ) from error
    arrays = layout.encode().encode()
    return pack_integer(len(arrays), 4) + arrays + text


def decode_task(
    task: bytes, layout: Layout, run_config: Mapping[str, object] = MappingProxyType({})
) -> dict[str, object]:
    """Return the settings of a round; refuse a task for another layout or another configuration of the run.

    Guarantee: what a client trains is in the context of its masks, so clients that were sent different names, shapes
    or settings do not cancel. Checked: test_flower_malicious_server.py::test_other_names_for_other_clients_give_no_sum.
    """
    size = int.from_bytes(task[:4], "little")
    # No other arrays are trained than those that were announced.
    if task[4 : 4 + size] != layout.encode().encode():
        raise PeerError("a task must be for the layout that the run was announced with")
    try:
        config = json.loads(task[4 + size :])
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise PeerError("a training configuration must be a flat JSON object")
    sent_run_config = config.pop(_RUN_CONFIG, {})
    for value in config.values():  # each a number, a text, or a list of one of these types
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, (bool, int, float, str)) for item in items) or len(set(map(type, items))) > 1:
            raise PeerError("a training configuration must be a flat JSON object")
    # All train under one configuration of the run, which by itself is not in the context.
    if json.dumps(sent_run_config, sort_keys=True) != json.dumps(dict(run_config), sort_keys=True):
        raise PeerError(
            "the configuration of the run must be that of the task: the server starts with "
            "run_config=context.run_config"
        )
    return config
