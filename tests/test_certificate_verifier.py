"""The verifier finds every forgery, agrees with the accountants, and would be noticed if it were wrong itself."""

import copy
import json
import math
import re
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

import d2pfed.certificate_verifier as verifier
from d2pfed.accounting import RELEASED, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.filters import CONDITION, Filter
from d2pfed.api.certificate_content import event as stated_event
from d2pfed.api.certificate_content import planned
from d2pfed.api.certify import certify, check_ledger
from d2pfed.cli import main
from d2pfed.ledger import Head, Ledger
from d2pfed.ledger.budget import ChargedRun, RunPlan
from d2pfed.noise.mechanisms import l1_radius
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.plan.plan import guarantees
from d2pfed.round import run_plan
from support.certificates import (
    KINDS,
    OTHER,
    PUBLIC,
    SILO_KINDS,
    certified,
    forged,
    key_in,
    signed,
    statistics,
    train,
    train_silos,
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> dict[str, Path]:
    """Return certificates of a run with known cohorts, of one with hidden ones, and of a ledger."""
    root, ledger = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("ledger") / "statistics.sqlite"
    found = {name: certified(root, name) / "certificate.json" for name in ("once", "fixed", *SILO_KINDS)}
    return found | {"ledger": certify(statistics(ledger, 2), key=key_in(root)).certificate}


def statuses(file: Path) -> int:
    return verifier.verify(file, [PUBLIC]).status


def claims_on(statement: dict, observer: str) -> list[dict]:
    found = [claim for claim in statement["claims"] if claim["observer"] == observer]
    assert found
    return found


def lower(observer: str, factor: float):
    def change(statement: dict) -> None:
        for claim in claims_on(statement, observer):
            claim["epsilon"] *= factor

    return change


def alter(**fields: object):
    """Change fields of the first event, alike in the plan's text where it is there by the same name."""
    return lambda statement: statement["events"][0].update(fields)


def with_plan(old: str, new: str):
    def change(statement: dict) -> None:
        assert old in statement["plan"]
        statement["plan"] = statement["plan"].replace(old, new)

    return change


def state(place: str, value: object):
    section, _, name = place.partition(".")
    return lambda statement: statement[section].update({name: value})


def invent(statement: dict) -> None:
    """Charge a run that never was, with much noise, and let all claims of a run be about that one."""
    own, old = statement["events"][0], statement["claims"]
    made = own | {"run": "nice", "row": "3:" + "0" * 64, "plan": "00" * 32, "variance": "1000000"}
    statement["events"].append(made)
    statement["ledger"]["runs"] = statement["tuning"]["runs_on_this_ledger"] = 2
    statement["claims"] = [claim | {"runs": ["nice"], "epsilon": 0.05} for claim in old]
    statement["claims"].append(old[1] | {"scope": "ledger", "runs": [own["run"], "nice"], "epsilon": 1e3})


def bind(statement: dict, plan: str) -> None:
    """State another plan's text, with its digest in the event."""
    statement.update(plan=plan)
    statement["events"][0]["plan"] = digest("d2pfed plan", plan).hex()


# What a signer who lies could state, by the certificate that is changed. The signature is right each time.
LIES = {
    "epsilon lowered, server": ("once", lower("server", 0.998)),
    "epsilon lowered, client": ("once", lower("client", 0.998)),
    "epsilon lowered, alone": ("once", lower("alone", 0.998)),
    "epsilon lowered, hidden cohorts": ("fixed", lower("released", 0.998)),
    **{f"epsilon lowered, {kind}": (kind, lower("server", 0.998)) for kind in SILO_KINDS},
    "epsilon of a single attempt, record": ("record", lower("server", 0.8)),
    "cap on records": ("record", alter(max_participations=1)),
    "rate lowered": ("record", alter(rate="1/100")),
    "a person's silos": ("person in two silos", alter(coins=1)),
    "epsilon lowered, ledger": (
        "ledger",
        lambda s: s["claims"][-1].update(epsilon=s["claims"][-1]["epsilon"] * 0.998),
    ),
    "epsilon of fewer colluders": (
        "once",
        lambda s: [c.update(observer="colluding(39)") for c in s["claims"] if c["observer"].startswith("coll")],
    ),
    "epsilon of the models said of the server": (
        "fixed",
        lambda s: claims_on(s, "server")[0].update(epsilon=claims_on(s, "released")[0]["epsilon"]),
    ),
    "epsilon that is no number": ("once", lambda s: s["claims"][0].update(epsilon="1")),
    "epsilon of zero": ("once", lambda s: s["claims"][0].update(epsilon=0.0)),
    "delta lowered": ("once", lambda s: [c.update(delta=c["delta"] / 10) for c in s["claims"]]),
    "delta of one": ("once", lambda s: s["claims"][0].update(delta=1.0)),
    "sigma raised": (
        "once",
        lambda s: s["events"][0].update(variance=str(4 * Fraction(s["events"][0]["variance"]))),
    ),
    "another noise": ("once", alter(kind="skellam")),
    "contributors raised": ("once", alter(contributors=1000)),
    "radius lowered": ("once", alter(radius="1/100")),
    "radius not rounded up": (
        "once",
        lambda s: s["events"][0].update(
            radius=str(Fraction(s["events"][0]["radius"]) * (1 - Fraction(1, 10**12)))
        ),
    ),
    "releases lowered": ("fixed", alter(releases=1)),
    "cap lowered": ("fixed", alter(max_participations=1)),
    "population raised": ("fixed", alter(population=40_000, rate="1/1000")),
    "rate that is not that of the cohort": ("fixed", alter(rate="1/1000")),
    "another sampling": ("fixed", alter(method="none")),
    "add-remove of clients": ("once", alter(adjacency="add-remove")),
    "coins of clients": ("once", alter(coins=2)),
    "blocks that do not fit": ("once", alter(releases=400)),
    "plan's sigma raised": (
        "once",
        with_plan('"Centered","sigma":{"":"Fraction","is":"', '"Centered","sigma":{"":"Fraction","is":"9'),
    ),
    "plan's epsilon changed": (
        "once",
        with_plan('"epsilon":{"":"float","is":"0x', '"epsilon":{"":"float","is":"0X'),
    ),
    "plan of nothing": ("once", lambda s: s.update(plan="{}")),
    "row dropped": ("ledger", lambda s: s["events"].pop(0)),
    "row twice": ("ledger", lambda s: s["events"].append(s["events"][0])),
    "claim dropped": ("once", lambda s: s["claims"].remove(claims_on(s, "alone")[0])),
    "claim of the whole ledger dropped": ("ledger", lambda s: s["claims"].pop()),
    "claim of another run": ("once", lambda s: s["claims"][0].update(runs=["another"])),
    "claim of a part of the ledger": ("ledger", lambda s: s["claims"][-1]["runs"].pop()),
    "claim of some scope": ("once", lambda s: s["claims"][0].update(scope="some")),
    "claim of another unit": ("once", lambda s: s["claims"][0].update(unit="record")),
    "field dropped": ("once", lambda s: s.pop("assumptions")),
    "field added": ("once", lambda s: s.update(approved=True)),
    "events of nothing": ("once", lambda s: s.update(events=[])),
    "events that are none": ("once", lambda s: s.update(events=["an event"])),
    "field of an event dropped": ("once", lambda s: s["events"][0].pop("dimension")),
    "count that is a truth value": ("once", alter(releases=True)),
    "rows in another order": ("ledger", lambda s: s["events"].reverse()),
    "row beyond the head": ("once", lambda s: s["ledger"].update(head="1:" + "0" * 64)),
    "row that is none": ("once", alter(row="x")),
    "field emptied": ("once", lambda s: s.update(assumptions=[])),
    "field of nothing": ("once", lambda s: s.update(subject=None)),
    "field of a claim added": ("once", lambda s: s["claims"][0].update(note="in truth it is 0.1")),
    "cap of a claim": ("fixed", lambda s: s["claims"][0].update(max_participations=1)),
    "colluders' claim dropped": (
        "once",
        lambda s: s.update(claims=[claim for claim in s["claims"] if "coll" not in claim["observer"]]),
    ),
    "one run's claims dropped": ("ledger", lambda s: s.update(claims=s["claims"][4:])),
    "claim of the ledger against another": ("ledger", lambda s: s["claims"][-1].update(observer="released")),
    "claims about another event": ("once", invent),
    "run's name": ("once", lambda s: s["subject"].update(name="another")),
    "dimension lowered": ("once", alter(dimension=1)),
    "L1 radius lowered": ("once", alter(l1_radius="1")),
    "plan without a fact": ("once", lambda s: bind(s, "{}")),
    "plan that is null": ("once", lambda s: bind(s, "null")),
    **{
        f"{place}, as readers see it": (kind, state(place, value))
        for kind, place, value in (
            ("once", "unit.name", "record"),
            ("once", "adjacency.name", "zero-out"),
            ("fixed", "sampling.method", "none"),
            ("fixed", "sampling.population", 10**6),
            ("fixed", "sampling.cohort_size", 1),
            ("record", "sampling.rate", "1/1000"),
            ("fixed", "participations.max_participations", 1),
            ("once", "colluders.of_a_cohort", 0),
            ("once", "dropouts.quorum", 40),
            ("once", "dropouts.tolerated", 39),
            ("once", "released.at_most", 1),
            ("ledger", "released.at_most", 1),
            ("ledger", "subject.runs", []),
            ("once", "tuning.runs_on_this_ledger", True),
            ("once", "trust_model.against", "alone"),
            ("once", "trust_model.consistency", "signed"),
            ("once", "subject.rounds_planned", 1),
            ("once", "mechanism.name", "skellam"),
            ("once", "mechanism.clip", 0.5),
            ("once", "mechanism.sigma", 10.0),
            ("record", "mechanism.noise_multiplier", 10.0),
            ("once", "mechanism.dimension", 1),
            ("once", "mechanism.bits", 64),
        )
    },
    "fraction with a sign": ("once", alter(variance="-4")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_although_it_is_signed(certificates, lie):
    name, change = LIES[lie]
    found = verifier.verify(forged(certificates[name], change), [PUBLIC])
    assert found.status == 1, found.lines


def in_plan(place: str, value: object):
    def change(statement: dict) -> None:
        plan = json.loads(statement["plan"])
        *path, name = place.split(".")
        reduce(getitem, path, plan)[name] = value
        bind(statement, json.dumps(plan, sort_keys=True, separators=(",", ":")))

    return change


def both(*changes):
    return lambda statement: [change(statement) for change in changes]


def more_noise(statement: dict) -> None:
    for event in statement["events"]:
        event["contributors"] = 10**6


# Lies that go through all of plan, event and claims, by what the verifier says of them.
CONTRADICTIONS = {
    "a quorum above the cohort": (
        "once",
        both(in_plan("quorum", 10**6), more_noise, state("dropouts.quorum", 10**6)),
        ": impossible",
    ),
    "statistics with more noises than clients": ("ledger", more_noise, ": impossible"),
    "two runs of one plan with different noise": (
        "ledger",
        lambda s: s["events"][1].update(variance="400") or [c.update(epsilon=1e3) for c in s["claims"]],
        "the digest of one plan",
    ),
    "a budget that was exceeded": (
        "once",
        lambda s: s["ledger"]["budget"].update(epsilon=0.001),
        "0.001 is claimed",
    ),
    "a budget at a smaller delta": (
        "once",
        lambda s: s["ledger"]["budget"].update(delta=1e-12),
        "not the budget's",
    ),
    "a ledger's budget against another": (
        "ledger",
        lambda s: [
            s["ledger"]["budget"].update(observer="alone", epsilon=5.0),
            s["claims"][-1].update(observer="alone", epsilon=None),
        ],
        "is claimed at",
    ),
    "more rounds than attempts": (
        "once",
        both(in_plan("rounds", 1000), state("subject.rounds_planned", 1000)),
        "are out of order",
    ),
    "another delta in the plan": ("once", in_plan("delta.is", (1e-12).hex()), "ledger.budget.delta is stated as"),
    "no delta in the plan": ("once", in_plan("delta.is", "nan"), "ledger.budget.delta is stated as"),
    "claims at another delta": ("once", lambda s: [c.update(delta=0.9) for c in s["claims"]], "delta 0.9"),
    "nobody to mask with": (
        "once",
        in_plan("threshold", 1),
        "are out of order",
    ),
    "a scope that reads like a run": ("once", lambda s: s["claims"][0].update(scope="['once']"), "['once']"),
    "a plan's text that is another's too": (
        "once",
        lambda s: bind(s, s["plan"].replace('"quorum":', '"quorum":1,"quorum":')),
        "its digest is",
    ),
    "a run without its plan": (
        "once",
        lambda s: s.update(plan=None) or s["subject"].update(runs=[s["subject"]["name"]]),
        "subject.kind is stated as",
    ),
    **{
        f"a budget that is {budget!r}": ("once", lambda s, budget=budget: s["ledger"].update(budget=budget), "")
        for budget in (None, [1], "x", {}, {"epsilon": 1.0, "delta": 1e-5})
    },
    "a field more in the budget": (
        "once",
        lambda s: s["ledger"]["budget"].update(true_epsilon=0.1),
        "true_epsilon",
    ),
    "a clip below zero": (
        "once",
        lambda s: (
            [
                in_plan(f"codec.{name}.is", "-" + json.loads(s["plan"])["codec"][name]["is"])(s)
                for name in ("clip", "granularity")
            ]
            + [s["mechanism"].update({name: -s["mechanism"][name] for name in ("clip", "sigma")})]
        ),
        "is stated as -",
    ),
    "a reason beside a number": (
        "once",
        lambda s: s["claims"][0].update(reason="it is 0.01"),
        "a reason for having none",
    ),
    "a model of any size": (
        "once",
        in_plan("codec.rotation", {"": "RandomPhase", "dimension": 10**80}),
        "a model has between 1 and 2^32 parameters",
    ),
    **{
        f"vectors folded to {length}": (
            "once",
            in_plan("codec.rotation", {"": "Fold", "dimension": 1000, "length": length, "kept": 0}),
            "cannot be folded to",
        )
        for length in (0, 1, 100, 1024, 10**80)
    },
    "vectors folded to fewer numbers than the event has": (
        "once",
        in_plan("codec.rotation", {"": "Fold", "dimension": 1000, "length": 2, "kept": 0}),
        "dimension",
    ),
    "grids of any fineness": ("once", in_plan("codec.fraction_bits", 10**11), "are out of order"),
    "a width beyond all numbers": ("once", in_plan("mechanism.sigma.is", "1e30000000"), "was expected, got"),
}


@pytest.mark.parametrize("lie", CONTRADICTIONS)
def test_a_contradiction_of_plan_budget_and_claims_is_found(certificates, lie):
    name, change, word = CONTRADICTIONS[lie]
    found = verifier.verify(forged(certificates[name], change), [PUBLIC])
    assert found.status == 1
    assert any(word in text for kind, text in found.lines if kind == "WRONG"), found.lines


def test_claims_that_are_tiny_end(certificates):
    for epsilon in (5e-324, 1e-9):
        tiny = forged(certificates["fixed"], lambda s, epsilon=epsilon: s["claims"][0].update(epsilon=epsilon))
        assert verifier.verify(tiny, [PUBLIC]).status in (1, 3)


def test_a_cap_that_costs_all_of_delta_leaves_other_runs_amplified(tmp_path):
    """Two runs on one ledger against whoever sees the models: the second one's cap binds more often than delta."""
    shared, given = (
        tmp_path / "shared.sqlite",
        {"dimension": 4, "population": 100, "cohort_size": 30, "delta": 1e-3},
    )
    wanted = {"epsilon": 2.0, "rounds": 6}, {"epsilon": 1.0, "rounds": 3, "max_participations": 2}
    plans = [calibrate(PrivacyTarget(**given, sampling="fixed", spare=0, **changes)) for changes in wanted]
    charges = [run_plan(plan) for plan in plans]
    cap = max(charge.max_participations for charge in charges)
    with Ledger.create(shared, replace(charges[0].budget, epsilon=6.0, max_participations=cap)) as book:
        for number, charge in enumerate(charges):
            book.begin(f"run {number}", f"owner {number}", charge)
    found = verifier.verify(certify(shared, key=key_in(tmp_path)).certificate, [PUBLIC])
    assert found.status == 0, found.lines


def test_a_mechanism_that_is_spelt_unlike_any_is_not_checked(certificates):
    rounded = in_plan("mechanism.rounded", {"beta": {"is": (0.6).hex()}})
    shared = forged(certificates["once"], both(in_plan("mechanism.", "SHARED"), rounded))
    found = verifier.verify(shared, [PUBLIC])
    assert found.status == 3
    assert dict(found.lines)["NOT CHECKED"] == "plan: an unknown mechanism: SHARED"


def test_what_takes_more_memory_than_there_is_is_not_checked():
    def take() -> str:
        raise MemoryError("all of it")

    found = verifier.Findings()
    assert not found.note("plan", take)
    assert found.status == 3


@pytest.mark.parametrize("name", ["once", "fixed", "ledger", *SILO_KINDS])
def test_an_honest_certificate_that_is_signed_again_holds(certificates, name):
    assert statuses(forged(certificates[name], lambda _: None)) == 0


def test_certificates_of_folded_vectors_hold(tmp_path):
    for name, make, changes in (
        ("clients", train, KINDS["once"] | {"compression": 64}),
        ("silos", train_silos, {"compression": 4}),
    ):
        file = certify(make(tmp_path / name, **changes), key=key_in(tmp_path)).certificate
        assert json.loads(file.read_text())["statement"]["mechanism"]["dimension"] == changes["compression"]
        assert verifier.verify(file, [PUBLIC]).status == 0, name


def test_what_has_no_arithmetic_here_is_named_and_ends_with_3(certificates):
    for change, word in (
        (alter(kind="binomial"), "binomial"),
        (alter(variance="1/100"), "less than 0.4 steps"),
        (lambda s: s.update(plan=None) or s["events"][0].update(kind="skellam"), "without a Gaussian bound"),
    ):
        found = verifier.verify(forged(certificates["fixed"], change), [PUBLIC])
        told = [text for kind, text in found.lines if kind == "NOT CHECKED"]
        if found.status != 1:  # the plan of a forged event may be wrong as well
            assert found.status == 3
        assert any(word in text for text in told), found.lines


def test_only_what_the_documentation_lists_ends_with_3(certificates):
    """A name or number that makes no sense is wrong; it does not end as something that could not be checked."""
    page = (Path(__file__).parent.parent / "docs" / "certificate.md").read_text()
    assert [kind for kind in verifier.UNCHECKED.values() if f"* {kind}\n" not in page] == []
    listed = page[page.index("ends with 3:") : page.index("`d2pfed certify verify` takes")]
    assert listed.count("\n* ") == len(verifier.UNCHECKED)
    for change in (
        alter(unit="person"),
        alter(kind="moonlight"),
        alter(method="twice"),
        alter(radius="1" * 80),
        lambda s: s["claims"].append(s["claims"][0] | {"observer": "moon"}),
        lambda s: s["ledger"]["budget"].update(declared=[1]),
        lambda s: s["ledger"]["budget"].update(epsilon=10**400),
    ):
        assert statuses(forged(certificates["fixed"], change)) == 1
    found = verifier.Findings()
    found.note("plan", lambda: str(math.exp(1e6)))
    assert found.status == 1


def test_a_signature_by_another_key_is_found(certificates):
    for change in (lambda _: None, lower("server", 1.5)):
        file = forged(certificates["once"], change, OTHER)
        assert verifier.verify(file).status == 3  # it is signed, and nobody knows by whom
        assert verifier.verify(file, [PUBLIC]).status == 1
    content = json.loads(certificates["once"].read_text())
    content["signature"] = json.loads(file.read_text())["signature"]
    file.write_bytes(verifier.canonical(content))
    assert verifier.verify(file, [PUBLIC]).status == 1


def test_a_stranger_cannot_make_it_work_for_hours(certificates, monkeypatch):
    """Neither by claims of one thing, or of many, nor by any numbers once the signer is not the one who was named."""
    twice = forged(certificates["once"], lambda s: s["claims"].append(dict(s["claims"][0])))
    found = verifier.verify(twice, [PUBLIC])
    assert found.status == 1
    assert "claims: some are made twice" in found.lines[-1][1]
    monkeypatch.setattr(verifier, "MOST_CLAIMS", 3)
    assert "more than 3" in verifier.verify(certificates["once"], [PUBLIC]).lines[-1][1]
    monkeypatch.setattr(verifier, "own_bound", lambda *_: pytest.fail("computed for a stranger"))
    assert verifier.verify(forged(certificates["once"], lambda _: None, OTHER), [PUBLIC]).status == 1


def test_any_changed_byte_is_found(certificates, tmp_path):
    """One bit of every eleventh byte, in turn: digits, letters' cases, spaces, signs."""
    data, file = certificates["once"].read_bytes(), tmp_path / "changed.json"
    for place in range(0, len(data), 11):
        changed = bytearray(data)
        changed[place] ^= (1, 0x20, 0x80, 4)[place // 11 % 4]
        file.write_bytes(changed)
        try:
            assert verifier.verify(file, [PUBLIC]).status == 1, place
        except ValueError:
            continue
    for other in (data[:-1], data + b"\n", b" " + data, data.replace(b"\n ", b"\n"), data.replace(b"\n", b"\r\n")):
        file.write_bytes(other)
        assert verifier.verify(file, [PUBLIC]).status == 1


def test_the_ledger_tells_what_no_arithmetic_can(certificates):
    honest = json.loads(certificates["once"].read_text())["statement"]
    ledger = certificates["once"].with_name("ledger.sqlite")
    assert check_ledger(honest, ledger)
    other = json.loads(certificates["once"].read_text())["statement"]
    other["ledger"]["head"] = other["ledger"]["head"][:-1] + ("0" if other["ledger"]["head"][-1] != "0" else "1")
    for statement, wrong in ((other, "lacks row"), (honest | {"events": []}, "charged other runs")):
        with pytest.raises(verifier.Wrong, match=wrong):
            check_ledger(statement, ledger)
    with pytest.raises(verifier.Wrong, match="there is no ledger"):
        check_ledger(honest, ledger.with_name("nothing.sqlite"))


def event(release, attempts: int, cap: int) -> verifier.Event:
    noise, sampling = release.noise, release.sampling
    skellam = isinstance(noise, SkellamSum)
    assert skellam or isinstance(noise, DiscreteGaussianSum)
    return verifier.Event(
        run="run",
        row="0",
        plan=b"",
        software="not recorded",
        unit="client",
        adjacency=release.adjacency.value,
        method=sampling.method.value,
        population=sampling.population,
        cohort_size=sampling.cohort_size,
        rate=Fraction(sampling.cohort_size, sampling.population),
        coins=1,
        kind="skellam" if skellam else "discrete-gaussian",
        variance=noise.variance if skellam else noise.sigma**2,
        contributors=noise.contributors,
        radius=noise.radius,
        l1_radius=noise.l1_radius if skellam else l1_radius(noise.radius, noise.dimension),
        dimension=noise.dimension,
        releases=attempts,
        max_participations=cap,
    )


@pytest.mark.parametrize("epsilon", [0.1, 2.0])
@pytest.mark.parametrize(
    ("mechanism", "sampling", "adjacency"),
    [
        ("centered", "once", "replace-one"),
        ("centered", "fixed", "replace-one"),
        ("centered", "fixed", "zero-out"),
        ("shared", "fixed", "replace-one"),
        ("ddgauss", "none", "zero-out"),
        ("skellam", "once", "replace-one"),
    ],
)
def test_the_verifiers_arithmetic_is_that_of_the_accountants(mechanism, sampling, adjacency, epsilon):
    target = PrivacyTarget(
        dimension=500,
        population=10_000,
        cohort_size=100,
        rounds=20,
        epsilon=epsilon,
        mechanism=mechanism,
        sampling=sampling,
        adjacency=adjacency,
        max_participations=2 if sampling == "none" else None,
    )
    plan = calibrate(target)
    own = event(plan.release("", 0, 0, (), plan.quorum), plan.max_attempts, plan.max_participations)
    for guarantee in guarantees(plan):
        bound = verifier.own_bound([own], str(guarantee.observer), guarantee.delta, guarantee.epsilon)
        if math.isinf(guarantee.epsilon):
            assert math.isinf(bound)
        else:
            hidden = guarantee.accountant == "allocation"  # two grids of the same sum
            assert bound == pytest.approx(guarantee.epsilon, rel=0.04 if hidden else 1e-4)
            assert bound <= guarantee.epsilon * (1 + verifier.TOLERANCE / 2)


@pytest.mark.parametrize("coins", [1, 3])
def test_the_profile_of_secret_coins_is_dp_accountings(coins):
    """Records: their coins are hidden from everyone, and a person may have several."""
    mu, rate = 0.7, 0.05
    heads = np.arange(coins + 1)
    chances = [math.comb(coins, k) * rate**k * (1 - rate) ** (coins - k) for k in range(coins + 1)]
    peer = pld.from_mixture_gaussian_mechanism(
        1.0, (heads * mu).tolist(), chances, value_discretization_interval=1e-2
    )
    own = verifier.Event(
        run="run",
        row="0",
        plan=b"",
        software="not recorded",
        unit="record",
        adjacency="add-remove",
        method="none",
        population=10,
        cohort_size=10,
        rate=Fraction(1, 20),
        coins=coins,
        kind="discrete-gaussian",
        variance=Fraction(10**4),
        contributors=1,
        radius=Fraction(70),
        l1_radius=l1_radius(Fraction(70), 1),
        dimension=1,
        releases=10,
        max_participations=10,
    )
    expected = peer.self_compose(10).get_epsilon_for_delta(1e-5)
    for observer in ("released", "server"):
        assert verifier.own_bound([own], observer, 1e-5, 0.5) == pytest.approx(expected, rel=2e-3)
    assert verifier.own_bound([own], "alone", 1e-5, 0.5) == math.inf


@pytest.mark.parametrize("rate", [0.001, 0.5])
@pytest.mark.parametrize("mu", [0.05, 3.0, 30.0, 60.0])
def test_the_profile_of_opposite_vectors_is_their_integral(mu, rate):
    """A sum of both tails in 40 digits; exponentials beyond the range of doubles once made it zero."""
    with mpmath.workdps(40):
        for epsilon in (0.0, 1e-3, 1.0, min(mu * mu / 2, 450.0), 350.0, 550.0):
            bound, found = mpmath.exp(epsilon), verifier.opposite_delta(np.array([epsilon]), mu, rate)[0]
            b, c = rate * mpmath.exp(-(mpmath.mpf(mu) ** 2) / 2), (1 - rate) * (bound - 1)
            passed = mpmath.log((c + mpmath.sqrt(c * c + 4 * b * b * bound)) / (2 * b)) / mu
            tails = [mpmath.ncdf(sign * mu - passed) for sign in (1, 0, -1)]
            expected = rate * tails[0] - c * tails[1] - rate * bound * tails[2]
            assert found == pytest.approx(float(expected), rel=1e-6, abs=1e-16)


def test_a_record_with_little_noise_gets_no_small_epsilon(certificates):
    """One whose epsilon is about 700: beyond the range of doubles its losses once counted as none."""
    statement = json.loads(certificates["record replaced"].read_text())["statement"]
    one = verifier.event_of(statement["events"][0])
    for factor in (9, 10, 40):
        radius = one.radius * factor
        l1 = l1_radius(radius, one.dimension)
        bare = replace(one, radius=radius, l1_radius=l1, releases=1, max_participations=1)
        for claimed in (1.5, 20.0, 350.0):
            with pytest.raises(verifier.Unchecked, match="too wide for a grid"):
                verifier.own_bound([bare], "alone", 1e-6, claimed)


def test_a_claim_is_not_met_by_a_bound_that_is_no_number(certificates, monkeypatch):
    statement = json.loads(certificates["once"].read_text())["statement"]
    monkeypatch.setattr(verifier, "own_bound", lambda *_: math.nan)
    with pytest.raises(verifier.Wrong, match="it is nan"):
        verifier.check_claim(statement["claims"][0], [verifier.event_of(statement["events"][0])])


def test_what_a_signer_wrote_moves_no_cursor_and_takes_no_memory(certificates):
    def rename(statement: dict) -> None:
        statement["events"][0]["run"] = statement["subject"]["name"] = "once\nholds\x1b[2J\ud800\u202e"
        for claim in statement["claims"]:
            claim["runs"] = [statement["subject"]["name"]]

    found = verifier.verify(forged(certificates["once"], rename), [PUBLIC])
    assert found.status == 0
    assert any("once?holds?[2J??" in line for _, line in found.lines)
    assert all(line.isprintable() for _, line in found.lines)
    coins = verifier.verify(forged(certificates["person in two silos"], alter(coins=10**9)), [PUBLIC])
    assert coins.status == 1


def test_nothing_follows_a_certificate_of_the_largest_size(certificates, tmp_path, monkeypatch):
    data = certificates["once"].read_bytes()
    monkeypatch.setattr(verifier, "MOST_BYTES", len(data))
    for more, status in ((b"", 0), (b" and in truth", 1)):
        (tmp_path / "long.json").write_bytes(data + more)
        assert statuses(tmp_path / "long.json") == status


def rounding_plan(mechanism: str):
    return calibrate(
        PrivacyTarget(
            dimension=500, population=10_000, cohort_size=100, rounds=20, epsilon=2.0, mechanism=mechanism
        )
    )


@pytest.mark.parametrize("mechanism", ["shared", "ddgauss", "skellam"])
def test_a_radius_that_is_not_what_rounding_makes_it_is_found(mechanism):
    """Of mechanisms that round first, a vector may be longer than the clip."""
    plan = rounding_plan(mechanism)
    own = verifier.event_of(stated_event(Head(1, bytes(32)), ChargedRun("run", "owner", run_plan(plan))))
    text = json.loads(canonical.encode(plan))
    for factor, is_it in ((1, True), (Fraction(999, 1000), False), (Fraction(1001, 1000), False)):
        radius = own.radius * factor
        given = replace(own, radius=radius, l1_radius=l1_radius(radius, own.dimension))
        assert (dict(verifier._computed(text, given, [given]))["radius"] == given.radius) is is_it


def test_events_of_different_persons_make_no_claim_together(certificates):
    """Priced for a person in one silo, an event says nothing about one in two."""
    statement = json.loads(certificates["record"].read_text())["statement"]
    one = verifier.event_of(statement["events"][0])
    two = replace(one, run="other", coins=2)
    claim = {"scope": "composed", "runs": [one.run, two.run], "observer": "server", "epsilon": 1e3, "delta": 1e-3}
    claim |= {"unit": one.unit, "adjacency": one.adjacency, "max_participations": one.max_participations}
    claim |= {"reason": ""}
    assert verifier.check_claim(claim, [one, replace(two, coins=1)])
    with pytest.raises(verifier.Wrong, match="a person's silos are not the same"):
        verifier.check_claim(claim, [one, two])


SAMPLED = {"sampling": "fixed", "against": "released", "rounds": 20, "epsilon": 1.0}
SILOS = {"unit": "record", "population": 10, "records": 2000, "against": "server", "epsilon": 1.0}
ONCE = {"sampling": "once", "against": "server", "cohort_size": 100, "rounds": 10, "epsilon": 1.0}
# Runs that share a ledger, each kind by what it changes in a target.
LEDGERS = {
    "two kinds of cohorts": [SAMPLED | {"cohort_size": 200}, SAMPLED | {"cohort_size": 20}],
    "two kinds at a small delta": [SAMPLED | {"cohort_size": size, "delta": 1e-8} for size in (200, 20)],
    "the same twice": [SAMPLED | {"cohort_size": 200}, SAMPLED | {"cohort_size": 200}],
    "records": [SILOS | {"batch_rate": 0.05, "rounds": 20}, SILOS | {"batch_rate": 0.02, "rounds": 40}],
    "known cohorts": [ONCE, SAMPLED | {"cohort_size": 20, "against": "server"}],
    "Renyi curves": [ONCE | {"mechanism": "skellam"}, ONCE | {"mechanism": "skellam", "rounds": 5}],
    "noises of two kinds": [ONCE | {"mechanism": "skellam"}, ONCE],
    "partitions": [ONCE, ONCE | {"rounds": 5, "dropouts": 0.1}],
    "drawn cohorts after known ones": [
        ONCE | {"against": "released"},
        SAMPLED | {"cohort_size": 20},
        SAMPLED | {"cohort_size": 20},
    ],
}


def charges(name: str) -> list[RunPlan]:
    base = {"dimension": 8, "population": 2000, "delta": 1e-4, "spare": 0}
    return [run_plan(calibrate(PrivacyTarget(**(base | changes)))) for changes in LEDGERS[name]]


def event_of(plan: RunPlan) -> verifier.Event:
    return verifier.event_of({"run": "run", "row": "row", "software": "none"} | planned(plan)).cost


@pytest.mark.parametrize("name", LEDGERS)
def test_the_verifiers_filter_admits_what_the_ledgers_filter_admits(name):
    """Two implementations of the same rules, on other grids, by other transforms."""
    plans = charges(name)
    first, *later = map(event_of, plans)
    observer, delta = plans[0].observer, plans[0].delta
    needed = min(rule() for rule in verifier.filter_rules([first], later, str(observer), delta, 2.0))
    costs = [plan.cost for plan in plans]
    assert Filter(needed * 1.005, delta, observer).charge(costs).admitted
    assert not Filter(needed * 0.99, delta, observer).charge(costs).admitted
    declared = Filter(needed, delta, observer, tuple(costs)).charge(costs)
    budget = {"epsilon": declared.composed_epsilon * 1.0001, "delta": delta, "observer": str(observer)}
    events = [replace(each, run=str(number)) for number, each in enumerate([first, *later])]
    assert verifier.check_budget(budget | {"declared": list(map(planned, plans))}, events)
    with pytest.raises(verifier.Wrong, match="is claimed at"):
        verifier.check_budget(budget | {"declared": []}, events)


def shared_ledger(file: Path, name: str, declared: int = 0) -> Path:
    """Return the certificate of a ledger on which these runs have begun."""
    plans = charges(name)
    budget = replace(
        plans[0].budget, epsilon=3.0, max_participations=max(plan.max_participations for plan in plans)
    )
    with Ledger.create(file, replace(budget, declared=tuple(plans[:declared]))) as book:
        for number, plan in enumerate(plans):
            book.begin(f"run {number}", f"owner {number}", plan)
    return certify(file, key=key_in(file.parent)).certificate


def test_a_budget_that_the_ledgers_filter_refuses_is_refused_here(tmp_path, monkeypatch):
    """The product of the runs fits it, but the second run may have been chosen from what the first one showed."""
    of_two_kinds = shared_ledger(tmp_path / "shared.sqlite", "two kinds of cohorts")
    assert statuses(of_two_kinds) == 0
    statement = json.loads(of_two_kinds.read_text())["statement"]
    assert statement["claims"][-1]["condition"] == CONDITION
    product = statement["claims"][-1]["epsilon"] * 1.01
    costs = [plan.cost for plan in charges("two kinds of cohorts")]
    refused = Filter(product, statement["ledger"]["budget"]["delta"], RELEASED).charge(costs)
    assert not refused.admitted
    file = forged(of_two_kinds, lambda s: s["ledger"]["budget"].update(epsilon=product))
    found = verifier.verify(file, [PUBLIC])
    assert found.status == 1
    assert [kind for kind, line in found.lines if line.startswith("budget against released")] == ["WRONG"]
    monkeypatch.setattr(
        verifier,
        "filter_rules",
        lambda fixed, later, *rest: [lambda: verifier.own_bound([*fixed, *later], *rest)],
    )
    assert statuses(file) == 0


def numbers(value: object, path: tuple = ()):
    """Yield the place of each number: whole ones, floats, fractions in texts, and the number of a row."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, (*path, name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from numbers(item, (*path, place))
    elif type(value) in (int, float) or (
        isinstance(value, str) and re.fullmatch(r"\d+(/\d+)?|\d+:[0-9a-f]{64}", value)
    ):
        yield path


def changed(value: object, up: bool) -> object:  # noqa: FBT001 - which way
    """Return a number a little above or below."""
    if isinstance(value, int):
        return value + (1 if up else -1)
    if isinstance(value, float):
        return value * (1.01 if up else 0.99)
    row, mark, rest = value.partition(":")
    return (
        f"{int(row) + (1 if up else -1)}:{rest}"
        if mark
        else str(Fraction(value) * (Fraction(101 if up else 99, 100)))
    )


def unnoticed(certificate: Path) -> set[tuple[str, bool]]:
    """Change each number of a certificate in turn, sign it anew with the signer's key, and return what holds."""
    statement = json.loads(certificate.read_text())["statement"]
    found = set()
    for *path, name in list(numbers(statement)):
        for up in (True, False):
            other, quick, events = copy.deepcopy(statement), verifier.Findings(), []
            place = reduce(getitem, path, other)
            place[name] = changed(place[name], up)
            if quick.note("content", partial(verifier.check_content, other, events)):
                quick.note("plan", partial(verifier.check_plan, other, events))
            if quick.status == 1:  # by what takes no time
                continue
            file = certificate.with_name("forged.json")
            file.write_bytes(signed(other))
            if statuses(file) != 1:
                found.add((".".join(part for part in (*path, name) if isinstance(part, str)), up))
    return found


# A greater epsilon than this file's own is a weaker claim, and holds; a budget may leave room for more runs.
WEAKER = {("claims.epsilon", True), ("ledger.budget.epsilon", True), ("ledger.budget.epsilon", False)}
# Numbers that nothing else in a certificate contradicts when they are changed alone: docs/certificate.md lists them.
ROWS = {"ledger.head", "events.row"}
NOISE = {"events.variance", "events.contributors"}


@pytest.mark.parametrize("name", ["once", "fixed", "record replaced"])
def test_each_number_of_a_runs_certificate_is_recomputed_or_compared(certificates, name):
    # For hidden blocks this file's own bound is up to 4 % below the accountant's: a claim between them holds as well.
    tighter = {("claims.epsilon", False)} if name == "once" else set()
    assert {place for place, up in unnoticed(certificates[name]) - WEAKER - tighter} <= ROWS


def test_each_number_of_a_ledgers_certificate_is_checked_or_listed(tmp_path):
    """Of its runs the ledger has no plans: while it is not at hand, what they were charged for is the signer's word."""
    certificate = shared_ledger(tmp_path / "shared.sqlite", "partitions", declared=1)
    found = {place for place, up in unnoticed(certificate) - WEAKER}
    declared = {place for place in found if place.startswith("ledger.budget.declared.")}
    assert found - declared == ROWS | NOISE
    page = (Path(__file__).parent.parent / "docs" / "certificate.md").read_text()
    for place in {*ROWS, *NOISE, "ledger.budget.declared"}:
        assert f"`{place}`" in page
    statement = json.loads(certificate.read_text())["statement"]
    for *path, name in list(numbers(statement["events"])):
        other = copy.deepcopy(statement)
        place = reduce(getitem, path, other["events"])
        place[name] = changed(place[name], up=True)
        with pytest.raises(verifier.Wrong, match="charged other runs"):
            check_ledger(other, tmp_path / "shared.sqlite")


# Mistakes in the verifier, and the lie that would then hold: without the one check it is believed.
PLANTED = {
    "colluders' noise counts": (
        "once",
        lambda s: [
            c.update(epsilon=claims_on(s, "server")[0]["epsilon"]) for c in s["claims"] if "coll" in c["observer"]
        ],
        (verifier.Event, "unknown", lambda self, _observer: self.contributors),
    ),
    "one radius for replace-one": (
        "once",
        lambda s: [c.update(epsilon=c["epsilon"] * 0.6) for c in s["claims"] if c["observer"] != "released"],
        (verifier, "gaussian_delta", lambda e, mu, rate=1.0, own=verifier.gaussian_delta: own(e, mu / 2, rate)),
    ),
    "the server does not know cohorts": (
        "fixed",
        lambda s: claims_on(s, "server")[0].update(epsilon=claims_on(s, "released")[0]["epsilon"]),
        (verifier.Event, "is_hidden", lambda self, _observer: self.rate < 1),
    ),
    "a tolerance of ten per cent": ("once", lower("server", 0.95), (verifier, "TOLERANCE", 0.1)),
    "any plan": ("once", alter(variance="10000"), (verifier, "check_plan", lambda _text, _events: "")),
    "any key": (
        "once",
        None,
        (verifier, "check_key", lambda _public, _keys: ""),
    ),
    "any bytes": ("once", b"", (verifier, "check_bytes", lambda _data, _content: "")),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_verifier_with_a_mistake_believes_a_lie_that_the_true_one_finds(
    certificates, mistake, monkeypatch, tmp_path
):
    name, change, (owner, attribute, wrong) = PLANTED[mistake]
    if change == b"":
        file = tmp_path / "changed.json"
        file.write_bytes(certificates[name].read_bytes().replace(b'"end": "complete"', b'"end": "exhausted"'))
    elif change is None:
        file = forged(certificates[name], lambda _: None, OTHER)
    else:
        file = forged(certificates[name], change)
    assert statuses(file) == 1
    monkeypatch.setattr(owner, attribute, wrong)
    assert statuses(file) == 0


BAD = {
    "empty": b"",
    "not JSON": b"certificate",
    "not text": b"\xff\xfe\x00\x01",
    "a list": b"[]",
    "another object": b'{"statement": {"format": "something else"}}',
    "no statement": b'{"statement": 1}',
    "not a number": b'{"statement": {"format": "d2pfed certificate 2", "epsilon": NaN}}',
    "infinite": b'{"statement": {"format": "d2pfed certificate 2", "epsilon": Infinity}}',
    "many digits": b'{"statement": {"format": "d2pfed certificate 2", "epsilon": ' + b"9" * 10_000 + b"}}",
    "deep": b"[" * 100_000,
    "huge": b'{"statement": "' + b"x" * (1 << 22) + b'"}',
}


def complaints(arguments: list[str], monkeypatch, capsys) -> list[str]:
    """Return what the command and the bare file say of the same input: one line each, and status 2."""
    found = []
    monkeypatch.setattr(sys, "argv", ["d2pfed", "certify", "verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    found.append(capsys.readouterr())
    assert verifier.main(arguments) == 2
    found.append(capsys.readouterr())
    assert all((said.out, said.err.count("\n")) == ("", 1) for said in found)
    return [said.err for said in found]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name, tmp_path, monkeypatch, capsys):
    file = tmp_path / "bad.json"
    file.write_bytes(BAD[name])
    assert all("certificate" in line for line in complaints([str(file)], monkeypatch, capsys))


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    for name, word in (("nothing.json", "No such file"), (".", "Is a directory")):
        assert all(word in line for line in complaints([str(tmp_path / name)], monkeypatch, capsys))


UNREAD = ("software", "accountant", "sampling", "reason", "run", "row")


def test_what_is_signed_and_makes_no_sense_is_wrong_and_raises_nothing(certificates):
    """Every field of event and claim with values of every type: a finding, never an exception, never a pass by type."""
    for where in ("events", "claims"):
        for name, stated in json.loads(certificates["once"].read_text())["statement"][where][0].items():
            for value in (None, [], {}, -1, 10**30, 1e300, "", "x", True):
                if value == stated:
                    continue
                file = forged(certificates["once"], lambda s, n=name, v=value, w=where: s[w][0].update({n: v}))
                found = verifier.verify(file, [PUBLIC])
                allowed = (0, 1) if name in UNREAD or value is None or value == 1e300 else (1,)
                assert found.status in allowed, (name, value)


def test_an_epsilon_that_no_grid_holds_is_neither_checked_nor_wrong():
    plan = calibrate(
        PrivacyTarget(
            unit="record",
            records=10**6,
            population=50,
            dimension=1,
            rounds=1,
            spare=3,
            epsilon=20.0,
            clip=0.01,
            colluders=0.05,
        )
    )
    charged = ChargedRun("run", "owner", run_plan(plan))
    events = [verifier.event_of(stated_event(Head(1, bytes(32)), charged))]
    alone = next(item for item in guarantees(plan) if str(item.observer) == "alone")
    assert alone.epsilon > 1000
    with pytest.raises(verifier.Unchecked, match="too wide for a grid"):
        verifier.own_bound(events, "alone", alone.delta, alone.epsilon)


# The lattice protocol: secret and committee follow from cohort, quorum, noise and ring

LATTICE = PrivacyTarget(
    dimension=100,
    population=10_000,
    cohort_size=100,
    rounds=5,
    epsilon=4.0,
    delta=1e-5,
    against="server",
    sampling="once",
    dropouts=0.1,
    colluders=0.1,
    consistency="signed",
)


lattice_plan = cache(calibrate)


def seats_of(plan, **changes) -> None:
    text = json.loads(canonical.encode(plan))
    for place, value in changes.items():
        *path, last = place.split("__")
        reduce(getitem, path, text)[last] = value
    own = verifier.event_of(stated_event(Head(1, bytes(32)), ChargedRun("run", "owner", run_plan(plan))))
    verifier.check_committee(text, own)


@pytest.mark.parametrize(
    ("size", "mechanism", "dropouts"),
    [(64, "centered", 0.0), (100, "ddgauss", 0.1), (300, "centered", 0.25), (5_000, "ddgauss", 0.1)],
)
def test_the_verifier_seats_the_committees_that_plans_have(size, mechanism, dropouts):
    target = replace(LATTICE, population=100 * size, cohort_size=size, dropouts=dropouts, colluders=0.05)
    seats_of(lattice_plan(replace(target, mechanism=mechanism)))


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": 384},
        {"threshold": 70},
        {"ring__bits": 12},
        {"ring__bits": 21},
        {"quorum": 99},
        {"colluders": 60},
        {"committee__packed": 17},
        {"committee__threshold": 13},
        {"committee__certificate": 60},
        {"committee__colluders": 0},
        {"committee__size": 64},
        {"mechanism__": "Shared"},
        {"mechanism__sigma": {"": "Fraction", "is": "1"}},
        {"mechanism__sigma": {"": "Fraction", "is": "16"}},
    ],
    ids=str,
)
def test_a_committee_against_the_rule_is_found(changes):
    with pytest.raises(verifier.Wrong):
        seats_of(lattice_plan(LATTICE), **changes)


def test_a_committee_that_tells_of_no_colluders_is_found():
    """All of it follows the rule, for a cohort in which nobody colludes."""
    plan, bare = lattice_plan(LATTICE), lattice_plan(replace(LATTICE, colluders=0.0))
    seats = json.loads(canonical.encode(bare))["committee"]
    with pytest.raises(verifier.Wrong, match="the rule requires"):
        seats_of(plan, committee=seats, threshold=bare.threshold)
