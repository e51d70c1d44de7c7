"""64 clients in processes of their own, the least cohort that is deployed: some are killed, the sum is of the rest."""

import json
import multiprocessing
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Error, Message

from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.requests import ExchangeRequest, RequestKind, RunAnnouncement
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import D2PFedError
from d2pfed.flower.grid import from_record, to_record
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.plan import Protocol
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan
from support.local_grid import LocalGrid, make_strategy, start
from support.malicious_server import add_one
from support.small_committees import keep_keys_in

pytestmark = pytest.mark.slow  # sixteen processes and 64 clients take a minute: the nightly script runs them

CLIENTS, TOGETHER = 64, 4  # of them in one process


def serve(directory, pipe):
    """Answer what comes through a pipe, each request from the client's directory alone."""
    while True:
        client, kind, data = pipe.recv()
        config = read_client_config(directory_of(directory, client))
        try:
            answer = PrivateClient(config, 100 + client, {}, add_one(client % DIMENSION)).answer(kind, data)
        except D2PFedError as error:
            answer = str(error)
        pipe.send(answer)


@dataclass
class ProcessGrid(LocalGrid):
    """A grid whose nodes are in processes of their own."""

    pipes: dict = field(default_factory=dict)
    processes: dict = field(default_factory=dict)

    def begin(self, directory, clients) -> None:
        for first in range(0, clients, TOGETHER):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(
                target=serve, args=(directory, theirs), daemon=True
            )
            process.start()
            theirs.close()
            for client in range(first, min(clients, first + TOGETHER)):
                self.apps[100 + client] = None
                self.pipes[client], self.processes[client] = ours, process

    def answer(self, node: int, message: Message) -> Message:
        client = node - 100
        answer = "its process was killed"
        with suppress(EOFError, OSError):
            self.pipes[client].send((client, *from_record(message.content)))
            answer = self.pipes[client].recv()
        if isinstance(answer, str):
            return Message(Error(code=0, reason=answer), reply_to=message)
        return Message(to_record(from_record(message.content)[0], answer), reply_to=message)

    def kill(self, client: int) -> None:
        self.processes[client].kill()
        self.processes[client].join()

    def end(self) -> None:
        for process in {id(each): each for each in self.processes.values()}.values():
            process.kill()
            process.join()


@pytest.mark.parametrize(
    "kind",
    [
        None,
        MessageKind.LATTICE_ADVERTS,
        MessageKind.LATTICE_REQUEST,
        MessageKind.LATTICE_SURVIVORS,
        MessageKind.LATTICE_CERTIFICATE,
    ],
)
def test_a_process_killed_at_an_exchange_takes_its_clients_alone(tmp_path, kind):
    roster = enrol(tmp_path, CLIENTS)
    keep_keys_in(tmp_path, CLIENTS)
    plan = make_plan(CLIENTS, rounds=1, dropouts=0.1, colluders=0.0)
    assert plan.protocol is Protocol.LATTICE  # nobody has asked for it
    grid, killed, announced = ProcessGrid({}), [], defaultdict(list)

    def going(client, message):
        request, data = from_record(message.content)
        if request is RequestKind.ANNOUNCEMENT:
            announced[client].append(RunAnnouncement.decode(data))
        if request is RequestKind.EXCHANGE and not killed and kind_of(ExchangeRequest.decode(data).frame) == kind:
            killed.extend(range(8, 8 + TOGETHER))
            grid.kill(8)
        return message

    grid.going = going
    grid.begin(tmp_path, CLIENTS)
    try:
        deadlines = Deadlines(joining=120.0, keys=120.0, grace=0.1, poll=0.001)
        params = start(make_strategy(plan, tmp_path, roster, deadlines=deadlines), grid, timeout=120.0)
    finally:
        grid.end()
    is_silent = kind in (MessageKind.LATTICE_ADVERTS, MessageKind.LATTICE_REQUEST)  # killed before it contributes
    left = [each for each in range(CLIENTS) if not (is_silent and each in killed)]
    expected = np.bincount([client % DIMENSION for client in left], minlength=DIMENSION) / CLIENTS
    assert np.abs(params - expected).max() < 0.3 / CLIENTS
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert record["survivors"] == len(left)
    rows = [row.kind for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None]
    assert rows == [RowKind.RESERVE, RowKind.COMMIT]
    charged = [
        client
        for client in range(CLIENTS)
        if read_client_config(directory_of(tmp_path, client)).log.read().bodies(Entry.CHARGE)
    ]
    assert charged == left
    for client in range(CLIENTS):  # a greeting, then all terms once, with the head and this client's own slip
        greeting, terms = announced[client]
        assert greeting == terms.greeting
        assert (terms.roster, terms.slip) == (roster.published.head, roster.published.slip(client))
        held = directory_of(tmp_path, client)
        assert (held / "roster-head").read_bytes().endswith(terms.roster + terms.slip)
        assert not (held / "roster").exists()
