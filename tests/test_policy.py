"""What a client refuses whatever the server wrote, and that each refusal is needed."""

import math
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from importlib import import_module

import numpy as np
import pytest

from d2pfed.accounting import (
    RELEASED,
    SERVER,
    Adjacency,
    CohortSampling,
    Sampling,
    Unit,
    account,
    client_epsilon,
)
from d2pfed.errors import ConfigError
from d2pfed.noise.mechanisms import Centered, DDGauss, Share
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import Ring
from d2pfed.plan import (
    Enrolled,
    MechanismName,
    Policy,
    PrivacyTarget,
    Protocol,
    Request,
    calibrate,
    policy,
)
from d2pfed.plan import plan as plan_module
from d2pfed.plan.bounds import colluders_within, colluding_clients
from d2pfed.plan.widths import noise_width
from d2pfed.secagg.lattice.parameters import colluders_in_committee, seated
from d2pfed.secagg.trust import Consistency

calibration = import_module("d2pfed.plan.calibrate")  # the package has a function of that name
TARGET = PrivacyTarget(
    dimension=100,
    population=2000,
    cohort_size=60,
    rounds=5,
    epsilon=4.0,
    delta=1e-5,
    against=SERVER,
    max_participations=2,
    dropouts=0.1,
    colluders=0.1,
    consistency=Consistency.SIGNED,
)
ENROLLED = Enrolled(2000, 4 << 12)

planned = cache(calibrate)


def nothing(*_inputs, **_named):
    """Stand for a check that is not made."""


def test_a_fold_does_not_hide_the_size_of_the_model():
    """A client trains and folds all parameters, however few numbers it sends."""
    plan = planned(replace(TARGET, compression=16))
    Policy(most_dimension=100).check(plan, ENROLLED)
    with pytest.raises(ConfigError, match="dimension"):
        Policy(most_dimension=99).check(plan, ENROLLED)


def test_the_defaults_take_a_plan_for_strangers():
    Policy().check(planned(TARGET), ENROLLED)


@pytest.mark.parametrize(
    ("bound", "value_of", "beyond"),
    [
        ("least_cohort", lambda plan: plan.cohort_size, 1),
        ("most_cohort", lambda plan: plan.cohort_size, -1),
        ("least_quorum", lambda plan: plan.quorum, 1),
        ("most_delta", lambda plan: plan.delta, -1e-12),
        ("most_participations", lambda plan: plan.max_participations, -1),
        ("most_clip_norm", lambda plan: plan.codec.clip, -1e-9),
        ("most_bits", lambda plan: plan.ring.bits, -1),
        ("most_dimension", lambda plan: plan.codec.length, -1),
        ("most_fraction_bits", lambda plan: plan.codec.fraction_bits, -1),
        ("most_rounds", lambda plan: plan.rounds, -1),
        ("most_attempts_per_round", lambda plan: plan.attempts_per_round, -1),
    ],
)
def test_a_policy_holds_a_plan_to_each_bound(bound, value_of, beyond):
    plan = planned(TARGET)
    value = value_of(plan)
    Policy(**{bound: value}).check(plan, ENROLLED)
    with pytest.raises(ConfigError, match="this client's policy") as refusal:
        Policy(**{bound: value + beyond}).check(plan, ENROLLED)
    assert "\n" not in str(refusal.value)
    assert bound.split("_", 1)[1].replace("_", " ") in str(refusal.value)
    with pytest.raises(ConfigError, match=r"this client's policy|must be of the type int, got nan"):
        Policy(**{bound: math.nan}).check(plan, ENROLLED)


def test_every_bound_is_tested():
    tested = {case[0] for case in test_a_policy_holds_a_plan_to_each_bound.pytestmark[0].args[1]}
    rest = {
        "protocols",
        "units",
        "requests",
        "extras",
        "mechanisms",
        "least_colluders",
        "least_noise_multiplier",
        "most_epsilon",
    }  # by the tests below
    assert tested | rest == {item.name for item in fields(Policy)}


def test_a_policy_is_read_from_plain_settings():
    assert Policy(mechanisms=["centered", "shared"]).mechanisms == (
        MechanismName.CENTERED,
        MechanismName.SHARED,
    )
    served = Policy(protocols=["standing"], units=["record"], requests=["training"])
    assert (served.protocols, served.units, served.requests) == (
        (Protocol.STANDING,),
        (Unit.RECORD,),
        (Request.TRAINING,),
    )
    for field in ("mechanisms", "protocols", "units", "requests"):
        with pytest.raises(ValueError, match="laplace"):
            Policy(**{field: ["laplace"]})
        with pytest.raises(ConfigError, match=f"{field} must name at least one of"):
            Policy(**{field: []})
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"least_colluders must be in \[0, 1\)"):
            Policy(least_colluders=share)


def test_consistency_is_that_of_the_clients_own_roster():
    signed, assumed = planned(TARGET), planned(replace(TARGET, consistency=Consistency.ASSUMED))
    Policy().check(assumed)
    with pytest.raises(ConfigError, match="consistency must be signed, the plan has assumed"):
        Policy().check(assumed, ENROLLED)
    with pytest.raises(ConfigError, match="consistency must be assumed, the plan has signed"):
        Policy().check(signed)


def test_a_population_larger_than_the_roster_is_refused():
    with pytest.raises(ConfigError, match="population must be at most 1999, the plan has 2000"):
        Policy().check(planned(TARGET), Enrolled(1999, 4 << 12))


# The client's own number of colluders


def test_colluders_are_counted_from_the_clients_own_roster():
    sampling = CohortSampling(Sampling.FIXED, 2000, 60)
    verified = colluders_within(0.1, sampling, 4 << 12)
    assert verified == planned(TARGET).colluders < 59
    assert colluders_within(0.1, sampling, 0) == 59
    assert colluders_within(0.1, CohortSampling(Sampling.NONE, 2000, 60), 4 << 12) == 59
    assert colluders_within(0.1, CohortSampling(Sampling.NONE, 60, 60), 0) == 6
    assert colluders_within(0.1, CohortSampling(Sampling.ONCE, 2000, 60), 1 << 9) == colluders_within(
        0.1, sampling, 33 << 9
    )  # each block of each partition is a cohort that the server may choose
    assert colluders_within(0.0, CohortSampling(Sampling.FIXED, 10**9, 10**6), 1) == 0
    with pytest.raises(ConfigError, match="at most 20000, got 20001"):
        colluders_within(0.1, CohortSampling(Sampling.FIXED, 10**6, 20_001), 1)


def test_cohorts_that_are_not_verified_may_be_all_colluders():
    with pytest.raises(ConfigError, match=r"2 quorum > cohort . colluders must hold, .* colluders 59"):
        Policy().check(planned(TARGET), Enrolled(2000, 0))
    Policy(least_colluders=0.0).check(planned(TARGET), Enrolled(2000, 0))


def test_a_plan_for_fewer_colluders_than_the_client_fears_is_refused():
    careless = planned(replace(TARGET, colluders=0.01))
    Policy(least_colluders=0.01).check(careless, ENROLLED)
    with pytest.raises(ConfigError, match="threshold must be in"):  # the client's colluders open a secret
        Policy().check(careless, ENROLLED)
    careless = replace(careless, threshold=planned(TARGET).threshold)
    with pytest.raises(ConfigError, match=r"epsilon against colluding\(\d+\) must be at most 4.5"):
        Policy(most_epsilon=4.5).check(careless, ENROLLED)
    Policy(most_epsilon=4.5).check(planned(TARGET), ENROLLED)


# Attacks: refused, and successful where the one check is patched away


def test_attack_a_population_that_the_server_makes_small(monkeypatch):
    """A plan for sixty clients of sixty has six colluders; sixty of two thousand that the server picks have 59."""
    plan = planned(replace(TARGET, population=60, sampling=Sampling.NONE))
    Policy().check(plan, Enrolled(60, 0))
    assert Policy().colluders(plan, Enrolled(60, 0)) == 6
    assert Policy().colluders(plan, Enrolled(2000, 0)) == 59
    with pytest.raises(ConfigError, match=r"2 quorum > cohort . colluders must hold, .* colluders 59"):
        Policy().check(plan, Enrolled(2000, 0))
    monkeypatch.setattr(policy, "CohortSampling", lambda *_roster: plan.sampling)
    Policy().check(plan, Enrolled(2000, 0))


def test_attack_a_number_of_colluders_that_flatters(monkeypatch):
    """All else is as the client wants it, but its account would charge each vector at the colluders' noise as well."""
    plan = planned(TARGET)
    flattering = replace(plan, colluders=0)
    with pytest.raises(ConfigError, match=rf"colluders must be at least {plan.colluders}, the plan has 0"):
        Policy().check(flattering, ENROLLED)
    at_least = policy._check_at_least
    monkeypatch.setattr(policy, "_check_at_least", lambda *asked: asked[0] == "colluders" or at_least(*asked))
    Policy().check(flattering, ENROLLED)
    assert flattering.contributed.contributors == plan.contributed.contributors + plan.colluders


def test_attack_a_threshold_that_colluders_reach(monkeypatch):
    """They hold all the shares that open a secret, before any request to unmask."""
    with pytest.raises(ConfigError, match=r"threshold must be in \[32, quorum 54\]"):
        replace(planned(TARGET), threshold=31)
    monkeypatch.setattr(plan_module, "require_shares", nothing)
    bare = replace(planned(TARGET), threshold=2)
    with pytest.raises(ConfigError, match=r"threshold must be in \[32, quorum 54\]"):
        Policy().check(bare, ENROLLED)
    monkeypatch.setattr(policy, "require_shares", nothing)
    Policy().check(bare, ENROLLED)
    assert bare.threshold <= bare.colluders


LATTICE = replace(TARGET, cohort_size=200)


def test_attack_a_committee_of_colluders(monkeypatch):
    """With a share for each of more colluders than counted, they open whatever they like, of anyone."""
    plan = planned(LATTICE)
    Policy().check(plan, ENROLLED)
    own = colluders_in_committee(2000, 200, plan.committee.size, ENROLLED.draws)
    assert plan.committee.colluders == own
    less = own - 1
    seats = seated(plan.committee.size, less, plan.secret, plan.cohort_size, plan.cohort_size - plan.quorum)
    bare = replace(plan, committee=seats, threshold=seats.openers)
    assert seats.threshold == less < own
    with pytest.raises(
        ConfigError, match=f"colluders in the committee must be at least {own}, the plan has {less}"
    ):
        Policy().check(bare, ENROLLED)
    Policy(least_colluders=0.05).check(bare, ENROLLED)
    monkeypatch.setattr(Policy, "_check_shares", nothing)
    Policy().check(bare, ENROLLED)


@pytest.mark.parametrize("draws", [0, 1 << 20])
def test_a_client_counts_a_committees_colluders_over_its_own_draws(draws):
    plan = planned(LATTICE)
    with pytest.raises(ConfigError, match="colluders in the committee must be at least"):
        Policy()._check_shares(plan, Enrolled(2000, draws), 0)


def test_a_quorum_of_the_lattice_leaves_two_honest_clients():
    plan = planned(LATTICE)
    with pytest.raises(
        ConfigError, match=f"quorum must be at least {plan.quorum + 1}, the plan has {plan.quorum}"
    ):
        Policy()._check_shares(plan, ENROLLED, plan.quorum - 1)


def test_attack_a_client_that_knows_the_group_seed_and_colludes(monkeypatch):
    """It knows the whole noise: the server subtracts it, and has the sum up to rounding."""
    plan = planned(replace(TARGET, mechanism=MechanismName.SHARED, colluders=0.0))
    with pytest.raises(ConfigError, match="must be one of centered, ddgauss, skellam, got shared"):
        Policy().check(plan, ENROLLED)
    anything = Policy(mechanisms=tuple(MechanismName))
    with pytest.raises(ConfigError, match=r"noise multiplier must be at least 0.3, the plan has 0"):
        anything.check(replace(plan, threshold=40), ENROLLED)
    monkeypatch.setattr(policy, "_check_one_of", nothing)
    Policy(least_colluders=0.0).check(plan, ENROLLED)
    root = Entropy.replay(b"shared")
    group = root.child("group")
    centres = plan.codec.prepare(np.zeros(100, np.float32), digest("rotation"))
    total = sum(
        plan.mechanism.encode(centres, Share(rank, plan.cohort_size, group), root.child("client", rank))
        for rank in range(plan.cohort_size)
    )
    known = DiscreteGaussian(plan.mechanism.sigma).draw(len(total), group.child("noise").stream())
    assert np.std(known) > 1
    assert not np.any(total - known)  # the bare sum of zeros: no noise is left


@pytest.mark.parametrize("mechanism", [MechanismName.CENTERED, MechanismName.DDGAUSS])
def test_attack_an_epsilon_that_lies(mechanism, monkeypatch):
    """A hundredth of the noise, and the stated epsilon unchanged: the client computes its own epsilon."""
    honest = planned(replace(TARGET, mechanism=mechanism))
    codec = replace(honest.codec, granularity=honest.codec.granularity / 16, fraction_bits=4)
    noise = Centered(Fraction(2)) if mechanism is MechanismName.CENTERED else DDGauss(honest.mechanism.sigma / 16)
    liar = replace(honest, codec=codec, mechanism=noise, epsilon=0.1, ring=Ring(32))
    lenient = Policy(least_noise_multiplier=0.0)
    lenient.check(honest, ENROLLED)
    with pytest.raises(ConfigError, match="epsilon against server must be at most 10"):
        lenient.check(liar, ENROLLED)
    with pytest.raises(ConfigError, match=r"noise multiplier must be at least 0.3"):
        Policy().check(liar, ENROLLED)
    monkeypatch.setattr(policy, "_epsilon", lambda plan, _noise: plan.epsilon)
    lenient.check(liar, ENROLLED)
    release = liar.release("", 0, 0, (), liar.quorum)
    assert client_epsilon([release] * liar.max_participations, liar.delta) > 30


def test_attack_an_adjacency_that_flatters(monkeypatch):
    """Zero-out halves what one release costs; the client counts replace-one whatever the plan says."""
    flattered = planned(replace(TARGET, adjacency=Adjacency.ZERO_OUT, epsilon=6.0))
    with pytest.raises(ConfigError, match=r"epsilon against .* must be at most 10"):
        Policy(least_noise_multiplier=0.0).check(flattered, ENROLLED)
    monkeypatch.setattr(
        policy,
        "client_epsilon",
        lambda releases, delta: account(releases, SERVER, delta=delta, max_participations=len(releases)).epsilon,
    )
    Policy(least_noise_multiplier=0.0).check(flattered, ENROLLED)


FALLS = PrivacyTarget(
    dimension=10, population=20, cohort_size=20, rounds=1, epsilon=8.0, delta=1e-3, dropouts=0.4, colluders=0.25
)


def test_attack_two_quorums_that_share_only_colluders(monkeypatch):
    """The calibrated plan of 20 clients, 40 % dropouts and 5 colluders falls to its own colluders."""
    with pytest.raises(ConfigError) as refusal:
        calibrate(FALLS)
    for part in ("2 quorum > cohort + colluders", "2 x 12 <= 20 + 5", "at most 7 dropouts", "at most 3 colluders"):
        assert part in str(refusal.value)
    monkeypatch.setattr(calibration, "_require_honest_majority", nothing)
    with pytest.raises(ConfigError, match=r"2 quorum > cohort . colluders must hold"):
        calibrate(FALLS)
    monkeypatch.setattr(plan_module, "require_honest_majority", nothing)
    plan = calibrate(FALLS)
    victim, colluders, others = 0, set(range(15, 20)), list(range(1, 15))
    with_it, without_it = {victim, *others[:7]} | colluders, set(others[7:]) | colluders
    assert not (with_it & without_it) - colluders  # no honest client signs twice,
    assert len(with_it) >= plan.quorum  # and both sets of survivors, with the victim
    assert len(without_it) >= plan.quorum  # and without, have their signatures: the difference is its vector


def test_what_would_do_does():
    for better in ({"dropouts": 0.35}, {"colluders": 0.15}):
        assert calibrate(replace(FALLS, **better)).quorum >= 12
    wide = replace(FALLS, population=2000, colluders=0.1)
    with pytest.raises(ConfigError, match=r"or a cohort of \d+$") as refusal:
        calibrate(wide)
    larger = replace(wide, cohort_size=int(str(refusal.value).split()[-1]))
    assert 2 * larger.quorum > larger.cohort_size + larger.cohort_colluders


def test_a_release_names_its_run_and_counts_all_survivors():
    plan = planned(TARGET)
    assert plan.release("a run", 1, 2, (), 55).noise == plan.noise(55)
    assert plan.contributed == plan.noise(plan.quorum - plan.colluders)
    assert plan.release("a run", 1, 2, (), 55).run == "a run"


def test_a_policy_does_not_trust_the_observer_of_the_plan():
    """A guarantee against an observer of the models says nothing of the server."""
    amplified = planned(replace(TARGET, against=RELEASED, max_participations=None, epsilon=1.0, rounds=100))
    with pytest.raises(ConfigError, match="must be at most"):
        Policy(least_noise_multiplier=0.0).check(amplified, ENROLLED)


# Each number that a client computes for itself, to its edge


def test_the_noise_multiplier_is_over_the_distance_of_two_vectors():
    plan = planned(TARGET)
    left = plan.noise(plan.quorum).without(plan.colluders)
    multiplier = math.sqrt(left.sum_variance) / (2 * float(left.radius))  # one vector in the place of another
    Policy(least_noise_multiplier=multiplier * (1 - 1e-9)).check(plan, ENROLLED)
    with pytest.raises(ConfigError, match="noise multiplier must be at least"):
        Policy(least_noise_multiplier=multiplier * (1 + 1e-9)).check(plan, ENROLLED)


def test_epsilon_is_of_every_vector_that_the_plan_allows_for():
    plan = planned(replace(TARGET, population=60, sampling=Sampling.NONE, max_participations=None))
    assert plan.max_participations == plan.max_attempts > plan.rounds
    release = replace(plan.release("", 0, 0, (), plan.quorum), noise=plan.contributed)
    fewer, every = (client_epsilon([release] * n, plan.delta) for n in (plan.rounds, plan.max_participations))
    assert fewer < every
    Policy(most_epsilon=every, least_noise_multiplier=0.0).check(plan, Enrolled(60, 0))
    with pytest.raises(ConfigError, match=r"epsilon against colluding\(6\) must be at most"):
        Policy(most_epsilon=(fewer + every) / 2, least_noise_multiplier=0.0).check(plan, Enrolled(60, 0))


def test_epsilon_of_records_is_of_every_vector_that_a_silo_may_send():
    wish = {"unit": "record", "dimension": 10, "population": 20, "rounds": 3, "spare": 3, "records": 200}
    plan = planned(PrivacyTarget(**wish, batch_rate=0.2, epsilon=4.0, delta=1e-5, colluders=0.1, against="server"))
    assert plan.max_attempts > plan.rounds
    release = replace(plan.release("", 0, 0, (), plan.quorum), noise=plan.contributed)
    every = account([release] * plan.max_attempts, SERVER, delta=plan.delta, max_participations=plan.max_attempts)
    assert policy._epsilon(plan, plan.contributed) == every.epsilon


@pytest.mark.parametrize(("share", "least"), [(0.0, 31), (0.7, 43)])
def test_a_threshold_is_more_than_half_and_more_than_the_colluders(share, least):
    target = replace(TARGET, population=60, sampling=Sampling.NONE, dropouts=0.0, colluders=share, epsilon=8.0)
    plan = planned(replace(target, consistency=Consistency.ASSUMED))
    assert plan.quorum == 60
    lenient = Policy(least_colluders=share, least_noise_multiplier=0.0, most_epsilon=20)
    lenient.check(replace(plan, threshold=least))
    with pytest.raises(ConfigError, match=rf"threshold must be in \[{least}, quorum 60\] .* got {least - 1}"):
        lenient.check(replace(plan, threshold=least - 1))


def test_the_largest_clip_is_that_of_an_update():
    adaptive = planned(replace(TARGET, clip="auto(0.5)"))
    weighted = calibrate(replace(TARGET, clip=3.0), max_weight=100.0)
    assert weighted.codec.clip == 1
    for plan, clip in ((adaptive, adaptive.adaptive_clip.most), (weighted, 3.0)):
        Policy(most_clip_norm=clip)._check_sizes(plan)
        with pytest.raises(ConfigError, match="clip norm must be at most"):
            Policy(most_clip_norm=clip * 0.999).check(plan, ENROLLED)


def test_noise_that_no_table_of_a_client_holds_is_refused():
    plan = planned(TARGET)
    _, most = noise_width(plan.codec, plan.mechanism)
    Policy().check(replace(plan, mechanism=Centered(Fraction(most)), ring=Ring(32)), ENROLLED)
    wide = replace(plan, mechanism=Centered(Fraction(most) + Fraction(1, 1024)), ring=Ring(32))
    with pytest.raises(ConfigError, match=f"width of a client's noise must be at most {most}"):
        Policy().check(wide, ENROLLED)


def test_a_share_of_the_population_is_rounded_up():
    counts = {(0.1, 2000): 200, (0.1, 2001): 201, (0.1, 1): 1, (0.001, 5): 1, (0.3, 10): 3, (0.0, 10): 0}
    assert {case: colluding_clients(*case) for case in counts} == counts
