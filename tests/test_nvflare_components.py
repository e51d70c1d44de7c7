"""The controller, the executors and the recipes by themselves, with NVFlare's own classes around them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="NVFlare is not installed (extra `nvflare`)")

from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.job_config.api import FedJob
from nvflare.recipe import SimEnv

from d2pfed.deploy.client import Purpose
from d2pfed.deploy.config import SIMULATION_VARIABLE
from d2pfed.deploy.requests import RequestKind, RunAcceptance
from d2pfed.errors import ConfigError
from d2pfed.nvflare import executor as executors
from d2pfed.nvflare.controller import JobAborted, PrivateController, TaskSender
from d2pfed.nvflare.executor import (
    PrivateExecutor,
    RecordsExecutor,
    evaluated,
    statistic_reply,
    to_model,
    trained_arrays,
)
from d2pfed.nvflare.recipe import PrivateFedAvgRecipe, PrivateStatisticRecipe
from d2pfed.nvflare.tasks import TaskEngine, read_result
from d2pfed.runs.json_files import to_json
from d2pfed.statistics.questions import MEANS, STATISTIC, Bounds, MetricMeans

LIGHT = Path(__file__).parent / "nvflare_light"
PRIVACY = {"epsilon": 5000.0, "clip": 4.0}
SENT = {"weights": np.ones(2, np.float32), "seen": np.zeros(3, np.float32)}


@dataclass
class Workspace:
    root: Path

    def get_site_config_dir(self):
        return str(self.root / "local")

    def get_app_dir(self, _job):
        return str(self.root / "app")

    def get_app_custom_dir(self, _job):
        return str(self.root / "app" / "custom")


def context(root, site="site-1"):
    workspace = Workspace(root)
    return SimpleNamespace(
        get_identity_name=lambda: site,
        get_prop=lambda name, *_: workspace if name == FLContextKey.WORKSPACE_OBJECT else None,
        get_job_id=lambda: "job",
    )


def task(kind, data, purpose=Purpose.TRAINING):
    return Shareable({"d2pfed.kind": kind.value, "d2pfed.data": data, "d2pfed.purpose": purpose.value})


def test_a_script_receives_a_model_and_its_arrays_alone_are_used():
    asked = to_model(SENT, {"server-round": 3, "total-rounds": 5})
    assert (asked.current_round, asked.total_rounds, asked.params_type) == (2, 5, ParamsType.FULL)
    whole = FLModel(params={"weights": np.full(2, 3.0), "other": np.zeros(1)}, params_type=ParamsType.FULL)
    assert set(trained_arrays(whole, SENT)) == {"weights"}
    assert trained_arrays(whole, SENT)["weights"].dtype == np.float32
    moved = FLModel(params={"weights": np.full(2, 3.0)}, params_type=ParamsType.DIFF)
    assert trained_arrays(moved, SENT)["weights"].tolist() == [4.0, 4.0]


def test_an_evaluation_counts_as_one_unless_it_says_more():
    means = MetricMeans({"accuracy": Bounds(0.0, 1.0)}, 4.0)
    settings = {MEANS: to_json(means)}
    one = evaluated(FLModel(metrics={"accuracy": 1.0}), settings)[STATISTIC]
    four = evaluated(FLModel(metrics={"accuracy": 1.0, "num-examples": 4}), settings)[STATISTIC]
    assert np.allclose(4 * one, four)
    assert np.allclose(four, means.encode({"accuracy": 1.0}, 4))


def test_a_statistic_is_answered_in_its_place():
    asked = FLModel(params={STATISTIC: np.zeros(2, np.float32)})
    assert statistic_reply(asked, np.array([1.0, 2.0])).params[STATISTIC].tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match="has an array named"):
        statistic_reply(FLModel(params={}), np.zeros(2))


def test_a_site_that_streams_its_logs_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("D2PFED_SIMULATION", raising=False)
    monkeypatch.setattr(executors, "is_log_streaming_allowed", lambda _: True)
    reply = executors.answer_task(task(RequestKind.PRESENCE, b""), context(tmp_path), lambda _: None)
    assert read_result(reply, 1).refused[1].startswith("this site lets its logs go to the server")


def test_a_site_that_is_not_set_up_says_no_more_than_that(tmp_path, monkeypatch):
    monkeypatch.delenv("D2PFED_SIMULATION", raising=False)
    monkeypatch.setattr(executors, "is_log_streaming_allowed", lambda _: False)
    reply = executors.answer_task(task(RequestKind.PRESENCE, b""), context(tmp_path), lambda _: None)
    assert read_result(reply, 1).refused[1] == "this client is not set up; its own log says why"
    reply = executors.answer_task(Shareable({"other": 1}), context(tmp_path), lambda _: None)
    assert read_result(reply, 1).refused[1].startswith("a task must have the kind")


def test_nothing_of_the_script_leaves_in_clear(tmp_path, monkeypatch):
    """What the script returns reaches the client's agent as arrays; what it logs reaches nobody."""
    monkeypatch.setenv("D2PFED_SIMULATION", str(tmp_path / "simulated"))
    seen = {}

    class Agent:
        def __init__(self, config, node, run_config, train, purpose):
            seen.update(train=train, run_config=run_config)

        def answer(self, kind, data):
            made = seen["train"](SENT, {"server-round": 1})
            seen["made"] = made
            return b"a vector"

    def run_script(self, name, shareable, fl_ctx, abort_signal):
        seen["task"] = name
        model = FLModelUtils.from_shareable(shareable)
        made = {key: value + 1 for key, value in model.params.items()}
        return FLModelUtils.to_shareable(FLModel(params=made, metrics={"secret": 31337.0}))

    config = tmp_path / "app" / "config" / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    monkeypatch.setattr(executors, "PrivateClient", Agent)
    monkeypatch.setattr(ClientAPIExecutor, "execute", run_script)
    executor = PrivateExecutor("in_process", task_script_path="script.py")
    reply = executor.execute("d2pfed", task(RequestKind.EXCHANGE, b"asked"), context(tmp_path), Signal())
    assert read_result(reply, 1).data == b"a vector"
    assert "31337" not in str(dict(reply))
    assert seen["task"] == "train"
    assert {name: array.tolist() for name, array in seen["made"].items()} == {"weights": [2, 2], "seen": [1, 1, 1]}
    fired = []
    monkeypatch.setattr(executor, "fire_event", lambda *arguments, **_: fired.append(arguments))
    executor.fire_log_analytics(context(tmp_path), None)
    assert fired == []


def test_a_script_that_fails_is_an_error_of_the_clients_own(tmp_path, monkeypatch):
    monkeypatch.setattr(ClientAPIExecutor, "execute", lambda *_: make_reply(ReturnCode.EXECUTION_EXCEPTION))
    executor = PrivateExecutor("in_process", task_script_path="script.py")
    caught = []

    def answer(_shareable, _context, train):
        with pytest.raises(ConfigError, match="the script must send a model, got EXECUTION_EXCEPTION"):
            train(Purpose.TRAINING)(SENT, {"server-round": 1})
        caught.append(1)
        return make_reply(ReturnCode.OK)

    monkeypatch.setattr(executors, "answer_task", answer)
    executor.execute("d2pfed", Shareable(), context(tmp_path), Signal())
    assert caught == [1]


def test_a_module_of_records_answers_by_its_functions(tmp_path, monkeypatch):
    custom = tmp_path / "app" / "custom"
    custom.mkdir(parents=True)
    (custom / "silo.py").write_text((LIGHT / "silo.py").read_text())
    executor = RecordsExecutor("silo.py")
    executor.handle_event("_start_run", context(tmp_path))
    found = []

    def answer(_shareable, _context, train):
        found.append(train(Purpose.TRAINING)(SENT, {}))
        settings = {MEANS: to_json(MetricMeans({"accuracy": Bounds(0.0, 1.0)}, 1.0))}
        found.append(train(Purpose.EVALUATION)(SENT | {STATISTIC: np.zeros(2)}, settings))
        return make_reply(ReturnCode.OK)

    monkeypatch.setattr(executors, "answer_task", answer)
    executor.execute("d2pfed", Shareable(), context(tmp_path), Signal())
    assert [each.count for each in found] == [100, 100]
    assert next(found[0].gradients(np.arange(3))).shape == (3, 2)
    assert next(found[1].gradients(np.arange(1))).shape == (1, 2)


class Server:
    """What a sender uses of a controller."""

    def __init__(self):
        self.tasks = []

    def send(self, task, fl_ctx, targets):
        self.tasks.append((task, targets))

    def get_client_disconnect_time(self, name):
        return 1.0 if name == "gone" else None


def test_a_task_goes_to_one_site_and_ends_in_one_answer():
    server, aborted = Server(), Signal()
    clients = [SimpleNamespace(name=name) for name in ("here", "gone")]
    fl_ctx = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_clients=lambda: clients))
    sender = TaskSender(server, fl_ctx, aborted)
    assert list(sender.sites()) == ["here"]
    engine = TaskEngine(sender)
    node = next(iter(engine.nodes()))
    first, second = (engine.push(RequestKind.PRESENCE, b"x", node, "PRESENCE", 5.5) for _ in range(2))
    (one, targets), (two, _) = server.tasks
    assert (one.timeout, targets, one.data["d2pfed.data"]) == (6, ["here"], b"x")
    accepted = RunAcceptance(1, b"").encode()
    result = Shareable({"d2pfed.kind": RequestKind.PRESENCE.value, "d2pfed.data": accepted})
    client_task = SimpleNamespace(result=result)
    one.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)
    one.task_done_cb(task=one, fl_ctx=fl_ctx)
    assert client_task.result is None  # a vector is not kept twice
    two.task_done_cb(task=two, fl_ctx=fl_ctx)
    answers = {answer.request: answer for answer in engine.pull({first, second})}
    assert answers[first].data == accepted
    assert answers[second].refused == ("refused or failed", "the task has ended without a result")
    aborted.trigger("by the admin")
    with pytest.raises(JobAborted):
        engine.nodes()
    with pytest.raises(JobAborted):
        list(engine.pull({first}))


def export(recipe, tmp_path):
    recipe.export(str(tmp_path))
    app = tmp_path / recipe.name / "app"
    read = {
        side: json.loads((app / "config" / f"config_fed_{side}.json").read_text()) for side in ("server", "client")
    }
    return read["server"], read["client"], sorted(file.name for file in (app / "custom").rglob("*.py"))


def test_a_job_brings_its_script_and_nothing_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(LIGHT)
    monkeypatch.syspath_prepend(LIGHT)
    from net import Net  # noqa: PLC0415

    recipe = PrivateFedAvgRecipe(
        name="light", model=Net(), min_clients=3, num_rounds=2, train_script="script.py", privacy=PRIVACY
    )
    server, client, files = export(recipe, tmp_path)
    assert files == ["net.py", "script.py"]
    workflow = server["workflows"][0]
    assert workflow["path"] == "d2pfed.nvflare.controller.PrivateController"
    assert workflow["args"]["trained"] == ["layer.weight", "layer.bias"]  # not the buffer
    assert server["server"]["task_request_interval"] < 1
    assert client["executors"][0]["tasks"] == ["d2pfed"]
    with pytest.raises(ConfigError, match="does not stream its clients' logs"):
        recipe.enable_log_streaming()
    with pytest.raises(ConfigError, match="takes no arguments"):
        PrivateFedAvgRecipe(
            name="light", model=Net(), min_clients=3, num_rounds=2, train_script="silo.py", train_args="--x",
            privacy={"unit": "record", **PRIVACY},
        )  # fmt: skip


def test_a_statistic_and_records_are_jobs_too(tmp_path, monkeypatch):
    monkeypatch.chdir(LIGHT)
    sums = PrivateStatisticRecipe(
        name="sums", statistic="sevens", size=4, min_clients=3, train_script="sevens.py", privacy=PRIVACY
    )
    server, _, files = export(sums, tmp_path)
    assert server["workflows"][0]["args"]["statistic"] == ["sevens", 4]
    assert files == ["sevens.py"]
    records = PrivateStatisticRecipe(
        name="silos", statistic="all", size=4, min_clients=3, train_script="silo.py",
        privacy={"unit": "record", **PRIVACY},
    )  # fmt: skip
    _, client, _ = export(records, tmp_path)
    assert client["executors"][0]["executor"]["path"] == "d2pfed.nvflare.executor.RecordsExecutor"


def test_jobs_of_one_process_are_simulated_in_their_own_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(LIGHT)
    monkeypatch.delenv(SIMULATION_VARIABLE, raising=False)
    seen = []
    monkeypatch.setattr(FedJob, "simulator_run", lambda *_, **__: seen.append(os.environ[SIMULATION_VARIABLE]))
    for place in (tmp_path / "a", tmp_path / "b"):
        sums = PrivateStatisticRecipe(
            name="sums", statistic="sevens", size=4, min_clients=3, train_script="sevens.py", privacy=PRIVACY
        )
        sums.execute(SimEnv(num_clients=3, workspace_root=str(place)))
    assert seen == [str(tmp_path / each / "sums-d2pfed") for each in "ab"]
    assert SIMULATION_VARIABLE not in os.environ


def test_a_runs_name_leads_to_no_other_directory():
    with pytest.raises(ConfigError, match="a run's name must be"):
        PrivateController(run="../other", privacy=PRIVACY, sites=3)
