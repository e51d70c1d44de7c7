"""A server that says what a test wants it to say, to client apps in real homes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from d2pfed.errors import D2PFedError
from d2pfed.flower.draws import Draws
from d2pfed.flower.envelope import Introduction, Request, unpack_answer
from d2pfed.flower.layout import Layout, encode_model, encode_task
from d2pfed.flower.rosters import SignedRoster
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, gather, session_of
from d2pfed.secagg import Session, Sum
from d2pfed.secagg.draws import draw_cohort, draw_key
from d2pfed.secagg.invitation import encode_invitation
from d2pfed.secagg.position import Position
from homes import home_in
from local_grid import DIMENSION, Train, make_app, make_context, make_message, one_hot

LAYOUT = Layout.of(ArrayRecord({"params": Array(np.zeros(DIMENSION, np.float32))}))


@dataclass
class LyingServer:
    """Speaks for one run; `refusals` are what clients said instead of an answer."""

    directory: Path
    plan: Plan
    roster: SignedRoster
    run: str = "a run"
    first_draw: int = 0
    layout: Layout = LAYOUT
    train: Callable[[int], Train] = one_hot
    homes: dict[int, Path] = field(default_factory=dict)  # of clients that live elsewhere than expected
    remembered: dict[int, Position] = field(default_factory=dict)
    refusals: dict[int, D2PFedError] = field(default_factory=dict)

    def ask(self, client: int, content: RecordDict) -> RecordDict:
        """The answer of a client app to one message; errors come out as they are."""
        home = self.homes.get(client, home_in(self.directory, client))
        app = make_app(self.train(client))
        return app(make_message(content, 100 + client), make_context(client, home)).content

    def introduction(self) -> Introduction:
        plan = canonical.encode(self.plan)
        return Introduction(self.run, plan, self.layout.encode(), self.first_draw, self.roster.data)

    def introduce(self, *clients: int) -> None:
        for client in clients or self.roster.roster.clients:
            self.ask(client, self.introduction().pack())

    def draw(self, number: int, attempt: int) -> int:
        return self.first_draw + number * self.plan.attempts_per_round + attempt

    def session(self, number: int = 0, attempt: int = 0, draw: int | None = None, block: int = 0) -> Session:
        roster = self.roster.roster
        place = self.draw(number, attempt) if draw is None else draw
        cohort = roster.clients[: self.plan.cohort_size]
        if roster.depth is not None:
            key = draw_key(roster.digest, place, self.opening(place).seed)
            cohort = draw_cohort(key, roster.clients, self.plan.sampling, block)
        where = place if roster.depth is not None else 0
        return session_of(
            self.plan, Attempt(self.run, number, attempt), cohort, roster=roster, draw=where, block=block
        )

    def opening(self, draw: int):
        roster = self.roster.roster
        return None if roster.depth is None else Draws(self.directory / "draws", roster).tree.open(draw)

    def invitation(self, client: int = 0, number: int = 0, attempt: int = 0, **options: object) -> RecordDict:
        session = self.session(number, attempt, **options)
        opening = self.opening(session.draw)
        frame = encode_invitation(session, session.rank(client), opening, self.remembered.get(client))
        return Request(frame, 60.0, 300.0).pack()

    def invite(self, client: int = 0, number: int = 0, attempt: int = 0, **options: object) -> RecordDict:
        return self.ask(client, self.invitation(client, number, attempt, **options))

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for client in requests:
            try:
                answer = self.ask(client, Request(requests[client], 60.0, 300.0).pack())
            except D2PFedError as error:
                self.refusals[client] = error
                continue
            yield client, unpack_answer(answer)

    def attempt(
        self, number: int = 0, attempt: int = 0, without: tuple[int, ...] = (), task: bytes | None = None
    ) -> Sum:
        """A whole attempt; what was remembered before is shown, and what is shown is not remembered."""
        self.refusals.clear()
        session = self.session(number, attempt)
        invite = Invite(
            roster=self.roster.roster,
            opening=self.opening(session.draw),
            remembered=self.remembered,
            excluded=without,
        )
        told = encode_task(self.layout, {"server-round": number + 1}) if task is None else task
        masked = gather(
            session, encode_model(np.zeros(DIMENSION, np.float32)), self.exchange, task=told, invite=invite
        )
        return masked.unmask()
