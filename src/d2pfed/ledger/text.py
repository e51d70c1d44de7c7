"""The one text of a release in a ledger: versioned, its participants packed, decoded exactly or not at all."""

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from d2pfed.accounting.events import (
    LAWS,
    Adjacency,
    BatchSampling,
    CohortSampling,
    Release,
    Sampling,
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


RELEASE_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Release, Unit, Adjacency, CohortSampling, BatchSampling, Sampling, *LAWS)
}
_TYPES = RELEASE_TYPES | {"Recorded": Recorded}


# What differs between the attempts of one run: participants, attempt, round, run. The rest of a text, the frame, is
# one of few in a ledger and decoded once. Braces are matched by depth, so a part cannot reach into the next.
_NUMBER = r"(0|[1-9][0-9]{0,18})"
_VALUE = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_ATTEMPT = re.compile(
    r'(\{"":"Recorded","participants":")([A-Za-z0-9+/=]*)'
    rf'(","release":\{{"":"Release","adjacency":{_VALUE},"attempt":){_NUMBER}'
    rf'((?:,"batches":{_VALUE})?,"noise":{_VALUE},"participants":\[\],"round":){_NUMBER}'
    r'(,"run":)("(?:[^"\\]|\\.)*")'
    rf'(,"sampling":{_VALUE},"unit":{_VALUE}\}},"version":[0-9]+\}})'
)
_FRAMES = 1024  # how many frames are remembered: a frame for each number of survivors, of a few hundred bytes each


def encode_release(release: Release) -> str:
    """Return the canonical text of a release."""
    packed = _pack(release.participants)
    return canonical.encode(Recorded(VERSION, replace(release, participants=()), packed))


def decode_release(text: str) -> Release:
    """Return the release that has exactly this text.

    Guarantee: `encode_release(decode_release(text)) == text`, so unknown fields, other versions and other spellings of
    a value are refused. Checked: test_ledger_text.py::test_a_damaged_text_is_refused_or_is_canonical.
    """
    parts = _ATTEMPT.fullmatch(text) if len(text) <= canonical.MOST_CHARACTERS else None
    if parts is None:
        return _decode_whole(text)
    start, packed, before, attempt, between, number, name, run, end = parts.groups()
    frame = _decode_frame(f'{start}{before}0{between}0{name}""{end}')
    try:
        decoded_run = _decode_name(run)
        release = Release(
            run=decoded_run,
            round=int(number),
            attempt=int(attempt),
            unit=frame.unit,
            adjacency=frame.adjacency,
            sampling=frame.sampling,
            noise=frame.noise,
            participants=_unpack(packed),
            batches=frame.batches,
        )
    except (ConfigError, ValueError, binascii.Error) as error:
        raise LedgerError(f"not the text of a release: {error}") from error
    # The frame is canonical, and so are the name, the two whole numbers by their pattern and the participants.
    return release


def _decode_whole(text: str) -> Release:
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


_decode_frame = lru_cache(_FRAMES)(_decode_whole)


@lru_cache(64)  # a ledger has few runs
def _decode_name(text: str) -> str:
    """Return the run's name that has exactly this text in JSON."""
    name: str = json.loads(text)
    if json.dumps(name) != text:
        raise ValueError("another spelling of the run's name")
    return name


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


@lru_cache(2)  # a commit often has its reservation's participants; more would hold large cohorts for nothing
def _unpack(text: str) -> tuple[int, ...]:
    """Return the identities that `_pack` writes as exactly this text."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("the participants are in another spelling of base64")
    if (found := _unpack_pairs(data)) is not None:
        return found
    identities: list[int] = []
    previous, rest = -1, iter(data)
    for byte in rest:  # a ledger has millions of gaps, most of them of one byte or two
        if byte < 128:
            previous += byte + 1
        elif 0 < (second := next(rest, 0)) < 128:
            previous += byte - 127 + (second << 7)
        else:
            previous += _long_gap(byte - 128, second, rest) + 1
        identities.append(previous)
    return tuple(identities)


def _unpack_pairs(data: bytes) -> tuple[int, ...] | None:
    """Return the identities if each gap, but perhaps the first, has two bytes, as in most large populations."""
    if not data:
        return ()
    one = data[0] < 128
    count, rest = divmod(len(data) - one, 2)
    steps = () if rest else tuple(map(_steps().__getitem__, struct.unpack_from(f"<{count}H", data, one)))
    if rest or not all(steps):
        return None
    return tuple(accumulate(steps, initial=data[0])) if one else tuple(accumulate(steps, initial=-1))[1:]


@cache
def _steps() -> list[int]:
    """Return how far each two bytes lead to the next identity; 0 for bytes that are no gap of two."""
    return [
        (word & 127) + (word >> 8 << 7) + 1 if word & 0x8080 == 0x80 and word >> 8 else 0
        for word in range(1 << 16)
    ]


def _long_gap(gap: int, byte: int, rest: Iterator[int]) -> int:
    """Return a gap of more than two bytes, of which the first seven bits and the second byte are given."""
    shift = 7
    while byte > 127:
        gap |= (byte & 127) << shift
        shift += 7
        byte = next(rest, 0)
    if not byte:
        raise ValueError("a participant has more bytes than it needs, or its last byte is missing")
    return gap | byte << shift
