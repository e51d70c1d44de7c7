"""A server that sends what a test wants it to send, to clients in real directories; needs no Flower."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from d2pfed.deploy.client import PrivateClient, TrainArrays
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.layout import Layout, NamedArrays, encode_task
from d2pfed.deploy.requests import Blob, ExchangeRequest, RequestKind, RunAnnouncement
from d2pfed.deploy.rosters import Draws, SignedRoster
from d2pfed.errors import D2PFedError
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.plan import Plan, Protocol
from d2pfed.round import Attempt, Invite, gather, rotation_seed, session_of
from d2pfed.secagg import Session, Sum
from d2pfed.secagg.draws import draw_key, draw_order
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.roster import Position
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, directory_of

MODEL = encode_model(np.zeros(DIMENSION, np.float32))
LAYOUT = Layout.of({"params": np.zeros(DIMENSION, np.float32)})


def add_one(client: int) -> TrainArrays:
    """A training function that adds one at a client's own place of each array."""

    def train(arrays: NamedArrays, settings: Mapping[str, object]) -> NamedArrays:
        return {name: array + np.eye(1, array.size, client, array.dtype)[0] for name, array in arrays.items()}

    return train


@dataclass
class MaliciousServer:
    """Speaks for one run; `refusals` are what clients said instead of an answer."""

    directory: Path
    plan: Plan
    roster: SignedRoster
    run: str = "a run"
    first_draw: int = 0
    layout: Layout = LAYOUT
    train: Callable[[int], TrainArrays] = add_one
    moved: dict[int, Path] = field(default_factory=dict)  # directories of clients that are elsewhere
    remembered: dict[int, Position] = field(default_factory=dict)
    refusals: dict[int, D2PFedError] = field(default_factory=dict)
    model: bytes = MODEL

    def ask(self, client: int, kind: RequestKind, data: bytes) -> bytes:
        """The answer of a client to one request; errors come out as they are."""
        directory = self.moved.get(client, directory_of(self.directory, client))
        return PrivateClient(read_client_config(directory), 100 + client, {}, self.train(client)).answer(
            kind, data
        )

    def ask_frame(self, client: int, frame: bytes) -> bytes:
        """The answer of a client to one frame."""
        beside = kind_of(frame) == MessageKind.LATTICE_REQUEST
        blob = Blob(self.model, sha256(self.model).digest()) if beside else None
        data = ExchangeRequest(frame, 60.0, 300.0).encode(blob, is_beside=beside)
        return self.ask(client, RequestKind.EXCHANGE, data)

    def announcement(self) -> RunAnnouncement:
        plan = canonical.encode(self.plan)
        data = self.roster.published.head if self.is_by_slot else self.roster.data
        return RunAnnouncement(self.run, plan, self.layout.encode(), self.first_draw, data)

    @property
    def is_by_slot(self) -> bool:
        """Whether clients hold the head of the roster."""
        return self.plan.protocol is Protocol.LATTICE

    @property
    def enrolled(self):
        """The roster as sessions go by it."""
        return self.roster.published.certified if self.is_by_slot else self.roster.roster

    def announce(self, *clients: int) -> None:
        for client in clients or self.roster.roster.clients:
            slip = self.roster.published.slip(client) if self.is_by_slot else b""
            self.ask(client, RequestKind.ANNOUNCEMENT, replace(self.announcement(), slip=slip).encode())

    def draw(self, number: int, attempt: int) -> int:
        return self.first_draw + number * self.plan.attempts_per_round + attempt

    def session(self, number: int = 0, attempt: int = 0, draw: int | None = None, block: int = 0) -> Session:
        roster = self.roster.roster
        place = self.draw(number, attempt) if draw is None else draw
        order = roster.clients[: self.plan.cohort_size]
        if roster.depth is not None:
            key = draw_key(roster.digest, place, self.opening(place).seed)
            order = draw_order(key, roster.clients, self.plan.sampling, block)
        where = place if roster.depth is not None else 0
        named = Attempt(self.run, number, attempt)
        order = tuple(map(self.enrolled.name, order))
        return session_of(
            self.plan, named, tuple(sorted(order)), roster=self.enrolled, draw=where, block=block, order=order
        )

    def opening(self, draw: int):
        roster = self.roster.roster
        return None if roster.depth is None else Draws(self.directory / "draws", roster).tree.open(draw)

    def invitation(self, client: int = 0, number: int = 0, attempt: int = 0, **options: object) -> bytes:
        session = self.session(number, attempt, **options)
        opening = self.opening(session.draw)
        return encode_invitation(
            session, session.rank(self.enrolled.name(client)), opening, self.remembered.get(client)
        )

    def invite(self, client: int = 0, number: int = 0, attempt: int = 0, **options: object) -> bytes:
        return self.ask_frame(client, self.invitation(client, number, attempt, **options))

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for client in requests:
            try:
                answer = self.ask_frame(client, requests[client])
            except D2PFedError as error:
                self.refusals[client] = error
                continue
            yield client, answer

    def attempt(
        self, number: int = 0, attempt: int = 0, without: tuple[int, ...] = (), task: bytes | None = None
    ) -> Sum:
        """A whole attempt; what was remembered before is shown, and what is shown is not remembered."""
        self.refusals.clear()
        session = self.session(number, attempt)
        invite = Invite(
            roster=self.enrolled,
            opening=self.opening(session.draw),
            remembered=self.remembered,
            excluded=without,
        )
        sent = encode_task(self.layout, {"server-round": number + 1}) if task is None else task
        return gather(session, self.model, self.exchange, task=sent, invite=invite).unmask()

    def sum_of_updates(self, attempt: int, task: bytes | None = None) -> np.ndarray:
        """The sum of the clients' updates, with its noise, as the server decodes it after an attempt at round 0."""
        seed = rotation_seed(self.session(attempt=attempt))
        opened = self.attempt(attempt=attempt, task=task)
        return self.plan.codec.decode(self.plan.ring.center(opened.vector), seed, 1)


def shows_only(client: int, found: np.ndarray) -> bool:
    """Whether a sum shows the update of `add_one` of this client and nobody else's."""
    return found[client] > 0.5 > np.abs(np.delete(found, client)).max()
