"""Which function of an app trains, and under which configuration of the run, is not for the server to choose."""

from collections.abc import Callable

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.deploy import client as private_client
from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.layout import decode_task, encode_task
from d2pfed.deploy.requests import RequestKind
from d2pfed.errors import TooFewClients
from d2pfed.flower import client as client_module
from d2pfed.flower.grid import from_record, to_record
from support.enrolled_clients import directory_of, enrol, make_plan
from support.local_grid import (
    Train,
    make_app,
    make_context,
    make_grid,
    make_message,
    make_strategy,
    one_hot,
    start,
)
from support.malicious_server import MaliciousServer, shows_only
from support.twins import twin

VICTIM = 0


@pytest.fixture
def server(tmp_path):
    """Five silos that are always asked together."""
    made = MaliciousServer(tmp_path, make_plan(rounds=4), enrol(tmp_path, 5))
    made.announce()
    return made


def vectors(server: MaliciousServer, client: int) -> int:
    log = read_client_config(directory_of(server.directory, client)).log
    return len(ClientSpending.of(log.read()).releases)


def ask_through(
    server: MaliciousServer,
    app_of: Callable[[int], ClientApp],
    type_of: Callable[[int], str] = lambda _client: "train",
    run_config_of: Callable[[int], dict[str, object]] = lambda _client: {},
) -> None:
    """Have requests answered by Flower apps: the server chooses each client's message type and run configuration."""

    def ask(client: int, kind: RequestKind, data: bytes) -> bytes:
        message = make_message(to_record(kind, data), 100 + client)
        message.metadata.message_type = type_of(client)
        context = make_context(client, directory_of(server.directory, client))
        context.run_config = run_config_of(client)
        return from_record(app_of(client)(message, context).content)[1]

    server.ask = ask


def measure(message: Message, _context: Context) -> Message:
    """What an app evaluates with: it returns no arrays, so a client that trains by it sends zero and its noise."""
    return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)


def app_with_more_functions(client: int) -> ClientApp:
    app = make_app(one_hot(client))
    app.evaluate()(measure)
    app.train("quiet")(measure)
    return app


@pytest.mark.parametrize(
    ("message_type", "refusal", "place", "name", "lax"),
    [
        (
            "evaluate",
            "a request for evaluation must have a task for it",
            PrivateClient,
            "_contribute",
            twin(
                PrivateClient._contribute,
                "if is_evaluation(settings) != (self.purpose",
                "if None is (self.purpose",
            ),
        ),
        ("train.quiet", "only requests of d2pfed", client_module, "require_type", lambda *_: None),
    ],
)
def test_the_server_does_not_choose_which_function_of_an_app_trains(
    server, message_type, refusal, place, name, lax, monkeypatch
):
    ask_through(server, app_with_more_functions, lambda client: "train" if client == VICTIM else message_type)
    with pytest.raises(TooFewClients):
        server.attempt()
    assert refusal in str(server.refusals[1])
    assert VICTIM not in server.refusals
    monkeypatch.setattr(place, name, lax)
    assert shows_only(VICTIM, server.sum_of_updates(1))


def with_epochs(client: int) -> Train:
    """A training function that takes its number of epochs from the configuration of the run."""

    def train(message: Message, context: Context) -> Message:
        params = message.content["arrays"]["params"].numpy().copy()
        params[client] += min(1.0, context.run_config["local-epochs"])
        return Message(RecordDict({"arrays": ArrayRecord({"params": Array(params)})}), reply_to=message)

    return train


def test_another_run_configuration_for_the_victim_gives_no_sum(server, monkeypatch):
    task = encode_task(server.layout, {"lr": 0.1}, {"local-epochs": 2})

    def app_of(client: int) -> ClientApp:
        return make_app(with_epochs(client))

    ask_through(server, app_of, run_config_of=lambda _client: {"local-epochs": 2})
    assert server.sum_of_updates(0, task)[:5].min() > 0.5
    ask_through(server, app_of, run_config_of=lambda client: {"local-epochs": 2 if client == VICTIM else 0})
    before = vectors(server, 1)
    with pytest.raises(TooFewClients):
        server.attempt(attempt=1, task=task)
    assert "the configuration of the run must be that of the task" in str(server.refusals[1])
    assert vectors(server, 1) == before
    lax = twin(decode_task, "if json.dumps(sent_run_config", "if False and json.dumps(sent_run_config")
    monkeypatch.setattr(private_client, "decode_task", lax)
    assert shows_only(VICTIM, server.sum_of_updates(2, task))


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_run_with_a_configuration_works_only_if_the_server_states_it(tmp_path, is_stated, caplog):
    grid = make_grid(tmp_path, train=with_epochs)
    for _app, context in grid.apps.values():
        context.run_config = {"local-epochs": 1}
    strategy = make_strategy(make_plan(rounds=1, spare=0), tmp_path, enrol(tmp_path, 5))
    if is_stated:
        assert start(strategy, grid, run_config={"local-epochs": 1})[:5].min() > 0.1
    else:
        with pytest.raises(TooFewClients):
            start(strategy, grid)
        assert "the server starts with run_config=context.run_config" in caplog.text
