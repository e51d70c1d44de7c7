"""The errata and the analytic results: golden numbers, laws behind them, and wrong twins that must be told apart."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from d2pfed.accounting import Accountant
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard
from d2pfed.secagg import upload_bytes
from reproduction import ball, communication, errata, error
from reproduction.errata import identities, moments, observers, practice, sensitivity, shares
from reproduction.result import Context, Result, Size, write
from reproduction.setting import CIFAR10, INFIMNIST

SMALL = replace(INFIMNIST, dimension=4096)
WIDE = Ring(24)


def _entropy(name: str) -> Entropy:
    return Entropy.replay(b"errata tests").child(name)


def _silent(folder, size: Size = Size.QUICK) -> Context:
    return Context(folder=folder, data=None, size=size, report=lambda _what, _done: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[Result, set[str]]]:
    """Every result, quickly made and written, with the kinds of files that came of it."""
    folder = tmp_path_factory.mktemp("results")
    heard: list[float] = []
    context = Context(folder=folder, data=None, size=Size.QUICK, report=lambda _what, done: heard.append(done))
    results = [module.make(context) for module in (ball, errata)]
    assert all(0 <= done <= 1 for done in heard)
    return {
        result.name: (result, {path.suffix for path in write(result, folder, "a command", "a date")})
        for result in results
    }


# The quantised ball


def _attained_by_trying(dimension: int, levels: int) -> Fraction:
    """Try every level vector: it is reached if its cell's lower corner lies strictly within the ball."""
    edge = levels - 1
    ends = [abs(end) for end in range(-edge, edge + 1, 2)]
    best = max(
        sum(end**2 for end in point)
        for point in itertools.product(ends, repeat=dimension)
        if sum(max(end - 2, 0) ** 2 for end in point) < edge**2
    )
    return Fraction(best, edge**2)


@pytest.mark.parametrize(("dimension", "levels"), [(1, 3), (2, 3), (2, 11), (3, 4), (3, 7), (4, 3), (4, 6)])
def test_the_dynamic_programme_finds_what_trying_everything_finds(dimension, levels):
    assert ball.attained_square(dimension, levels) == _attained_by_trying(dimension, levels)


@pytest.mark.parametrize("root", [4, 6, 16, 28])
def test_odd_levels_reach_towards_the_root_of_seven(root):
    d = root * root
    assert ball.approached_square(d, root + 1) == 7
    assert ball.attained_square(d, root + 1) == 7 - Fraction(12, d)


@pytest.mark.parametrize("root", [3, 5, 15, 27])
def test_even_levels_reach_towards_three(root):
    d = root * root
    assert ball.approached_square(d, root + 1) == 9
    assert ball.attained_square(d, root + 1) == 9 - Fraction(8, d)


@pytest.mark.parametrize(("dimension", "levels"), [(16, 5), (25, 6), (784, 29), (65_536, 21)])
def test_the_radius_is_within_the_triangle_inequality_and_beyond_the_proof(dimension, levels):
    radius = math.sqrt(ball.attained_square(dimension, levels))
    assert ball.proof_radius(dimension, levels) < radius < ball.minkowski_radius(dimension, levels)


def test_the_papers_circle_is_exact_and_outside_its_own_bound():
    points = ball.reachable(ball.DRAWN_LEVELS)
    farthest = max(Fraction(x * x + y * y, (ball.DRAWN_LEVELS - 1) ** 2) for x, y in points)
    assert farthest == ball.DRAWN_SQUARE == ball.attained_square(2, ball.DRAWN_LEVELS)
    assert ball.proof_radius(2, ball.DRAWN_LEVELS) ** 2 < ball.DRAWN_SQUARE


def test_the_experiments_levels_reach_much_farther():
    assert math.sqrt(ball.attained_square(65_536, 21)) == pytest.approx(25.7, abs=0.05)


# What survives of the corollary


def _psi(w: float, order: int, sigma: float) -> float:
    a, floor = order * (order - 1) / (2 * sigma**2), math.floor(w)
    part = w - floor
    return (a * floor**2 + math.log1p(part * math.expm1(a * (2 * floor + 1)))) / (order - 1)


def _splits(order: int, *, sigma: float, shift: float, dimension: int) -> list[float]:
    """Divide the squared shift: so many coordinates of one size, and the rest of it evenly over the others."""
    found = []
    for size, count in itertools.product(np.arange(0, 6, 0.05), range(dimension)):
        rest = shift**2 - count * size**2
        if rest >= 0:
            other = math.sqrt(rest / (dimension - count))
            found.append(count * _psi(size, order, sigma) + (dimension - count) * _psi(other, order, sigma))
    return [value * 2 * sigma**2 / order for value in found]


@pytest.mark.parametrize("order", [2, 16, 40])
def test_the_coupled_bound_is_above_every_split_of_the_shift(order):
    dimension, shift, sigma = 64, 8.0, 9.6
    bound = sensitivity.coupled_square(order, sigma=sigma, shift=shift, dimension=dimension)
    splits = _splits(order, sigma=sigma, shift=shift, dimension=dimension)
    assert max(splits) <= bound * (1 + 1e-9)
    assert bound <= 1.02 * max(splits)  # and hardly looser than the best of them
    assert max(splits) > 1.2 * shift**2  # a bound that forgot the rounding would be too low


@pytest.mark.parametrize("order", [2, 16])
def test_at_the_theorems_levels_neighbours_look_the_root_of_five_apart(order):
    square = sensitivity.coupled_square(order, sigma=2.4 * 128, shift=256.0, dimension=65_536) / 128**2
    assert square == pytest.approx(5, rel=0.01)
    assert square < 16


# Shares of a common noise


@pytest.fixture(scope="module")
def cohort() -> shares.Cohort:
    return shares.cohort_of(SMALL, 65, 0.0, _entropy("cohort"))


@pytest.mark.parametrize("survivors", [99, 97, 91])
def test_the_server_reads_all_of_the_noise_when_a_client_is_missing(cohort, survivors):
    assert shares.recovered_fraction(cohort, survivors, WIDE) == 1.0


def test_the_attack_fails_against_a_full_cohort(cohort):
    lucky = float(np.mean(cohort.rounded.sum(axis=0) == 0))
    assert shares.recovered_fraction(cohort, cohort.size, WIDE) == lucky < 0.1


def test_the_attack_fails_against_noise_that_each_client_drew_for_itself(cohort):
    total = np.zeros_like(cohort.nu)
    for client in range(99):
        own = DiscreteGaussian(Fraction(77)).draw(len(total), _entropy("own").child(client).stream())
        total += 100 * cohort.rounded[client] + own
    assert float(np.mean(shares.recover_noise(total, 100, 99) == cohort.nu)) < 0.05


def test_the_attack_reads_only_what_the_common_divisor_leaves():
    everyone = np.arange(-500, 501)
    for survivors in (99, 90, 75, 50):
        read = shares.recover_noise(100 * 3 + survivors * everyone, 100, survivors)
        period = 100 // math.gcd(100, survivors)
        assert np.all((read - everyone) % period == 0)


def test_the_opened_sum_is_the_literal_one(cohort):
    expected = 100 * cohort.rounded[:99].sum(axis=0) + 99 * cohort.nu
    assert np.array_equal(shares.literal_sum(cohort, 99, WIDE), expected)


@pytest.mark.parametrize("client", [0, 57])
def test_masks_of_whole_steps_leave_the_fraction_of_a_share_open(cohort, client):
    group = 6501
    masks = _entropy("masks").stream().below_each(group, len(cohort.nu)).astype(np.int64)
    message = shares.masked_message(cohort, client, masks, group)
    opened = cohort.rounded.sum(axis=0) + cohort.nu
    assert np.mean(shares.noise_behind_masks(message, opened, cohort.size) == cohort.nu) == 1.0
    finer = _entropy("finer").stream().below_each(100 * group, len(cohort.nu)).astype(np.int64)
    hidden = (message + finer) % (100 * group)  # masks on the lattice of the shares
    assert np.mean(shares.noise_behind_masks(hidden, opened, cohort.size) == cohort.nu) < 0.05


def test_a_missing_integer_share_shows_a_thousand_times_more():
    sigma = INFIMNIST.sigma_steps(227)
    intact, broken = (shares.unit_divergence(shares.noise_pmf(sigma, 100, missing)) for missing in (0, 1))
    assert intact == pytest.approx(1 / (2 * float(sigma) ** 2), rel=1e-6)
    assert intact == pytest.approx(6.8e-6, rel=0.01)
    assert broken == pytest.approx(6.9e-3, rel=0.01)


def test_rounded_shares_show_the_sum_and_integer_shares_do_not(cohort):
    assert shares.rounded_share_leak(cohort) == 1.0
    assert shares.integer_share_leak(cohort) < 0.05


# The error of the mean

SMALL_CASE = error.Case(dimension=256, cohort_size=10, levels=17, sigma=Fraction("0.6"), rounds=150)
MEDIUM_CASE = error.Case(dimension=1024, cohort_size=50, levels=33, sigma=Fraction("2.4"), rounds=60)


@pytest.mark.parametrize(
    ("case", "real", "steps", "corrected", "simulated"),
    [(SMALL_CASE, 0.101, 0.192, 1.022, 0.989), (MEDIUM_CASE, 0.0202, 0.0672, 2.379, 2.360)],
)
def test_the_error_exceeds_the_published_bound_and_keeps_the_corrected_one(
    case, real, steps, corrected, simulated
):
    assert error.published_bound(case, float(case.sigma)) == pytest.approx(real, rel=5e-3)
    assert error.published_bound(case, float(case.sigma_steps)) == pytest.approx(steps, rel=5e-3)
    assert error.corrected_bound(case) == pytest.approx(corrected, rel=1e-3)
    measured = error.simulate(case, error.shared_noise, _entropy("shared"))
    assert abs(measured.mean - simulated) < 4 * measured.deviation + 0.01
    assert steps < measured.mean < corrected + 4 * measured.deviation


@pytest.mark.parametrize("case", [SMALL_CASE, MEDIUM_CASE])
def test_separate_draws_would_keep_the_published_bound(case):
    measured = error.simulate(case, error.separate_noise, _entropy("separate"))
    assert measured.mean < error.published_bound(case, float(case.sigma_steps))


# Bits and bytes


@pytest.mark.parametrize(("levels", "literal", "integer"), [(21, 18, 12), (227, 22, 15)])
def test_literal_shares_need_more_than_two_bytes_and_integer_shares_fewer(levels, literal, integer):
    assert math.ceil(communication.literal_bits(INFIMNIST, levels)) == literal
    assert math.ceil(communication.integer_bits(INFIMNIST, levels)) == integer
    saved = communication.literal_bits(INFIMNIST, levels) - communication.integer_bits(INFIMNIST, levels)
    assert saved == pytest.approx(math.log2(100))


def test_independent_noise_of_the_same_size_needs_a_byte():
    assert communication.centered_bits(INFIMNIST, Hadamard(INFIMNIST.dimension)) == 8


def test_no_simulated_literal_sum_leaves_its_range():
    cohort = shares.cohort_of(SMALL, 21, shares.ALIGNED, _entropy("range"))
    total = 100 * cohort.rounded.sum(axis=0) + 100 * cohort.nu
    assert 2 * int(np.abs(total).max()) < 2 ** communication.literal_bits(SMALL, 21)


def test_a_measured_upload_is_the_one_foretold():
    setting = replace(INFIMNIST, dimension=1000, cohort_size=12)
    ours = [upload for upload in communication.uploads(setting) if upload.system.startswith("ours")]
    for upload in ours:
        session = communication.session_of(setting, upload)
        assert communication.measure(session) == upload_bytes(session)
        assert communication.measure(session) > Ring(upload.whole_bits).packed_bytes(upload.coordinates)


def test_every_system_is_in_the_table_and_no_literal_share_fits_two_bytes():
    settings = [list(communication.uploads(setting)) for setting in (INFIMNIST, CIFAR10)]
    for found in settings:
        literal = [upload for upload in found if "literal" in upload.system]
        assert len(found) == 9
        assert all(upload.bits > 16 for upload in literal)


# Steps of the proofs


def test_the_theta_functions_numbers():
    assert float(identities.gaussian_mass(mpmath.mpf(2), mpmath.mpf("0.3"))) == pytest.approx(5.0133, abs=5e-5)
    assert float(identities.printed_mass(mpmath.mpf("0.3"))) == pytest.approx(1.7724, abs=1e-4)


def test_the_printed_ratio_is_wrong_away_from_its_one_sigma():
    half = mpmath.mpf("0.5")
    assert float(identities.gaussian_ratio(half, half)) == pytest.approx(0.97164, abs=1e-5)
    assert float(identities.printed_ratio(half)) == pytest.approx(0.99979, abs=1e-5)
    root = mpmath.sqrt(half)
    assert float(identities.gaussian_ratio(root, half)) == pytest.approx(float(identities.printed_ratio(half)))


@pytest.mark.parametrize("sigma", ["0.5", "1", "2"])
@pytest.mark.parametrize("centre", ["0", "0.3", "0.5"])
def test_poisson_summation_is_the_sum_term_by_term(sigma, centre):
    with mpmath.workdps(identities.DIGITS):
        s, c = mpmath.mpf(sigma), mpmath.mpf(centre)
        assert abs(identities.gaussian_mass(s, c) - identities.poisson_mass(s, c)) < mpmath.mpf(10) ** -30


def test_the_printed_expression_is_right_for_its_one_sigma():
    with mpmath.workdps(identities.DIGITS):
        sigma, centre = mpmath.sqrt(mpmath.mpf(1) / 2), mpmath.mpf("0.3")
        assert (
            abs(identities.gaussian_mass(sigma, centre) - identities.printed_mass(centre)) < mpmath.mpf(10) ** -30
        )


def test_the_discrete_gaussian_never_diverges_more_than_the_continuous_one():
    for order in ("1.2", "1.5", "2", "2.5", "3"):
        excess = identities.renyi_excess(mpmath.mpf(order), 1, mpmath.mpf("0.5"))
        assert excess < mpmath.mpf(10) ** -30
        assert (abs(excess) < mpmath.mpf(10) ** -30) == (mpmath.mpf(order) % 1 == 0)


def test_wrapping_a_sum_is_not_the_sum_of_wrapped():
    assert identities.wrap(1, 3) + identities.wrap(1, 3) == 2
    assert identities.wrap(2, 3) == -1


# Observers


def test_a_cohort_member_reads_the_noiseless_sum():
    entropy = _entropy("observers")
    assert observers.subtracted_fraction(entropy.child("group"), entropy) == 1.0
    assert observers.subtracted_fraction(entropy.child("stranger"), entropy) < 0.05


def test_the_published_epsilon_and_the_servers():
    assert observers.released_epsilon(INFIMNIST, 0.6, Accountant.WBK_MIRONOV) == pytest.approx(2.950479, abs=1e-5)
    assert observers.released_epsilon(INFIMNIST, 0.6, Accountant.PLD) == pytest.approx(0.7827, abs=1e-3)
    assert observers.server_epsilon(1.2, 1) == pytest.approx(3.55, abs=0.01)
    assert observers.server_epsilon(1.2, 3) == pytest.approx(6.74, abs=0.01)


# The authors' code


def test_the_birthday_problem_and_the_truncated_noise():
    assert practice.repeat_chance(365, 23) == pytest.approx(0.5073, abs=1e-4)
    assert practice.repeat_chance(10, 1) == 0
    assert practice.truncated_deviation(INFIMNIST) == pytest.approx(1, abs=1e-4)
    assert practice.truncated_deviation(CIFAR10) < 0.55


# Carried moments


def test_carried_moments_let_one_client_move_the_others_beyond_any_clip():
    few, many = (moments.others_shift(clients, moments.Memory.CARRIED) for clients in moments.COHORTS)
    assert many > 1  # more than the client's own update ever could
    assert many > 1.5 * few  # and the more, the more clients follow


def test_a_fresh_optimizer_keeps_one_clients_data_out_of_the_others_updates():
    assert moments.others_shift(10, moments.Memory.FRESH) == 0


def test_rounding_down_to_two_steps_lowers_a_value_by_half_a_step():
    steps = np.arange(-1000, 1000)
    assert np.mean(steps - 2 * np.floor(steps / 2)) == practice.group_bias(1.0)


# The results


def test_the_errata_say_claim_place_truth_and_means_of_each(made):
    result, kinds = made["errata"]
    assert kinds == {".csv", ".json", ".png", ".svg"}
    assert result.table.columns == ("topic", "claim", "where", "truth", "demonstration", "remedy")
    assert all(isinstance(cell, str) and cell for row in result.table.rows for cell in row)
    topics = [row[0] for row in result.table.rows]
    assert len(set(topics)) == len(topics)
    for part in (
        "after quantisation",
        "masks",
        "literal",
        "integer",
        "rounded",
        "error",
        "bits",
        "theta",
        "phi",
        "every",
        "server",
    ):
        assert any(part in topic for topic in topics), part
    read = [row for row in result.table.rows if row[0].startswith("code")]
    assert len(read) == 9
    assert all("authors' code: " in row[2] for row in read)


def test_the_attack_at_the_papers_size_is_in_the_errata(made):
    curves = made["errata"][0].ran["recovered by clients missing"]
    assert curves["k = 21"][1] == curves["k = 227"][1] == 1.0
    assert curves["k = 227"][0] < 0.1
    assert curves["k = 227, clients agree"][1] == pytest.approx(0.83, abs=0.03)


def test_the_ball_is_drawn(made):
    result, kinds = made["fig2"]
    assert kinds == {".csv", ".json", ".png", ".svg"}
    assert len(result.table.rows) == 1 + len(ball.ROOTS)


def test_the_table_of_errors_shows_the_violation_in_every_row(tmp_path):
    few = {"small": replace(SMALL_CASE, rounds=20), "tiny": replace(SMALL_CASE, dimension=64, rounds=20)}
    table = error.compare(few, _silent(tmp_path)).table
    for row in table.rows:
        found = dict(zip(table.columns, row, strict=True))
        assert found["simulated"] > 2 * max(found["paper, sigma real"], found["paper, sigma in steps"])
        assert found["simulated"] < found["corrected"] + 5 * found["standard error"]
    assert {case.levels % 2 for case in error.cases(Size.FULL).values()} == {1}


@pytest.mark.parametrize(("size", "measured"), [(Size.QUICK, 2), (Size.FULL, 6)])
def test_the_table_of_uploads_measures_more_than_it_needs(tmp_path, size, measured):
    small = replace(INFIMNIST, dimension=500, cohort_size=12)
    result = communication.compare((small,), _silent(tmp_path, size))
    rows = [dict(zip(result.table.columns, row, strict=True)) for row in result.table.rows]
    sent = [row for row in rows if row["bytes measured, whole protocol"] is not None]
    assert len(sent) == measured
    assert all(row["bytes measured, whole protocol"] > row["bytes needed"] for row in sent)
    assert bool(result.reduced) == (size is Size.QUICK)
