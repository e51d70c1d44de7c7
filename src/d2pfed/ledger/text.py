"""The one text of a release in a ledger: versioned, its participants packed, decoded exactly or not at all."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace

from d2pfed.accounting.events import (
    Adjacency,
    BinomialSum,
    CohortSampling,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Release,
    Sampling,
    SkellamSum,
    Unit,
)
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.numerics import canonical

VERSION = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A release without its participants, and these packed."""

    version: int
    release: Release
    participants: str


_LAWS = (DiscreteGaussianSum, SkellamSum, BinomialSum, ContinuousGaussian)
RELEASE_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Release, Unit, Adjacency, CohortSampling, Sampling, *_LAWS)
}
_TYPES = RELEASE_TYPES | {"Recorded": Recorded}


def encode_release(release: Release) -> str:
    """Return the canonical text of a release."""
    packed = _pack(release.participants)
    return canonical.encode(Recorded(VERSION, replace(release, participants=()), packed))


def decode_release(text: str) -> Release:
    """Return the release that has exactly this text.

    Guarantee: `encode_release(decode_release(text)) == text`, so unknown fields, other versions and other spellings of
    a value are refused. Checked: test_ledger_text.py::test_a_damaged_text_is_refused_or_is_canonical.
    """
    try:
        recorded = canonical.decode(text, _TYPES)
        if not isinstance(recorded, Recorded) or recorded.version != VERSION:
            raise LedgerError(f"not the text of a release of version {VERSION}")
        release = replace(recorded.release, participants=_unpack(recorded.participants))
    except (ConfigError, ValueError, binascii.Error) as error:
        raise LedgerError(f"not the text of a release: {error}") from error
    if encode_release(release) != text:
        raise LedgerError("not the canonical text of a release: another spelling")
    return release


def _pack(participants: Sequence[int]) -> str:
    """Return increasing identities as base64 of their gaps: seven bits a byte, the last byte of each below 128."""
    packed = bytearray()
    previous = -1
    for identity in participants:
        gap = identity - previous - 1
        if gap < 0:
            raise ConfigError(f"participants must be at least 0 and increasing, got {identity} after {previous}")
        while gap > 127:
            packed.append(128 | gap & 127)
            gap >>= 7
        packed.append(gap)
        previous = identity
    return base64.b64encode(packed).decode()


def _unpack(text: str) -> tuple[int, ...]:
    identities: list[int] = []
    previous, gap, shift = -1, 0, 0
    for byte in base64.b64decode(text, validate=True):
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            previous += gap + 1
            identities.append(previous)
            gap, shift = 0, 0
    if shift:
        raise ValueError("the last participant is cut short")
    return tuple(identities)
