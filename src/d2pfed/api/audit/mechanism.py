"""The audit of the mechanism: two neighboring worlds, distinguished by what the server sees of whole rounds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from d2pfed.accounting import SERVER, Adjacency, Sampling, account
from d2pfed.api.audit.bounds import counted_epsilon, gaussian_epsilon
from d2pfed.errors import ConfigError
from d2pfed.fields import check_between
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.numerics.rotation import Fold
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.round import Attempt, AttemptSession, rotation_seed, session_of
from d2pfed.simulation import Encoder, Fidelity, SimulatedFederation

DIMENSION = 8  # a power of two, so that no coordinate is padding and the decoded mean holds all that is in the sum
RELEASES = 2  # of one trial: noise that is used twice shows only in two
TARGET_CLIENT = 0
MOST_CLIP = 1e30
_BEYOND = 4.0  # times the clip: the pipeline has to clip it
_OFFSETS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # thresholds, in standard deviations of the statistic from the middle

SHOWS = (
    "This attack can show that the code of a whole round leaks more than claimed, but not that it leaks no more. It "
    "does not try rare events, other inputs or side channels."
)


class Worlds(StrEnum):
    """The two worlds that the server has to distinguish."""

    NEIGHBORS = "neighbours"  # one client's vector differs as much as the adjacency allows
    SAME = "same"  # nothing differs: whatever is found is an error of the audit


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismAudit:
    """What the attack on the mechanism came to."""

    claimed: float  # epsilon against the server of all releases of a trial
    delta: float  # of the claim and of the bounds
    counted: float  # lower bound by Clopper-Pearson intervals alone
    gaussian: float  # lower bound if the mechanism's trade-off curve is a Gaussian one
    confidence: float  # that both bounds hold together
    trials: int  # per world, fixed beforehand
    errors: tuple[int, int]  # false alarms and misses at the middle threshold
    releases: int  # rounds per trial
    cohort_size: int
    survivors: int  # in the sum: the fewest that may be
    mechanism: str
    fidelity: Fidelity
    worlds: Worlds
    shows: str = SHOWS

    @property
    def is_refuted(self) -> bool:
        """Whether a lower bound is above the claim."""
        return max(self.counted, self.gaussian) > self.claimed


def audited_plan(target: PrivacyTarget, releases: int = RELEASES) -> Plan:
    """Return the plan that is attacked: the target's mechanism against the server, each client in every release."""
    if target.against != SERVER or target.initial_clip is not None:
        raise ConfigError(
            f"an audit needs a fixed clip and a claim against the server, got {target.clip} and {target.against}"
        )
    return calibrate(
        replace(
            target,
            dimension=DIMENSION,
            population=target.cohort_size,
            rounds=releases,
            spare=0,
            sampling=Sampling.NONE,
            max_participations=releases,
        )
    )


def audit_mechanism(
    plan: Plan,
    trials: int,
    *,
    entropy: Entropy | None = None,
    confidence: float = 0.99,
    fidelity: Fidelity = Fidelity.PROTOCOL,
    worlds: Worlds = Worlds.NEIGHBORS,
) -> MechanismAudit:
    """Attack a plan: `trials` times in each of two worlds, its rounds are run and the server guesses the world.

    Args:
        plan: from `audited_plan`; every client takes part in all of its rounds.
        trials: per world; fixed beforehand, as all else.
        entropy: the root of the worlds' randomness; None is the system's.
        confidence: that both lower bounds hold together.
        fidelity: protocol sends every message, sum adds up the same ring vectors without masks.
        worlds: neighbours, or the same, where the bounds must be 0.
    """
    if trials < 1:
        raise ConfigError(f"trials must be at least 1, got {trials}")
    check_between("confidence", confidence, 0, 1)
    if not 1 / MOST_CLIP <= plan.codec.clip <= MOST_CLIP:
        raise ConfigError(
            f"an audit needs a clip in [{1 / MOST_CLIP:g}, {MOST_CLIP:g}], whose multiples fit float32, got "
            f"{plan.codec.clip:g}"
        )
    root = Entropy.system() if entropy is None else entropy
    # The direction that is attacked in each round. After its rotation the client's vector has opposite signs in any two
    # releases that follow each other: the best test of fresh noise is then also one from which noise that is used again
    # falls out.
    rounds, rotation = list[tuple[AttemptSession, FloatVector]](), plan.codec.rotation
    for number in range(plan.rounds):
        session = session_of(plan, Attempt("audit", number, 0), tuple(range(plan.cohort_size)))
        direction = np.eye(1, plan.dimension, dtype=np.float32)[0]
        if rounds:
            before = rotation.forward(rounds[-1][1], rotation_seed(rounds[-1][0]))
            back = rotation.lift if isinstance(rotation, Fold) else rotation.inverse
            direction = back(-before, rotation_seed(session)).astype(np.float32)
        rounds.append((session, direction))
    two_sided = plan.adjacency is Adjacency.REPLACE_ONE
    lower = -_BEYOND if two_sided else 0.0  # the target's vector in each world, along what is attacked
    zero, seen = np.zeros(plan.dimension, np.float32), np.zeros((2, trials))
    for place, world in enumerate((lower, lower if worlds is Worlds.SAME else _BEYOND)):
        length = np.float32(world * plan.codec.clip)
        for trial in range(trials):
            source = root.child("trial", trial, "world", place)
            for session, direction in rounds:  # as few survivors as may be, and all but the target send zero
                vectors = dict.fromkeys(session.cohort[: plan.quorum], zero) | {TARGET_CLIENT: length * direction}
                federation = SimulatedFederation(
                    plan=plan, backend=_Given(vectors), entropy=source, fidelity=fidelity
                )
                collected = federation.collect(session, zero, dict.fromkeys(session.cohort, session.round))
                total = plan.ring.center(collected.unmask().vector)
                mean = plan.codec.decode(total, rotation_seed(session), plan.cohort_size)
                seen[place, trial] += float(np.dot(mean.astype(np.float64), direction))
    seen *= plan.cohort_size
    # The threshold halfway between the two worlds, and the planned standard deviation of the statistic.
    middle = 0.0 if two_sided else plan.rounds * plan.codec.clip / 2
    spread = math.sqrt(plan.rounds * plan.noise(plan.quorum).sum_variance) * plan.codec.granularity
    counts = {}
    for offset in _OFFSETS:
        threshold = middle + offset * spread
        counts[offset] = int(np.sum(seen[0] > threshold)), int(np.sum(seen[1] <= threshold))
    alpha = (1 - confidence) / 2  # one half for each kind of bound
    release, cap = plan.release("", 0, 0, (), plan.quorum), plan.max_participations
    claimed = account([release] * plan.max_attempts, SERVER, delta=plan.delta, max_participations=cap)
    return MechanismAudit(
        claimed=claimed.epsilon,
        delta=plan.delta,
        counted=max(counted_epsilon(each, trials, plan.delta, alpha / len(_OFFSETS)) for each in counts.values()),
        gaussian=gaussian_epsilon(counts[0.0], trials, plan.delta, alpha),
        confidence=confidence,
        trials=trials,
        errors=counts[0.0],
        releases=plan.rounds,
        cohort_size=plan.cohort_size,
        survivors=plan.quorum,
        mechanism=type(plan.mechanism).__name__.lower(),
        fidelity=fidelity,
        worlds=worlds,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """Clients whose updates are given; one without an update drops out before the third exchange."""

    vectors: dict[int, FloatVector] = field(repr=False)

    def train(self, _params: FloatVector, clients: Sequence[int], _seed: int) -> Iterator[FloatVector | None]:
        """Yield the updates of these clients, in their order."""
        return (self.vectors.get(client) for client in clients)

    def encode(
        self, encoder: Encoder, _params: FloatVector, clients: Sequence[int], _seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Yield the sum of the ring vectors of those who have an update."""
        present = tuple(client for client in clients if client in self.vectors)
        yield present, encoder.total([(client, self.vectors[client]) for client in present])

    def close(self) -> None:
        """There is nothing to end."""
