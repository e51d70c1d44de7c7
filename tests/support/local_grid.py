"""Flower's grid and nodes inside one process: real messages, real client apps, and every byte that leaves a client."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.deploy.requests import ExchangeRequest, RequestKind
from d2pfed.deploy.rosters import SignedRoster
from d2pfed.deploy.transport import Deadlines
from d2pfed.flower.client import private
from d2pfed.flower.grid import from_record
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.plan import Plan
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, directory_of

RUN = 17
SERVER_NODE = 1

Train = Callable[[Message, Context], Message]
Lose = Callable[[int, Message], Message | None]  # by client: what becomes of a message, going or coming


def make_message(content: RecordDict, node: int, group: str = "", seconds: float = 60.0) -> Message:
    """A message as a ServerApp would make it."""
    metadata = Metadata(
        run_id=RUN,
        message_id="",
        src_node_id=SERVER_NODE,
        dst_node_id=node,
        reply_to_message_id="",
        group_id=group,
        created_at=time.time(),
        ttl=seconds,
        message_type="train",
    )
    return Message(content=content, metadata=metadata)


def kind(message: Message) -> MessageKind | None:
    """The kind of frame in a request of the server; None for an announcement."""
    kind, data = from_record(message.content)
    return MessageKind(kind_of(ExchangeRequest.decode(data).frame)) if kind is RequestKind.EXCHANGE else None


def one_hot(client: int) -> Train:
    """A training function that adds one at a client's own place."""

    def train(message: Message, context: Context) -> Message:
        params = message.content["arrays"]["params"].numpy().copy()
        params[client] += 1.0
        arrays = ArrayRecord({"params": Array(params)})
        metrics = MetricRecord({"num-examples": 31337.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return train


def keep(client: int, message: Message) -> Message:
    return message


@dataclass
class LocalGrid:
    """Nodes 100, 101, ... whose client apps run when their message is pushed; `lose` may drop or change any message."""

    apps: dict[int, tuple[ClientApp, Context]]
    going: Lose = keep
    coming: Lose = keep
    inbox: dict[str, Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        reference = f"message-{len(self.sent)}"
        message.metadata.__dict__["_message_id"] = reference
        self.sent.append(message)
        node = message.metadata.dst_node_id
        going = self.going(node - 100, message)
        if going is not None:
            coming = self.coming(node - 100, self.answer(node, going))
            if coming is not None:
                self.inbox[reference] = coming
        return reference

    def answer(self, node: int, message: Message) -> Message:
        """What Flower sends back: the app's reply, or an error with the exception's text."""
        app, context = self.apps[node]
        copy = Message(content=message.content.copy(), metadata=message.metadata)
        try:
            reply = app(copy, context)
        except Exception as error:  # noqa: BLE001 - Flower takes whatever an app raises
            reply = Message(Error(code=0, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        self.received.append(reply)
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.inbox.pop(reference) for reference in list(message_ids) if reference in self.inbox]


def make_app(train: Train) -> ClientApp:
    app = ClientApp(mods=[private])
    app.train()(train)
    return app


def make_context(client: int, directory: Path | None) -> Context:
    config: dict[str, object] = {"partition-id": client}
    if directory is not None:
        config["d2pfed-directory"] = str(directory)
    return Context(run_id=RUN, node_id=100 + client, node_config=config, state=RecordDict(), run_config={})


def make_grid(directory: Path, clients: int = 5, train: Callable[[int], Train] = one_hot) -> LocalGrid:
    return LocalGrid(
        {
            100 + client: (make_app(train(client)), make_context(client, directory_of(directory, client)))
            for client in range(clients)
        }
    )


def make_strategy(plan: Plan, directory: Path, roster: SignedRoster | None, **changes: object) -> PrivateFedAvg:
    settings: dict[str, object] = {
        "plan": plan,
        "directory": directory / "run",
        "roster": roster,
        "draws": None if roster is None or roster.roster.depth is None else directory / "draws",
        "deadlines": Deadlines(joining=60.0, keys=60.0, poll=0.001),
        "message_factory": make_message,
    }
    return PrivateFedAvg(**(settings | changes))


def start(
    strategy: PrivateFedAvg, grid: LocalGrid, rounds: int | None = None, timeout: float = 60.0, **options: object
) -> np.ndarray:
    """The parameters after the rounds, from zero."""
    initial = ArrayRecord({"params": Array(np.zeros(DIMENSION, np.float32))})
    result = strategy.start(grid, initial, rounds, timeout, **options)
    return result.arrays["params"].numpy()
