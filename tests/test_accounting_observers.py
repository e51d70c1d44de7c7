"""One epsilon per observer, from what really happened."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from d2pfed.accounting.amplification import Accountant, cap_excess, epsilon_of
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.observers import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Observer,
    View,
    account,
    colluding,
    upper_bound,
)
from d2pfed.accounting.profiles import gaussian_epsilon
from d2pfed.cli.show import epsilons
from d2pfed.errors import ConfigError
from d2pfed.secagg.trust import COHORT_BITS

FIXED = CohortSampling(Sampling.FIXED, 100_000, 100)
ONCE = CohortSampling(Sampling.ONCE, 10_000, 100)
NONE = CohortSampling(Sampling.NONE, 100, 100)
INDEPENDENT = DiscreteGaussianSum(Fraction(2), 100, Fraction(8), 51_370)
SINGLE = DiscreteGaussianSum(Fraction(20), 1, Fraction(8), 51_370)
TRUSTED = ContinuousGaussian(20.0, 8.0)
SKELLAM = SkellamSum(Fraction(4), 100, Fraction(8), Fraction(64), 51_370)
BINOMIAL = BinomialSum(400_000, 100, Fraction(300), Fraction(60_000), Fraction(30), 51_370)
EVERY_NOISE = (INDEPENDENT, SINGLE, TRUSTED, SKELLAM, BINOMIAL)
EVERY_OBSERVER = (RELEASED, SERVER, CLIENT, colluding(10), ALONE)


def row(
    number,
    noise=INDEPENDENT,
    sampling=FIXED,
    adjacency=Adjacency.REPLACE_ONE,
    attempt=0,
    participants=(),
    run="run",
):
    return Release(
        run=run,
        round=number,
        attempt=attempt,
        unit=Unit.CLIENT,
        adjacency=adjacency,
        sampling=sampling,
        noise=noise,
        participants=participants,
    )


def rows(count, noise=INDEPENDENT, sampling=FIXED, adjacency=Adjacency.REPLACE_ONE):
    return [row(number, noise, sampling, adjacency) for number in range(count)]


def epsilon(releases, observer, max_participations=3, delta=1e-5):
    return account(releases, observer, delta=delta, max_participations=max_participations).epsilon


@pytest.mark.parametrize("noise", EVERY_NOISE)
def test_an_observer_that_sees_more_never_has_a_smaller_epsilon(noise):
    found = [
        epsilon(rows(30, noise), observer) for observer in (RELEASED, SERVER, colluding(1), colluding(10), ALONE)
    ]
    assert found == sorted(found)
    assert epsilon(rows(30, noise), RELEASED) <= epsilon(rows(30, noise), CLIENT)


@pytest.mark.parametrize("observer", EVERY_OBSERVER)
def test_a_guarantee_states_observer_unit_adjacency_delta_and_sampling(observer):
    result = account(rows(5), observer, delta=1e-6, max_participations=5)
    assert (result.observer, result.delta, result.max_participations) == (observer, 1e-6, 5)
    assert (result.unit, result.adjacency) == (Unit.CLIENT, Adjacency.REPLACE_ONE)
    assert ("not amplified" in result.sampling) == (observer != RELEASED)
    assert result.accountant == ("pld" if observer == RELEASED else "gaussian")


def test_the_chance_of_more_colluders_stands_beside_delta():
    """Of a drawn cohort; where nothing is drawn, or everyone is asked, no such chance is taken."""
    beside = f"with chance 2^-{COHORT_BITS} for each cohort size, which is not in delta"
    for sampling, observer, is_said in (
        (FIXED, colluding(2), True),
        (replace(FIXED, method=Sampling.ONCE), colluding(2), True),
        (replace(FIXED, method=Sampling.NONE), colluding(2), False),
        (replace(FIXED, population=FIXED.cohort_size), colluding(2), False),
        (FIXED, SERVER, False),
    ):
        item = account(rows(5, sampling=sampling), observer, delta=1e-6, max_participations=5)
        assert (beside in item.sampling) is is_said
        table = epsilons((item,))
        assert (beside in str(table.caption)) is is_said


def test_observers_print_as_they_are_named():
    assert [str(observer) for observer in EVERY_OBSERVER] == [
        "released",
        "server",
        "client",
        "colluding(10)",
        "alone",
    ]


def test_released_epsilon_is_within_half_a_percent_of_the_tight_gaussian():
    def by_gaussian(z):
        return epsilon_of(z, FIXED, 100, adjacency=Adjacency.REPLACE_ONE, delta=1e-5, accountant=Accountant.PLD)

    found = epsilon(rows(100), RELEASED, max_participations=100)
    assert by_gaussian(20 / 16) <= found <= by_gaussian(0.995 * 20 / 16)


def test_the_server_number_composes_the_cap_and_not_the_rounds():
    for cap in (1, 2, 5, 200):
        ratio = math.sqrt(min(cap, 100)) * 16 / 20
        exact = gaussian_epsilon(1e-5, ratio)
        assert exact <= epsilon(rows(100), SERVER, cap) <= exact * 1.005


def test_the_cap_takes_the_costliest_releases():
    weak = replace(INDEPENDENT, contributors=50)
    mixed = [row(0), row(1, weak), row(2), row(3, weak), row(4)]
    assert epsilon(mixed, SERVER, max_participations=2) == epsilon(rows(2, weak), SERVER, max_participations=2)
    assert (
        epsilon(mixed, SERVER, max_participations=1)
        < epsilon(mixed, SERVER, max_participations=3)
        < epsilon(mixed, SERVER, max_participations=5)
    )


@pytest.mark.parametrize("noise", [INDEPENDENT, SKELLAM, BINOMIAL])
def test_known_shares_of_the_noise_count_as_absent(noise):
    for observer, left in ((CLIENT, 99), (colluding(10), 90), (ALONE, 1)):
        fewer = replace(noise, contributors=left)
        assert epsilon(rows(4, noise), observer) == epsilon(rows(4, fewer), SERVER)


def test_noise_that_one_client_knows_is_none_against_it():
    for observer in (CLIENT, colluding(1), ALONE):
        result = account(rows(3, SINGLE), observer, delta=1e-5, max_participations=1)
        assert result.epsilon == math.inf
        assert "no noise" in result.reason
    assert epsilon(rows(3, SINGLE), SERVER) < math.inf


def test_noise_that_the_server_adds_is_none_against_it():
    for observer in (SERVER, colluding(1), ALONE):
        assert epsilon(rows(3, TRUSTED), observer) == math.inf
    assert epsilon(rows(3, TRUSTED), RELEASED) < epsilon(rows(3, TRUSTED), CLIENT) < math.inf


def test_more_colluders_than_contributors_leave_nothing():
    assert epsilon(rows(1), colluding(100)) == math.inf


def test_zero_out_halves_the_distance_where_nothing_is_replaced():
    for noise, sampling, observer in (
        (INDEPENDENT, FIXED, SERVER),
        (INDEPENDENT, ONCE, SERVER),
        (INDEPENDENT, NONE, RELEASED),
    ):
        half = replace(noise, radius=noise.radius / 2)
        zero_out = epsilon(rows(3, noise, sampling, Adjacency.ZERO_OUT), observer)
        assert zero_out == pytest.approx(epsilon(rows(3, half, sampling), observer), rel=1e-12)
    half = replace(INDEPENDENT, radius=INDEPENDENT.radius / 2)
    for cap in (20, 50):
        least = epsilon(rows(50, half, FIXED), RELEASED, cap)
        most = epsilon(rows(50, INDEPENDENT, FIXED), RELEASED, cap)
        assert least < epsilon(rows(50, INDEPENDENT, FIXED, Adjacency.ZERO_OUT), RELEASED, cap) < most


def test_a_partition_costs_at_most_its_worst_round():
    weak = replace(INDEPENDENT, contributors=60)
    partition = [row(0, INDEPENDENT, ONCE), row(1, weak, ONCE), row(2, INDEPENDENT, ONCE)]
    worst = epsilon([row(0, weak, ONCE)], SERVER, max_participations=1)
    assert epsilon(partition, RELEASED, max_participations=10) <= worst * (1 + 1e-4)
    assert epsilon(partition, SERVER, max_participations=1) == pytest.approx(worst, rel=1e-4)


def test_a_second_run_is_a_second_partition():
    first = rows(4, INDEPENDENT, ONCE)
    again = [replace(release, run="another") for release in first]
    twice = epsilon(first + again, RELEASED, max_participations=10)
    assert twice == pytest.approx(epsilon(rows(2, INDEPENDENT, NONE), RELEASED, max_participations=10), rel=1e-4)


def test_runs_are_distinguished_by_name_in_any_order_of_releases():
    first, second = (
        rows(4, INDEPENDENT, ONCE),
        [replace(each, run="another") for each in rows(4, INDEPENDENT, ONCE)],
    )
    mixed = [release for pair in zip(first, second, strict=True) for release in pair]
    for observer in (RELEASED, SERVER):
        assert epsilon(mixed, observer, max_participations=1) == pytest.approx(
            epsilon(first + second, observer, max_participations=1), rel=1e-12
        )
        assert epsilon(mixed, observer, max_participations=1) > 1.3 * epsilon(
            first, observer, max_participations=1
        )


def test_the_cap_holds_for_each_run_separately():
    first, second = rows(20), [replace(each, run="another") for each in rows(20)]
    assert epsilon(first + second, SERVER, max_participations=3) == pytest.approx(
        epsilon(rows(6), SERVER, max_participations=6), rel=1e-5
    )


def test_a_charged_attempt_is_a_further_release_behind_its_own_cohort():
    retried = [row(0), row(1), row(1, attempt=1), row(2)]
    for observer in EVERY_OBSERVER:
        assert epsilon(retried, observer, max_participations=4) == epsilon(rows(4), observer, max_participations=4)


def test_a_retry_at_half_time_costs_next_to_nothing():
    """The default job: epsilon 1 at 100 rounds; a retry behind the same cohort would make 2.2 of it."""
    noise = DiscreteGaussianSum(Fraction(2), 100, Fraction(10), 51_370)
    whole = upper_bound(rows(100, noise), RELEASED, delta=3e-6, max_participations=100).epsilon
    retried = upper_bound(
        [*rows(100, noise), row(99, noise, attempt=1)], RELEASED, delta=3e-6, max_participations=100
    ).epsilon
    assert whole < retried < 1.01 * whole


def test_a_retry_takes_the_next_block_and_a_repeated_block_counts_twice():
    apart = [row(0, sampling=ONCE, participants=(1, 2)), row(0, sampling=ONCE, attempt=1, participants=(3, 4))]
    again = [row(0, sampling=ONCE, participants=(1, 2)), row(0, sampling=ONCE, attempt=1, participants=(2, 4))]
    one, both = (gaussian_epsilon(1e-5, math.sqrt(count) * 16 / 20) for count in (1, 2))
    assert one <= epsilon(apart, SERVER, max_participations=1) <= 1.005 * one
    assert both <= epsilon(again, RELEASED, max_participations=9) <= 1.005 * both


def test_releases_of_a_run_must_share_their_sampling():
    with pytest.raises(ConfigError, match="one sampling"):
        epsilon([row(1), row(1, sampling=NONE, attempt=1)], RELEASED)
    epsilon([row(1), row(1, sampling=NONE, run="another")], RELEASED)


def test_what_a_cap_costs_falls_with_the_cap_and_grows_with_the_attempts():
    found = [cap_excess(FIXED, 100, cap) for cap in (1, 3, 5, 8, 100)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0
    assert cap_excess(FIXED, 2000, 8) > cap_excess(FIXED, 100, 8)
    for sampling in (ONCE, NONE, replace(FIXED, cohort_size=FIXED.population)):
        assert cap_excess(sampling, 100, 2) == 0


@pytest.mark.parametrize(
    ("cohort", "attempts", "cap", "kappa"),
    [(100, 100, 5, 6.6e-9), (1_000, 100, 11, 5.6e-9), (1_000, 1_000, 34, 1.6e-8), (10_000, 100, 32, 1.1e-8)],
)
def test_the_least_cap_that_costs_a_hundredth_of_delta(cohort, attempts, cap, kappa):
    sampling = CohortSampling(Sampling.FIXED, 100_000, cohort)
    delta = 100_000**-1.1
    assert cap_excess(sampling, attempts, cap) == pytest.approx(kappa, rel=0.05)
    assert cap_excess(sampling, attempts, cap) <= delta / 100 < cap_excess(sampling, attempts, cap - 1)


def test_a_guarantee_does_not_depend_on_who_took_part():
    """A number that depends on the cohorts beside an amplified one would undo the amplification."""
    happened = [row(number, participants=(1, 2, number + 5)) for number in range(3)]
    others = [row(number, participants=(number, 9)) for number in range(3)]
    for observer in EVERY_OBSERVER:
        assert account(happened, observer, delta=1e-5, max_participations=2) == account(
            others, observer, delta=1e-5, max_participations=2
        )


def test_survivors_that_differ_between_rounds_compose_round_by_round():
    def with_survivors(counts):
        return [row(i, replace(INDEPENDENT, contributors=count)) for i, count in enumerate(counts)]

    for observer in EVERY_OBSERVER[:4]:
        most, some, fewest = (
            upper_bound(with_survivors(counts), observer, delta=1e-5, max_participations=8).epsilon
            for counts in ([100] * 8, [100, 90, 80, 70, 100, 90, 80, 70], [70] * 8)
        )
        assert most < some < fewest


def test_the_upper_bound_is_above_the_account_and_close():
    for noise in EVERY_NOISE:
        fine, quick = (
            f(rows(100, noise), RELEASED, delta=1e-5, max_participations=100) for f in (account, upper_bound)
        )
        assert fine.epsilon * (1 - 1e-5) <= quick.epsilon <= 1.005 * fine.epsilon


@pytest.mark.parametrize("noise", EVERY_NOISE)
@pytest.mark.parametrize("observer", [RELEASED, SERVER])
def test_more_releases_and_smaller_deltas_cost_more(noise, observer):
    if observer is SERVER and noise is TRUSTED:
        return
    by_rounds = [epsilon(rows(count, noise), observer, max_participations=100) for count in (1, 10, 40)]
    by_delta = [epsilon(rows(10, noise), observer, 5, delta) for delta in (1e-3, 1e-5, 1e-7)]
    assert all(a <= b for a, b in pairwise(by_rounds))
    assert all(a <= b for a, b in pairwise(by_delta))


def test_noise_of_two_kinds_composes_and_binomial_stands_alone():
    result = account([row(0), row(1, SKELLAM)], SERVER, delta=1e-5, max_participations=2)
    assert result.accountant == "rdp"
    assert result.epsilon > epsilon([row(0)], SERVER)
    assert account([row(0), row(1, SKELLAM)], RELEASED, delta=1e-5, max_participations=2).accountant == "pld"
    for observer in (RELEASED, SERVER):
        with pytest.raises(ConfigError, match="binomial"):
            epsilon([row(0), row(1, BINOMIAL)], observer)


def test_noise_too_narrow_for_its_dimension_costs_nearly_infinity():
    narrow = DiscreteGaussianSum(Fraction(1), 100, Fraction(8), 65_536)
    assert epsilon(rows(100, narrow, NONE), SERVER, max_participations=100) == math.inf


def test_rounds_with_and_without_amplification_compose():
    trusted = rows(20, TRUSTED)
    some = trusted + [replace(release, run="another") for release in rows(2, TRUSTED, NONE)]
    assert epsilon(trusted, RELEASED, 30) < epsilon(some, RELEASED, 30)
    assert epsilon(rows(2, TRUSTED, NONE), RELEASED, 30) < epsilon(some, RELEASED, 30)
    assert epsilon([*rows(2, TRUSTED), row(2, SKELLAM)], RELEASED) < math.inf


@pytest.mark.parametrize(("delta", "accountant"), [(1e-13, "pld"), (1e-100, "pld"), (1e-306, "rdp")])
def test_the_smallest_deltas_get_a_finite_number(delta, accountant):
    result = account(rows(2000), RELEASED, delta=delta, max_participations=2000)
    assert result.accountant == accountant
    assert result.epsilon < math.inf


def test_noise_too_narrow_for_any_bound_costs_infinity():
    dust = DiscreteGaussianSum(Fraction(1, 10), 3, Fraction(1), 1)
    assert epsilon(rows(1, dust, NONE), SERVER) == math.inf


@pytest.mark.parametrize(
    ("releases", "max_participations", "delta", "rule"),
    [
        ([], 1, 1e-5, "at least one release"),
        (rows(1), 0, 1e-5, "max_participations"),
        (rows(1), 1, 0.0, "delta"),
        ([row(0), row(1, adjacency=Adjacency.ZERO_OUT)], 1, 1e-5, "same unit and adjacency"),
    ],
)
def test_invalid_accounts_are_refused(releases, max_participations, delta, rule):
    with pytest.raises(ConfigError, match=rule):
        account(releases, SERVER, delta=delta, max_participations=max_participations)


def test_only_a_colluding_observer_has_colluders():
    for view, colluders in ((View.SERVER, 1), (View.COLLUDING, 0), (View.COLLUDING, -1)):
        with pytest.raises(ConfigError, match="colluders"):
            Observer(view, colluders)


def test_a_cap_that_may_bind_is_charged_to_delta():
    """Other clients at their cap send zeros, which amplification does not foresee: delta pays, without a factor."""
    releases = rows(100)
    free = epsilon(releases, RELEASED, max_participations=100)
    hardly = epsilon(releases, RELEASED, max_participations=5)
    assert free < hardly < 1.01 * free
    rarely = epsilon(releases, RELEASED, max_participations=4)  # 4e-7 of 1e-5
    assert hardly < rarely
    assert rarely == pytest.approx(
        epsilon(releases, RELEASED, max_participations=100, delta=1e-5 - cap_excess(FIXED, 100, 4)), rel=1e-5
    )
    often = epsilon(releases, RELEASED, max_participations=1)
    assert often == epsilon(
        releases, SERVER, max_participations=1
    )  # what is left holds even where cohorts are known
    assert cap_excess(FIXED, 100, 1) > 1e-5


def test_too_many_releases_for_the_fine_grid_use_the_coarse_one():
    """Both are upper bounds; what is left without either, Renyi curves, needs more than twice the noise."""
    wide = [row(0, ContinuousGaussian(17.2, 1.0), CohortSampling(Sampling.FIXED, 400, 40))] * 110_000
    fine = account(wide, RELEASED, delta=1e-3, max_participations=110_000)
    assert fine.accountant == "pld"
    assert fine.epsilon == upper_bound(wide, RELEASED, delta=1e-3, max_participations=110_000).epsilon < 25
