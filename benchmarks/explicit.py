"""Every setting of the benchmarks, written out: a changed default of the library changes no measured work."""

from typing import TYPE_CHECKING

from d2pfed.accounting import RELEASED, Adjacency, Sampling, Unit
from d2pfed.plan import MechanismName, PrivacyTarget, ProtocolChoice, RotationName
from d2pfed.secagg.trust import Consistency

if TYPE_CHECKING:
    from d2pfed.learning import LocalTraining


def privacy_target(
    *, dimension: int, population: int, cohort_size: int, rounds: int, epsilon: float = 1.0, dropouts: float = 0.0
) -> PrivacyTarget:
    """Return a target of fixed-size cohorts against who sees the models, with delta population^-1.1."""
    return PrivacyTarget(
        dimension=dimension,
        population=population,
        cohort_size=cohort_size,
        rounds=rounds,
        epsilon=epsilon,
        delta=None,
        against=RELEASED,
        mechanism=MechanismName.CENTERED,
        sampling=Sampling.FIXED,
        adjacency=Adjacency.REPLACE_ONE,
        dropouts=dropouts,
        colluders=0.0,
        draws=4 << 12,
        consistency=Consistency.ASSUMED,
        protocol=ProtocolChoice.AUTO,
        compression="off",
        longest_mean=1.0,
        download_bits=32,
        max_participations=None,
        attempts_per_round=3,
        spare=None,
        clip=1.0,
        bits=None,
        rotation=RotationName.HADAMARD,
        unit=Unit.CLIENT,
        records=None,
        batch_rate=None,
        max_silos=1,
    )


def local_training(*, lr: float, epochs: int, batch_size: int) -> "LocalTraining":
    """Return plain SGD of a client."""
    from d2pfed.learning import LocalTraining, Optimizer  # noqa: PLC0415 - torch takes seconds to load

    return LocalTraining(
        optimizer=Optimizer.SGD,
        lr=lr,
        momentum=0.0,
        epochs=epochs,
        batch_size=batch_size,
        weight_decay=None,
        lr_schedule=None,
        step_schedule=None,
        max_grad_norm=None,
        proximal=None,
        precision=None,
        rounds=None,
    )
