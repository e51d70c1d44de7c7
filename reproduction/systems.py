"""The systems that are compared: each a way to aggregate, with the local training that goes with it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from d2pfed.accounting import RELEASED, Adjacency, ContinuousGaussian, Unit, account
from d2pfed.learning import LocalTraining
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import BinomialNoise, Mechanism, Shared
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, calibrate, describe, ideal_multiplier
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.trust import Consistency
from d2pfed.training import ServerOptimizer
from reproduction.as_coded import CodeNoise, CodeRun, Pixels
from reproduction.explicit import local_training, privacy_target, server_optimizer
from reproduction.published import Experiment, binomial_epsilon, d2pfed_epsilon
from reproduction.setting import DELTA
from reproduction.workload import Workload

OUR_LOCAL = local_training(lr=0.2, epochs=3, batch_size=10)  # these two: what `d2pfed train` takes by default
OUR_STEP = server_optimizer(lr=0.8, momentum=0.5, averaging=0.8)
PAPER_STEP = server_optimizer()
_OUR_CLIP = 1.0
_CLIPPED_COORDINATES = 1e-5  # chance that g_max changes any coordinate of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Something to run: `work` is a plan for secure aggregation, a trusted server's noise, the authors' own loop, or
    None for FedAvg."""

    name: str  # of its run's folder
    label: str  # in plots and tables
    workload: Workload
    work: Plan | ContinuousGaussian | CodeRun | None
    target: PrivacyTarget
    local: LocalTraining
    step: ServerOptimizer
    published: Callable[[int], float] | None = field(
        default=None, repr=False
    )  # from rounds to the printed epsilon

    @property
    def epsilon(self) -> float:
        """The true epsilon of the released models after the last round, as planned."""
        return self.work.epsilon if isinstance(self.work, Plan) else self.target.epsilon

    @property
    def as_coded(self) -> bool:
        """Whether this is the authors' loop as it ran, for which no bound holds."""
        return isinstance(self.work, CodeRun)

    @property
    def upload_bytes(self) -> int:
        """What a client sends in a round: the vector alone, padding included, keys and shares not."""
        if isinstance(self.work, Plan):
            return self.work.ring.packed_bytes(self.work.codec.length)
        return self.bits // 8 * self.workload.model.dimension

    @property
    def bits(self) -> int:
        """How many bits a coordinate takes on the wire; of the authors' loop, what the paper says of it."""
        if isinstance(self.work, CodeRun):
            return {CodeNoise.NONE: 32, CodeNoise.GAUSS: 16, CodeNoise.COINS: 24}[self.work.noise]
        return self.work.ring.bits if isinstance(self.work, Plan) else 32


def d2pfed(
    workload: Workload, *, sigma: float | None = None, clip: float | None = None, bits: int = 16, note: str = ""
) -> System:
    """Return the paper's Algorithm 1, its clip kept, with g_max as in its Remark 1, so that a bound holds.

    Its shares are integers: a fractional share is off the lattice, and the total is the same. A clip other than the
    experiment's changes what is run and not what was published.
    """
    experiment = workload.experiment
    sigma, clip = sigma or experiment.sigma, clip or experiment.clip
    rotation = Hadamard(workload.model.dimension)
    bound = _largest_coordinate(experiment, rotation.padded) * clip
    granularity = 2 * bound / (experiment.levels - 1)
    codec = Codec(rotation=rotation, clip=clip, granularity=granularity, box=bound if bound < clip else None)
    mechanism = Shared(Fraction(math.ceil(sigma / granularity * 1024), 1024))
    return System(
        name=f"d2pfed-{sigma:g}",
        label=f"D2P-Fed, sigma {sigma:g}{note}",
        workload=workload,
        work=_by_hand(experiment, codec, mechanism, bits),
        target=_target(workload, mechanism=MechanismName.SHARED, clip=clip, bits=bits),
        local=workload.local,
        step=PAPER_STEP,
        published=lambda rounds: d2pfed_epsilon(experiment, sigma, rounds),
    )


def cpsgd(workload: Workload, *, bits: int = 24) -> System:
    """Return cpSGD with the paper's levels and coins, at its three bytes."""
    experiment = workload.experiment
    granularity = 2 * experiment.clip / (experiment.cpsgd_levels - 1)
    codec = Codec(rotation=Hadamard(workload.model.dimension), clip=experiment.clip, granularity=granularity)
    mechanism = BinomialNoise(2 * math.ceil(experiment.cpsgd_trials / experiment.cohort_size / 2))
    return System(
        name="cpsgd",
        label="cpSGD",
        workload=workload,
        work=_by_hand(experiment, codec, mechanism, bits),
        target=_target(workload, mechanism=MechanismName.BINOMIAL, clip=experiment.clip, bits=bits),
        local=workload.local,
        step=PAPER_STEP,
        published=lambda rounds: binomial_epsilon(experiment, rounds),
    )


def fedavg(workload: Workload) -> System:
    """Return federated averaging of bare 32-bit updates."""
    return System(
        name="fedavg",
        label="not private",
        workload=workload,
        work=None,
        target=_target(workload),
        local=workload.local,
        step=PAPER_STEP,
    )


def as_coded(workload: Workload, noise: CodeNoise, *, sigma: float | None = None) -> System:
    """Return what the authors' code did in the paper's place: no bound on what a client shows holds for it."""
    experiment = workload.experiment
    coins = noise is CodeNoise.COINS
    levels = experiment.cpsgd_levels if coins else experiment.levels
    step = 2 * experiment.clip / (levels - 1)
    deviations = {
        CodeNoise.NONE: 0.0,
        CodeNoise.GAUSS: sigma or experiment.sigma,
        CodeNoise.COINS: step * math.sqrt(experiment.cpsgd_trials) / 2,
    }
    names = {
        CodeNoise.NONE: "not private",
        CodeNoise.GAUSS: f"D2P-Fed, sigma {deviations[CodeNoise.GAUSS]:g}",
        CodeNoise.COINS: "cpSGD",
    }
    published: dict[CodeNoise, Callable[[int], float] | None] = {
        CodeNoise.NONE: None,
        CodeNoise.GAUSS: lambda rounds: d2pfed_epsilon(experiment, deviations[CodeNoise.GAUSS], rounds),
        CodeNoise.COINS: lambda rounds: binomial_epsilon(experiment, rounds),
    }
    return System(
        name=f"as-coded-{noise}",
        label=f"{names[noise]}, as the code ran",
        workload=workload,
        work=CodeRun(
            noise=noise,
            deviation=deviations[noise],
            clip=experiment.clip,
            levels=levels,
            pixels=Pixels.BARE if workload.partition == "shards" else Pixels.STANDARDISED,
        ),
        target=_target(workload),
        local=workload.local,
        step=PAPER_STEP,
        published=published[noise],
    )


def planned(
    workload: Workload, kind: MechanismName, epsilon: float, *, bits: int | None = None, label: str = ""
) -> System:
    """Return a mechanism of ours, calibrated to a true epsilon of the released models, trained as by default."""
    target = _target(workload, mechanism=kind, epsilon=epsilon, clip=_OUR_CLIP, bits=bits)
    return System(
        name=f"{kind}-{epsilon:.4g}",
        label=label or str(kind),
        workload=workload,
        work=calibrate(target),
        target=target,
        local=OUR_LOCAL,
        step=OUR_STEP,
    )


def relative_error(system: System) -> float:
    """Return the root mean square error of its mean over a trusted server's at the same epsilon."""
    return describe(system.target, system.work).relative_error if isinstance(system.work, Plan) else 1.0


def with_smaller_lr(system: System, by: float) -> System:
    """Return the same with the server's rate divided by a number, if that is above 1: for greater noise."""
    rate = system.step.lr / max(1.0, by)
    return replace(system, step=replace(system.step, lr=float(f"{rate:.3g}")))


def ours_at_epsilon_of(system: System) -> System:
    """Return ours at the true epsilon of the system's released models, where no more noise enters than at epsilon 1."""
    epsilon = float(f"{system.epsilon:.3g}")
    ours = planned(system.workload, MechanismName.CENTERED, epsilon, label=f"ours, true epsilon {epsilon:g}")
    usual = ideal_multiplier(_target(system.workload, clip=_OUR_CLIP))
    return with_smaller_lr(ours, ideal_multiplier(ours.target) / usual)


def central(workload: Workload, epsilon: float) -> System:
    """Return the Gaussian mechanism of a server that everyone trusts, at a true epsilon of the released models."""
    target = _target(workload, epsilon=epsilon, clip=_OUR_CLIP)
    return System(
        name=f"gaussian-{epsilon:.4g}",
        label="central Gaussian",
        workload=workload,
        work=ContinuousGaussian(2 * _OUR_CLIP * ideal_multiplier(target), _OUR_CLIP),
        target=target,
        local=OUR_LOCAL,
        step=OUR_STEP,
    )


def _target(
    workload: Workload,
    *,
    mechanism: MechanismName = MechanismName.CENTERED,
    epsilon: float = 1.0,
    clip: float = _OUR_CLIP,
    bits: int | None = None,
) -> PrivacyTarget:
    experiment = workload.experiment
    return privacy_target(
        dimension=workload.model.dimension,
        population=experiment.population,
        cohort_size=experiment.cohort_size,
        rounds=experiment.rounds,
        epsilon=epsilon,
        delta=DELTA,
        mechanism=mechanism,
        clip=clip,
        bits=bits,
    )


def _largest_coordinate(experiment: Experiment, length: int) -> float:
    """Return g_max over the clip by the paper's Remark 1, or 1 where levels are fine enough without."""
    if experiment.levels - 1 >= math.sqrt(length):
        return 1.0
    return min(1.0, 2 * math.sqrt(math.log(2 * experiment.cohort_size * length / _CLIPPED_COORDINATES) / length))


def _by_hand(experiment: Experiment, codec: Codec, mechanism: Mechanism, bits: int) -> Plan:
    """Return the plan that these parts make, promising what they cost; as in the paper, no cap on participations."""
    plan = Plan(
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=experiment.sampling,
        rounds=experiment.rounds,
        attempts_per_round=1,
        max_attempts=experiment.rounds,
        max_participations=experiment.rounds,
        epsilon=1.0,
        delta=DELTA,
        against=RELEASED,
        consistency=Consistency.ASSUMED,
        colluders=0,
        quorum=experiment.cohort_size,
        threshold=least_threshold(experiment.cohort_size, 0),
        codec=codec,
        mechanism=mechanism,
        ring=Ring(bits),
    )
    releases = [plan.release("", number, 0, (), plan.quorum) for number in range(plan.rounds)]
    return replace(
        plan, epsilon=account(releases, RELEASED, delta=DELTA, max_participations=plan.max_participations).epsilon
    )
