"""Weights and an adaptive clip over Flower's grid: the same sums as in a simulation, for clients that allow them."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from d2pfed.deploy import client as deployed
from d2pfed.deploy.health import Event, read_events
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.flower.server import KeyUse
from d2pfed.noise.clipping import with_clip
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Attempt, aggregate
from d2pfed.simulation import Fidelity, SimulatedFederation
from d2pfed.training import Cohorts
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan
from support.local_grid import LocalGrid, make_app, make_context, make_grid, make_strategy, start
from support.simulations import Given

CLIENTS = 5
WEIGHTS = [10.0, 20.0, 30.0, 40.0, 1000.0]
CAP = 50.0


class Diary:
    """A ledger that allows everything."""

    def participations(self, _run, cohort):
        return dict.fromkeys(cohort, 0)

    def require_plan(self, *_):
        pass

    reserve = commit = void = require_plan


def with_keys(directory):
    """Enrolled clients that may keep standing keys here."""
    roster = enrol(directory, CLIENTS)
    for client in range(CLIENTS):
        file = directory_of(directory, client) / "client.toml"
        file.write_text(f'state = "{directory}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    return roster


def updates_of(client):
    update = np.zeros(DIMENSION, np.float32)
    update[client] = 0.2 * (client + 1)
    return update


def weighing(weights=WEIGHTS):
    def make(client):
        def train(message, _context):
            params = message.content["arrays"]["params"].numpy() + updates_of(client)
            content = {"arrays": ArrayRecord({"params": Array(params)})}
            if weights[client] is not None:
                content["metrics"] = MetricRecord({"num-examples": weights[client], "loss": 3.0})
            return Message(RecordDict(content), reply_to=message)

        return train

    return make


def planned(max_weight=None, *, count_failures=False, **changes):
    settings = {
        "dimension": DIMENSION,
        "population": CLIENTS,
        "cohort_size": CLIENTS,
        "rounds": 2,
        "sampling": "none",
    }
    settings |= {"against": "server", "epsilon": 1e5, "delta": 1e-5, "dropouts": 0.4, "spare": 4}
    target = PrivacyTarget(**(settings | {"consistency": "signed"} | changes))
    return calibrate(target, max_weight, count_failures=count_failures)


EXTRAS = {"plain": {}, "weights": {"max_weight": CAP}, "adaptive clip": {"clip": "auto(0.5)"}}


@pytest.mark.parametrize("changes", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("fold", ["off", 8])
def test_a_deployed_round_is_the_simulations_bit_for_bit(tmp_path, monkeypatch, changes, fold):
    plan = planned(consistency="assumed", rounds=1, compression=fold, **changes)
    root, seen = Entropy.replay(b"extras"), {}
    contribute = deployed.PrivateClient._contribute

    def noted(self, attempt, *given):
        seen.update(client=self.config.client, run=attempt.session.run)
        return contribute(self, attempt, *given)

    def system():
        return SimpleNamespace(require_system=lambda: root.child("client", seen["client"]))

    monkeypatch.setattr(deployed.PrivateClient, "_contribute", noted)
    monkeypatch.setattr(deployed, "Entropy", SimpleNamespace(system=system))
    monkeypatch.setenv("D2PFED_SIMULATION", str(tmp_path / "clients"))
    apps = {100 + each: (make_app(weighing()(each)), make_context(each, None)) for each in range(CLIENTS)}
    found = start(make_strategy(plan, tmp_path, None), LocalGrid(apps))
    weights = [[np.float32(weight)] if plan.weighting is not None else [] for weight in WEIGHTS]
    own = SimulatedFederation(
        plan=plan,
        backend=Given(
            lambda clients: iter([np.append(updates_of(c), weights[c]).astype(np.float32) for c in clients])
        ),
        entropy=root,
        cohorts=Cohorts(plan.sampling, root),
        fidelity=Fidelity.PROTOCOL,
    )
    clip = None if plan.adaptive_clip is None else plan.adaptive_clip.initial
    model = np.zeros(DIMENSION, np.float32)
    outcome = aggregate(plan, Attempt(seen["run"], 0, 0), model, own, Diary(), clip=clip)
    np.testing.assert_array_equal(found, outcome.mean)
    assert np.abs(found).max() > 0.01


@pytest.mark.parametrize("keys", KeyUse)
def test_the_mean_is_weighted_by_examples_that_nobody_learns(tmp_path, keys):
    plan, roster = planned(CAP, rounds=1), with_keys(tmp_path)
    grid = make_grid(tmp_path, train=weighing())
    found = start(make_strategy(plan, tmp_path, roster, keys=keys), grid)
    capped = np.minimum(WEIGHTS, CAP)
    expected = sum(weight * updates_of(client) for client, weight in enumerate(capped)) / capped.sum()
    assert np.abs(found - expected).max() < 0.05
    assert np.abs(expected - np.mean([updates_of(client) for client in range(CLIENTS)], axis=0)).max() > 0.08
    sent = b"".join(str(message.content).encode() for message in grid.received if message.has_content())
    assert b"num-examples" not in sent


@pytest.mark.parametrize("keys", KeyUse)
def test_the_clip_follows_the_updates(tmp_path, keys):
    plan, roster = planned(clip="auto(0.01)", rounds=4), with_keys(tmp_path)
    strategy = make_strategy(plan, tmp_path, roster, keys=keys)
    start(strategy, make_grid(tmp_path, train=weighing()), rounds=2)
    start(strategy, make_grid(tmp_path, train=weighing()))  # goes on with the clip that it had come to
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    clips = [line["clip"] for line in lines]
    assert clips[0] == 0.01
    for before, after in pairwise(clips):  # all are beyond it: by e^(rate / 2) each time
        assert after == pytest.approx(before * np.exp(0.1), rel=0.1)  # the fraction has a noise of 0.1, as planned
    assert clips[-1] > 1.15 * clips[0]


def test_a_round_is_clipped_by_its_own_clip(tmp_path):
    plan, roster = planned(clip="auto(2.0)", rounds=4), enrol(tmp_path, CLIENTS)
    found = start(make_strategy(plan, tmp_path, roster), make_grid(tmp_path, train=weighing()))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["clip"] < 1.8  # it has moved, and every update is within it still
    assert np.abs(found - 4 * np.mean([updates_of(each) for each in range(CLIENTS)], axis=0)).max() < 0.05


def test_a_client_without_its_weight_sends_noise_and_its_operator_learns_why(tmp_path):
    plan, roster = planned(CAP, rounds=1), enrol(tmp_path, CLIENTS)
    odd = [10.0, None, -1.0, float("nan"), 10.0]
    found = start(make_strategy(plan, tmp_path, roster), make_grid(tmp_path, train=weighing(odd)))
    assert np.abs(found - (updates_of(0) + updates_of(4)) / 2).max() < 0.2
    texts = [read_events(directory_of(tmp_path, each)).get(Event.FAILED) for each in range(CLIENTS)]
    assert texts[0] is texts[4] is None
    assert "needs the weight of each update" in texts[1].text
    assert "a weight must be at least 0" in texts[2].text
    assert "must be finite" in texts[3].text


@pytest.mark.parametrize(
    ("name", "changes"), [("weights", {"max_weight": CAP}), ("adaptive_clip", {"clip": "auto"})]
)
def test_a_client_refuses_what_its_policy_does_not_list(tmp_path, name, changes):
    roster, grid = enrol(tmp_path, CLIENTS, extras=[]), make_grid(tmp_path)
    with pytest.raises(TooFewClients, match=f"the extra coordinate must be one of , got {name}"):
        start(make_strategy(planned(**changes), tmp_path, roster), grid)
    start(replace(make_strategy(make_plan(rounds=1), tmp_path, roster), directory=tmp_path / "plain"), grid)


def test_a_clip_beyond_the_plans_limits_is_refused_before_anything_is_charged(tmp_path, monkeypatch):
    plan, roster = planned(clip="auto(0.5)", rounds=1), enrol(tmp_path, CLIENTS)
    for clip in (0.0, -1.0, float("nan"), float("inf"), plan.adaptive_clip.most * 2):
        with pytest.raises(PeerError, match="a round's clip must be in"):
            deployed.split_clip(plan.adaptive_clip, with_clip(b"task", clip))
    monkeypatch.setattr("d2pfed.deploy.federation.with_clip", lambda task, _clip: with_clip(task, 1e9))
    with pytest.raises(TooFewClients):
        start(make_strategy(plan, tmp_path, roster), make_grid(tmp_path))
    log = directory_of(tmp_path, 0) / "log"
    assert b'"charge"' not in log.read_bytes()


def test_a_statistic_takes_neither(tmp_path):
    from d2pfed.flower.statistics import private_total  # noqa: PLC0415

    strategy = make_strategy(planned(CAP, rounds=1), tmp_path, enrol(tmp_path, CLIENTS))
    with pytest.raises(ConfigError, match="a statistic sends only its vector, the plan has weights"):
        private_total(strategy, make_grid(tmp_path), "sum", DIMENSION)


@pytest.mark.parametrize("keys", KeyUse)
@pytest.mark.parametrize(
    "changes", [{}, {"clip": "auto(0.5)"}, {"max_weight": CAP}], ids=["plain", "clip", "weights"]
)
def test_the_server_learns_how_many_clients_failed(tmp_path, keys, changes):
    def train(client):
        def fail(message, _context):
            raise RuntimeError("no such column: age")

        def misshape(message, _context):
            arrays = ArrayRecord({"params": Array(np.zeros(3, np.float32))})
            return Message(RecordDict({"arrays": arrays}), reply_to=message)

        return {1: fail, 3: misshape}.get(client, weighing()(client))

    plan, roster = planned(rounds=1, count_failures=True, **changes), with_keys(tmp_path)
    start(make_strategy(plan, tmp_path, roster, keys=keys), make_grid(tmp_path, train=train))
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    error = plan.failures_error(CLIENTS)
    assert error < 0.2
    assert record["failures"] == pytest.approx(2, abs=6 * error)
    figures = (tmp_path / "run" / "metrics.prom").read_text()
    assert f"}} {record['failures']:.10g}\n" in figures.partition("TYPE d2pfed_failures_estimated")[2]
    assert "d2pfed_failures_standard_error" in figures
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{record['failures']:.1f} \u00b1 {error:.1f}" in page
    assert record["survivors"] == CLIENTS


def test_failures_are_not_counted_unless_asked_for(tmp_path):
    start(make_strategy(planned(rounds=1), tmp_path, enrol(tmp_path, CLIENTS)), make_grid(tmp_path))
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["failures"] is None
    assert "failures" not in (tmp_path / "run" / "metrics.prom").read_text()
    assert "failed, estimate" not in (tmp_path / "run" / "report.html").read_text()
