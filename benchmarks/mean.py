"""The error of a private mean against the bits of a message: each mechanism beside a trusted server's Gaussian."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.explicit import privacy_target
from d2pfed.accounting import SERVER, Sampling
from d2pfed.errors import ConfigError
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.rotation import seeded_bits
from d2pfed.plan import Plan, PrivacyTarget, calibrate, ideal_multiplier
from d2pfed.round import Attempt
from d2pfed.round.participant import Participant
from d2pfed.round.session import delivery_of, rotation_seed, session_of
from d2pfed.secagg import Delivery

DELTA = 1e-5
LONGEST_MEAN = 0.1  # over the clip: the mean of vectors with random signs has a length of 1 / sqrt(n)
CURVE = (1000, 250)  # clients and numbers of the literature's figures
BITS = (8, 9, 10, 11, 12, 13, 14, 16, 18)
CURVE_EPSILONS = (0.5, 2.0, 8.0)
GRID_CLIENTS = (100, 1000, 10_000)
GRID_DIMENSIONS = (250, 4096, 65_536)
_COORDINATES = 40_000  # over all sums, whose errors are averaged
_ENCODINGS = 40_000  # of all clients over all sums, at most
_SEED = b"bench-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRow:
    """The mean squared error of the mean of unit vectors with random signs.

    `error` is measured, `trusted` that of a trusted server's Gaussian at the same epsilon and delta, so that their
    ratio is the price of having no such server; `bits` are those of a coordinate, `size_bytes` of a client's vector.
    """

    what: str  # curve: the bits are given; grid: the plan chooses them
    mechanism: str
    clients: int
    dimension: int
    epsilon: float
    bits: int
    coordinates: int
    size_bytes: int
    error: float
    trusted: float
    sums: int
    seconds: float

    @property
    def key(self) -> tuple[object, ...]:
        """Return what is measured."""
        return self.what, self.mechanism, self.clients, self.dimension, self.epsilon, self.bits, self.sums

    @property
    def ratio(self) -> float:
        """Return the error over that of a trusted server."""
        return self.error / self.trusted


def bench_mean(known: Sequence[MeanRow] = ()) -> Iterator[MeanRow]:
    """Yield the curves of error against bits, then a row for each size at the bits that a plan chooses.

    What is known already is not measured again.
    """
    clients, dimension = CURVE
    for epsilon in CURVE_EPSILONS:
        for mechanism in MechanismName:
            for bits in BITS:
                target = target_of(clients, dimension, epsilon)
                yield from rows_of("curve", replace(target, mechanism=mechanism, bits=bits), known)
    for clients in GRID_CLIENTS:
        for dimension in GRID_DIMENSIONS:
            for epsilon in CURVE_EPSILONS:
                target = target_of(clients, dimension, epsilon)
                for mechanism in MechanismName:
                    yield from rows_of("grid", replace(target, mechanism=mechanism), known)
                for length in (dimension // 4, dimension // 16) if dimension >= 4096 else ():
                    yield from rows_of("grid", replace(target, compression=length), known)


def target_of(clients: int, dimension: int, epsilon: float) -> PrivacyTarget:
    """Return a target for one sum over everyone: nobody is missing, and nobody helps the server."""
    usual = privacy_target(dimension=dimension, population=clients, cohort_size=clients, rounds=1, epsilon=epsilon)
    asked = replace(usual, sampling=Sampling.NONE, against=SERVER, delta=DELTA, spare=0)
    return replace(asked, longest_mean=LONGEST_MEAN)


def rows_of(what: str, target: PrivacyTarget, known: Sequence[MeanRow] = ()) -> Iterator[MeanRow]:
    """Yield a measured row; none where a mechanism cannot keep the target with these bits."""
    try:
        plan = calibrate(target)
    except ConfigError:
        return
    clients, dimension, folded = plan.cohort_size, target.dimension, target.compression
    row = MeanRow(
        what=what,
        mechanism=target.mechanism.value + (f", 1/{dimension // folded}" if isinstance(folded, int) else ""),
        clients=clients,
        dimension=dimension,
        epsilon=target.epsilon,
        bits=plan.ring.bits,
        coordinates=plan.codec.length,
        size_bytes=math.ceil(plan.codec.length * plan.ring.bits / 8),
        trusted=dimension * (2 * ideal_multiplier(target) / clients) ** 2,  # sigma over twice the clip
        sums=max(1, min(_COORDINATES // dimension, _ENCODINGS // clients)),
        error=math.nan,
        seconds=math.nan,
    )
    for each in known:
        if each.key == row.key:
            yield each
            return
    begun = time.perf_counter()
    errors = [_squared_error(plan, Entropy.replay(_SEED).child(number)) for number in range(row.sums)]
    yield replace(row, error=float(np.mean(errors)), seconds=(time.perf_counter() - begun) / row.sums)


def _squared_error(plan: Plan, entropy: Entropy) -> float:
    """Return how far one private mean is from the true one, by the clients' own encoder and a ring sum."""
    session = session_of(plan, Attempt("mean", 0, 0), tuple(range(plan.cohort_size)))
    group = digest("group", entropy.key) if delivery_of(plan) is Delivery.EVERYONE else None
    total, signs = np.zeros(plan.codec.length, np.uint32), np.zeros(plan.dimension, np.int64)
    for client in range(plan.cohort_size):
        random = entropy.child(client)
        bits = np.unpackbits(seeded_bits(random.child("signs").key, plan.dimension), count=plan.dimension)
        own = 2 * bits.astype(np.int64) - 1
        signs += own
        participant = Participant(plan=plan, client=client, entropy=random, participations=0)
        update = own.astype(np.float32) / np.float32(math.sqrt(plan.dimension))
        plan.ring.add_into(total, participant.encode(session, update, group))
    found = plan.codec.decode(plan.ring.center(total), rotation_seed(session), plan.divisor)
    return float(np.sum((found - signs / (plan.divisor * math.sqrt(plan.dimension))) ** 2))
