"""From what a user asks of `fit` to a complete privacy target, or to cohorts in the clear."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from d2pfed.accounting import Adjacency, CohortSampling, Sampling, Unit
from d2pfed.errors import ConfigError
from d2pfed.fields import check_range, checked_fields
from d2pfed.plan import DEFAULT_TARGET, PrivacyTarget
from d2pfed.plan.bounds import MOST_ATTEMPTS_PER_ROUND, MOST_COHORT, MOST_ROUNDS
from d2pfed.plan.calibrate import ideal_multiplier
from d2pfed.plan.target import AUTO

RECORD_PRIVACY = replace(
    DEFAULT_TARGET, unit=Unit.RECORD, sampling=Sampling.NONE, adjacency=Adjacency.ADD_REMOVE, dropouts=0.0
)
NOISE_TO_CLIP = 2.0  # norm of a round's noise over the clip, up to which a cohort is made smaller for more rounds
LEAST_ROUNDS, MANY_ROUNDS = 10, 100  # that are chosen
LEAST_COHORT, LARGEST_COHORT = 20, 20_000  # that are chosen; colluders are counted in no larger ones
# Of infimnist: 100,000 clients, each asked once; `auto` would fold to four times as many coordinates.
MAIN_JOB = {"rounds": 50, "cohort_size": 1000, "spare": 5, "compression": 2048}
FEW_CLIENTS = 1000  # below it, the default delta is no small number


@dataclass(frozen=True, slots=True)
class Scope:
    """How a run goes over its clients; without a target nothing is private."""

    target: PrivacyTarget | None
    sampling: CohortSampling
    rounds: int
    notes: tuple[str, ...]  # on what was chosen, one line each


def scope_of(
    privacy: PrivacyTarget | Mapping[str, object] | None,
    *,
    dimension: int,
    population: int,
    rounds: int | None,
    cohort_size: int | None,
    count_units: Callable[[], int] | None = None,
    is_main_job: bool = False,
) -> Scope:
    """Fill in a privacy target, or say how cohorts are drawn without one.

    `count_units` counts the records, or groups of records, of all silos, for a target whose unit is a record.
    `is_main_job`: the clients are infimnist's own, for which rounds and cohorts are known.
    """
    asked = privacy if isinstance(privacy, PrivacyTarget) else None
    if privacy is not None and asked is None:
        changes = checked_fields(PrivacyTarget, privacy, "privacy")
        asked = replace(RECORD_PRIVACY if changes.get("unit") == Unit.RECORD else DEFAULT_TARGET, **changes)
    rounds = _count("rounds", rounds, asked, MOST_ROUNDS)
    cohort_size = _count("cohort_size", cohort_size, asked, MOST_COHORT)
    if asked is None:
        if rounds is None or cohort_size is None:
            raise ConfigError("rounds and cohort_size must be given for training in the clear")
        if cohort_size > population:
            raise ConfigError(f"cohort_size must be at most the population {population}, got {cohort_size}")
        method = Sampling.ONCE if rounds * cohort_size <= population else Sampling.FIXED
        each = "each client in at most one round" if method is Sampling.ONCE else "a fresh cohort in each round"
        note = f"In the clear, {each}: it protects nobody."
        return Scope(None, CohortSampling(method, population, cohort_size), rounds, (note,))
    asked = asked.completed("fit", dimension=dimension, population=population)
    if population == 1 and asked.delta is None:
        raise ConfigError(
            "one client cannot hide among others: split the data over clients, or state delta (population^-1.1 is 1)"
        )
    if is_main_job and rounds is None and cohort_size is None:
        rounds, cohort_size = MAIN_JOB["rounds"], MAIN_JOB["cohort_size"]
        is_tuned = asked.compression == AUTO and 2 * MAIN_JOB["compression"] <= dimension
        asked = replace(
            asked,
            spare=MAIN_JOB["spare"] if asked.spare is None else asked.spare,
            compression=MAIN_JOB["compression"] if is_tuned else asked.compression,
        )
    notes = []
    if asked.unit is Unit.RECORD:
        if rounds is None:
            raise ConfigError("rounds must be given for the unit record")
        if asked.records is None and count_units is not None:
            if asked.adjacency is Adjacency.ADD_REMOVE:
                raise ConfigError(
                    "records must be given under add-remove: a public number near that of all silos' records, by which "
                    "sums are divided; if the true number may be known, choose adjacency zero-out, and it is counted"
                )
            asked = replace(asked, records=max(1, count_units()))
        cohort_size = population
    if rounds is None or cohort_size is None:
        rounds, cohort_size, why = split_population(asked, rounds, cohort_size)
        notes.append(why)
    target = replace(asked, rounds=rounds, cohort_size=cohort_size)
    # A round that is killed again and again is bounded by the run's attempts, not by its own.
    tries = min(MOST_ATTEMPTS_PER_ROUND, target.attempts_per_round + target.max_attempts - target.rounds)
    target = replace(target, attempts_per_round=tries)
    protected = target.records or population
    if target.delta is None and protected < FEW_CLIENTS:
        notes.append(
            f"Delta is {'records' if target.records else 'population'}^-1.1 = {target.effective_delta:.2g}, large as "
            "they are few: state a smaller one."
        )
    return Scope(target, target.cohort_sampling, rounds, tuple(notes))


def split_population(target: PrivacyTarget, rounds: int | None, cohort_size: int | None) -> tuple[int, int, str]:
    """Choose rounds and cohorts for a target whose clients are asked once each; a tenth of the rounds is reserve.

    The noise of a round does not depend on how many rounds there are, so its norm over the clip falls as cohorts grow.
    Cohorts are as small as keeps it at 2 times the clip, for as many rounds as that gives, from 10 to 100, and never so
    small that fewer than half of their clients can be counted on; what is left of the population makes them larger.
    """
    if target.sampling is not Sampling.ONCE:
        raise ConfigError(f"rounds and cohort_size must be given, unless sampling is once, got {target.sampling}")
    population = target.population
    if rounds is not None:
        # Without a reserve, if there is none to have.
        size = population // (rounds + math.ceil(rounds / 10)) or population // rounds
        if size < 1:
            raise ConfigError(f"rounds must be at most the population {population} under `once`, got {rounds}")
        return rounds, size, f"Cohorts of {size:,}: {population:,} clients over {rounds:,} rounds and a reserve."
    if cohort_size is not None:
        if cohort_size > population:
            raise ConfigError(f"cohort_size must be at most the population {population}, got {cohort_size}")
        count = min(MOST_ROUNDS, _most_rounds(population // cohort_size))
        return count, cohort_size, f"{count:,} rounds: {population:,} clients in cohorts of {cohort_size:,}."
    whole = replace(target, rounds=1, cohort_size=population, colluders=0.0, spare=0)
    # The norm of the least noise in a sum over the clip.
    spread = target.adjacency.radii * ideal_multiplier(whole) * math.sqrt(target.dimension)

    def honest(size: int) -> int:  # how many clients of a cohort neither drop out nor collude
        own = replace(target, rounds=1, cohort_size=size, spare=0)
        return own.quorum - own.cohort_colluders

    def noise(size: int) -> float:  # its norm in the mean of a whole cohort, over the clip
        return spread / math.sqrt(size * max(1, honest(size)))

    # The smallest cohorts for which a condition holds that does so for all larger ones.
    largest = min(LARGEST_COHORT, population)
    sizes = range(1, largest + 1)
    sound, quiet = (
        None if at == largest else sizes[at]
        for at in (
            bisect_left(sizes, 1, key=lambda size: honest(size) >= size / 2),
            bisect_left(sizes, 1, key=lambda size: noise(size) <= NOISE_TO_CLIP),
        )
    )
    if sound is None:
        raise ConfigError(
            f"no cohort of {population:,} clients has an honest half with {target.dropouts:g} dropouts and "
            f"{target.colluders:g} colluders: plan for fewer"
        )
    most = _most_rounds(population // min(population, max(sound, LEAST_COHORT)))
    count = min(most, MANY_ROUNDS, max(LEAST_ROUNDS, _most_rounds(population // (quiet or population))))
    blocks = count + math.ceil(count / 10) if count > 1 else 1
    size = min(LARGEST_COHORT, population // blocks)
    enough = f"from {quiet:,} clients on it is at most" if quiet else f"even with {largest:,} clients it is above"
    why = (
        f"{count:,} round{'s' * (count != 1)} with cohorts of {size:,} clients, each asked once: the noise of a round "
        f"is {noise(size):.2g} times the clip ({enough} "
        f"{NOISE_TO_CLIP:g}; an honest half needs {sound:,})."
    )
    return count, size, why


def _most_rounds(blocks: int) -> int:
    """Return the most rounds that leave a tenth of them in reserve; a single block has none."""
    return max(1, 10 * blocks // 11)


def _count(name: str, given: object, asked: PrivacyTarget | None, most: int) -> int | None:
    """Return a number that `fit` is given, or that the target has; None: it is to be chosen."""
    stated: int | None = None if asked is None else getattr(asked, name)
    if given is None:
        return stated
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(f"{name} must be a whole number or None, got {given!r}")
    check_range(name, given, 1, most)
    if stated not in (None, given):
        raise ConfigError(f"the privacy target has {name} {stated}, and fit is given {given}")
    return given
