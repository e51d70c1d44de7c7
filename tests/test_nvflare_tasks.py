"""The adapter for NVFlare without NVFlare: requests as tasks, over which a whole federation trains."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from d2pfed.deploy.client import PrivateClient, Purpose
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.evaluation import Asked, evaluation_strategy, means_of, total_of
from d2pfed.deploy.questions import question_of
from d2pfed.deploy.requests import RequestKind
from d2pfed.deploy.strategy import Strategy
from d2pfed.deploy.transport import Deadlines, Pace, Transport
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.nvflare.sites import APP, app_digest, client_config, node_of, server_directory
from d2pfed.nvflare.tasks import TaskEngine, make_refusal, make_result, read_result, read_task
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.statistics.questions import STATISTIC, is_evaluation
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan, noise_bound

ROOT = Path(__file__).resolve().parent.parent
SITES = 5
CODE = {APP: "the same code"}
ZEROS = {"params": np.zeros(DIMENSION, np.float32)}

TARGET = PrivacyTarget(
    dimension=4, rounds=1, epsilon=1e4, population=SITES, cohort_size=SITES, sampling="none", clip=14.0,
    against="server", delta=1e-5, dropouts=0.0, colluders=0.0, consistency="signed", draws=0,
)  # fmt: skip


def name_of(client):
    return f"hospital-{client}"


@dataclass
class LocalSites:
    """Sites whose clients answer when a task is sent; `lost` never answer, `refused` end without a result."""

    directory: Path
    code: dict = field(default_factory=dict)  # by client, another app than that of the job
    lost: set = field(default_factory=set)
    refused: set = field(default_factory=set)
    gone: set = field(default_factory=set)
    signs_for: dict = field(default_factory=dict)  # by client, the name that it believes its site has
    results: list = field(default_factory=list)

    def require_running(self):
        pass

    def sites(self):
        return [name_of(client) for client in range(SITES) if client not in self.gone]

    def send(self, site, fields, seconds, answered):
        client = int(site.rpartition("-")[2])
        if client in self.lost:
            return
        if client in self.refused:
            answered(None)
            return
        kind, data, purpose = read_task(fields)
        config = read_client_config(directory_of(self.directory, client))
        node = node_of(self.signs_for.get(client, site))
        agent = PrivateClient(config, node, self.code.get(client, CODE), train_for(client), purpose)
        try:
            result = make_result(kind, agent.answer(kind, data))
        except (PeerError, ConfigError) as error:
            result = make_refusal(error)
        self.results.append(result)
        answered(result)


def train_for(client):
    """A client adds one at its own place, holds 7 of a statistic, and is right in a quarter of its examples."""

    def train(arrays, settings):
        if is_evaluation(settings):
            vector = question_of(settings).encode({"accuracy": 0.25}, 10)
            return {**arrays, STATISTIC: vector.astype(np.float32)}
        if STATISTIC in settings:
            return {**arrays, STATISTIC: np.full_like(arrays[STATISTIC], 7.0)}
        params = arrays["params"].copy()
        params[client] += 1.0
        return {"params": params}

    return train


def strategy(plan, tmp_path, roster, **changes):
    settings = {
        "plan": plan,
        "directory": tmp_path / "run",
        "roster": roster,
        "draws": None if roster.roster.depth is None else tmp_path / "draws",
        "deadlines": Deadlines(joining=60.0, keys=60.0, poll=0.001),
        "run_config": CODE,
    }
    return Strategy(**(settings | changes))


def train(strategy, sites, **options):
    engine = TaskEngine(sites)
    return strategy.train(engine, ZEROS, over="NVFlare", **({"timeout": 60.0} | options))["params"]


def test_a_federation_of_sites_trains_in_pairs(tmp_path):
    plan, roster = make_plan(rounds=2), enrol(tmp_path, SITES)
    params = train(strategy(plan, tmp_path, roster), LocalSites(tmp_path))
    exact = np.zeros(DIMENSION)
    exact[:SITES] = 2 / SITES
    assert np.abs(params - exact).max() < 2 * noise_bound(plan, SITES)
    rows = read_rows(tmp_path / "run" / "ledger.sqlite")
    assert [row.kind for row in rows if row.key is not None] == [RowKind.RESERVE, RowKind.COMMIT] * 2


def test_a_long_model_that_goes_beside_its_request_arrives(tmp_path):
    size, sent = 70_000, []
    plan, roster, sites = make_plan(dimension=size, download_bits=8), enrol(tmp_path, SITES), LocalSites(tmp_path)
    engine = TaskEngine(sites)
    push = engine.push

    def watched(*arguments, blob=b""):
        sent.append(len(blob))
        return push(*arguments, blob=blob)

    watching = SimpleNamespace(nodes=engine.nodes, pull=engine.pull, push=watched)
    start = {"params": np.zeros(size, np.float32)}
    params = strategy(plan, tmp_path, roster).train(watching, start, over="NVFlare", rounds=1)["params"]
    assert sum(length >= size for length in sent) == SITES
    assert params[:SITES].min() > 0.5 / SITES


def test_a_site_that_is_lost_drops_out_and_a_run_goes_on(tmp_path):
    plan, roster, sites = make_plan(rounds=2), enrol(tmp_path, SITES), LocalSites(tmp_path)
    train(strategy(plan, tmp_path, roster), sites, rounds=1)
    sites.refused = {4}
    again = strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=1.0, keys=1.0, grace=0.1, poll=0.001))
    params = train(again, sites)
    assert params[4] < params[:4].min()
    charged = [
        len(read_client_config(directory_of(tmp_path, client)).log.read().bodies(Entry.CHARGE))
        for client in range(SITES)
    ]
    assert charged == [2, 2, 2, 2, 1]


def test_standing_keys_need_one_task_a_round(tmp_path):
    plan, roster = make_plan(rounds=3), enrol(tmp_path, SITES, None)
    for client in range(SITES):
        file = directory_of(tmp_path, client) / "client.toml"
        file.write_text(f'state = "{tmp_path}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    sites = LocalSites(tmp_path)
    params = train(strategy(plan, tmp_path, roster, keys="standing"), sites)
    assert np.abs(params[:SITES] - 3 / SITES).max() < 3 * noise_bound(plan, SITES)
    assert len(sites.results) == (3 + 3) * SITES  # an announcement, two for the keys, one for each round


def test_sites_with_other_code_are_refused(tmp_path):
    plan, roster, sites = make_plan(), enrol(tmp_path, SITES), LocalSites(tmp_path, code={2: {APP: "other"}})
    params = train(strategy(plan, tmp_path, roster, deadlines=Deadlines(keys=1.0, grace=0.1, poll=0.001)), sites)
    assert params[2] < params[[0, 1, 3, 4]].min()
    assert any("the configuration of the run must be that of the task" in str(each) for each in sites.results)


def test_a_key_of_the_roster_speaks_for_its_site_alone(tmp_path):
    plan, roster = make_plan(), enrol(tmp_path, SITES)
    sites = LocalSites(tmp_path, signs_for=dict.fromkeys(range(SITES), "another-site"))
    impatient = strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=0.5, poll=0.001))
    with pytest.raises(TooFewClients, match="0 came"):
        train(impatient, sites)


def test_statistics_and_evaluations_are_asked_over_tasks(tmp_path):
    roster, sites = enrol(tmp_path, SITES, None), LocalSites(tmp_path)
    asking = strategy(
        calibrate(TARGET), tmp_path, roster, target=replace(TARGET, longest_mean=0.5), trained=(STATISTIC,)
    )
    found = total_of(Asked(asking, TaskEngine(sites), "NVFlare", 60.0), "sevens", 4, {})
    assert np.abs(found.value - 7 * SITES).max() < 6 * found.standard_error
    trained = replace(asking, directory=tmp_path / "trained", trained=None)
    engine = TaskEngine(sites, Purpose.EVALUATION)
    asked = Asked(trained, engine, "NVFlare", 60.0)
    means = means_of(asked, ZEROS, {"accuracy": (0.0, 1.0)}, epsilon=1e4, max_examples=10.0, name="quarter")
    assert abs(means.value["accuracy"] - 0.25) < 6 * means.standard_error["accuracy"]
    # Unlike updates, answers may all be the same: then their mean is as long as the clip.
    assert evaluation_strategy(trained, ZEROS, 3, 1.0, "quarter").plan.longest_mean == 1.0
    again = means_of(asked, ZEROS, {"accuracy": (0.0, 1.0)}, epsilon=1e4, max_examples=10.0, name="quarter")
    assert again.value == means.value


def test_another_question_under_an_answered_name_is_refused(tmp_path):
    """The answer would be that to the first question, with the second one's name."""
    roster = enrol(tmp_path, SITES, None)
    asking = strategy(calibrate(TARGET), tmp_path, roster, trained=(STATISTIC,), target=TARGET)
    asked = Asked(asking, TaskEngine(LocalSites(tmp_path)), "NVFlare", 60.0)
    total_of(asked, "sevens", 4, {})
    with pytest.raises(ConfigError, match=r"sevens.*now.*eights.*choose another name"):
        total_of(asked, "eights", 4, {})
    trained = replace(asking, directory=tmp_path / "trained", trained=None)
    asked = Asked(trained, TaskEngine(LocalSites(tmp_path), Purpose.EVALUATION), "NVFlare", 60.0)
    options = {"epsilon": 1e4, "max_examples": 10.0, "name": "end"}
    means_of(asked, ZEROS, {"accuracy": (0.0, 1.0)}, **options)
    for other in ({"accuracy": (0.0, 2.0)}, {"recall": (0.0, 1.0)}):
        with pytest.raises(ConfigError, match="choose another name"):
            means_of(asked, ZEROS, other, **options)


class SilentSites:
    """Keeps what answers a task, to be called later."""

    def __init__(self):
        self.waiting = []

    def require_running(self):
        pass

    def sites(self):
        return ["a", "b"]

    def send(self, site, fields, seconds, answered):
        self.waiting.append((site, fields, seconds, answered))


def test_an_answer_is_matched_to_its_request_and_a_late_one_is_known():
    sites = SilentSites()
    engine = TaskEngine(sites)
    assert engine.nodes() == {node_of("a"), node_of("b")}
    first = engine.push(RequestKind.PRESENCE, b"x", node_of("a"), "PRESENCE", 30.0)
    late = engine.push(RequestKind.PRESENCE, b"y", node_of("b"), "PRESENCE", 1e-9)
    assert engine.push(RequestKind.PRESENCE, b"z", 1, "PRESENCE", 30.0) is None  # no such site
    assert [each[2] for each in sites.waiting] == [30, 1]  # NVFlare's whole seconds
    for *_, answered in sites.waiting:
        answered(make_result(RequestKind.PRESENCE, b"here"))
    transport = Transport(engine, Pace(0.01))
    assert list(transport.pull(RequestKind.PRESENCE, "PRESENCE", {first: node_of("a")})) == [(first, b"here")]
    assert transport.refusals["not asked"] == 1
    assert late not in engine._answers
    assert not list(engine.pull({first, late}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"d2pfed.kind": RequestKind.EXCHANGE.value},
        {"d2pfed.kind": 3, "d2pfed.data": b""},
        {"d2pfed.kind": RequestKind.PRESENCE.value, "d2pfed.data": "text"},
    ],
)
def test_what_is_no_task_or_result_of_ours_is_refused(fields):
    with pytest.raises(PeerError, match="a task must have"):
        read_task(fields)
    assert read_result(fields, 1).refused[0] == "malformed"


def test_a_task_without_a_result_and_a_refusal_say_why():
    assert read_result(None, 7).refused == ("refused or failed", "the task has ended without a result")
    assert read_result(make_refusal(ConfigError("by rule")), 7).refused == ("refused or failed", "by rule")


def test_another_line_of_code_is_another_app(tmp_path):
    def app(name, client="{}", script="x = 1\n", file="train.py"):
        for part, content in ((f"custom/{file}", script), ("config/config_fed_client.json", client)):
            path = tmp_path / name / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return app_digest(tmp_path / name)

    first = app("a")
    assert first == app("b")
    assert len({first, app("c", script="x = 2\n"), app("d", client='{"a": 1}'), app("e", file="other.py")}) == 4
    (tmp_path / "b" / "custom" / "__pycache__").mkdir()
    (tmp_path / "b" / "custom" / "__pycache__" / "train.pyc").write_bytes(b"compiled")
    streamer = '{ "components": [{"path": "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"}]}'
    assert app("f", client=streamer) == app("g", client='{"components": []}')
    (tmp_path / "b" / "custom" / ".__nvfl_sig.json").write_text("NVFlare's signature")
    assert app_digest(tmp_path / "b") == first


def test_only_whoever_starts_the_process_can_make_a_site_a_simulated_one(tmp_path, monkeypatch):
    monkeypatch.delenv("D2PFED_SIMULATION", raising=False)
    with pytest.raises(ConfigError):
        client_config(tmp_path, "site-1")
    enrol(tmp_path, 1, None)
    directory_of(tmp_path, 0).rename(tmp_path / "d2pfed")
    assert client_config(tmp_path, "site-9").client == 0
    assert server_directory(tmp_path) == tmp_path / "d2pfed"
    monkeypatch.setenv("D2PFED_SIMULATION", str(tmp_path / "simulated"))
    assert client_config(tmp_path, "site-9").client == 8
    assert server_directory(tmp_path) == tmp_path / "simulated" / "server"
    with pytest.raises(ConfigError, match="a simulated site must be called site-1"):
        client_config(tmp_path, "hospital")


def test_hello_pt_becomes_private_in_at_most_fifteen_lines():
    """The example is what the diff makes of NVFlare's own: each hunk's new side stands in its file."""
    example = ROOT / "examples" / "nvflare"
    diff = (example / "hello-pt.diff").read_text()
    assert len(re.findall(r"^[+-](?![+-]{2} ).*\S", diff, re.MULTILINE)) <= 15
    for part in diff.split("--- before/")[1:]:
        name, *lines = part.splitlines()
        now = (example / name).read_text()
        for hunk in "\n".join(lines).split("@@ -")[1:]:
            new = [line[1:] for line in hunk.splitlines()[1:] if line[0] != "-"]
            assert "\n".join(new) in now
        old = [line for line in now.splitlines() if f"+{line}" not in lines]
        assert not any("d2pfed" in line for line in old)
    assert diff.rstrip("\n") in (ROOT / "docs" / "howto" / "from-nvflare.md").read_text()
