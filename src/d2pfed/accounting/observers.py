"""One epsilon per observer: what each observer sees of the releases, and what they cost against it."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache

from d2pfed.accounting.amplification import is_amplified, once_epsilon, record_runs_epsilon, sampled_runs_epsilon
from d2pfed.accounting.composition import (
    AdditiveCost,
    Amplification,
    NoiseCost,
    composed,
    costliest_choice,
    filtered_epsilon,
    method_for,
    total_epsilon,
)
from d2pfed.accounting.events import (
    Adjacency,
    BatchSampling,
    CohortSampling,
    Release,
    RunReleases,
    Sampling,
    Unit,
    releases_by_run,
)
from d2pfed.accounting.laws import ContinuousGaussian, Noise
from d2pfed.accounting.losses import COARSE, FINE
from d2pfed.accounting.rdp import check_delta, sparse_orders
from d2pfed.errors import ConfigError
from d2pfed.fields import Choice, check_arguments, check_fields

# The chance that a verified draw has more colluders than planned (COHORT_BITS of the neighbors); delta excludes it.
UNCOUNTED = "2^-40 for each cohort size, which is not in delta"


class View(Choice):
    """What an observer sees."""

    RELEASED = "released"  # the released models, nothing of who took part
    SERVER = "server"  # every sum and every cohort
    CLIENT = "client"  # the models, the cohorts, and its own share of the noise
    COLLUDING = "colluding"  # the server's view and the noise of some clients
    ALONE = "alone"  # the server's view and the noise of every client but one


@dataclass(frozen=True, slots=True)
class Observer:
    """A view, and for `COLLUDING` how many clients share it.

    Attributes:
        view: released, server, client, colluding or alone.
        colluders: how many clients collude with the server; 0 in all other views.

    Examples:
        >>> str(SERVER), str(colluding(3)), colluding(3).colluders
        ('server', 'colluding(3)', 3)
    """

    view: View
    colluders: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.colluders > 0) != (self.view is View.COLLUDING) or self.colluders < 0:
            raise ConfigError(f"colluders must be positive for colluding and 0 otherwise, got {self.colluders}")

    def __str__(self) -> str:
        return f"{self.view}({self.colluders})" if self.colluders else str(self.view)


RELEASED, SERVER, CLIENT, ALONE = (Observer(one) for one in (View.RELEASED, View.SERVER, View.CLIENT, View.ALONE))


def colluding(colluders: int) -> Observer:
    """Return the server together with some clients as one observer.

    Args:
        colluders: how many clients tell the server all they know.

    Examples:
        >>> str(colluding(3))
        'colluding(3)'
    """
    return Observer(View.COLLUDING, colluders)


def observer_named(name: str) -> Observer:
    """Return the observer of that name."""
    known = {str(each): each for each in (RELEASED, SERVER, CLIENT, ALONE)}
    if name in known:
        return known[name]
    count = name.removeprefix("colluding(").removesuffix(")")
    if name == f"colluding({count})" and count.isdecimal() and count.isascii() and len(count) <= 9:
        return colluding(int(count))
    raise ConfigError(f"against must be released, server, client, alone or colluding(c), got {name[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One epsilon and all that it depends on.

    Attributes:
        epsilon: the guarantee; infinite where there is none.
        delta: its failure probability.
        observer: against whom it holds.
        unit: the unit of privacy.
        adjacency: the neighboring relation.
        sampling: how cohorts were sampled, and whether that amplified, in words.
        max_participations: the cap on one client's participations in a run that was assumed.
        accountant: how the cost was composed.
        reason: why epsilon is infinite; else empty.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> (released, *_) = describe(target, calibrate(target)).guarantees
        >>> released.unit.value, released.adjacency.value, released.epsilon <= 2
        ('client', 'replace-one', True)
    """

    epsilon: float
    delta: float
    observer: Observer
    unit: Unit
    adjacency: Adjacency
    sampling: str
    max_participations: int
    accountant: str
    reason: str = ""


def account(
    releases: Sequence[Release], observer: Observer, *, delta: float, max_participations: int
) -> Guarantee:
    """Return what the releases cost against the observer, on the fine grid.

    Args:
        releases: every charged attempt is a release of its own, behind its own cohort.
        observer: against whom.
        delta: the probability that the guarantee may fail, over all releases together.
        max_participations: the number of unmasked uploads in one run that every client itself enforces.

    Guarantee: (epsilon, delta)-privacy of each unit under the stated adjacency; errs upwards only.
    Proof: theory.md#observers. Checked: test_accounting_observers.py, test_accounting_oracle.py.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> releases = [plan.release("", at, 0, (), plan.quorum) for at in range(plan.max_attempts)]
        >>> account(releases, RELEASED, delta=plan.delta, max_participations=plan.max_participations).epsilon <= 2
        True
    """
    check_arguments(account, locals())
    return _account(tuple(releases), observer, delta, max_participations, FINE)


def upper_bound(
    releases: Sequence[Release], observer: Observer, *, delta: float, max_participations: int
) -> Guarantee:
    """Return the same as `account` on a coarse grid: several times faster, at most a few parts in 10^3 above it."""
    return _account(tuple(releases), observer, delta, max_participations, COARSE)


def _account(
    releases: tuple[Release, ...], observer: Observer, delta: float, max_participations: int, points: int
) -> Guarantee:
    check_delta(delta)
    if max_participations < 1:
        raise ConfigError(f"max_participations must be at least 1, got {max_participations}")
    check_releases(releases)
    runs = releases_by_run(releases, max_participations)
    found = runs_epsilon(runs, releases[0].adjacency, observer, delta, points)
    epsilon, accountant, amplified = found or (math.inf, "none", True)
    told = SERVER if observer.view is View.RELEASED and not amplified else observer
    kinds = dict.fromkeys((run.sampling, run.batches) for run in runs)
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        observer=observer,
        unit=releases[0].unit,
        adjacency=releases[0].adjacency,
        sampling="; ".join(_describe(*kind, told) for kind in kinds)
        if accountant != "allocation"
        else f"{_drawn(runs[0].sampling)}, amplified, unknown block",
        max_participations=max_participations,
        accountant=accountant,
        reason="" if found else f"a release has no noise that is unknown to {observer}",
    )


def runs_epsilon(
    runs: Sequence[RunReleases], adjacency: Adjacency, observer: Observer, delta: float, points: int
) -> tuple[float, str, bool] | None:
    """Return epsilon, the accountant, and whether amplification helped; None if the observer knows all of a noise."""
    exposed = [left for run in runs if (left := without_known_noise(run, observer)) is not None]
    if len(exposed) < len(runs):
        return None
    if any(run.batches is not None for run in exposed):
        return (*record_runs_epsilon(exposed, adjacency, delta, points), True)
    # A client may be known to take part in the costliest releases of each run, up to its cap.
    noises = list({noise for run in exposed for noise, _ in run.noises})
    most = sum(min(run.max_participations, run.count) for run in exposed)
    method = method_for(noises, most)

    def total(noise_cost: NoiseCost, _amplify: Amplification) -> AdditiveCost:
        costs = {noise: noise_cost(noise, adjacency.radii) for noise in noises}
        return composed(
            (costliest_choice([(costs[noise], count) for noise, count in run.noises], run.max_participations), 1)
            for run in exposed
        )

    plain = total_epsilon(method, total, delta, most, sparse_orders), str(method)
    if observer.view is View.RELEASED:
        # This view is a function of one that knows the cohorts, so whatever holds there holds here.
        amplified = sampled_runs_epsilon(runs, adjacency, delta, points)
        amplified = min(amplified, once_epsilon(runs, plain[0], delta))
        if amplified < plain:
            return (*amplified, True)
    return (*plain, False)


def without_known_noise(run: RunReleases, observer: Observer) -> RunReleases | None:
    """Return the run with the noise that the observer does not know; None if some release has none."""
    known = {View.CLIENT: 1, View.COLLUDING: observer.colluders}.get(observer.view, 0)
    noises: list[tuple[Noise, int]] = []
    for noise, count in run.noises:
        left: Noise | None
        if isinstance(noise, ContinuousGaussian):
            # The server adds this noise itself, so every observer with the server's view knows it.
            left = noise if observer.view in {View.RELEASED, View.CLIENT} else None
        elif observer.view is View.ALONE:
            left = noise.without(max(1, noise.contributors - 1))  # a single contributor is a seed that all share
        else:
            left = noise.without(known)
        if left is None:
            return None
        noises.append((left, count))
    return replace(run, noises=tuple(noises))


def check_releases(releases: Sequence[Release]) -> None:
    """Refuse releases that do not make one account."""
    if not releases:
        raise ConfigError("there must be at least one release to account for")
    distinct = {id(release): release for release in releases}.values()
    given: Iterable[object] = distinct
    if strange := [each for each in given if not isinstance(each, Release)]:
        raise ConfigError(f"releases must be of the type Release, got {type(strange[0]).__name__}")
    if len({(release.unit, release.adjacency) for release in distinct}) > 1:
        raise ConfigError("all releases of one account must have the same unit and adjacency")
    silos = {release.max_silos for release in distinct}
    if len(silos) > 1:
        raise ConfigError(f"all releases of one account must have the same max_silos, got {sorted(silos)}")


def _drawn(sampling: CohortSampling) -> str:
    return f"{sampling.cohort_size} of {sampling.population}, {sampling.method}"


def _describe(sampling: CohortSampling, batches: BatchSampling | None, observer: Observer) -> str:
    if batches is not None:
        person = f", a person in up to {batches.max_silos} silos" if batches.max_silos > 1 else ""
        if batches.rate == 1:
            return f"all records of {sampling.population} silos, not amplified{person}"
        coin = f"by a secret coin of {float(batches.rate):.4g}, amplified{person}"
        return f"each record of {sampling.population} silos {coin}"
    drawn = _drawn(sampling)
    is_drawn = sampling.method is not Sampling.NONE and sampling.cohort_size < sampling.population
    if observer.view is View.COLLUDING and is_drawn:
        drawn += f", more than {observer.colluders} colluders in a drawn cohort with chance {UNCOUNTED}"
    if observer.view is View.RELEASED and is_amplified(sampling):
        return f"{drawn}, amplified, known size"
    return f"{drawn}, not amplified"


_OF_RECORDS = 0.9  # the share of delta for accounts that come to hold releases of records of one kind alone


def client_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of one client that took part in all of these releases, for replace-one neighbours.

    The releases may be of any runs, plans and mechanisms, and each may have been chosen after seeing the ones
    before: a client that takes part only while this stays below its budget is protected by that budget. Noise
    that the server adds itself does not protect against the server: infinite.

    Where all of them are of records, with one noise and one rate, it is epsilon of a record, amplified by the coins,
    which the silo tosses itself and tells nobody. Cohorts are drawn by the server, so they amplify nothing; nor do
    coins in an account with anything else in it.

    Guarantee: a filter; errs upwards. Proof: theory.md#client. Checked: test_accounting_client.py.
    """
    noises = Counter(release.noise for release in releases)
    if any(isinstance(noise, ContinuousGaussian) for noise in noises):
        return math.inf
    drawn = {release.batches for release in releases}
    if drawn <= {None}:
        return filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, delta)
    plain = filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, (1 - _OF_RECORDS) * delta)
    if len(noises) > 1 or len(drawn) > 1:
        return plain
    ((noise, count),), (batches,) = noises.items(), drawn
    return plain if batches is None else min(plain, _of_records(noise, batches, count, _OF_RECORDS * delta))


@lru_cache(maxsize=64)  # it is asked for before, at and after each charge
def _of_records(noise: Noise, batches: BatchSampling, count: int, delta: float) -> float:
    """Return epsilon of one record of this silo; what a person has in other silos is for those to count."""
    everyone = CohortSampling(Sampling.NONE, 1, 1)
    run = RunReleases(everyone, ((noise, count),), count, batches=replace(batches, max_silos=1))
    return record_runs_epsilon([run], Adjacency.REPLACE_ONE, delta, COARSE)[0]


def round_up(value: float, digits: int) -> str:
    """Return a bound in at most this many significant digits, none of which is too small.

    Guarantee: read as a number, the text is at least `value`. Checked: test_accounting_formatting.py.
    """
    if not math.isfinite(value):
        return "infinite" if value == math.inf else "not a number"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(float(value)))).normalize()
    if rounded != 0 and not Decimal("0.001") <= abs(rounded) < Decimal(1_000_000):
        mantissa, exponent = f"{rounded:e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{rounded:f}"
