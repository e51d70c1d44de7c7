"""The warm node: the private interface of Flower that it speaks, whose app it runs, and a round through two of them."""

import hashlib
import inspect
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supernode import start_client_internal
from loopback import Federation

from d2pfed.deploy.config import read_client_config
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower import node, runtime
from d2pfed.ledger.client_log import Entry
from support.local_grid import make_message

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "tests" / "flower_light"


def takes(function: object, *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


def test_the_private_interface_is_the_one_that_the_node_speaks():
    assert takes(runtime.get_load_client_app_fn, "default_app_ref", "app_path", "multi_app")
    assert takes(runtime.pull_task_input, "client")
    assert takes(runtime.push_message, "client", "message", "context")
    assert takes(runtime.push_task_output, "client", "context", "sub_status", "details")
    assert takes(runtime.load_app, "module_attribute_str", "error_type", "project_dir")
    assert takes(runtime.make_task_heartbeat_fn_http, "client")
    assert takes(runtime.SuperExecAuthHttpInterceptor, "master_secret", "protected_methods")
    assert not takes(runtime.push_message, "reply")
    request = runtime.AcquireTaskRequest(supported_task_types=[runtime.TaskType.CLIENT_APP])
    assert list(request.supported_task_types) == ["flwr-clientapp"]
    client = runtime.Runtime("127.0.0.1:1", None, b"secret").client(None)
    assert takes(client.AcquireTask, "request")
    client.close()


def test_the_loop_of_flowers_supernode_takes_the_steps_that_the_node_takes():
    loop = inspect.getsource(start_client_internal.start_client_internal)
    steps = re.findall(r"_[a-z]+_[a-z_]+\(|state\.set_node_id|time\.sleep\(3\)", loop.partition("with _init")[2])
    assert steps == [
        "state.set_node_id",
        "_pull_and_store_message(",
        "time.sleep(3)",
        "_push_messages(",
    ]
    waits = inspect.getsource(runtime._push_messages)
    assert re.findall(r"(?:state|object_store)\.get\w*|time\.sleep", waits)[:2] == [
        "state.get_messages_legacy",
        "time.sleep",
    ]
    assert set(re.findall(r"\b(?:state|object_store)\.\w+", waits)) == {
        "state.get_messages_legacy",
        "state.get_message_processing_duration",
        "state.delete_messages",
        "object_store.get",
        "object_store.get_object_tree",
        "object_store.delete",
    }
    assert takes(runtime._init_connection, "server_address", "authentication_keys", "max_retries", "max_wait_time")
    assert takes(runtime._start_supernode_http_api, "config", "state_factory")


@pytest.mark.parametrize("version", ["1.40.2", "1.42.0", "2.41.0", "1.4"])
def test_another_version_of_flower_is_refused(version):
    with pytest.raises(ConfigError, match=f"d2pfed-node needs Flower 1.41, got {version}"):
        node.require_flower(version)


def test_the_command_refuses_another_flower_in_one_line_that_names_the_way_out(monkeypatch):
    monkeypatch.setattr("sys.argv", ["d2pfed-node", "--app", str(LIGHT), "--", "--superlink", "nowhere:1"])
    monkeypatch.setattr(node, "version", lambda _package: "1.42.0")
    with pytest.raises(SystemExit) as ended:
        node.main()
    assert ended.value.code == (
        "d2pfed-node: d2pfed-node needs Flower 1.41, got 1.42.0: use flower-supernode with its own executor"
    )


def test_the_installed_version_of_flower_is_served():
    node.require_flower(start_client_internal.package_version)


def drawn_in_forks(count: int) -> list[bytes]:
    """What numpy's global generator gives first in so many forks."""
    np.random.random()  # noqa: NPY002, TID251 - numpy makes its generator when it is first used
    drawn = []
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            node.reseed()
            os.write(writing, np.random.bytes(8))  # noqa: NPY002, TID251
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        drawn.append(os.read(reading, 8))
        os.close(reading)
    return drawn


def test_forks_do_not_repeat_each_others_shuffles(monkeypatch):
    assert len(set(drawn_in_forks(3))) == 3
    monkeypatch.setattr(node, "reseed", lambda: None)
    assert len(set(drawn_in_forks(3))) == 1


def run_of(name: str = "d2pfed-tests/light", version: str = "1.0.0") -> SimpleNamespace:
    return SimpleNamespace(fab_id=name, fab_version=version)


def bundle() -> SimpleNamespace:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("light/client_app.py", "raise RuntimeError('it was run')")
    return SimpleNamespace(content=data.getvalue())


def test_a_local_app_answers_for_its_own_name_only():
    source = runtime.Apps((runtime.LocalApp(LIGHT),))
    source.preload()
    own = runtime.get_metadata_from_config(runtime.get_project_config(LIGHT))
    with source.load(run_of(*own), bundle()) as (name, app):
        assert (name, app.__class__.__name__) == (own[0], "ClientApp")
    with pytest.raises(PeerError, match=r"this client runs the app .*light"):
        source.load(run_of("someone/else"), bundle()).__enter__()
    with pytest.raises(PeerError, match="and was asked for another"):
        source.load(run_of(own[0], "9.9.9"), bundle()).__enter__()


def answered(monkeypatch, app) -> list[object]:
    """What happens when a message comes for an app, in order."""
    done = []
    message, context = make_message(RecordDict(), 100), SimpleNamespace(node_config={})
    monkeypatch.setattr(runtime, "pull_task_input", lambda _client: (message, context, run_of(), bundle()))
    monkeypatch.setattr(runtime, "push_message", lambda _client, reply, context: done.append((reply, context)))
    monkeypatch.setattr(
        runtime, "push_task_output", lambda **output: done.extend((output["sub_status"], output["details"]))
    )
    monkeypatch.setattr(
        runtime, "HeartbeatSender", lambda _send: SimpleNamespace(start=lambda: done.append("heartbeat"))
    )
    source = SimpleNamespace(load=lambda _run, _fab: nullcontext(("someone/app", app)))
    runtime.answer(runtime.Runtime("127.0.0.1:1", None, None), "token", source)
    return done


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PeerError("a rule"), "a rule"),
        (ValueError("patient 7 has a loss of 3"), "this client failed; its own log says why"),
        (runtime.FileError("/home/alice/client"), "this client failed; its own log says why"),
    ],
)
def test_the_server_hears_rules_and_nothing_else(error, said, monkeypatch):
    def fail(message: Message, context: object) -> Message:
        raise error

    done = answered(monkeypatch, fail)
    assert done[1][0].error.reason == said
    assert done[2:] == [runtime.SubStatus.FAILED, said]


def test_a_rehearsal_loads_what_messages_need():
    node.rehearse()


def test_a_hanging_message_does_not_hold_up_others(tmp_path, monkeypatch, caplog):
    tokens = ["stuck", "one", "bad", "two"]
    monkeypatch.setattr(runtime, "acquire", lambda _client: tokens.pop(0) if tokens else None)

    def answer(_runtime: object, token: str, _source: object) -> None:
        if token == "bad":
            raise ValueError("a fork fails alone")
        (tmp_path / token).write_text(str(os.getpid()))
        if token == "stuck":
            time.sleep(3600)

    def ended() -> int | None:
        is_done = caplog.text.count("a message took") == 3 and (tmp_path / "stuck").exists()
        return 0 if is_done or time.monotonic() > until else None

    until = time.monotonic() + 60
    monkeypatch.setattr(runtime, "answer", answer)
    with caplog.at_level("INFO", "d2pfed.deploy"):
        node.serve(SimpleNamespace(client=lambda _token: None), None, SimpleNamespace(poll=ended))
    forks = {int((tmp_path / token).read_text()) for token in ("stuck", "one", "two")}
    assert len(forks) == 3
    assert os.getpid() not in forks
    assert caplog.text.count("its process ended with 1") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "stuck").read_text()), 0)


def test_a_fork_ends_although_an_app_has_closed_its_streams(monkeypatch):
    """Else it goes on as a second node, and ends the other forks."""
    monkeypatch.setattr(runtime, "answer", lambda *_given: sys.stdout.close())
    test = os.getpid()
    try:
        child = node.fork(None, "token", None)
    finally:
        if os.getpid() != test:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_node_that_is_not_reached_has_no_message():
    unreachable = SimpleNamespace(
        AcquireTask=lambda _request: (_ for _ in ()).throw(runtime.httpx.ConnectError("no"))
    )
    assert runtime.acquire(unreachable) is None
    none = SimpleNamespace(HasField=lambda _name: False, token="")
    assert runtime.acquire(SimpleNamespace(AcquireTask=lambda _request: none)) is None
    one = SimpleNamespace(HasField=lambda _name: True, token="token")
    assert runtime.acquire(SimpleNamespace(AcquireTask=lambda _request: one)) == "token"


def test_a_message_is_pulled_answered_and_pushed(monkeypatch):
    done = answered(monkeypatch, lambda message, context: "the answer")
    context = SimpleNamespace(node_config={"d2pfed-app": "someone/app"})  # whose code it is, by what was loaded
    assert done == ["heartbeat", ("the answer", context), runtime.SubStatus.COMPLETED, ""]


@dataclass
class Link:
    """A SuperNode's state and objects as Flower keeps them, between a script of messages and what it sends."""

    script: list[Message | None]
    state: object = None
    store: object = None
    task: int | None = None
    slept: list[object] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # the ids of the messages that were answered

    def receive(self):
        if not self.script:
            raise KeyboardInterrupt
        message = self.script.pop(0)
        return None if message is None else (message, None)

    def send(self, reply, _tree, _seconds):
        self.sent.append(reply.metadata.reply_to_message_id)
        self.slept.append("answer")
        return set(), ""

    def answer(self, message):
        reply = Message(RecordDict(), reply_to=message)
        start_client_internal._insert_message(reply, self.state, self.store)

    def run(self, monkeypatch, on_message):
        config = SimpleNamespace(node_config={}, trusted_entities=None)
        config.server_address = config.insecure = config.root_certificates = config.authentication_keys = None
        config.max_retries = config.max_wait_time = None
        unused = ["get_run", "get_fab", "pull", "push", "confirm"]
        connection = nullcontext((5, self.receive, self.send, *unused))

        def start(_config, states):
            self.state, self.store = states.state(), states.objectstore_factory.store()
            return SimpleNamespace(), SimpleNamespace()

        def pull(*, receive, **_given):
            if (found := receive()) is None:
                return None
            self.task = self.state.create_task(runtime.TaskType.CLIENT_APP, 7)
            on_message(found[0])
            return 7

        for name, stand_in in {
            "_parse_supernode_lifespan_config": lambda: config,
            "_start_supernode_http_api": start,
            "add_exit_handler": lambda _stop: None,
            "register_signal_handlers": lambda **_given: None,
            "_init_connection": lambda *_given: connection,
            "_pull_and_store_message": pull,
        }.items():
            monkeypatch.setattr(runtime, name, stand_in)
        monkeypatch.setattr(runtime.sys, "argv", [])
        with pytest.raises(KeyboardInterrupt):
            runtime.run_supernode(["--insecure"])
        assert runtime.sys.argv == ["flower-supernode", "--insecure"]


def messages(count: int) -> list[Message]:
    found = [make_message(RecordDict(), node) for node in range(count)]
    for number, message in enumerate(found):
        message.metadata.__dict__["_message_id"] = f"message {number}"
    return found


def test_the_pauses_of_a_supernode_are_short_while_messages_come(monkeypatch):
    (one,) = messages(1)
    link = Link([None, None, one, *[None] * 31])
    monkeypatch.setattr("d2pfed.deploy.transport.time.sleep", link.slept.append)
    link.run(monkeypatch, link.answer)
    assert link.slept[:4] == [0.05, pytest.approx(0.0625), "answer", 0.05]
    assert link.slept[-1] == 3.0


def test_an_answer_to_a_stopped_run_does_not_delay_later_ones(monkeypatch):
    """The stale answer is there when a message comes, whose own answer takes a while."""
    stale, *own = messages(4)
    link = Link([own[0], own[1], None, own[2]])
    working, before = [], {}

    def sleep(_seconds):
        while working:
            link.answer(working.pop())

    def on_message(message):
        before[message.metadata.message_id] = list(link.sent)
        if message is own[0]:
            link.answer(stale)
        working.append(message)

    monkeypatch.setattr("d2pfed.deploy.transport.time.sleep", sleep)
    link.run(monkeypatch, on_message)
    assert before["message 2"] == ["message 0", "message 1"]
    assert link.sent == [f"message {number}" for number in range(4)]


def test_an_answer_that_comes_when_idle_leaves(monkeypatch):
    (stale,) = messages(1)
    link = Link([None, None])
    monkeypatch.setattr("d2pfed.deploy.transport.time.sleep", lambda _seconds: link.sent or link.answer(stale))
    link.run(monkeypatch, None)
    assert link.sent == ["message 0"]


def test_a_message_whose_process_was_lost_before_it_began_is_given_up(monkeypatch, caplog):
    """A machine that sleeps between the two loses the process: Flower answers only for messages that were pulled."""
    lost, later = messages(2)
    for message in (lost, later):
        message.metadata.__dict__["_message_id"] = message.object_id  # as it is stored
    link = Link([lost, later, None])

    def on_message(message):
        start_client_internal._insert_message(message, link.state, link.store)
        if message is later:
            (taken,) = link.state.get_messages_legacy(is_reply=False)
            link.answer(taken)
        else:
            link.state.task_store[link.task].status.status = runtime.Status.FINISHED

    link.run(monkeypatch, on_message)
    assert link.sent == [later.metadata.message_id]


@pytest.mark.parametrize("arguments", [["--app", "a"], ["--app", "a", "--runtime", "b", "--", "--insecure"]])
def test_a_node_has_one_supernode(arguments, monkeypatch):
    monkeypatch.setattr(node.sys, "argv", ["d2pfed-node", *arguments])
    with pytest.raises(SystemExit, match="d2pfed-node: either --runtime ADDRESS or, after --"):
        node.main()


@contextmanager
def listening() -> Iterator[tuple[int, list[bytes]]]:
    """A listener on this machine that hangs up, its port, and the first bytes that it was sent by each caller."""
    heard: list[bytes] = []

    def hear() -> None:
        with suppress(OSError):
            while True:
                caller, _ = server.accept()
                with caller:
                    heard.append(caller.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=hear)
        thread.start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "127.0.0.1:80@example.org", "[::]", ""])
def test_a_runtime_beyond_loopback_needs_certificates(host):
    with pytest.raises(ConfigError, match="without --root-certificates the runtime must be on loopback, got"):
        runtime.Runtime(f"{host}:8001", None, b"secret")
    runtime.Runtime(f"{host}:8001", b"certificates", b"secret")


def test_without_the_check_messages_are_asked_for_in_the_clear(monkeypatch):
    monkeypatch.setattr(runtime.Runtime, "__post_init__", lambda _self: None)
    with listening() as (port, heard):  # 0.0.0.0 is no loopback address, and happens to lead here
        assert runtime.acquire(runtime.Runtime(f"0.0.0.0:{port}", None, b"secret").client(None)) is None
    assert heard[0].startswith(b"POST /v1/runtime/acquire-task")


@pytest.mark.parametrize("address", ["127.0.0.1:8001", "127.8.9.1:1", "localhost:8001", "[::1]:8001"])
def test_a_runtime_on_loopback_needs_none(address):
    runtime.Runtime(address, None, b"secret").client(None).close()


def test_a_proxy_is_not_asked_for_this_machines_own_runtime(monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "")
    with listening() as (proxy, heard_by_proxy), listening() as (port, heard):
        for variable in ("http_proxy", "all_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy}")
        own = runtime.Runtime(f"127.0.0.1:{port}", None, b"secret")
        runtime.acquire(own.client(None))
        assert (len(heard_by_proxy), len(heard)) == (1, 0)
        node.bypass_proxies()
        runtime.acquire(own.client(None))
    assert (len(heard_by_proxy), len(heard)) == (1, 1)


def test_a_supernode_runs_nothing_here_and_keeps_its_secret(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("open('planted', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with node.started_supernode(["--isolation", "subprocess", "--host", "0.0.0.0", "--help"]) as (_, _, process):
        assert process.args.index("0.0.0.0") < process.args.index("127.0.0.1")
        assert process.args.index("subprocess") < process.args.index("process")
        assert process.wait(timeout=60) == 0
    assert not (tmp_path / "planted").exists()
    # Without -P.
    subprocess.run([arg for arg in process.args if arg != "-P"], check=False, capture_output=True, timeout=60)
    assert (tmp_path / "planted").exists()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_round_of_each_of_two_apps_through_two_warm_nodes(tmp_path):
    """One runs its own apps, the other bundles that it has pinned, although another lies where Flower unpacks it.

    Both apps have modules of the same names, and each has an account of its own.
    """
    other = tmp_path / "other"
    shutil.copytree(LIGHT, other)
    settings = (LIGHT / "pyproject.toml").read_text()
    (other / "pyproject.toml").write_text(settings.replace('name = "light"', 'name = "other"'))
    signals = tmp_path / "signals"
    signals.mkdir()
    (signals / "planted").write_text("planted")
    config = {"cohort": 2, "rounds": 1, "dropouts": 0.0, "colluders": 0.0, "signals": str(signals)}
    seconds = {"joining-seconds": 180.0, "keys-seconds": 60.0, "training-seconds": 60.0}
    with Federation(
        tmp_path / "federation", 2, 2, 2, 0.0, environment={"PYTHONPATH": str(ROOT / "src")}, app=LIGHT, preload=""
    ) as federation:
        federation.start_superlink()
        sha256 = hashlib.sha256(build_fab_from_disk(LIGHT)).hexdigest()
        planted = federation.directory / "flower" / "apps" / f"d2pfed.light.1.0.0.{sha256[:8]}"
        shutil.copytree(LIGHT, planted)
        (planted / "light" / "client_app.py").write_text("raise RuntimeError('it was run')")
        pins = [None, sha256]
        second = ["--app", str(other)], ["--fab-sha256", hashlib.sha256(build_fab_from_disk(other)).hexdigest()]
        for client, (pin, more) in enumerate(zip(pins, second, strict=True)):
            with (federation.client_directory(client) / "client.toml").open("a") as file:
                file.write('\n[apps."d2pfed/light"]\n[apps."d2pfed/other"]\n')
            federation.register(client)
            federation.start_supernode(client, pin=pin, more=more)
        files = {
            "roster": str(federation.roster),
            "authority": federation.authority,
            "draws": str(federation.draws),
        }
        for app in (LIGHT, other):
            federation.run(app, config | seconds | files | {"directory": str(tmp_path / f"run-{app.name}")})
            models = tmp_path / f"run-{app.name}" / "models.json"
            until = time.monotonic() + 300
            while not models.exists() and time.monotonic() < until:
                time.sleep(0.1)
            assert models.exists(), federation.log("superlink")[-3000:] + federation.log("supernode-0")[-3000:]
            after = json.loads(models.read_text())["1"]
            assert np.argsort(after)[-2:].tolist() in ([0, 1], [1, 0])
        for client in range(2):
            history = read_client_config(federation.client_directory(client)).log.read()
            charged = [(body["app"], str(body["run"]).rpartition("-")[0]) for body in history.bodies(Entry.CHARGE)]
            assert charged == [("d2pfed/light", "run-flower_light"), ("d2pfed/other", "run-other")]
