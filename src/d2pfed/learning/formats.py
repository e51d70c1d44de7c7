"""The official file formats of the data sets, from bytes to arrays."""

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.task import IntVector

_IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
_CIFAR_RECORD = 1 + 3 * 32 * 32
_SPEECH = re.compile(r"(?:\A|(?<=\n\n))([^\n:]+):\n(.+?)(?=\n\n|\n?\Z)", re.DOTALL)


def read_idx(content: bytes) -> NDArray[np.integer[Any]]:
    """Read an IDX file of bytes or 32-bit integers (MNIST, QMNIST)."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or not content[3]:
        raise ConfigError(f"an IDX file must start with 0, 0, type 8 or 12, and its axes, got {content[:4]!r}")
    kind, axes = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + kind.itemsize * math.prod(shape):
        raise ConfigError(f"an IDX file of shape {shape} must not have {len(content)} bytes")
    values: NDArray[np.integer[Any]] = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="))


def read_cifar(content: bytes) -> tuple[NDArray[np.uint8], IntVector]:
    """Read a binary CIFAR-10 batch: images (count, 3, 32, 32) and labels."""
    if not content or len(content) % _CIFAR_RECORD:
        raise ConfigError(f"a CIFAR-10 batch must have a multiple of {_CIFAR_RECORD} bytes, got {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


def read_speeches(text: str) -> dict[str, str]:
    """Return what each speaker of a play says, in order, speeches joined by newlines.

    A speech is a line with a name and a colon, then lines up to an empty one.
    """
    said: dict[str, list[str]] = {}
    for name, speech in _SPEECH.findall(text):
        said.setdefault(name, []).append(speech)
    return {name: "\n".join(speeches) for name, speeches in sorted(said.items())}
