"""Requests, answers and models as Flower's records: the one place that knows both forms."""

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from d2pfed.errors import PeerError
from d2pfed.flower.layout import NamedArrays
from d2pfed.flower.requests import RequestKind

MESSAGE_TYPE = "train"  # all requests: Flower hands them to the mods of the client's training function
EVALUATION_TYPE = "evaluate"  # all requests of an evaluation: to the mods of its evaluation function

_FIELD = "data"


def to_record(kind: RequestKind, data: bytes) -> RecordDict:
    """Return the content of a message: one record with one field."""
    return RecordDict({kind.value: ConfigRecord({_FIELD: data})})


def from_record(content: RecordDict) -> tuple[RequestKind, bytes]:
    """Read the content of a message; refuse anything beside the one record."""
    names = list(content)
    if len(names) != 1 or names[0] not in set(RequestKind):
        raise PeerError(f"a message must hold one record of d2pfed, got {_names(content)}")
    record = content[names[0]]
    data = record.get(_FIELD) if isinstance(record, ConfigRecord) and list(record) == [_FIELD] else None
    if not isinstance(data, bytes):
        raise PeerError(f"a record {names[0]} must have one field of bytes")
    return RequestKind(names[0]), data


def answer_from_record(content: RecordDict, asked: RequestKind) -> bytes:
    """Read an answer to a request of a kind."""
    kind, data = from_record(content)
    if kind is not asked:
        raise PeerError(f"an answer to {asked.value} was expected, got {kind.value}")
    return data


def to_named_arrays(record: ArrayRecord, names: Iterable[str] | None = None) -> NamedArrays:
    """Return the arrays of a record, all or those of these names."""
    wanted = set(record if names is None else names)
    return {name: array.numpy() for name, array in record.items() if name in wanted}


def to_array_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _names(found: Mapping[str, object]) -> str:
    return f"{len(found)}: {', '.join(sorted(name[:40] for name in found)[:8])}"
