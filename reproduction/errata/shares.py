"""What the shares of a common noise give away: behind masks, to a server that misses some, and if they are rounded."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.codec import Codec, stochastic_round
from d2pfed.noise.mechanisms import Share
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import IntVector, Ring
from d2pfed.numerics.rotation import Hadamard
from reproduction.communication import literal_bits, sum_range
from reproduction.errata.finding import Finding
from reproduction.setting import INFIMNIST, Setting
from reproduction.synthetic import directions

SHARE = "Algorithm 1, the line that adds nu / (gamma n)"
ALIGNED = 0.7  # the cosine of clients that mostly agree
MOST_MISSING = 20

Fractions = tuple[float, ...]  # of coordinates that the server reads, by the number of missing clients
Masses = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cohort:
    """A round's secrets: every client's quantised vector, in steps, as rows, and the noise that all of them know."""

    rounded: IntVector
    nu: IntVector

    @property
    def size(self) -> int:
        """Return the number of clients."""
        return len(self.rounded)


def cohort_of(setting: Setting, levels: int, cosine: float, entropy: Entropy) -> Cohort:
    """Clip, rotate and quantise made-up updates, and draw the noise, as Algorithm 1 does."""
    codec = Codec(
        rotation=Hadamard(setting.dimension),
        clip=float(setting.clip),
        granularity=float(setting.step(levels)),
    )
    seed = digest("rotation", entropy.key)
    rounded = np.empty((setting.cohort_size, codec.length), np.int64)
    updates = directions(setting.cohort_size, setting.dimension, cosine, entropy.child("updates"))
    for client, update in enumerate(updates):
        centres = codec.prepare(update * float(setting.clip), seed)
        rounded[client] = stochastic_round(centres, entropy.child("rounding", client).stream())
    nu = DiscreteGaussian(setting.sigma_steps(levels)).draw(codec.length, entropy.child("noise").stream())
    return Cohort(rounded, nu)


def literal_sum(cohort: Cohort, survivors: int, ring: Ring) -> IntVector:
    """Return the sum of the first clients' messages, m + nu / N in Nths of a step, as the server opens it."""
    total = ring.wrap(np.zeros(len(cohort.nu), np.int64))
    for client in range(survivors):
        ring.add_into(total, ring.wrap(cohort.size * cohort.rounded[client] + cohort.nu))
    return ring.center(total)


def recover_noise(total: IntVector, cohort: int, survivors: int) -> IntVector:
    """Return the noise as the server reads it from a sum of N sum(m) + survivors nu.

    Modulo N the clients' vectors vanish, which gives nu modulo N / gcd(survivors, N); of the values left, the one
    that makes sum(m) smallest is taken.
    """
    common = math.gcd(survivors, cohort)
    period = cohort // common
    known = total % cohort // common * pow(survivors // common, -1, period) % period
    nearest = (2 * (total - survivors * known) + survivors * period) // (2 * survivors * period)
    noise: IntVector = known + period * nearest
    return noise


def recovered_fraction(cohort: Cohort, survivors: int, ring: Ring) -> float:
    """Return the fraction of coordinates whose noise the server reads exactly."""
    read = recover_noise(literal_sum(cohort, survivors, ring), cohort.size, survivors)
    return float(np.mean(read == cohort.nu))


def masked_message(cohort: Cohort, client: int, masks: IntVector, group: int) -> IntVector:
    """Return what a client sends, in Nths of a step: vector and share behind masks of whole steps, in a group of q."""
    message: IntVector = (cohort.size * (cohort.rounded[client] + masks) + cohort.nu) % (cohort.size * group)
    return message


def noise_behind_masks(message: IntVector, opened: IntVector, cohort: int) -> IntVector:
    """Return the noise as the server reads it from one masked message and the opened sum(m) + nu of a full cohort.

    Modulo N the message is nu; of the values left, the one that makes sum(m) smallest is taken.
    """
    known = message % cohort
    noise: IntVector = known + cohort * ((2 * (opened - known) + cohort) // (2 * cohort))
    return noise


def noise_pmf(sigma: Fraction, cohort: int, missing: int) -> Masses:
    """Return the law of integer shares' sum without the last ranks' ones, from its least value on."""
    reach = math.ceil(14 * sigma)
    nu = np.arange(-reach, reach + 1)
    late = [Share(rank, cohort, Entropy.replay(b"")) for rank in range(cohort - missing, cohort)]
    left = nu - sum((share.part(nu) for share in late), np.zeros_like(nu))
    mass = np.bincount(left - left.min(), weights=np.exp(-(nu**2) / (2 * float(sigma) ** 2)))
    return np.asarray(mass / mass.sum())


def unit_divergence(pmf: Masses) -> float:
    """Return the Kullback-Leibler divergence in nats between the law and itself one step on."""
    here, there = pmf[1:], pmf[:-1]
    return float(np.sum(here * np.log(here / there)))


def rounded_share_leak(cohort: Cohort) -> float:
    """Return the fraction of coordinates whose true sum a full cohort's total shows, if shares are rounded to L."""
    size = cohort.size
    share = (2 * cohort.nu + size) // (2 * size)
    truth = cohort.rounded.sum(axis=0)
    return _read_fraction(truth + size * share, truth, size)


def integer_share_leak(cohort: Cohort) -> float:
    """Return the same for integer shares, whose sum is the whole noise: chance alone."""
    truth = cohort.rounded.sum(axis=0)
    return _read_fraction(truth + cohort.nu, truth, cohort.size)


def findings(
    curves: dict[str, Fractions], cohorts: dict[str, tuple[Cohort, int]], entropy: Entropy
) -> tuple[Finding, ...]:
    """Return what masks, a missing client and a rounded share give away; curves are the `recovered_curves`."""
    most = max(levels for _, levels in cohorts.values())
    return _masked(cohorts, entropy), _literal(curves), _integer(most), _rounded(cohorts)


def recovered_curves(cohorts: dict[str, tuple[Cohort, int]]) -> dict[str, Fractions]:
    """Return, for each named cohort and its levels, the recovered fraction for 0, 1, 2 ... missing clients."""
    return {
        name: tuple(
            recovered_fraction(cohort, cohort.size - missing, Ring(_ring_bits(levels)))
            for missing in range(MOST_MISSING + 1)
        )
        for name, (cohort, levels) in cohorts.items()
    }


def _ring_bits(levels: int) -> int:
    return math.ceil(literal_bits(INFIMNIST, levels))


def _read_fraction(total: IntVector, truth: IntVector, size: int) -> float:
    centred = (total + size // 2) % size - size // 2
    return float(np.mean(centred == truth))


def behind_masks_fraction(cohort: Cohort, levels: int, entropy: Entropy) -> float:
    """Return the fraction of coordinates whose noise one masked message and the sum of a full cohort show."""
    group = sum_range(INFIMNIST, levels)
    masks = entropy.stream().below_each(group, len(cohort.nu)).astype(np.int64)
    message = masked_message(cohort, 0, masks, group)
    opened = cohort.rounded.sum(axis=0) + cohort.nu
    return float(np.mean(noise_behind_masks(message, opened, cohort.size) == cohort.nu))


def _masked(cohorts: dict[str, tuple[Cohort, int]], entropy: Entropy) -> Finding:
    said = "; ".join(
        f"{name}: {behind_masks_fraction(cohort, levels, entropy.child(name)):.1%}"
        for name, (cohort, levels) in cohorts.items()
    )
    return Finding(
        topic="masks leave the shares open",
        claim="behind the masks u_ij, drawn from multiples of the step, the server sees nothing but the sum",
        where="Algorithm 1, the line that sends u_ij; Theorem on secure aggregation",
        truth="nu / N is no multiple of the step, so no mask hides its fraction: any one client's message shows nu "
        f"modulo N steps. With the opened sum that is nu itself on so many coordinates, nobody missing: {said}",
        how="simulated at INFIMNIST's size: one masked message modulo the step, and the sum of a full cohort; of the "
        "values of nu that are left, the one with the smallest sum of updates",
        remedy="masks on the lattice of the shares, which the next erratum grants, or integer shares",
    )


def _literal(curves: dict[str, Fractions]) -> Finding:
    said = "; ".join(
        f"{name}: {curve[1]:.1%} with 1 missing, {curve[10]:.1%} with 10 (by guessing alone {curve[0]:.1%})"
        for name, curve in curves.items()
    )
    return Finding(
        topic="literal shares, a client drops out",
        claim="the complete secure aggregation, which deals with dropouts, is reconciled by exactly the same trick",
        where=SHARE + "; Remark 2 on secure aggregation",
        truth=f"the server reads the noise itself from the sum of those left, on so many coordinates: {said}",
        how="simulated at INFIMNIST's size, behind masks that hide all but the sum: with M clients left it is N sum(m) "
        "+ M nu, in Nths of a step, and modulo N the vectors m vanish. Guessing: sum(m) = 0. Clients agree: cosine "
        f"{ALIGNED:g} between updates",
        remedy="void a round with a missing share, or let every client draw noise of its own, with dropouts planned "
        "for",
    )


def _integer(levels: int) -> Finding:
    sigma, cohort = INFIMNIST.sigma_steps(levels), INFIMNIST.cohort_size
    intact, broken = (unit_divergence(noise_pmf(sigma, cohort, missing)) for missing in (0, 1))
    moved = ((levels - 1) // 2) ** 2  # coordinates that a vector of norm D can move by one step each
    return Finding(
        topic="integer shares, a client drops out",
        claim="the same of shares that are integers and add up to nu",
        where="not in the paper: a natural repair of Algorithm 1",
        truth=f"where a coordinate moves by a step, the law of the sum moves by {broken:.2g} nats instead of "
        f"{intact:.2g}; over the {moved} coordinates that an update of norm D can move, {moved * broken:.3g} instead "
        f"of {moved * intact:.2g}",
        how=f"Kullback-Leibler divergence of the noise without one share, k = {levels}: every {cohort - 1}th value is "
        "twice as likely",
        remedy="as above: void the round, or independent noise",
    )


def _rounded(cohorts: dict[str, tuple[Cohort, int]]) -> Finding:
    said = "; ".join(
        f"{name}: {rounded_share_leak(cohort):.1%} (integer shares {integer_share_leak(cohort):.1%})"
        for name, (cohort, _) in cohorts.items()
    )
    return Finding(
        topic="shares rounded to the lattice",
        claim="nu / (gamma n) is added to vectors on the lattice L, in a group of multiples of its step",
        where=SHARE,
        truth="it is no multiple of the step; if each share is rounded to one, a full cohort's total shows sum(m) "
        f"modulo N, and sum(m) itself on so many coordinates: {said}",
        how="simulated as above, nobody missing: N equal integer shares add up to a multiple of N; integer shares that "
        "add up to nu give what chance gives",
        remedy="integer shares floor((nu + rank) / N), which sum to nu exactly",
    )
