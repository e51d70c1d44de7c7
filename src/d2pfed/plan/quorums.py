"""Which cohort, quorum and graph withstand a target's dropouts and colluders."""

from dataclasses import replace

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError
from d2pfed.plan.names import MechanismName
from d2pfed.plan.target import PrivacyTarget
from d2pfed.secagg.graph import (
    SIGNED_COMPLETE_UP_TO,
    SIGNED_UP_TO,
    Consistency,
    Neighbourhood,
    Risk,
    choose,
    complete,
)


def neighbourhood_of(target: PrivacyTarget) -> Neighbourhood:
    """Return who holds whose shares: the least that withstands the target's dropouts and colluders."""
    _require_honest_majority(target)
    risk = Risk(dropouts=target.cohort_size - target.quorum, colluders=target.cohort_colluders)
    # Under `shared` everyone contributes to everyone's seed, which needs a channel between any two.
    if target.mechanism is not MechanismName.SHARED:
        return choose(target.cohort_size, risk, target.consistency)
    if target.consistency is Consistency.SIGNED and target.cohort_size > SIGNED_COMPLETE_UP_TO:
        raise ConfigError(
            f"the mechanism {target.mechanism} under signed consistency takes cohorts of at most "
            f"{SIGNED_COMPLETE_UP_TO}, got {target.cohort_size}"
        )
    return complete(target.cohort_size, risk)


def _require_honest_majority(target: PrivacyTarget) -> None:
    """Refuse a target whose quorums may have nobody honest in common, and state what would do."""
    cohort, quorum, colluders = target.cohort_size, target.quorum, target.cohort_colluders
    if 2 * quorum > cohort + colluders:
        return
    missing = cohort - (cohort + colluders) // 2 - 1
    hints = [f"at most {missing} dropouts"] if missing >= 0 and cohort >= colluders + 2 else []
    hints += [f"at most {2 * quorum - cohort - 1} colluders in a cohort"] if 2 * quorum > cohort else []
    hints += [f"a cohort of {larger}"] if (larger := _larger_cohort(target)) else []
    raise ConfigError(
        f"2 quorum > cohort + colluders must hold, or two quorums may sign different survivors: {cohort - quorum} "
        f"dropouts and {colluders} colluders of {cohort} leave 2 x {quorum} <= {cohort} + {colluders}; "
        f"what would do: {', or '.join(hints) or 'fewer of both'}"
    )


def _larger_cohort(target: PrivacyTarget) -> int | None:
    """Return a larger cohort, in steps of a quarter, that has few enough dropouts and colluders at the same shares."""
    most = min(target.population // (target.rounds if target.sampling is Sampling.ONCE else 1), SIGNED_UP_TO)
    size = target.cohort_size
    while (size := size + max(1, size // 4)) <= most:
        larger = replace(target, cohort_size=size, spare=0, max_participations=None)
        if 2 * larger.quorum > size + larger.cohort_colluders:
            return size
    return None
