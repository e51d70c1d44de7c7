"""One more coordinate of a client's vector: a bit for an adaptive clip, or a private weight.

Adaptive clipping: each client adds one bit to its vector, and the clip of the next round follows from their sum.

A client with update x and a round's clip C sends, in units of C,

    (x / max(|x|, C), beta (b - 1/2)),   b = 1 if |x| <= C else 0,

whose norm is at most sqrt(1 + beta^2 / 4) whatever x and C are. The bits' sum estimates how many updates were within
the clip, as private as the rest of the vector; the clip is public, since it follows from released sums alone.
Andrew, Thakkar, McMahan and Ramaswamy 2021; docs/theory.md, adaptive clipping.

Private weights: each client adds its capped weight, and the mean is a ratio of two noisy sums. A client with update x
and weight w sends, for u = min(w, cap) / cap and a^2 + b^2 = 1,

    (a u x / max(|x|, clip), b u),

whose norm is at most 1 whatever x and w are. The sums of both parts are as private as any vector within that radius,
and their ratio is the weighted mean of the clipped updates. No weight is sent in clear.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError
from d2pfed.fields import Choice, check_between, check_positive
from d2pfed.noise.codec import FloatVector, moderate


class Extra(Choice):
    """What may stand in the coordinates beside an update, within the same radius and under the same noise."""

    ADAPTIVE_CLIP = "adaptive_clip"  # a bit: whether the update was within the round's clip
    WEIGHTS = "weights"  # the client's capped weight in the mean
    FAILURES = "failures"  # the radius if the client has nothing else to send because something failed


QUANTILE = 0.5  # a missing or silent client counts as one half, which is no bias where one half is the target
RATE = 0.2
LARGEST_BETA = 0.28  # costs 1 % more noise
FRACTION_NOISE = 0.1  # standard deviation of the estimated fraction that is good enough
REACH = 1e6  # how far the clip may move from its start, as a factor
DROWNED = 3.0  # standard deviations of its noise: a total weight below that is taken to be that
_LABEL = b"d2pfed clip\0"
_VALUE = struct.Struct(">d")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClip:
    """How the clip moves from round to round; all of it public and fixed before the run."""

    beta: float  # weight of a client's bit beside an update at the clip
    quantile: float = QUANTILE  # the fraction of updates that should be within the clip
    rate: float = RATE  # how fast the clip moves: by at most a factor of e^rate per round
    initial: float = 1.0  # the clip of the first round
    least: float  # the clip never falls below it
    most: float  # the clip never rises above it

    def __post_init__(self) -> None:
        check_between("beta", self.beta, 0, 1, "(]")
        check_between("quantile", self.quantile, 0, 1)
        check_between("rate", self.rate, 0, 1, "(]")
        if not 0 < self.least <= self.initial <= self.most < math.inf:
            raise ConfigError(
                f"the clip must have 0 < least <= initial <= most < infinity, "
                f"got {self.least}, {self.initial}, {self.most}"
            )

    @staticmethod
    def beside(noise: float, initial: float) -> "AdaptiveClip":
        """Return the least weight that the bits' sum needs beside this much noise per coordinate of the mean."""
        beta = min(noise / FRACTION_NOISE, LARGEST_BETA)
        return AdaptiveClip(beta=beta, initial=initial, least=initial / REACH, most=initial * REACH)

    @property
    def radius(self) -> float:
        """Bound on the norm of a client's vector, bit included, in units of the clip."""
        return math.sqrt(1 + self.beta**2 / 4)

    def require(self, clip: float) -> None:
        """Refuse a round's clip that is not finite, positive and within the limits."""
        if not self.least <= clip <= self.most:
            raise PeerError(f"a round's clip must be in [{self.least:g}, {self.most:g}], got {clip:g}")

    def vector(self, update: NDArray[np.floating], clip: float) -> FloatVector:
        """Return what a client sends for an update, in units of the clip, its bit last.

        A zero update (a client at its cap, without data, or whose training diverged) is silent: all entries are zero,
        and its bit counts for neither side. Checked: test_clipping.py::test_no_update_exceeds_the_radius.
        """
        self.require(clip)
        sent = np.zeros(len(update) + 1, np.float32)
        vector, scale = moderate(update)
        norm = math.sqrt(float(np.dot(vector, vector))) * scale
        if norm > 0:
            np.multiply(vector, np.float32(scale / max(norm, clip)), out=sent[:-1])
            sent[-1] = self.beta / 2 if norm <= clip else -self.beta / 2
        return sent

    def step(self, clip: float, released: float) -> "ClipStep":
        """Return what the last coordinate of a round's mean over the planned cohort says, and the next clip."""
        within = min(max(0.5 + released / self.beta, 0.0), 1.0)
        moved = clip * math.exp(-self.rate * (within - self.quantile))
        return ClipStep(clip, within, min(max(moved, self.least), self.most))


@dataclass(frozen=True, slots=True)
class ClipStep:
    """A round's clip, the private estimate of the fraction of updates within it, and the clip of the next round."""

    clip: float
    within: float
    following: float


def with_clip(task: bytes, clip: float | None) -> bytes:
    """Return a task that carries a round's clip, so that masks are bound to it; without a clip, as it is."""
    return task if clip is None else _LABEL + _VALUE.pack(clip) + task


def split_clip(adaptive: AdaptiveClip | None, task: bytes) -> tuple[float | None, bytes]:
    """Return the clip that a task carries, checked against the plan, and the rest; None where the clip is fixed."""
    if adaptive is None:
        return None, task
    start = len(_LABEL)
    if not task.startswith(_LABEL) or len(task) < start + _VALUE.size:
        raise PeerError("the plan's clip adapts, so a task must carry the clip of its round; this one has none")
    (clip,) = _VALUE.unpack_from(task, start)
    adaptive.require(clip)
    return clip, task[start + _VALUE.size :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How a client's weight enters its vector; all of it public and fixed before the run."""

    cap: float  # the largest weight; a larger one counts as this
    clip: float  # L2 bound on an update
    share: float  # b, the part of the radius that a weight at the cap takes

    def __post_init__(self) -> None:
        check_positive("a weighting's cap", self.cap)
        check_positive("a weighting's clip", self.clip)
        check_between("a weighting's share", self.share, 0, 1)

    @staticmethod
    def balanced(cap: float, clip: float, dimension: int) -> "Weighting":
        """Return the weighting with the least error of a mean at the clip: it goes with dimension / a^2 + 1 / b^2."""
        return Weighting(cap=cap, clip=clip, share=1 / math.sqrt(1 + math.sqrt(dimension)))

    @property
    def rest(self) -> float:
        """The part of the radius that an update at the clip takes: a."""
        return math.sqrt(1 - self.share**2)

    def vector(self, weighted: NDArray[np.floating]) -> FloatVector:
        """Return what a client sends for an update with its weight as last number.

        A zero update (a client at its cap of participations, without data, or whose training diverged) is silent: it
        has no weight either. Checked: test_weighting.py::test_no_vector_exceeds_the_radius.
        """
        sent = np.zeros(len(weighted), np.float32)
        weight = float(weighted[-1])
        if not weight >= 0:
            raise ConfigError("a weight must be at least 0")
        update, scale = moderate(weighted[:-1])
        norm = math.sqrt(float(np.dot(update, update))) * scale
        if norm > 0:
            part = min(weight / self.cap, 1.0)
            np.multiply(update, np.float32(self.rest * part * scale / max(norm, self.clip)), out=sent[:-1])
            sent[-1] = self.share * part
        return sent

    def mean(self, released: FloatVector, noise: float) -> FloatVector:
        """Return the weighted mean of the clipped updates, from the means of both parts.

        `noise` is the standard deviation of a coordinate of `released`: a total weight that is not well above it
        would make the ratio arbitrarily large, so it counts as a few times the noise.
        """
        weight = max(float(released[-1]), DROWNED * noise) / self.share
        return released[:-1] * np.float32(self.clip / (self.rest * weight))
