import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy
from d2pfed.round import Outcome
from d2pfed.training import Cohorts, ServerOptimizer, train
from support.stats import check_fits

FALSE_ALARM = 1e-6
ROOT = Entropy.replay(b"test training")


def means(rounds, length=50):
    """Return a round's mean for each round, as different in size as signs and powers of ten make them."""
    grid = np.arange(length)
    return [(np.sin(grid * (t + 1) + t) * 10.0 ** (t % 4 - 2)).astype(np.float32) for t in range(rounds)]


def states(step, given_means, start=None):
    state = step.start(np.linspace(-1, 1, given_means[0].size, dtype=np.float32) if start is None else start)
    found = [state]
    for mean in given_means:
        found.append(step.apply(found[-1], mean))
    return found


def close(left, right):
    return np.allclose(left, right, rtol=2e-5, atol=2e-6)


# The server's step


def test_the_plain_step_is_federated_averaging():
    plain = states(ServerOptimizer(), means(5))
    for before, after, mean in zip(plain, plain[1:], means(5), strict=False):
        assert np.array_equal(after.params, before.params + mean)
        assert np.array_equal(after.average, after.params)


def test_momentum_equals_a_loop_by_hand():
    step, given_means = ServerOptimizer(lr=0.3, momentum=0.9), means(12)
    params, velocity = np.linspace(-1, 1, 50), np.zeros(50)
    for mean in given_means:
        velocity = 0.9 * velocity + mean
        params = params + 0.3 * velocity
    assert close(states(step, given_means)[-1].params, params)


def test_momentum_equals_sgd_of_torch():
    step, given_means = ServerOptimizer(lr=0.3, momentum=0.9), means(12)
    params = torch.linspace(-1, 1, 50, dtype=torch.float64, requires_grad=True)
    run(torch.optim.SGD([params], lr=0.3, momentum=0.9), params, given_means)
    assert close(states(step, given_means)[-1].params, params.detach().numpy())


def run(optimizer, params, given_means):
    for mean in given_means:
        params.grad = -torch.from_numpy(mean.astype(np.float64))  # a mean of updates is the way down
        optimizer.step()


@pytest.mark.parametrize("first", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_two_moments_equal_adam_of_torch(first, rounds):
    step = ServerOptimizer(lr=0.1, momentum=first, second_moment=0.99)
    params = torch.linspace(-1, 1, 50, dtype=torch.float64, requires_grad=True)
    run(torch.optim.Adam([params], lr=0.1, betas=(first, 0.99), eps=1e-8), params, means(rounds))
    found = states(step, means(rounds))[-1].params
    assert close(found, params.detach().numpy())
    uncorrected = np.linspace(-1, 1, 50) + (found - np.linspace(-1, 1, 50)) * (1 - first)
    assert first == 0 or not close(uncorrected, params.detach().numpy())


def test_yogi_follows_the_squares_by_their_sign():
    beta, given_means, second = 0.9, means(30), np.zeros(50)
    params, first = np.linspace(-1, 1, 50), np.zeros(50)
    for number, mean in enumerate((each.astype(np.float64) for each in given_means), 1):
        first = 0.5 * first + 0.5 * mean
        second = np.where(second > mean**2, second - (1 - beta) * mean**2, second + (1 - beta) * mean**2)
        params = params + 0.1 * first / (1 - 0.5**number) / (np.sqrt(second / (1 - beta**number)) + 1e-8)
    step = ServerOptimizer(lr=0.1, momentum=0.5, second_moment=beta, second_rule="yogi")
    assert close(states(step, given_means)[-1].params, params)
    assert not close(states(replace(step, second_rule="adam"), given_means)[-1].params, params)


def test_decay_shrinks_the_rate_by_the_round():
    step, given_means = ServerOptimizer(lr=2.0, lr_decay=0.5), means(6)
    expected = np.linspace(-1, 1, 50) + sum(2.0 * 0.5**t * mean for t, mean in enumerate(given_means))
    assert close(states(step, given_means)[-1].params, expected)


@given(st.floats(0.01, 0.99), st.integers(1, 20))
def test_averaging_is_the_corrected_exponential_mean_of_the_models(averaging, rounds):
    found = states(ServerOptimizer(averaging=averaging), means(rounds, 10))[1:]
    weights = (1 - averaging) * averaging ** np.arange(rounds)[::-1]
    expected = sum(weight * state.params for weight, state in zip(weights, found, strict=True)) / weights.sum()
    assert close(found[-1].average, expected)


def test_averaging_does_not_touch_the_training():
    with_average, without = (states(ServerOptimizer(momentum=0.5, averaging=a), means(8)) for a in (0.9, 0.0))
    for left, right in zip(with_average, without, strict=True):
        assert np.array_equal(left.params, right.params)
    assert not np.array_equal(with_average[-1].average, without[-1].average)


def test_the_first_average_is_the_first_model_and_not_the_start():
    first = states(ServerOptimizer(averaging=0.99), means(1))[1]
    assert close(first.average, first.params)


@pytest.mark.parametrize(
    "step", [ServerOptimizer(), ServerOptimizer(momentum=0.9, second_moment=0.9, averaging=0.5, lr_decay=0.9)]
)
def test_a_step_changes_no_state_that_was_given_and_keeps_single_precision(step):
    start = step.start(np.ones(4, np.float32))
    kept = [part.copy() for part in (start.params, start.velocity, start.second, start.average)]
    after = step.apply(start, np.full(4, 0.5, np.float32))
    for part, copy in zip((start.params, start.velocity, start.second, start.average), kept, strict=True):
        assert np.array_equal(part, copy)
    assert {part.dtype for part in (after.params, after.velocity, after.average)} == {np.dtype(np.float32)}
    assert (start.rounds, after.rounds) == (0, 1)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"lr": 0.0}, r"lr must be positive and at most 1e\+06, got 0\.0"),
        ({"lr": math.nan}, "lr must be positive and at most .*, got nan"),
        ({"lr": math.inf}, "lr must be positive and at most .*, got inf"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0\.1"),
        ({"second_moment": 1.0}, r"second_moment must be in \[0, 1\), got 1\.0"),
        ({"averaging": 1.0}, r"averaging must be in \[0, 1\), got 1\.0"),
        ({"lr_decay": 0.0}, r"lr_decay must be in \(0, 1\], got 0\.0"),
        ({"lr_decay": 1.1}, r"lr_decay must be in \(0, 1\], got 1\.1"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(wrong, rule):
    with pytest.raises(ConfigError, match=rule):
        ServerOptimizer(**wrong)


# Cohorts


def cohorts(scheme, population, cohort, name="cohorts"):
    return Cohorts(CohortSampling(scheme, population, cohort), ROOT.child(name))


def uniform(count):
    return lambda values: np.where((values >= 0) & (values < count), 1 / count, 0.0)


def biased(drawn):
    """A planted bug: now and then the last client of a cohort gives its place to client 0."""
    return tuple(sorted({0, *drawn[:-1]})) if drawn[-1] == 5 and 0 not in drawn and 3 in drawn else drawn


def test_fixed_cohorts_are_uniform_subsets():
    index = {subset: number for number, subset in enumerate(combinations(range(6), 3))}
    drawn = [cohorts(Sampling.FIXED, 6, 3).draw(number, 0, 0) for number in range(20_000)]
    check_fits(np.array([index[subset] for subset in drawn]), uniform(20), FALSE_ALARM)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(np.array([index[biased(subset)] for subset in drawn]), uniform(20), FALSE_ALARM)


def test_fixed_cohorts_of_two_rounds_are_independent():
    drawn = [cohorts(Sampling.FIXED, 4, 1).draw(number, 0, 0)[0] for number in range(20_000)]
    pairs = 4 * np.array(drawn[:-1:2]) + np.array(drawn[1::2])
    check_fits(pairs, uniform(16), FALSE_ALARM)
    stuck = 4 * np.array(drawn[:-1:2]) + np.where(np.arange(10_000) % 10, drawn[1::2], drawn[:-1:2])
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(stuck, uniform(16), FALSE_ALARM)


@given(st.integers(1, 200), st.data())
def test_a_fixed_cohort_is_sorted_and_of_its_size(population, data):
    cohort = data.draw(st.integers(1, population))
    drawn = cohorts(Sampling.FIXED, population, cohort).draw(
        data.draw(st.integers(0, 10**9)), data.draw(st.integers(0, 9)), 0
    )
    assert list(drawn) == sorted(set(drawn))
    assert len(drawn) == cohort
    assert set(drawn) <= set(range(population))


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_once_is_a_partition(rounds, cohort, left_over):
    source = cohorts(Sampling.ONCE, rounds * cohort + left_over, cohort)
    drawn = [client for number in range(rounds) for client in source.draw(0, 0, number)]
    assert len(set(drawn)) == len(drawn) == rounds * cohort
    assert set(drawn) <= set(range(rounds * cohort + left_over))


def test_once_gives_each_client_each_round_alike():
    drawn = [
        next(
            number
            for number in range(3)
            if 4 in cohorts(Sampling.ONCE, 6, 2, f"partition {seed}").draw(0, 0, number)
        )
        for seed in range(5000)
    ]
    check_fits(np.array(drawn), uniform(3), FALSE_ALARM)


def test_once_has_no_round_beyond_the_population():
    source = cohorts(Sampling.ONCE, 25, 10)
    assert len(source.draw(7, 3, 1)) == 10
    with pytest.raises(ConfigError, match="2 blocks of 10 out of 25, got block 2"):
        source.draw(0, 0, 2)


def test_a_known_cohort_is_always_the_same():
    source = cohorts(Sampling.NONE, 10, 4)
    assert source.draw(0, 0, 0) == source.draw(7, 2, 5) == (0, 1, 2, 3)


@pytest.mark.parametrize("scheme", [Sampling.FIXED, Sampling.ONCE])
def test_cohorts_follow_from_the_entropy(scheme):
    same, again, other = (cohorts(scheme, 1000, 100, name) for name in ("one", "one", "two"))
    places = [(3, 1, 3), (0, 0, 0), (9, 0, 9)]
    assert [same.draw(*place) for place in places] == [again.draw(*place) for place in places]
    assert same.draw(0, 0, 0) != other.draw(0, 0, 0)
    assert same.draw(0, 0, 0) != same.draw(1, 0, 1)
    assert all(type(client) is int for client in same.draw(0, 0, 0))


def test_every_attempt_has_a_fresh_cohort():
    drawn = {
        cohorts(Sampling.FIXED, 1000, 100).draw(number, attempt, 0) for number in range(20) for attempt in range(5)
    }
    assert len(drawn) == 100


def test_the_cohorts_of_two_attempts_at_a_round_are_independent():
    source = cohorts(Sampling.FIXED, 4, 1)
    pairs = [4 * source.draw(number, 0, 0)[0] + source.draw(number, 1, 0)[0] for number in range(10_000)]
    check_fits(np.array(pairs), uniform(16), FALSE_ALARM)
    same = [
        5 * source.draw(number, 0, 0)[0] for number in range(10_000)
    ]  # the planted bug: a retry keeps its cohort
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(np.array(same), uniform(16), FALSE_ALARM)


def test_a_partition_goes_by_its_block_alone():
    source = cohorts(Sampling.ONCE, 100, 10)
    assert source.draw(0, 0, 3) == source.draw(5, 2, 3)
    assert not set(source.draw(0, 0, 3)) & set(source.draw(0, 0, 4))


# The loop


class Descent:
    """Moves the model half-way to the round's number, and counts how often it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, state):
        number = state.rounds
        self.asked.append(number)
        return Outcome(((number - state.params) / 2).astype(np.float32), attempt=number % 2, survivors=90 + number)


STEP = ServerOptimizer(lr=0.7, momentum=0.5, second_moment=0.9, lr_decay=0.9, averaging=0.8)


def test_there_is_one_record_for_each_round():
    descent = Descent()
    records = list(train(STEP.start(np.zeros(3, np.float32)), STEP, 5, descent))
    assert descent.asked == [0, 1, 2, 3, 4]
    assert [record.round for record in records] == [record.state.rounds for record in records] == [1, 2, 3, 4, 5]
    assert [record.attempt for record in records] == [0, 1, 0, 1, 0]
    assert [record.survivors for record in records] == [90, 91, 92, 93, 94]
    assert records[0].update_norm == 0
    mean = (1 - records[0].state.params) / 2
    assert records[1].update_norm == pytest.approx(float(np.linalg.norm(mean)))


@pytest.mark.parametrize("kept", range(6))
def test_a_run_carried_on_from_a_kept_state_gives_the_same_numbers(kept):
    start = STEP.start(np.arange(4, dtype=np.float32))
    whole = list(train(start, STEP, 6, Descent()))
    state = whole[kept - 1].state if kept else start
    rest = list(train(replace(state), STEP, 6, Descent()))
    assert len(rest) == 6 - kept
    for left, right in zip(whole[kept:], rest, strict=True):
        assert (left.round, left.survivors, left.update_norm) == (right.round, right.survivors, right.update_norm)
        for name in ("params", "velocity", "second", "average"):
            assert np.array_equal(getattr(left.state, name), getattr(right.state, name))


def test_nothing_happens_unless_it_is_asked_for():
    descent = Descent()
    records = train(STEP.start(np.zeros(3, np.float32)), STEP, 100, descent)
    assert descent.asked == []
    next(records)
    next(records)
    assert descent.asked == [0, 1]
    records.close()
    assert descent.asked == [0, 1]


def test_a_run_that_is_over_yields_nothing():
    descent = Descent()
    *_, last = train(STEP.start(np.zeros(3, np.float32)), STEP, 2, descent)
    assert list(train(last.state, STEP, 2, descent)) == []
    assert descent.asked == [0, 1]


def test_a_round_that_fails_ends_the_run_after_the_records_before_it():
    def failing(state):
        if state.rounds == 2:
            raise ConfigError("a round failed")
        return Descent()(state)

    records = train(STEP.start(np.zeros(3, np.float32)), STEP, 5, failing)
    assert [next(records).round, next(records).round] == [1, 2]
    with pytest.raises(ConfigError, match="a round failed"):
        next(records)
