"""Adaptive clipping: the bound, the estimate and the path of the clip, each with planted twins that must fall."""

import json
import math
import struct
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
from typer.testing import CliRunner

from d2pfed.accounting import SERVER, Adjacency, CohortSampling, Release, Sampling, Unit, account
from d2pfed.accounting.laws import DiscreteGaussianSum
from d2pfed.api import Job
from d2pfed.cli import app
from d2pfed.errors import ConfigError, DamagedFile, PeerError, TooFewClients
from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.noise.clipping import LARGEST_BETA, AdaptiveClip, split_clip, with_clip
from d2pfed.noise.codec import Centers, Codec
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from d2pfed.plan import MechanismName, Policy, PrivacyTarget, calibrate, decode_plan, describe
from d2pfed.plan.describe import describe_plan
from d2pfed.round import Attempt, Participant, aggregate, gather, local_sum, session_of
from d2pfed.runs import Checkpoint, RunDirectory
from d2pfed.secagg import Sum
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, frame, kind_of
from d2pfed.simulation import Dropouts, Fidelity, SimulatedFederation
from d2pfed.simulation.backend import simulated_participant
from d2pfed.training import Cohorts, ServerOptimizer, train
from reproduction.job import Settings, execute, task_job
from support import oracle
from support.simulations import NO_MODEL, Attempting, Given

D = 30
COHORT = 20
LIMITS = {"least": 1e-6, "most": 1e6}


def target(**changes) -> PrivacyTarget:
    base = {
        "dimension": D,
        "population": 100,
        "cohort_size": COHORT,
        "rounds": 100,
        "epsilon": 50.0,
        "delta": 1e-3,
        "clip": "auto",
    }
    return PrivacyTarget(**(base | changes))


def loud(plan, beta=1.0):
    """The same plan with a heavier bit than its noise allows for: what the bits say is then hardly noisy."""
    adaptive = replace(plan.adaptive_clip, beta=beta)
    codec = replace(plan.codec, clip=adaptive.radius)
    return replace(plan, adaptive_clip=adaptive, codec=codec)


@dataclass
class Diary:
    """A ledger that allows everything."""

    capped: tuple = ()
    events: list = field(default_factory=list)

    def require_plan(self, _run, _plan):
        pass

    def participations(self, _run, clients):
        return {client: 10_000 if client in self.capped else 0 for client in clients}

    def reserve(self, release):
        self.events.append(release)

    def commit(self, release):
        self.events.append(release)

    def void(self, *_):
        pass


def federation(plan, update_of, *, fidelity=Fidelity.SUM, dropouts=None, seed=b"clip"):
    entropy = Entropy.replay(seed)
    return SimulatedFederation(
        plan=plan,
        backend=Given(lambda clients: (update_of(client) for client in clients)),
        cohorts=Cohorts(plan.sampling, entropy.child("cohorts")),
        dropouts=dropouts or Dropouts(),
        fidelity=fidelity,
        entropy=entropy.child("clients"),
        ledger=None,
    )


def direction(client: int, dimension: int = D) -> np.ndarray:
    found = np.sin(np.arange(1, dimension + 1) * (client + 1))
    return (found / np.linalg.norm(found)).astype(np.float32)


def round_of(plan, update_of, clip, number=1, ledger=None, **changes):
    given_federation = federation(plan, update_of, **changes)
    return aggregate(plan, Attempt("run", number, 0), NO_MODEL, given_federation, ledger or Diary(), clip=clip)


# The bound

ADAPTIVE = AdaptiveClip(beta=0.28, **LIMITS)


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=9),
    st.floats(1e-6, 1e6),
    st.floats(1e-3, 1.0),
)
def test_no_update_exceeds_the_radius(entries, clip, beta):
    adaptive = AdaptiveClip(beta=beta, **LIMITS)
    sent = adaptive.vector(np.array(entries, np.float32), clip)
    assert np.linalg.norm(sent.astype(np.float64)) <= adaptive.radius * (1 + 1e-6)
    codec = Codec(rotation=Hadamard(len(sent)), clip=adaptive.radius, granularity=adaptive.radius / 20)
    centres = codec.prepare(sent, bytes(32), codec.dither(Entropy.replay(b"dither").stream()))
    assert int(np.dot(centres.values, centres.values)) <= codec.grid_radius**2


def bit_from_zero(update, clip, beta):
    """Planted: the bit is 0 or beta, not centred."""
    norm = np.linalg.norm(update)
    return np.append(update / max(norm, clip), beta * (norm <= clip))


def test_the_radius_is_attained_and_an_uncentred_bit_exceeds_it():
    at_the_clip, beyond = 2.0 * direction(1), -7.0 * direction(1)
    for update in (at_the_clip, beyond):
        sent = ADAPTIVE.vector(update.astype(np.float32), 2.0000002)
        assert np.linalg.norm(sent) == pytest.approx(ADAPTIVE.radius, rel=1e-6)
    twin = bit_from_zero(at_the_clip, 2.0000002, ADAPTIVE.beta)
    assert np.linalg.norm(twin) == pytest.approx(math.sqrt(1 + ADAPTIVE.beta**2), rel=1e-6)
    assert np.linalg.norm(twin) > ADAPTIVE.radius * 1.01


def test_a_bit_that_is_added_after_the_norm_check_is_refused_by_the_check():
    beta, steps = 0.28, 4000
    without_bit = Codec(rotation=RandomPhase(D), clip=1.0, granularity=1 / steps, fraction_bits=4)
    centres = without_bit.prepare(direction(3) * 5, bytes(32))
    late = np.append(centres.values, round(beta / 2 * steps * 16))
    with pytest.raises(ConfigError, match="exceeds its bound"):
        Centers(late, centres.radius, 4)


SIDE, WIDTH = 12, 18  # of the clip and of the noise, in lattice steps


def points(vector_of, radius):
    """The centres in lattice steps of one-dimensional updates on both sides of a clip of 1, through the real codec."""
    found = []
    for x in (-2.0, -1.0001, -1.0, -0.5, 0.0, 0.5, 1.0, 1.0001, 2.0):
        codec = Codec(rotation=Hadamard(2), clip=radius, granularity=1 / SIDE)
        sent = np.asarray(vector_of(np.array([x], np.float32)), np.float32)
        found.append(codec.prepare(sent, bytes(range(32))).values / 256)
    return codec, found


def law(centre):
    reach = 10 * WIDTH
    one, two = (oracle.discrete_gaussian(WIDTH, value, reach) for value in centre)
    return np.outer(one, two).ravel()


def claimed(radius, adjacency=Adjacency.REPLACE_ONE, delta=1e-3):
    release = Release(
        run="run",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=adjacency,
        sampling=CohortSampling(Sampling.NONE, 1, 1),
        noise=DiscreteGaussianSum(Fraction(WIDTH), 1, radius, 2),
        participants=(),
    )
    return account([release], SERVER, delta=delta, max_participations=1).epsilon


def worst(found):
    pairs = [(left, right) for left in found for right in found]
    return max(pairs, key=lambda pair: float(np.linalg.norm(pair[0] - pair[1])))


def test_an_exhaustive_search_finds_the_claimed_epsilon_and_no_more():
    adaptive = AdaptiveClip(beta=1.0, **LIMITS)
    sent = [adaptive.vector(np.array([x], np.float32), 1.0) for x in (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)]
    largest = max(float(np.linalg.norm(left - right)) for left in sent for right in sent)
    assert largest == pytest.approx(math.sqrt(4 + adaptive.beta**2), rel=1e-6)

    codec, found = points(lambda x: adaptive.vector(x, 1.0), adaptive.radius)
    left, right = worst(found)
    shift, bound = float(np.linalg.norm(left - right)), 2 * float(codec.radius)
    assert 0.99 * bound < shift <= bound
    true = oracle.epsilon(law(left), law(right), 1e-3)
    assert 0.97 * claimed(codec.radius) < true <= claimed(codec.radius)
    for one in found:  # no other pair is worse
        assert oracle.delta(law(one), law(left), claimed(codec.radius)) <= 1e-3


def test_the_search_rejects_a_radius_without_the_bit_and_an_uncentered_bit():
    adaptive = AdaptiveClip(beta=1.0, **LIMITS)
    codec, found = points(lambda x: adaptive.vector(x, 1.0), adaptive.radius)
    left, right = worst(found)
    assert oracle.epsilon(law(left), law(right), 1e-3) > claimed(Fraction(SIDE))
    # An uncentred bit is longer, so that it is told from silence more easily than the radius says.
    silence, bound = law(np.zeros(2)), claimed(codec.radius, Adjacency.ZERO_OUT)
    assert max(oracle.epsilon(law(each), silence, 1e-3) for each in found) <= bound
    _, planted = points(lambda x: bit_from_zero(x, 1.0, 1.0), math.sqrt(2))
    assert max(oracle.epsilon(law(each), silence, 1e-3) for each in planted) > bound


def test_whoever_is_silent_sends_nothing_at_all():
    silent = ADAPTIVE.vector(np.zeros(D, np.float32), 1.0)
    assert silent.shape == (D + 1,)
    assert not silent.any()
    active = [ADAPTIVE.vector(size * direction(1), 1.0) for size in (0.1, 1.0, 5.0)]
    assert all(np.linalg.norm(each - silent) <= ADAPTIVE.radius * (1 + 1e-6) for each in active)
    planted = silent.copy()
    planted[-1] = -ADAPTIVE.beta / 2  # planted: a capped client counts as clipped
    assert max(np.linalg.norm(each - planted) for each in active) > ADAPTIVE.radius * 1.01


def test_a_client_at_its_cap_sends_what_a_zero_update_sends():
    plan = calibrate(target())
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(COHORT)))
    capped, fresh = (
        simulated_participant(plan, 3, Entropy.replay(b"cap"), {3: count})
        for count in (plan.max_participations, 0)
    )
    zero = np.zeros(D, np.float32)
    np.testing.assert_array_equal(
        capped.encode(session, direction(3), None, 0.5), fresh.encode(session, zero, None, 0.5)
    )
    assert not np.array_equal(
        capped.encode(session, direction(3), None, 0.5), fresh.encode(session, direction(3), None, 0.5)
    )


def test_capped_and_diverged_clients_count_for_neither_side():
    plan = loud(calibrate(target(population=COHORT, sampling="none", rounds=2, spare=0)))
    some = tuple(range(0, COHORT, 2))
    outcome = round_of(plan, lambda client: 0.1 * direction(client), 1.0, ledger=Diary(capped=some))
    noise = plan.sigma / COHORT
    assert noise < 0.04
    assert outcome.clipping.within == pytest.approx(
        0.75, abs=3 * noise
    )  # counted as clipped they would make it 0.5

    def diverging(client):
        return np.full(D, np.nan, np.float32) if client in some else 0.1 * direction(client)

    assert round_of(plan, diverging, 1.0).clipping.within == pytest.approx(0.75, abs=3 * noise)


# The estimate


def test_the_fraction_is_over_the_planned_cohort_not_the_survivors():
    plan = loud(calibrate(target(dropouts=0.4, rounds=2, spare=0, epsilon=100.0)))
    outcome = round_of(plan, lambda client: 0.1 * direction(client), 1.0, dropouts=Dropouts(masked=Fraction(1, 4)))
    assert 0.6 * COHORT <= outcome.survivors < 0.9 * COHORT
    expected, noise = 0.5 + outcome.survivors / (2 * COHORT), plan.sigma / COHORT
    planted = 1.0  # the sum divided by the survivors
    assert outcome.clipping.within == pytest.approx(expected, abs=3 * noise)
    assert planted - expected > 3 * noise


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.02, 0.4])
def test_updates_far_below_the_clip_are_seen_to_be_within_it(size):
    adaptive = AdaptiveClip(beta=0.05, **LIMITS)
    rotation = Hadamard(4096)
    coarse = 3 * 64  # grid units to the clip: as few as a plan has for this length
    codec = Codec(rotation=rotation, clip=adaptive.radius, granularity=256 * adaptive.radius / coarse)

    def within(dithers):
        """The fraction that the centres say, without any noise."""
        total = np.zeros(4096)
        for client, dither in enumerate(dithers):
            sent = adaptive.vector(np.float32(size) * direction(client, 4095), 1.0)
            total += codec.prepare(sent, bytes(32), dither).values
        mean = rotation.inverse(total * codec.granularity / 256 / len(dithers), bytes(32))
        return adaptive.step(1.0, float(mean[-1])).within

    dithers = [codec.dither(Entropy.replay(b"%d" % client).stream()) for client in range(200)]
    assert within(dithers) == pytest.approx(1.0, abs=0.02)
    if size < 0.01:  # planted: rounding to the nearest swallows the bit, and the clip would never move
        assert within([None] * 200) == pytest.approx(0.5, abs=0.02)


def test_dithering_is_right_on_average_and_rounding_to_the_nearest_is_not():
    codec = Codec(rotation=Hadamard(64), clip=1.0, granularity=1.0, fraction_bits=5)
    update = (0.05 * direction(5, 64)).astype(np.float32)
    exact = codec.rotation.forward(update, bytes(32)) * 32
    streams = (Entropy.replay(b"%d" % each).stream() for each in range(4000))
    mean = np.mean([codec.prepare(update, bytes(32), codec.dither(stream)).values for stream in streams], axis=0)
    assert np.abs(mean - exact).max() < 5 * 0.5 / math.sqrt(4000)
    assert not codec.prepare(update, bytes(32)).values.any()


@pytest.mark.parametrize("clip", [0.25, 3.0])
def test_the_mean_is_in_real_units_of_this_rounds_clip(clip):
    plan = loud(calibrate(target(population=COHORT, sampling="none", rounds=2, spare=0)), 0.28)
    outcome = round_of(plan, lambda _client: np.float32(0.8 * clip) * direction(1), clip)
    along, noise = float(np.dot(outcome.mean, direction(1))), plan.sigma * clip / COHORT
    assert along == pytest.approx(0.8 * clip, abs=2 * noise)
    previous = clip * math.exp(0.1)  # planted: in units of the clip of the round before
    assert abs(along * previous / clip - 0.8 * clip) > 2 * noise
    assert outcome.clipping.clip == clip


def test_noise_and_lattice_go_by_the_same_clip():
    """A client that scaled by another clip than it clips to would leave the ball; the exact check shrinks it back."""
    plan = calibrate(target())
    codec, adaptive = plan.codec, plan.adaptive_clip
    stale = np.append(direction(1) / 0.5, adaptive.beta / 2).astype(np.float32)  # clipped to 1, in units of 0.5
    assert np.linalg.norm(stale) > 1.9 * adaptive.radius
    centres = codec.prepare(stale, bytes(32))
    assert int(np.dot(centres.values, centres.values)) <= codec.grid_radius**2
    unchecked = np.rint(codec.rotation.forward(stale, bytes(32)) * (1 << codec.fraction_bits) / codec.granularity)
    with pytest.raises(ConfigError, match="exceeds its bound"):
        Centers(unchecked.astype(np.int64), codec.grid_radius, codec.fraction_bits)


# The path of the clip


@dataclass(frozen=True)
class Opened:
    """A sum that was opened before, whatever clients hold."""

    plan: object
    total: np.ndarray
    survivors: tuple = tuple(range(COHORT))

    def draw(self, _attempt):
        return self.survivors

    def bind(self, attempt, cohort):
        return session_of(self.plan, attempt, cohort)

    def collect(self, _session, _model, _participations):
        return self

    def with_clip(self, _clip):
        return self

    def unmask(self):
        return Sum(self.total, ())


def test_the_next_clip_follows_from_the_released_sum_alone():
    plan = loud(calibrate(target()))
    own = federation(plan, lambda client: np.float32(0.1 * client) * direction(client))
    kept = {}

    @dataclass(frozen=True)
    class Spying:
        clip: float | None = None

        def draw(self, attempt):
            return own.draw(attempt)

        def bind(self, attempt, cohort):
            return own.bind(attempt, cohort)

        def with_clip(self, clip):
            return Spying(clip)

        def collect(self, session, model, participations):
            kept["sum"] = own.with_clip(self.clip).collect(session, model, participations)
            return kept["sum"]

    outcome = aggregate(plan, Attempt("run", 1, 0), NO_MODEL, Spying(), Diary(), clip=0.8)
    again = aggregate(
        plan, Attempt("run", 1, 0), NO_MODEL, Opened(plan, kept["sum"].unmask().vector), Diary(), clip=0.8
    )
    assert again.clipping == outcome.clipping

    norms = [0.1 * client for client in range(COHORT)]  # planted: from raw norms, the same sum gives another clip
    raw = ADAPTIVE.step(0.8, ADAPTIVE.beta * (np.mean(np.array(norms) <= 0.8) - 0.5))
    assert raw.following != outcome.clipping.following


@given(st.floats(-10, 10), st.floats(1e-6, 1e6))
def test_a_step_is_bounded_and_stays_within_the_limits(released, clip):
    step = ADAPTIVE.step(clip, released)
    assert 0 <= step.within <= 1
    assert ADAPTIVE.least <= step.following <= ADAPTIVE.most
    assert abs(math.log(step.following / clip)) <= ADAPTIVE.rate / 2 + 1e-12
    if 2e-6 < clip < 5e5:
        assert step.following == pytest.approx(clip * math.exp(-0.2 * (step.within - 0.5)))


@pytest.mark.parametrize(("median", "initial"), [(0.3, 1.0), (5.0, 1.0), (0.01, 0.1)])
def test_the_median_is_found_within_fifty_rounds(median, initial):
    plan = calibrate(
        target(population=1000, cohort_size=200, rounds=50, epsilon=8.0, sampling="fixed", clip=f"auto({initial})")
    )
    # Norms whose logarithm is spread evenly over a factor of e on both sides.
    norms = median * np.exp(np.linspace(-1, 1, 1000)[np.argsort(np.sin(np.arange(1000) * 7.0))])
    own = federation(plan, lambda client: np.float32(norms[client]) * direction(client))

    def step(state):
        return aggregate(plan, Attempt("run", state.rounds, 0), state.params, own, Diary(), clip=state.clip)

    optimizer = ServerOptimizer()
    start = replace(optimizer.start(np.zeros(D, np.float32), plan.adaptive_clip.initial))
    rounds = list(train(start, optimizer, 50, step))
    # Noise of 0.1 in the released fraction moves the clip's logarithm by 0.1 x 0.2 / sqrt(0.2) = 0.045; four times it.
    assert rounds[-1].state.clip == pytest.approx(median, rel=0.18)
    assert rounds[0].clipping.clip == initial
    assert not math.isclose(initial, median, rel_tol=0.18)  # planted: a clip that stays is not it
    late = [each.clipping.within for each in rounds[-10:]]
    assert np.mean(late) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("kind", [kind for kind in MechanismName if kind is not MechanismName.BINOMIAL])
def test_sum_and_protocol_agree_bit_for_bit(kind):
    plan = calibrate(target(mechanism=kind))
    one, two = (
        round_of(plan, lambda client: client / 10 * direction(client), 0.7, fidelity=fidelity)
        for fidelity in Fidelity
    )
    np.testing.assert_array_equal(one.mean, two.mean)
    assert one.clipping == two.clipping
    assert one.mean.shape == (D,)


def test_masks_are_bound_to_the_clip():
    plan = loud(calibrate(target()))
    cohort = tuple(range(COHORT))
    session = session_of(plan, Attempt("run", 0, 0), cohort)

    def total(lie):
        machines = {
            client: simulated_participant(plan, client, Entropy.replay(b"bound"), {}).join(
                session, lambda _task, _model: 0.1 * direction(1)
            )
            for client in cohort
        }
        honest, other = (struct.pack(">d", clip) for clip in (0.5, 0.5 + lie))

        def exchange(asked):
            for client, request in asked.items():
                told = request
                if client == 3 and kind_of(request) == MessageKind.MASK_REQUEST:
                    body = request[HEADER_BYTES:].replace(honest, other)
                    told = frame(MessageKind.MASK_REQUEST, session.digest, client, body)
                yield client, machines[client].receive(told)

        opened = gather(session, b"model", exchange, task=with_clip(b"", 0.5)).unmask().vector
        return np.abs(plan.ring.center(opened)).max()

    assert total(0.0) < plan.ring.modulus / 2
    with pytest.raises(TooFewClients):  # the client's masks are bound to another context, and everyone is needed
        total(1e-9)


# What is agreed, and what is refused


def test_the_weight_of_the_bit_follows_the_noise():
    quiet, noisy = calibrate(target(cohort_size=60, rounds=10)), calibrate(target(epsilon=0.5))
    assert quiet.adaptive_clip.beta == pytest.approx(quiet.sigma / (0.1 * 60), rel=0.01)
    assert noisy.adaptive_clip.beta == LARGEST_BETA
    assert noisy.adaptive_clip.radius < 1.01
    assert noisy.sigma / calibrate(target(epsilon=0.5, clip=1.0)).sigma == pytest.approx(
        noisy.adaptive_clip.radius, rel=1e-3
    )


def test_the_guarantee_covers_the_bit():
    for plan in (calibrate(target()), calibrate(target(epsilon=0.5))):
        exact = Fraction(plan.adaptive_clip.radius) / Fraction(plan.codec.granularity)
        assert plan.codec.radius == plan.contributed.radius
        assert exact * Fraction(999, 1000) < plan.codec.radius <= exact
        summary = describe(target(epsilon=plan.epsilon), plan)
        assert summary.guarantees[0].epsilon <= plan.epsilon
        assert "The clip starts at 1" in summary.why_noise
        assert summary.noise_to_clip == pytest.approx(plan.sigma / COHORT * math.sqrt(D), rel=0.01)
        alone = describe_plan(plan)
        assert (alone.noise_to_clip, alone.sigma) == (summary.noise_to_clip, summary.sigma)


@pytest.mark.parametrize(
    ("dimension", "rotation", "length"),
    [(1000, Hadamard(1001), 1024), (1023, Hadamard(1024), 1024), (1024, RandomPhase(1025), None)],
)
def test_one_more_coordinate_never_doubles_a_transform(dimension, rotation, length):
    plan = calibrate(target(dimension=dimension))
    assert plan.codec.rotation == rotation
    assert plan.dimension == dimension
    assert plan.codec.length == length or dimension < plan.codec.length < 1.05 * dimension


def test_plans_with_a_fixed_clip_keep_their_text():
    fixed, adaptive = calibrate(target(clip=1.0)), calibrate(target())
    text = canonical.encode(fixed)
    assert "adaptive" not in text
    with pytest.raises(ConfigError, match="written differently"):
        decode_plan(text.replace('"against"', '"adaptive_clip":null,"against"'))
    assert decode_plan(canonical.encode(adaptive)) == adaptive
    assert decode_plan(text) == fixed


def test_the_digest_changes_with_every_field_of_the_clip():
    plan = calibrate(target())
    changes = {"quantile": 0.4, "rate": 0.1, "initial": 2.0, "least": 1e-5, "most": 1e5}
    others = [replace(plan, adaptive_clip=replace(plan.adaptive_clip, **{k: v})) for k, v in changes.items()]
    others.append(loud(plan))
    assert len({each.digest for each in (plan, *others)}) == len(fields(AdaptiveClip)) + 1


def test_a_plan_whose_radius_is_not_that_of_the_bit_is_refused():
    plan = calibrate(target())
    with pytest.raises(ConfigError, match="radius"):
        replace(plan, codec=replace(plan.codec, clip=1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta": 0.0},
        {"beta": 1.1},
        {"beta": math.nan},
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"rate": 0.0},
        {"rate": math.inf},
        {"least": 0.0},
        {"least": 2.0},
        {"most": math.inf},
        {"most": math.nan},
        {"initial": math.nan},
    ],
)
def test_a_clip_that_cannot_adapt_is_refused(wrong):
    with pytest.raises(ConfigError):
        AdaptiveClip(**({"beta": 0.1} | LIMITS | wrong))


@pytest.mark.parametrize(("text", "initial"), [("auto", 1.0), ("auto(0.1)", 0.1), ("auto(3)", 3.0)])
def test_an_adaptive_clip_is_asked_for_by_name(text, initial):
    assert target(clip=text).initial_clip == initial
    adaptive = calibrate(target(clip=text)).adaptive_clip
    assert (adaptive.initial, adaptive.quantile, adaptive.rate) == (initial, 0.5, 0.2)
    assert target(clip="0.5") == target(clip=0.5)


@pytest.mark.parametrize(
    "text", ["AUTO", "auto()", "auto(0)", "auto(-1)", "auto(nan)", "auto(inf)", "median", "nan", ""]
)
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match="clip must be"):
        target(clip=text)


@pytest.mark.parametrize("clip", [math.nan, math.inf, 0.0, -1.0, 1e-7, 1e7])
def test_a_client_refuses_a_clip_out_of_its_limits(clip):
    plan = calibrate(target())
    with pytest.raises(PeerError, match="clip must be in"):
        split_clip(plan.adaptive_clip, with_clip(b"task", clip))
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(COHORT)))
    participant = Participant(plan=plan, client=1, entropy=Entropy.replay(b"limits"), participations=0)
    with pytest.raises(PeerError, match="clip must be in"):
        participant.encode(session, direction(1), None, clip)


def test_a_task_carries_its_clip():
    plan = calibrate(target())
    assert split_clip(plan.adaptive_clip, with_clip(b"task", 0.3)) == (0.3, b"task")
    assert split_clip(None, with_clip(b"task", None)) == (None, b"task")
    for task in (b"", b"task", b"a task that is long enough for a clip" * 3, with_clip(b"", 0.3)[:-1]):
        with pytest.raises(PeerError, match="carry the clip"):
            split_clip(plan.adaptive_clip, task)
    with pytest.raises(PeerError, match="clip must be in"):
        plan.adaptive_clip.vector(np.zeros(3, np.float32), 2 * plan.adaptive_clip.most)


def test_a_round_without_its_clip_is_refused_and_so_is_one_too_many():
    plan, fixed = calibrate(target()), calibrate(target(clip=1.0))
    cohort = tuple(range(COHORT))
    for own, clip, error in ((plan, None, PeerError), (fixed, 0.5, ConfigError)):
        participant = Participant(plan=own, client=1, entropy=Entropy.replay(b"none"), participations=0)
        with pytest.raises(error, match="clip"):
            participant.encode(session_of(own, Attempt("run", 0, 0), cohort), direction(1), None, clip)
        with pytest.raises(error, match="clip"):
            round_of(own, direction, clip)


def test_a_transport_without_clip_is_refused_before_any_charge():
    plan, diary = calibrate(target()), Diary()
    attempts = Attempting(plan, lambda _number: tuple(range(COHORT)), lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="tells its clients no clip"):
        aggregate(plan, Attempt("run", 0, 0), NO_MODEL, attempts, diary, clip=1.0)
    assert not diary.events
    with pytest.raises(ConfigError, match="a private sum takes a fixed clip"):
        local_sum(plan, Attempt("run", 0, 0), {}, diary, Entropy.replay(b"sum"))


def test_a_policy_bounds_the_largest_clip():
    plan = calibrate(
        target(population=1000, cohort_size=100, epsilon=1.0, rounds=1, dropouts=0.1, colluders=0.1, delta=1e-5)
    )
    Policy(most_clip_norm=1e6).check(plan)
    with pytest.raises(ConfigError, match="clip norm must be at most"):
        Policy(most_clip_norm=1e5).check(plan)


# Runs


@pytest.fixture(scope="module")
def parts():
    task = load_task("digits", population=40)
    return task, build_model("logistic", task, seed=0)


def job(parts, clip="auto(0.4)") -> Job:
    wanted = PrivacyTarget(
        dimension=parts[1].dimension,
        population=40,
        cohort_size=20,
        rounds=4,
        epsilon=30.0,
        delta=1e-3,
        clip=clip,
    )
    settings = Settings(
        task="digits",
        data="digits",
        model="logistic",
        target=wanted,
        local=LocalTraining(lr=0.5, epochs=1, batch_size=10),
        server=ServerOptimizer(lr=1.0, momentum=0.5, averaging=0.5),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=7,
    )
    return task_job(settings, *parts, calibrate(wanted))


def clips(path):
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [(record["clip"], record["fraction_clipped"], record["update_norm"]) for record in records]


def test_a_resumed_run_keeps_its_clip(parts, tmp_path):
    whole, halves = tmp_path / "a" / "run", tmp_path / "b" / "run"
    execute(job(parts), whole, None, lambda _record: True)
    execute(job(parts), halves, None, lambda record: record.round < 2)
    execute(job(parts), halves, None, lambda _record: True)
    assert clips(halves) == clips(whole)
    path = [clip for clip, _, _ in clips(whole)]
    assert path[0] == 0.4
    assert len(set(path)) == 4  # planted: a resumed run that began with the initial clip again would show it
    page = (whole / "report.html").read_text()
    assert "Fraction of updates clipped" in page
    assert f"{path[-1]:.4g}" in page
    assert (whole / "plots" / "clip.png").exists()


def test_a_checkpoint_without_its_clip_or_with_another_is_refused(parts, tmp_path):
    path = tmp_path / "run"
    execute(job(parts), path, None, lambda record: record.round < 2)
    settings = (path / "settings.json").read_text()
    with RunDirectory.open(path, settings) as directory:
        last = directory.load()
        assert last.state.clip is not None
        directory.save(Checkpoint(replace(last.state, clip=None), last.head))
    with pytest.raises(ConfigError, match="does not go with the plan"):
        execute(job(parts), path, None, lambda _record: True)
    with RunDirectory.open(path, settings) as directory:
        directory.save(last)
        arrays = {name: getattr(last.state, name) for name in ("params", "velocity", "second", "average")}
        notes = {"rounds": str(last.state.rounds), "ledger": last.head, "clip": (0.1).hex()}
        directory.replace("checkpoint.safetensors", save(arrays, notes | {"checksum": _checksum(directory, last)}))
        with pytest.raises(DamagedFile, match="checksum"):
            directory.load()


def _checksum(directory, last):
    directory.save(last)
    with safe_open(directory.path / "checkpoint.safetensors", "numpy") as stored:
        return stored.metadata()["checksum"]


def test_a_fixed_clip_is_recorded_without_a_fraction(parts, tmp_path):
    execute(job(parts, 0.5), tmp_path / "run", None, lambda record: record.round < 1)
    assert [found[:2] for found in clips(tmp_path / "run")] == [(0.5, None)]
    assert "Fraction of updates clipped" not in (tmp_path / "run" / "report.html").read_text()


def test_the_command_line_plans_an_adaptive_clip():
    options = "plan --dimension 100 --population 1000 --cohort-size 100 --rounds 8 --clip auto --json"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    assert "The clip starts at 1" in result.stdout
