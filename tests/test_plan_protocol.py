"""Which protocol a plan runs, the committee that follows from it, and every byte that its clients send and receive."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from d2pfed.accounting import SERVER
from d2pfed.errors import ConfigError
from d2pfed.noise.mechanisms import DDGauss
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.numerics.ring import Ring
from d2pfed.plan import PROFILES, PrivacyTarget, Protocol, calibrate, decode_plan, describe, require_deployable
from d2pfed.plan.traffic import traffic_of
from d2pfed.secagg import Consistency, Delivery, encode_roster, traffic
from d2pfed.secagg.lattice.parameters import committee_sizes, seated
from support import lattice
from support.federation import MODEL, TASK, Federation, make_session, run_round
from support.rosters import AUTHORITY, roster_of

SIGNED = Consistency.SIGNED
TARGET = PrivacyTarget(
    dimension=100,
    population=10_000,
    cohort_size=100,
    rounds=5,
    epsilon=4.0,
    delta=1e-5,
    against=SERVER,
    sampling="once",
    dropouts=0.1,
    colluders=0.1,
    consistency=SIGNED,
)
planned = cache(calibrate)
SILOS = {
    "unit": "record",
    "records": 4000,
    "population": 20,
    "cohort_size": 20,
    "sampling": "none",
    "dropouts": 0.0,
}
ASSUMED = {"consistency": "assumed"}


@pytest.mark.parametrize(
    ("changes", "protocol"),
    [
        ({}, "lattice"),
        ({"cohort_size": 64}, "lattice"),
        ({"cohort_size": 63}, "pairwise"),
        ({"mechanism": "ddgauss"}, "lattice"),
        ({"mechanism": "skellam"}, "pairwise"),
        ({"mechanism": "shared", "colluders": 0.0, "dropouts": 0.0}, "pairwise"),
        ({"bits": 21}, "pairwise"),
        ({"cohort_size": 1_001}, "lattice"),
        ({"protocol": "pairwise"}, "pairwise"),
        (ASSUMED, "lattice"),
        (ASSUMED | {"against": "released"}, "pairwise"),
        (ASSUMED | {"protocol": "lattice"}, "lattice"),
        (ASSUMED | {"against": "released", "cohort_size": 1_000}, "pairwise"),
        (ASSUMED | {"cohort_size": 1_001}, "lattice"),
        (ASSUMED | {"cohort_size": 1_001, "mechanism": "skellam"}, None),
        (ASSUMED | {"mechanism": "binomial", "rounds": 1, "epsilon": 60.0}, None),
        (ASSUMED | {"population": 10**6, "cohort_size": 20_001, "colluders": 0.0}, None),
        (SILOS, "standing"),
        ({"population": 20, "cohort_size": 20, "sampling": "none", "protocol": "standing"}, "standing"),
    ],
)
def test_a_target_leads_to_its_protocol(changes, protocol):
    plan = planned(replace(TARGET, **changes))
    assert plan.protocol == protocol
    assert decode_plan(canonical.encode(plan)) == plan
    assert ("committee" in canonical.encode(plan)) == (protocol == "lattice")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cohort_size": 2_000, "mechanism": "skellam"}, "lattice protocol does not carry the mechanism skellam"),
        ({"cohort_size": 1_001, "protocol": "pairwise"}, "pair masks take cohorts of at most 1000, got 1001"),
        (ASSUMED | {"cohort_size": 1_001, "protocol": "pairwise"}, "pair masks take cohorts of at most 1000"),
        (ASSUMED | {"mechanism": "binomial", "protocol": "pairwise"}, "does not carry the mechanism binomial"),
        ({"protocol": "standing"}, "standing keys are for all silos in every round"),
        ({"mechanism": "shared", "colluders": 0.0, "protocol": "standing"}, "does not carry the mechanism shared"),
        ({"mechanism": "skellam", "protocol": "lattice"}, "does not carry the mechanism skellam"),
        ({"bits": 21, "protocol": "lattice"}, "bits must be in"),
        ({"cohort_size": 20, "colluders": 0.0, "protocol": "lattice"}, "no committee of a cohort of 20"),
        ({"dropouts": 0.5, "protocol": "lattice"}, "no committee of a cohort of 100"),
        ({"protocol": "auto and more"}, "one of auto, pairwise, standing, lattice"),
        (SILOS | {"protocol": "lattice"}, "the lattice protocol takes the unit client, got record"),
    ],
)
def test_a_protocol_that_cannot_carry_a_target_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        calibrate(replace(TARGET, **changes))


def test_a_plan_of_the_lattice_is_deployed_in_no_other_protocol():
    plan, masked = planned(TARGET), planned(replace(TARGET, protocol="pairwise"))
    require_deployable(Protocol.LATTICE, plan, 10_000)
    require_deployable(Protocol.PAIRWISE, masked, 10_000)
    for protocol, other in ((Protocol.PAIRWISE, plan), (Protocol.LATTICE, masked)):
        with pytest.raises(ConfigError, match="the plan runs in the"):
            require_deployable(protocol, other, 10_000)
    PROFILES[Protocol.LATTICE].require(planned(replace(TARGET, protocol="lattice", clip="auto")))
    with pytest.raises(ConfigError, match="cohorts of 64 to 20,000"):
        PROFILES[Protocol.LATTICE].require(planned(replace(TARGET, protocol="lattice", cohort_size=63)))


def test_what_a_plan_of_the_lattice_says_is_checked():
    plan = planned(TARGET)
    for name in ("size", "threshold", "packed", "certificate", "colluders"):
        for step in (-1, 1):
            seats = replace(plan.committee, **{name: getattr(plan.committee, name) + step})
            with pytest.raises(ConfigError, match="a committee must be"):
                replace(plan, committee=seats, threshold=seats.openers)
    for step in (-64, 64):
        with pytest.raises(ConfigError, match="a secret must have"):
            replace(plan, secret=plan.secret + step)
    for changes, words in (
        ({"threshold": plan.threshold + 1}, "its openers the threshold"),
        ({"secret": None}, "go together"),
        ({"committee": None}, "go together"),
        ({"ring": Ring(21)}, "rings of 1 to 20 bits"),
        ({"mechanism": DDGauss(Fraction(7, 4))}, "at least 2 steps in every coordinate"),
        ({"mechanism": planned(replace(TARGET, mechanism="skellam")).mechanism}, "takes discrete Gaussians"),
        ({"quorum": plan.colluders + 1}, "quorum must be in"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(plan, **changes)


def test_a_committee_with_fewer_colluders_than_its_share_does_not_exist():
    """All else follows the rule, but nobody of it is said to collude although two fifths of the cohort may."""
    plan = planned(TARGET)
    seats = seated(plan.committee.size, 0, plan.secret, plan.cohort_size, plan.cohort_size - plan.quorum)
    with pytest.raises(ConfigError, match="a committee must be one of 100 clients with 44 colluders"):
        replace(plan, committee=seats, threshold=seats.openers)


@pytest.mark.parametrize("changes", [{}, {"clip": "auto"}, {"max_weight": 10.0}, {"rotation": "phase"}])
@pytest.mark.parametrize("mechanism", ["centered", "ddgauss"])
def test_noise_of_the_lattice_is_two_steps_wide_in_every_coordinate(changes, mechanism):
    """Bits of an adaptive clip and weights are coordinates like all others, with noise of the same width."""
    weight = dict(changes).pop("max_weight", None)
    settings = {name: value for name, value in changes.items() if name != "max_weight"}
    plan = calibrate(replace(TARGET, mechanism=mechanism, **settings), weight)
    assert plan.protocol is Protocol.LATTICE
    assert plan.least_width >= 2


def test_noise_that_given_bits_make_too_narrow_is_refused():
    coarse = replace(TARGET, mechanism="ddgauss", epsilon=8.0, bits=7)
    assert planned(coarse).protocol is Protocol.PAIRWISE
    assert planned(coarse).least_width < 2
    with pytest.raises(ConfigError, match="noise of at least 2 steps in every coordinate"):
        calibrate(replace(coarse, protocol="lattice"))


# --- bytes ---


def test_from_64_clients_on_the_lattice_sends_less():
    """By counting bytes, at every size where pair masks serve as well; 18 bits and more are never needed there."""
    for size in (64, 65, 96, 97, 128, 200, 384, 512, 513, 1_000):
        target = replace(TARGET, cohort_size=size, population=100 * size)
        sent = [traffic_of(planned(replace(target, protocol=name))).client for name in ("lattice", "pairwise")]
        assert 2 * (sent[0].sent - 130) < sent[1].sent
        assert sent[0].received < sent[1].received


@pytest.mark.parametrize("signed", [True, False])
def test_lattice_traffic_is_what_clients_and_members_send_and_receive(signed, monkeypatch):
    lattice.quick(monkeypatch)
    session = lattice.make_session(70, signed=signed, committee=seated(64, 0, 48, 70, 7))
    sent, received = Counter[int](), Counter[int]()

    def loss(_name, client, answer):
        sent[client] += len(answer)
        return answer

    federation = lattice.LatticeFederation(session, loss=loss)
    answered = federation.answer

    def answer(exchange, client, data):
        received[client] += len(data) + (len(MODEL) if exchange == "contribute" else 0)
        return answered(exchange, client, data)

    monkeypatch.setattr(federation, "answer", answer)
    federation.open(federation.gather())
    for client in session.cohort:
        count = traffic.member_traffic if client in session.members else traffic.lattice_traffic
        planned_traffic = count(session, None, len(MODEL))
        assert (sent[client], received[client] - len(TASK)) == (planned_traffic.sent, planned_traffic.received)


@pytest.mark.parametrize("shape", [{}, {"consistency": SIGNED}, {"delivery": Delivery.EVERYONE, "quorum": 8}])
def test_pairwise_traffic_is_what_a_client_sends_and_receives(shape):
    session = make_session(8, dimension=1000, **shape)
    vectors = {client: np.ones(1000, np.uint32) for client in session.cohort}
    federation, received = Federation(session, vectors=vectors), Counter[int]()
    for client, machine in federation.clients.items():
        kept = machine.receive

        def receive(data, client=client, kept=kept):
            received[client] += len(data)
            return kept(data)

        federation.clients[client] = type("Counted", (), {"receive": staticmethod(receive)})()
    run_round(federation)
    expected = traffic.pairwise_traffic(session, None, len(MODEL)).received + len(TASK)
    assert set(received.values()) == {expected}


def test_the_size_of_a_roster_is_counted():
    for clients in (3, 50):
        roster = roster_of({client: digest("key", client) for client in range(clients)})
        assert traffic.roster_bytes(clients) == len(encode_roster(roster, AUTHORITY))


def test_a_plan_prints_the_bytes_of_its_own_session():
    target = replace(TARGET, population=100_000, cohort_size=1_000, rounds=50, dimension=19_354)
    target = replace(target, epsilon=1.0, delta=None)
    summary = describe(target, planned(target))
    assert (summary.bits, summary.upload_bytes) == (10, 40_960)
    assert summary.traffic.client.sent == 40_960 + 3_408
    assert summary.traffic.member.sent == 40_960 + 5_932
    assert summary.traffic.client.received == 4 * 19_354 + 17_944
    assert describe(replace(target, consistency="assumed"), planned(target)).traffic == summary.traffic


def test_where_no_protocol_serves_no_bytes_are_counted():
    target = replace(TARGET, cohort_size=1_001, mechanism="skellam", consistency="assumed")
    assert traffic_of(planned(target)) is None


def test_a_committee_has_a_size_of_the_table_or_is_the_whole_cohort():
    assert committee_sizes(64) == (64,)
    assert committee_sizes(100) == (64, 96, 100)
    assert committee_sizes(513) == (64, 96, 128, 192, 256, 384, 512)
