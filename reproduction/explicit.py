"""Every setting of the paper's evaluation, written out: a changed default of the library changes no result."""

from d2pfed.accounting import RELEASED, Adjacency, Sampling, Unit
from d2pfed.learning import LocalTraining, Optimizer
from d2pfed.plan import MechanismName, PrivacyTarget, ProtocolChoice, RotationName
from d2pfed.secagg.trust import Consistency
from d2pfed.training import SecondMoment, ServerOptimizer


def privacy_target(
    *,
    dimension: int,
    population: int,
    cohort_size: int,
    rounds: int,
    epsilon: float,
    delta: float,
    mechanism: MechanismName = MechanismName.CENTERED,
    clip: float = 1.0,
    bits: int | None = None,
    rotation: RotationName = RotationName.HADAMARD,
) -> PrivacyTarget:
    """Return the paper's kind of target: fixed-size cohorts, against who sees the models, one attempt per round."""
    return PrivacyTarget(
        dimension=dimension,
        population=population,
        cohort_size=cohort_size,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        against=RELEASED,
        mechanism=mechanism,
        sampling=Sampling.FIXED,
        adjacency=Adjacency.REPLACE_ONE,
        dropouts=0.0,
        colluders=0.0,
        draws=4 << 12,
        consistency=Consistency.ASSUMED,
        protocol=ProtocolChoice.AUTO,
        compression="off",
        longest_mean=1.0,
        download_bits=32,
        max_participations=None,
        attempts_per_round=3,
        spare=0,
        clip=clip,
        bits=bits,
        rotation=rotation,
        unit=Unit.CLIENT,
        records=None,
        batch_rate=None,
        max_silos=1,
    )


def local_training(
    *, lr: float, batch_size: int, optimizer: Optimizer = Optimizer.SGD, momentum: float = 0.0, epochs: int = 1
) -> LocalTraining:
    """Return how a client trains."""
    return LocalTraining(
        optimizer=optimizer,
        lr=lr,
        momentum=momentum,
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


def server_optimizer(
    *, lr: float = 1.0, momentum: float = 0.0, lr_decay: float = 1.0, averaging: float = 0.0
) -> ServerOptimizer:
    """Return how the server moves the model; without arguments, plain federated averaging."""
    return ServerOptimizer(
        lr=lr,
        momentum=momentum,
        second_moment=0.0,
        second_rule=SecondMoment.ADAM,
        lr_decay=lr_decay,
        averaging=averaging,
    )


PAPER_LOCAL = local_training(optimizer=Optimizer.ADAM, lr=1e-3, epochs=5, batch_size=10)  # the paper's clients
