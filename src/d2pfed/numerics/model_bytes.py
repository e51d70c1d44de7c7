"""A model's parameters as the bytes that clients are sent: 32-bit floats, or 8 bits each with a scale for each block.

The same bytes follow from the same parameters on every machine, and the same parameters from the same bytes.
"""

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError

FLOAT_BITS, SHORT_BITS = 32, 8  # per parameter
_BLOCK = 256  # consecutive parameters with one scale, so that a scale costs an eighth of a bit for each
_MOST = 127  # of a short parameter; -128 is no code
_FLOAT = np.dtype("<f4")

Parameters = NDArray[np.float32]


def require_bits(bits: int) -> None:
    """Refuse a format that is not one of the two."""
    if bits not in (SHORT_BITS, FLOAT_BITS):
        raise ConfigError(f"download_bits must be {SHORT_BITS} or {FLOAT_BITS}, got {bits}")


def model_size(dimension: int, bits: int) -> int:
    """Return how many bytes a model has."""
    require_bits(bits)
    return 4 * dimension if bits == FLOAT_BITS else 4 * _blocks(dimension) + dimension


def encode_model(params: Parameters, bits: int = FLOAT_BITS) -> bytes:
    """Return the bytes of a model: all scales, then all codes.

    A block's scale is the greatest size in it over 127, rounded to 32 bits; a code is the parameter over the scale,
    rounded to the nearest whole number and to the even one of two; both quotients are taken in 64 bits.
    """
    require_bits(bits)
    if bits == FLOAT_BITS:
        return params.astype(_FLOAT).tobytes()
    if not np.isfinite(params).all():
        raise ConfigError("a model must be finite to be sent at 8 bits per parameter, got NaN or infinity")
    rows = np.zeros((_blocks(len(params)), _BLOCK))
    rows.reshape(-1)[: len(params)] = params
    scales = (np.abs(rows).max(axis=1) / _MOST).astype(_FLOAT)
    wide = scales.astype(np.float64)[:, None]
    # A scale that vanishes in 32 bits is that of a block of zeros. A scale rounded down may give a quotient above 127.
    quotients = np.divide(rows, wide, out=np.zeros_like(rows), where=wide > 0)
    codes = np.rint(quotients).clip(-_MOST, _MOST).astype(np.int8).reshape(-1)[: len(params)]
    return bytes(scales.tobytes() + codes.tobytes())


def decode_model(data: bytes, dimension: int, bits: int = FLOAT_BITS) -> Parameters:
    """Return the parameters that clients train from: each code times its block's scale, in 32 bits.

    Guarantee: bytes of another length, and scales or codes that no finite model has, are refused.
    Checked: test_model_bytes.py::test_a_hostile_model_is_refused.
    """
    if len(data) != model_size(dimension, bits):
        raise PeerError(
            f"a model of {dimension} parameters at {bits} bits must have {model_size(dimension, bits)} bytes, got "
            f"{len(data)}"
        )
    if bits == FLOAT_BITS:
        return np.frombuffer(data, _FLOAT).astype(np.float32)
    scales = np.frombuffer(data, _FLOAT, _blocks(dimension)).astype(np.float32)
    codes = np.frombuffer(data, np.int8, offset=scales.nbytes)
    if np.signbit(scales).any():
        raise PeerError("the scales of a model must not be negative")
    if (codes < -_MOST).any():
        raise PeerError(f"the codes of a model must be in [-{_MOST}, {_MOST}], got -128")
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # refused below; a scale that is not finite has no finite product
        params = codes.astype(np.float32) * np.repeat(scales, _BLOCK)[:dimension]
    if not np.isfinite(params).all():  # of what a peer has sent
        raise PeerError("a model's codes times their scales must be finite")
    return params


def _blocks(dimension: int) -> int:
    return -(-dimension // _BLOCK)
