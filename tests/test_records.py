"""The client half where the unit is a record: what each record adds, coins, noise, and twins that are found out."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from d2pfed.accounting import BatchSampling, Sampling, Unit
from d2pfed.errors import BudgetExceeded, ConfigError, TooFewClients
from d2pfed.learning import RecordTrainer, UserClients, user_model
from d2pfed.ledger import Ledger, verify
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import Centered
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import Fold, Hadamard, RandomPhase
from d2pfed.plan import PrivacyTarget, calibrate, decode_plan, describe, record_terms
from d2pfed.round import Attempt, Batch, Batches, Participant, aggregate, rotation_seed, run_plan, session_of
from d2pfed.round.participant import toss
from d2pfed.simulation import Dropouts, Fidelity, Silos, SimulatedFederation
from d2pfed.training import Cohorts

DIMENSION, SILOS, RECORDS = 42, 5, 200
ROOT = Entropy.replay(b"records")


def target(**changes):
    values = {
        "unit": "record",
        "dimension": DIMENSION,
        "population": SILOS,
        "rounds": 4,
        "epsilon": 4.0,
        "delta": 1e-5,
        "records": RECORDS,
        "batch_rate": 0.2,
        "colluders": 0.2,
        "against": "server",
    }
    return PrivacyTarget(**(values | changes))


@pytest.fixture(scope="module")
def plan():
    return calibrate(target())


def vectors(count=30, scale=1.0, seed=1):
    return normal(count, DIMENSION, seed) * np.float32(scale)


def normal(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).numpy()


SEED = ROOT.child("rotation").key


# What one record adds.


@pytest.mark.parametrize(
    "rotation", [Hadamard(DIMENSION), RandomPhase(DIMENSION), Hadamard(64), Fold(DIMENSION, 8)]
)
@pytest.mark.parametrize("dither", [None, ROOT.child("dither")])
@pytest.mark.parametrize("scale", [1e-6, 0.05, 1.0, 1e25, 1e-30])
def test_a_sum_is_that_of_the_rows_prepared_one_by_one(rotation, dither, scale):
    codec = Codec(rotation=rotation, clip=1.0, granularity=0.05, fraction_bits=8)
    rows = normal(40, rotation.dimension, 2).astype(np.float64) * scale
    rows = np.clip(rows, -3e38, 3e38).astype(np.float32)
    rows[3] = 0
    expected = np.zeros(codec.length, np.int64)
    for row in rows:
        expected += codec.prepare(row, SEED, None if dither is None else codec.dither(dither.stream())).values
    rows = np.insert(rows, 5, np.nan, axis=0)
    rows = np.insert(rows, 9, np.inf, axis=0)
    totals = np.zeros((2, codec.length), np.int64)
    dithers = None if dither is None else np.stack([codec.dither(dither.stream())] * 2)
    owners = np.repeat([0, 1], [20, len(rows) - 20])
    codec.add_prepared(totals, owners, rows, SEED, dithers)
    assert np.array_equal(totals.sum(0), expected)
    first = np.zeros((1, codec.length), np.int64)
    codec.add_prepared(first, owners[:20], rows[:20], SEED, None if dithers is None else dithers[:1])
    assert np.array_equal(first[0], totals[0])


def test_rows_rounded_beyond_the_radius_are_shrunk_as_single_vectors():
    codec = Codec(rotation=Hadamard(256), clip=1.0, granularity=1 / 6, fraction_bits=0)  # a coarse grid
    rows = normal(50, 256, 3) * 10
    total = np.zeros((1, 256), np.int64)
    codec.add_prepared(total, np.zeros(50, np.int64), rows, SEED)
    assert np.array_equal(total[0], sum(codec.prepare(row, SEED).values for row in rows))


def test_what_is_no_matrix_of_the_right_type_is_refused():
    codec = Codec(rotation=Hadamard(DIMENSION), clip=1.0, granularity=0.05)
    for rows, length in ((vectors()[0], 64), (vectors().astype(np.float64), 64), (vectors(), 63)):
        with pytest.raises(ConfigError, match="rows of float32"):
            codec.add_prepared(np.zeros((1, length), np.int64), np.zeros(len(rows), np.int64), rows, SEED)
    total, rows = np.zeros((1, 64), np.int64), vectors()
    for owners in (np.ones(len(rows), np.int64), np.full(len(rows), -1)):
        with pytest.raises(ConfigError, match=r"owners must be in \[0, 1\)"):
            codec.add_prepared(total, owners, rows, SEED)
    with pytest.raises(ConfigError, match="dithers must have the shape"):
        codec.add_prepared(total, np.zeros(len(rows), np.int64), rows, SEED, np.zeros((1, 63), np.uint16))


def exact_centre(plan, rows):
    """The silo's integer centre of these records."""
    batch = Batch(plan, SEED, ROOT.child("attempt"), np.arange(len(rows)), np.zeros(plan.codec.length, np.int64))
    for start in range(0, len(rows), 7):
        batch.add(rows[start : start + 7])
    return batch.total


def test_batches_of_two_attempts_are_not_added_together(plan):
    two = [
        Batch(plan, seed, ROOT, np.arange(0), np.zeros(plan.codec.length, np.int64)) for seed in (SEED, bytes(32))
    ]
    with pytest.raises(ConfigError, match="of one attempt"):
        Batches.of(two)


def test_rows_left_over_are_dithered_by_their_own_silo(plan):
    """Rows beyond the compiled loop's range are added afterwards, and must not share another silo's offsets."""
    rows = vectors(6, scale=1e25)

    def fresh(silo):
        return Batch(plan, SEED, ROOT.child("silo", silo), np.arange(3), np.zeros(plan.codec.length, np.int64))

    together = Batches.of([fresh(0), fresh(1)])
    together.add(np.repeat([0, 1], 3), rows)
    for silo, own in ((0, rows[:3]), (1, rows[3:])):
        alone, other = fresh(silo), fresh(1 - silo)
        alone.add(own)
        other.add(own)
        assert np.array_equal(together.each[silo].total, alone.total)
        assert not np.array_equal(alone.total, other.total)


def own_integers(plan, row):
    return plan.codec.prepare(row, SEED, plan.codec.dither(ROOT.child("attempt").child("dither").stream())).values


def require_additive(plan, centre, rows):
    """Removing any record changes the centre by exactly its own integers, which are within the radius."""
    whole = centre(plan, rows)
    for record in range(0, len(rows), 3):
        moved = whole - centre(plan, np.delete(rows, record, axis=0))
        assert np.array_equal(moved, own_integers(plan, rows[record])), f"record {record} moves others"
        assert int(moved @ moved) <= plan.codec.grid_radius**2


@pytest.mark.parametrize("scale", [1e-3, 0.1, 5.0])
def test_removing_a_record_changes_the_centre_by_exactly_its_integers(plan, scale):
    require_additive(plan, exact_centre, vectors(scale=scale))


def clipped(rows):
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.maximum(norms, 1.0)).astype(np.float32)


def float32_sum(plan, rows):
    """A twin: records are clipped as floats and added in single precision, then the sum is put on the grid."""
    total = clipped(rows)[0] * 0
    for row in clipped(rows):
        total = total + row
    return _on_grid(plan, total)


def rounded_sum(plan, rows):
    """A twin: the exact sum of clipped floats is rounded, as if that moved it by the clip at most."""
    return _on_grid(plan, clipped(rows).astype(np.float64).sum(0).astype(np.float32))


def per_batch_clip(plan, rows):
    """A twin: the sum of the batch is clipped, not each record."""
    return plan.codec.prepare(
        rows.sum(0), SEED, plan.codec.dither(ROOT.child("attempt").child("dither").stream())
    ).values


def truncated(plan, rows):
    """A twin: a batch keeps at most ten records."""
    return exact_centre(plan, rows[:10])


def normalised_by_batch(plan, rows):
    """A twin: gradients depend on the batch, as with batch norm."""
    return exact_centre(plan, ((rows - rows.mean(0)) / (rows.std(0) + 1e-3)).astype(np.float32))


def _on_grid(plan, total):
    rotated = plan.codec.rotation.forward(total, SEED)
    return np.rint(rotated * (1 << plan.codec.fraction_bits) / plan.codec.granularity).astype(np.int64)


@pytest.mark.parametrize("twin", [float32_sum, rounded_sum, per_batch_clip, truncated, normalised_by_batch])
def test_the_check_of_removal_finds_each_twin(plan, twin):
    with pytest.raises(AssertionError):
        require_additive(plan, twin, vectors())


def test_rounding_a_sum_can_move_it_by_more_than_the_clip():
    """Every coordinate of a record just above a grid point, on a sum just below a boundary: the shift exceeds D."""
    grid, record, rest = 1.0, np.full(64, 2.01), np.full(64, 0.495)
    shift = np.rint((rest + record) / grid) - np.rint(rest / grid)
    assert np.linalg.norm(shift) > 1.4 * np.linalg.norm(record)


def test_a_record_that_is_not_finite_adds_nothing_and_raises_nothing(plan):
    rows = vectors()
    bad = np.insert(rows, 4, np.nan, axis=0)
    bad[7, 3] = np.inf
    assert np.array_equal(exact_centre(plan, bad), exact_centre(plan, np.delete(rows, 6, axis=0)))
    with pytest.raises(ConfigError, match="finite"):  # the twin that prepares records as clients' updates raises
        plan.codec.prepare(bad[4], SEED)


# Coins.


@dataclass(frozen=True)
class Held:
    """A silo with given vectors."""

    rows: np.ndarray
    asked: list

    @property
    def count(self):
        return len(self.rows)

    def gradients(self, chosen):
        self.asked.append(chosen)
        if len(chosen):
            yield self.rows[chosen]


def attempt(plan, number=0, round_number=0):
    return session_of(plan, Attempt("run", round_number, number), tuple(range(SILOS)))


def participant(plan, client=0, entropy=ROOT):
    return Participant(plan=plan, client=client, entropy=entropy.child("client", client), participations=0)


def drawn(plan, session, client=0, entropy=ROOT, count=400):
    return participant(plan, client, entropy).batch(session, count).chosen


def test_coins_have_exactly_their_rate():
    for numerator in (1 << 30, 3 << 20, 1 << 32):
        rate = Fraction(numerator, 1 << 32)
        count = 200_000
        heads = len(toss(BatchSampling(rate), count, ROOT.child("coins", numerator).stream()))
        assert binom.cdf(heads, count, float(rate)) > 1e-6
        assert binom.sf(heads - 1, count, float(rate)) > 1e-6
    words = np.empty(8, np.uint32)
    ROOT.child("few").stream().fill(words)
    at = BatchSampling(Fraction(int(words[2]), 1 << 32))
    found = toss(at, 8, ROOT.child("few").stream())
    assert list(found) == [place for place in range(8) if words[place] < words[2]]  # strictly below: exact


def test_the_rate_is_rounded_down():
    third = target(batch_rate=1 / 3).batches.rate
    assert third <= Fraction(1 / 3) < third + Fraction(1, 1 << 32)
    assert target(batch_rate=1.0).batches.rate == 1


def require_secret_and_fresh(coins, plan):
    """Coins differ between secrets, attempts, rounds and silos, and repeat for none of them."""
    first = coins(plan, attempt(plan))
    others = [
        coins(plan, attempt(plan), entropy=Entropy.replay(b"another secret")),
        coins(plan, attempt(plan, number=1)),
        coins(plan, attempt(plan, round_number=1)),
        coins(plan, attempt(plan), client=1),
    ]
    assert all(not np.array_equal(first, other) for other in others)


def test_coins_are_secret_and_fresh_in_every_attempt(plan):
    require_secret_and_fresh(drawn, plan)


def public_coins(plan, session, client=0, entropy=ROOT, count=400):
    """A twin: coins from the round's public seed."""
    return toss(plan.batches, count, Entropy(rotation_seed(session), is_replayed=True).child(client).stream())


def reused_coins(plan, session, client=0, entropy=ROOT, count=400):
    """A twin: a retry has the coins of the first attempt."""
    return drawn(plan, attempt(plan, 0, session.round), client, entropy, count)


@pytest.mark.parametrize("twin", [public_coins, reused_coins])
def test_the_check_of_coins_finds_each_twin(plan, twin):
    with pytest.raises(AssertionError):
        require_secret_and_fresh(twin, plan)


# Noise, sizes, and what leaves the silo.


def sent(plan, rows, number=0, entropy=ROOT):
    vector = participant(plan, 0, entropy).encode(attempt(plan, number), Held(rows, []), None)
    return plan.ring.center(vector)


def require_noise(plan, send):
    """An empty batch looks like any other: as wide as the silo's noise, whatever the silo holds."""
    draws = np.concatenate([send(plan, vectors(0), number).astype(float) for number in range(40)])
    assert draws.std() == pytest.approx(float(plan.mechanism.sigma), rel=0.06)
    assert abs(draws.mean()) < 5 * draws.std() / math.sqrt(len(draws))


def test_an_empty_batch_sends_noise(plan):
    require_noise(plan, sent)


def silent_when_empty(plan, rows, number=0):
    """A twin: nothing drawn, nothing sent but zeros."""
    return sent(plan, rows, number) if len(rows) else np.zeros(plan.codec.length, np.int64)


def test_the_check_of_noise_finds_a_silo_that_is_silent_when_empty(plan):
    with pytest.raises(AssertionError):
        require_noise(plan, silent_when_empty)


def test_what_is_sent_has_one_size_and_all_of_the_batch(plan):
    few, many = (participant(plan).encode(attempt(plan), Held(vectors(n), []), None) for n in (1, 3000))
    assert few.shape == many.shape == (plan.codec.length,)
    held = Held(vectors(3000), [])
    participant(plan).encode(attempt(plan), held, None)
    batch = participant(plan).batch(attempt(plan), 3000)
    assert len(batch.chosen) == pytest.approx(600, abs=120)
    assert np.array_equal(held.asked[0], batch.chosen)  # none is left out, however many they are


def test_the_centre_of_what_is_sent_is_the_batch_drawn(plan):
    rows = vectors(100, scale=0.2)
    batch = participant(plan).batch(attempt(plan), 100)
    batch.add(rows[batch.chosen])
    noise = replace(batch, total=np.zeros_like(batch.total))
    moved = plan.ring.center(batch.encode()) - plan.ring.center(noise.encode())
    expected = batch.total / (1 << plan.codec.fraction_bits)
    assert np.max(np.abs(moved - expected)) <= 8 * float(plan.mechanism.sigma)
    assert np.corrcoef(moved, expected)[0, 1] > 0.1


def test_vectors_and_records_are_refused_in_each_others_place(plan):
    with pytest.raises(ConfigError, match="takes a silo's records"):
        participant(plan).encode(attempt(plan), vectors(1)[0], None)
    with pytest.raises(ConfigError, match="the plan's clip is fixed"):
        participant(plan).encode(attempt(plan), Held(vectors(), []), None, clip=0.5)
    client = calibrate(PrivacyTarget(dimension=DIMENSION, population=20, cohort_size=20, rounds=2, delta=1e-3))
    own = Participant(plan=client, client=0, entropy=ROOT, participations=0)
    session = session_of(client, Attempt("run", 0, 0), tuple(range(20)))
    with pytest.raises(ConfigError, match="is for the unit record"):
        own.encode(session, Held(vectors(), []), None)


# Plans.


def test_sums_are_divided_by_a_constant_of_the_plan(plan):
    assert plan.divisor == pytest.approx(0.2 * RECORDS, rel=1e-8)
    assert plan.protocol == "standing"
    assert decode_plan(canonical.encode(plan)) == plan
    assert plan.mechanism.sigma >= 8
    assert calibrate(target(batch_rate=None, records=1000)).divisor == pytest.approx(256, rel=1e-8)


def test_the_digest_changes_with_the_batches_and_the_records(plan):
    others = [
        replace(plan, batches=BatchSampling(plan.batches.rate, 2)),
        replace(plan, batches=BatchSampling(Fraction(1, 4))),
        replace(plan, records=201),
    ]
    assert len({each.digest for each in (plan, *others)}) == 4


def test_plans_that_do_not_go_together_are_refused(plan):
    with pytest.raises(ConfigError, match="records go with the unit record"):
        replace(plan, records=None)
    with pytest.raises(ConfigError, match="batches go with the unit record"):
        replace(plan, batches=None)
    with pytest.raises(ConfigError, match="at least 8 steps"):
        replace(plan, mechanism=Centered(Fraction(4)))
    with pytest.raises(ConfigError, match="max_participations"):
        replace(plan, max_participations=1)


def test_a_plan_of_records_keeps_its_epsilon_against_colluding_silos(plan):
    found = {str(each.observer): each.epsilon for each in describe(target(), plan).guarantees}
    assert found["server"] < found["colluding(1)"] <= 4.0 < found["alone"]
    assert found["colluding(1)"] > 3.9


def test_the_ring_holds_the_records_of_a_batch():
    small, large = calibrate(target()), calibrate(target(records=200_000, batch_rate=0.2, epsilon=100.0))
    assert large.ring.bits > small.ring.bits + 5
    assert large.wrap_probability <= 0.01
    assert replace(large, ring=replace(large.ring, bits=large.ring.bits - 2)).wrap_probability > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "skellam"}, "mechanism centered"),
        ({"clip": "auto"}, "fixed clip"),
        ({"max_participations": 2}, "no cap"),
        ({"sampling": "once"}, "every silo"),
        ({"cohort_size": 3}, "every silo"),
        ({"batch_rate": 0.0}, "batch_rate"),
        ({"batch_rate": 1.5}, "batch_rate"),
        ({"records": 0}, "records"),
        ({"unit": "client"}, "for the unit record"),
        ({"unit": "client", "records": None, "batch_rate": None, "adjacency": "add-remove"}, "of records"),
    ],
)
def test_targets_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        target(**changes)


def test_a_plan_without_its_public_number_of_records_is_refused():
    with pytest.raises(ConfigError, match="records"):
        calibrate(target(records=None))


def test_delta_and_adjacency_follow_the_unit():
    own = target(delta=None)
    assert own.effective_delta == pytest.approx(RECORDS**-1.1)
    assert (own.adjacency.value, own.sampling, own.cohort_size) == ("add-remove", Sampling.NONE, SILOS)
    assert PrivacyTarget().adjacency.value == "replace-one"


def test_the_terms_say_what_a_person_in_several_silos_means(plan):
    text = " ".join(record_terms(plan))
    assert "set max_silos and groups" in text
    assert "At least 4 honest silos" in text
    several = " ".join(record_terms(calibrate(target(max_silos=3))))
    assert "up to 3 silos" in several
    assert "if none of these silos is the observer or colludes" in several
    assert "if none of these silos" not in text
    client = calibrate(PrivacyTarget(dimension=8, population=20, cohort_size=20, rounds=2, delta=1e-3))
    assert record_terms(client) == ()


# Whole rounds.


def network():
    torch.manual_seed(3)
    return user_model(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)))


def trainer(chunk=16):
    torch.manual_seed(4)
    data = [(torch.randn(n, 6), torch.randint(0, 2, (n,))) for n in (40, 0, 1, 25, 60)]
    model = network()
    return RecordTrainer(model, UserClients.of(data, None, model.device), None, chunk)


@pytest.fixture(scope="module")
def small_plan():
    dimension = network().dimension
    return calibrate(target(dimension=dimension, records=126))


def federation(plan, fidelity, ledger, dropouts=None):
    return SimulatedFederation(
        plan=plan,
        backend=Silos(trainer()),
        cohorts=Cohorts(plan.sampling, ROOT.child("cohorts")),
        dropouts=dropouts or Dropouts(),
        fidelity=fidelity,
        entropy=ROOT.child("clients"),
        ledger=ledger,
    )


@pytest.fixture
def ledger(tmp_path, small_plan):
    charged = run_plan(small_plan)
    with Ledger.create(tmp_path / "ledger.db", charged.budget) as opened:
        opened.begin("run", "owner", charged)
        yield opened


@pytest.mark.parametrize("compression", ["off", 8])
def test_both_fidelities_give_the_same_sum(compression, tmp_path):
    plan = calibrate(target(dimension=network().dimension, records=126, compression=compression))
    charged, found = run_plan(plan), []
    for fidelity in Fidelity:
        with Ledger.create(tmp_path / f"{fidelity}.db", charged.budget) as book:
            book.begin("run", "owner", charged)
            own = federation(plan, fidelity, book)
            found.append(aggregate(plan, Attempt("run", 0, 0), network().initial(), own, book).mean)
            assert book.charged("run") == 1
    assert np.array_equal(*found)
    assert len(found[0]) == plan.dimension == network().dimension


# Coins of whole attempts, against the rate that the ledger was charged.

LEVEL = 1e-6  # of the exact binomial tests: a rate that is off by one in fifty is ten deviations away
UNITS = 1_000_000


@dataclass(frozen=True)
class Many:
    """A silo with so many units that the rate of their coins shows; they add nothing."""

    tossed: list
    count: int = UNITS

    def gradients(self, chosen):
        self.tossed.append(chosen)
        return iter(())


@dataclass(frozen=True)
class ManyEach:
    """Silos of this kind, as a backend asks for them."""

    tossed: dict

    def count(self, client):
        return UNITS

    def units(self, _params, client):
        return Many(self.tossed.setdefault(client, []))

    def chunks(self, _params, wanted):
        for client, chosen in wanted:
            self.tossed.setdefault(client, []).append(chosen)
        return iter(())


def is_tossed_at(rate, chosen):
    return bool(binomtest(len(chosen), UNITS, float(rate)).pvalue >= LEVEL)


@pytest.mark.parametrize("fidelity", Fidelity)
def test_every_silo_tosses_at_the_rate_that_the_ledger_was_charged(small_plan, ledger, fidelity):
    tossed = {}
    own = replace(federation(small_plan, fidelity, ledger), backend=Silos(ManyEach(tossed)))
    first = Attempt("run", 0, 0)
    aggregate(small_plan, first, network().initial(), own, ledger)
    (release,), (charged,) = ledger.releases(), ledger.plans()
    assert release.batches == charged.release.batches
    rate, session = release.batches.rate, own.bind(first, release.participants)
    assert sorted(tossed) == list(release.participants) == list(range(SILOS))
    for client, (chosen,) in tossed.items():
        # Exactly: a coin comes up if its word is below the charged rate, in units of 2^-32.
        words = np.empty(UNITS, np.uint32)
        fresh = own.entropy.child("client", client).child("contribution", session.digest, client)
        fresh.child("coins").stream().fill(words)
        assert np.array_equal(chosen, np.flatnonzero(words < int(rate * 2**32)))
        # And by its frequency, wherever the words come from.
        assert is_tossed_at(rate, chosen)


def test_the_check_of_the_rate_finds_one_that_is_off_by_a_fiftieth(plan):
    charged = plan.batches.rate
    for rate, passes in ((charged, True), (charged * 51 / 50, False), (charged * 49 / 50, False)):
        coins = BatchSampling(Fraction(int(rate * 2**32), 2**32))
        assert is_tossed_at(charged, toss(coins, UNITS, ROOT.child("twin").stream())) is passes


def test_an_attempt_that_fails_after_vectors_were_sent_stays_charged(small_plan, ledger):
    params = network().initial()
    own = federation(small_plan, Fidelity.SUM, ledger, Dropouts(masked=Fraction(1, 2)))
    with pytest.raises(TooFewClients):
        aggregate(small_plan, Attempt("run", 0, 0), params, own, ledger)
    assert ledger.charged("run") == small_plan.attempts_per_round


def test_runs_of_any_length_share_a_ledger(tmp_path, small_plan):
    longer = replace(small_plan, rounds=6, max_attempts=7, max_participations=7, epsilon=8.0)
    budget = replace(run_plan(small_plan).budget, epsilon=9.0)
    with Ledger.create(tmp_path / "shared.db", budget) as opened:
        opened.begin("one", "owner", run_plan(small_plan))
        opened.begin("two", "another", run_plan(longer))
        with pytest.raises(BudgetExceeded):
            opened.begin("three", "third", run_plan(replace(longer, max_attempts=400, max_participations=400)))
    found = verify(tmp_path / "shared.db")
    assert [each.run for each in found.runs] == ["one", "two"]
    assert found.units <= found.of  # counted in attempts of the first


def test_the_released_mean_is_clipped_gradients_over_the_expected_batch(small_plan):
    params, own = network().initial(), trainer()
    every = [(client, np.arange(own.count(client))) for client in range(SILOS)]
    total = sum(clipped(rows).sum(0) for _, rows in own.chunks(params, every))
    wanted = total * 0.2 / small_plan.divisor
    session, means = attempt(small_plan), []
    for secret in range(30):
        ring_sum = np.zeros(small_plan.codec.length, np.uint32)
        for client in range(SILOS):
            one = participant(small_plan, client, Entropy.replay(f"{secret}".encode()))
            small_plan.ring.add_into(
                ring_sum, one.encode(session, next(Silos(own).train(params, (client,), 0)), None)
            )
        centred = small_plan.ring.center(ring_sum)
        means.append(small_plan.codec.decode(centred, rotation_seed(session), small_plan.divisor))
    error = np.mean(means, 0) - wanted
    spread = small_plan.sigma * math.sqrt(5 / 4) / small_plan.divisor / math.sqrt(30)
    assert np.linalg.norm(error) < 2 * spread * math.sqrt(len(wanted))
    assert small_plan.unit is Unit.RECORD


def test_nothing_that_is_printed_tells_which_records_were_drawn(plan):
    batch = Batch.draw(plan, SEED, 1000, ROOT.child("printed"))
    assert len(batch.chosen)
    assert not any(name in repr(batch) for name in ("chosen", "total", "entropy"))
