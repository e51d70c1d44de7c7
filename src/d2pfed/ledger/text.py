"""The one canonical text of a release: versioned JSON that decodes exactly or not at all."""

import base64
import json
from collections.abc import Sequence
from fractions import Fraction

from d2pfed.accounting.release import (
    Adjacency,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Noise,
    Release,
    Sampling,
    Scheme,
    SkellamSum,
    Unit,
)
from d2pfed.errors import ConfigError, LedgerError

VERSION = 1

# Whatever a damaged text can make a decoder raise.
DAMAGE = (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, ConfigError)

Json = dict[str, object]


def encode_json(value: object) -> str:
    """Return the JSON text without spaces, with sorted keys and in ASCII: one text per value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode_release(release: Release) -> str:
    """Return the canonical text of a release: rationals as "p/q", floats in hexadecimal, participants packed."""
    return encode_json(
        {
            "version": VERSION,
            "round": int(release.round),
            "attempt": int(release.attempt),
            "unit": release.unit.value,
            "adjacency": release.adjacency.value,
            "sampling": {
                "scheme": release.sampling.scheme.value,
                "population": int(release.sampling.population),
                "cohort": int(release.sampling.cohort),
            },
            "noise": _encode_noise(release.noise),
            "participants": _pack(release.participants),
        }
    )


def decode_release(text: str) -> Release:
    """Return the release that has exactly this text.

    Guarantee: `encode_release(decode_release(text)) == text`, so unknown fields, other versions and other
    spellings of a value are refused. Checked: test_ledger_text.py::test_a_damaged_text_is_refused_or_is_canonical.
    """
    try:
        release = _decode_release(json.loads(text))
    except DAMAGE as error:
        raise LedgerError(f"not the text of a release: {error}") from error
    if encode_release(release) != text:
        raise LedgerError("not the canonical text of a release: unknown fields or another spelling")
    return release


def _decode_release(fields: Json) -> Release:
    if fields["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, got {fields['version']}")
    return Release(
        round=_whole(fields["round"]),
        attempt=_whole(fields["attempt"]),
        unit=Unit(_string(fields["unit"])),
        adjacency=Adjacency(_string(fields["adjacency"])),
        sampling=_decode_sampling(_fields(fields["sampling"])),
        noise=_decode_noise(_fields(fields["noise"])),
        participants=_unpack(_string(fields["participants"])),
    )


def _decode_sampling(fields: Json) -> Sampling:
    return Sampling(Scheme(_string(fields["scheme"])), _whole(fields["population"]), _whole(fields["cohort"]))


def _encode_noise(noise: Noise) -> Json:
    match noise:
        case DiscreteGaussianSum():
            return {
                "law": "discrete-gaussian-sum",
                "sigma": _ratio(noise.sigma),
                "contributors": int(noise.contributors),
                "radius": _ratio(noise.radius),
                "dimension": int(noise.dimension),
            }
        case SkellamSum():
            return {
                "law": "skellam-sum",
                "variance": _ratio(noise.variance),
                "contributors": int(noise.contributors),
                "radius": _ratio(noise.radius),
                "l1_radius": _ratio(noise.l1_radius),
                "dimension": int(noise.dimension),
            }
        case ContinuousGaussian():
            return {
                "law": "continuous-gaussian",
                "sigma": float(noise.sigma).hex(),
                "radius": float(noise.radius).hex(),
            }


def _decode_noise(fields: Json) -> Noise:
    def ratio(name: str) -> Fraction:
        return Fraction(_string(fields[name]))

    match fields["law"]:
        case "discrete-gaussian-sum":
            contributors, dimension = _whole(fields["contributors"]), _whole(fields["dimension"])
            return DiscreteGaussianSum(ratio("sigma"), contributors, ratio("radius"), dimension)
        case "skellam-sum":
            contributors, dimension = _whole(fields["contributors"]), _whole(fields["dimension"])
            return SkellamSum(ratio("variance"), contributors, ratio("radius"), ratio("l1_radius"), dimension)
        case "continuous-gaussian":
            sigma, radius = _string(fields["sigma"]), _string(fields["radius"])
            return ContinuousGaussian(float.fromhex(sigma), float.fromhex(radius))
        case law:
            raise ValueError(f"unknown law of noise {law!r}")


def _ratio(value: Fraction | int) -> str:
    exact = Fraction(value)
    return f"{exact.numerator}/{exact.denominator}"


def _fields(value: object) -> Json:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r}")
    return value


def _pack(participants: Sequence[int]) -> str:
    """Return increasing identities as base64 of their gaps: seven bits a byte, the last byte of each below 128."""
    packed = bytearray()
    previous = -1
    for identity in map(int, participants):
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
