"""What a client runs: only plans, protocols and requests that the table and its own settings list."""

from dataclasses import replace
from functools import cache

import pytest

from d2pfed.accounting import SERVER, Unit, client_epsilon
from d2pfed.deploy.account import ClientSpending, charged
from d2pfed.deploy.client import PrivateClient, WeightedArrays
from d2pfed.deploy.config import init_client, make_secret, read_client_config
from d2pfed.deploy.layout import Layout, encode_task
from d2pfed.deploy.rosters import make_draws
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.numerics.model_bytes import decode_model
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PROFILES, Plan, Policy, PrivacyTarget, Protocol, calibrate, policy
from d2pfed.plan.policy import require_deployable
from d2pfed.round import Participant, epoch_of, session
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.standing.epoch import encode_invitation
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.statistics.questions import MEANS, STATISTIC
from support.enrolled_clients import DIMENSION, anchor_in, directory_of, enrol, make_plan, sign_roster
from support.federation import enrolment_secret
from support.malicious_server import LAYOUT, MaliciousServer, add_one
from support.twins import twin

CLIENTS = 5


def nothing(*_inputs, **_named):
    """Stand for a check that is not made."""


def epsilon_spent(directory, client):
    config = read_client_config(directory_of(directory, client))
    return len(ClientSpending.of(config.log.read()).releases)


@cache
def plan_with(**changes) -> Plan:
    weight = changes.pop("max_weight", None)
    target = PrivacyTarget(
        **(
            {
                "dimension": DIMENSION,
                "population": 40,
                "cohort_size": 40,
                "rounds": 2,
                "epsilon": 20.0,
                "delta": 1e-5,
                "sampling": "none",
                "against": SERVER,
                "dropouts": 0.1,
                "consistency": Consistency.SIGNED,
            }
            | changes
        )
    )
    return calibrate(target, weight)


RECORD = {"unit": "record", "records": 4000, "colluders": 0.1}
LISTED = [
    ({}, {"pairwise", "standing"}),
    ({"mechanism": "ddgauss"}, {"pairwise", "standing"}),
    ({"mechanism": "skellam"}, {"pairwise", "standing"}),
    ({"mechanism": "shared", "dropouts": 0.0}, {"pairwise"}),
    ({"mechanism": "binomial", "rounds": 1, "epsilon": 60.0}, set()),
    ({"sampling": "fixed", "cohort_size": 20}, {"pairwise"}),
    ({"sampling": "once", "cohort_size": 10, "spare": 1}, {"pairwise"}),
    ({"sampling": "none", "cohort_size": 20}, {"pairwise"}),
    (RECORD, {"standing"}),
    ({"clip": "auto"}, {"pairwise", "standing"}),
    ({"max_weight": 10.0}, {"pairwise", "standing"}),
]


@pytest.mark.parametrize(("changes", "carried"), LISTED, ids=[str(changes) for changes, _ in LISTED])
def test_the_table_says_which_protocol_carries_a_plan(changes, carried):
    plan, found = plan_with(**changes), set()
    for protocol in Protocol:
        try:
            require_deployable(protocol, plan, 40)
        except ConfigError:
            continue
        found.add(protocol.value)
    assert found == carried


def test_a_protocol_is_bound_to_its_roster():
    assumed = replace(plan_with(), consistency=Consistency.ASSUMED)
    require_deployable(Protocol.PAIRWISE, assumed, None)
    for protocol, plan, enrolled in (
        (Protocol.PAIRWISE, assumed, 40),
        (Protocol.PAIRWISE, plan_with(), None),
        (Protocol.STANDING, assumed, None),
        (Protocol.STANDING, plan_with(), 41),
        (Protocol.STANDING, plan_with(), 39),
    ):
        with pytest.raises(ConfigError):
            require_deployable(protocol, plan, enrolled)


def test_every_feature_of_a_plan_is_seen():
    bare = replace(PROFILES[Protocol.STANDING], extras=frozenset())
    bare.require(plan_with())
    with pytest.raises(ConfigError, match="the standing protocol does not take adaptive_clip, the plan has it"):
        bare.require(plan_with(clip="auto"))
    with pytest.raises(ConfigError, match="the standing protocol does not take weights, the plan has it"):
        bare.require(plan_with(max_weight=10.0))


# A plan with weights: a weight below zero used to raise, with a text that reached the server


def weight_of(value: float):
    """A training function whose weight is a private number."""

    def train(_client):
        return lambda arrays, _settings: WeightedArrays({name: array + 1 for name, array in arrays.items()}, value)

    return train


def outcome(tmp_path, value: float, **rules: object) -> str:
    """What a server sees of one attempt under a plan with weights, about a client with this private number."""
    plan = calibrate(
        PrivacyTarget(
            dimension=DIMENSION,
            population=CLIENTS,
            cohort_size=CLIENTS,
            rounds=2,
            epsilon=5000.0,
            delta=1e-5,
            sampling="none",
            against=SERVER,
            consistency=Consistency.SIGNED,
        ),
        10.0,
    )
    tmp_path.mkdir(exist_ok=True)
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, CLIENTS, **rules), train=weight_of(value))
    server.announce()
    try:
        server.attempt()
    except D2PFedError as error:
        return f"{error} {server.refusals}"
    return f"a sum {server.refusals}"


def test_a_client_whose_policy_does_not_list_weights_refuses_them(tmp_path):
    with pytest.raises(ConfigError, match="the extra coordinate must be one of adaptive_clip, got weights"):
        outcome(tmp_path, 1.0, extras=["adaptive_clip"])


def test_weights_tell_nothing_beside_the_sum(tmp_path):
    assert outcome(tmp_path / "one", 1.0) == outcome(tmp_path / "two", -1.0) == "a sum {}"


def test_without_totality_weights_are_an_oracle(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateClient, "_contribute", fragile)
    assert outcome(tmp_path / "one", 1.0) == "a sum {}"
    assert "a weight must be" in outcome(tmp_path / "two", -1.0)


def fragile(self, attempt, task, model, group=None):
    """Contribute as a client does that lets errors out."""

    layout = Layout.decode(attempt.terms.layout)
    params, before = decode_model(model, layout.dimension), attempt.charge()
    participant = Participant(
        plan=attempt.plan, client=attempt.config.client, entropy=Entropy.system(), participations=before
    )
    return participant.encode(attempt.session, self._update(attempt, {}, params, layout), group)


# Standing keys under a plan whose noise counts on draws


VICTIM, POPULATION, COHORT = 0, 1000, 100


@cache
def drawn_plan() -> Plan:
    return calibrate(
        PrivacyTarget(
            dimension=DIMENSION,
            population=POPULATION,
            cohort_size=COHORT,
            rounds=10,
            epsilon=8.0,
            delta=1e-5,
            sampling="fixed",
            against="colluding(34)",
            protocol="pairwise",
            dropouts=0.1,
            colluders=0.1,
            attempts_per_round=2,
            max_participations=2,
            consistency=Consistency.SIGNED,
        )
    )


def join_colluders(tmp_path, monkeypatch, *skipped) -> bytes:
    """The answer of a victim to an epoch in which all but itself collude, under a plan of drawn cohorts."""

    tmp_path.mkdir(exist_ok=True)
    authority = make_secret(tmp_path / "authority.key")
    own = init_client(directory_of(tmp_path, VICTIM), VICTIM, authority, anchor_in(tmp_path, VICTIM))
    keys = {client: signing_public(enrolment_secret(client)) for client in range(1, POPULATION)}
    roster = sign_roster(tmp_path, {VICTIM: own} | keys, None, make_draws(tmp_path / "draws", 12))
    server = MaliciousServer(tmp_path, drawn_plan(), roster, train=add_one)
    server.announce(VICTIM)
    with monkeypatch.context() as patched:
        patched.setattr(session, "require_standing", nothing)  # the server's own
        colluding = epoch_of(drawn_plan(), server.run, roster.roster, tuple(range(drawn_plan().quorum)))
    for module, name in skipped:
        monkeypatch.setattr(module, name, nothing)
    invitation = encode_invitation(colluding, VICTIM, roster.roster.serial, None)
    return server.ask_frame(VICTIM, invitation)


def test_standing_keys_under_a_plan_of_drawn_cohorts_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="the standing protocol takes sampling none, the plan has fixed"):
        join_colluders(tmp_path, monkeypatch)
    with pytest.raises(D2PFedError, match="the standing protocol takes sampling none, the plan has fixed"):
        join_colluders(tmp_path / "again", monkeypatch, (Policy, "require_served"))


def test_without_the_table_a_victim_joins_an_epoch_of_colluders(tmp_path, monkeypatch):
    """It is charged for the noise of a drawn cohort, and has its own alone."""
    skipped = (Policy, "require_served"), (session, "require_standing")
    assert kind_of(join_colluders(tmp_path, monkeypatch, *skipped)) == MessageKind.STANDING_ADVERT
    plan = drawn_plan()
    release = charged(plan, "a run", 0, 0)
    alone = replace(release, noise=plan.noise(1))
    assert client_epsilon([release], 1e-5) < 8 < 4 * 8 < client_epsilon([alone], 1e-5)


# What a client serves, by its own settings


def test_a_client_refuses_a_protocol_that_its_settings_do_not_list(tmp_path, monkeypatch):
    roster = enrol(tmp_path, CLIENTS, protocols=["standing"])
    server = MaliciousServer(tmp_path, make_plan(CLIENTS), roster)
    server.announce()  # standing keys carry it
    with pytest.raises(ConfigError, match="the protocol must be one of standing, got pairwise"):
        server.invite(0)
    monkeypatch.setattr(Policy, "require_served", nothing)
    assert kind_of(server.invite(0)) == MessageKind.KEY_ADVERTISEMENT


@pytest.mark.parametrize(
    ("settings", "refused"), [({STATISTIC: "sum"}, "statistics"), ({MEANS: "{}"}, "evaluation"), ({}, "training")]
)
def test_a_client_refuses_a_request_that_its_settings_do_not_list(tmp_path, monkeypatch, settings, refused):
    served = [kind for kind in ("training", "statistics", "evaluation") if kind != refused]
    server = MaliciousServer(tmp_path, make_plan(CLIENTS), enrol(tmp_path, CLIENTS, requests=served))
    server.announce()
    lax = twin(
        PrivateClient._contribute, "if is_evaluation(settings) != (self.purpose", "if None is (self.purpose"
    )
    monkeypatch.setattr(PrivateClient, "_contribute", lax)
    task = encode_task(LAYOUT, settings)
    with pytest.raises(D2PFedError):
        server.attempt(task=task)
    assert {str(error) for error in server.refusals.values()} == {
        f"this client's policy: the request must be one of {', '.join(served)}, got {refused}"
    }
    assert epsilon_spent(tmp_path, 0) == 0
    monkeypatch.setattr(Policy, "require_request", nothing)
    server.attempt(attempt=1, task=task)
    assert epsilon_spent(tmp_path, 0) == 1


def test_a_new_client_agrees_to_the_unit_that_its_owner_names(tmp_path):
    records = plan_with(**RECORD)
    for unit, refused in ((Unit.CLIENT, True), (Unit.RECORD, False)):
        place = tmp_path / unit
        init_client(place / "client", 3, bytes(range(32)), place / "anchor", unit=unit)
        config = read_client_config(place / "client")
        assert config.policy == Policy(units=(unit,))
        served = config.policy
        if refused:
            with pytest.raises(ConfigError, match="the unit must be one of client, got record"):
                served.require_served(Protocol.STANDING, records, policy.Enrolled(40, 0))
        else:
            served.require_served(Protocol.STANDING, records, policy.Enrolled(40, 0))
