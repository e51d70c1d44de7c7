"""Clients and a server in one process, joined by an exchange that can lose, damage and repeat messages."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import (
    Advertising,
    Client,
    Consistency,
    Delivery,
    Enrolment,
    Exchange,
    History,
    Position,
    Roster,
    Session,
    Sum,
    collect,
    crypto,
)
from d2pfed.secagg.pairwise import messages
from d2pfed.secagg.pairwise.server import Unmasking
from d2pfed.secagg.roster import sign_position
from support.rosters import roster_of

TASK = b"names and shapes"
MODEL = b"the model of this round"
PHASES = ("advertise", "share", "mask", "confirm", "unmask")

Loss = Callable[[str, int, bytes | None], bytes | None]  # phase, client, answer (None: before it was asked)


def make_session(size: int = 20, **changes: object) -> Session:
    """A session whose cohort's identities are not its ranks; if signed, all of its clients are enrolled."""
    settings: dict[str, object] = {
        "plan_digest": digest("a plan"),
        "run": "a run",
        "round": 3,
        "attempt": 0,
        "cohort": tuple(7 + 3 * rank for rank in range(size)),
        "dimension": size,
        "bits": 8,
        "threshold": size // 2 + 1,
        "quorum": max(2, size // 2 + 1),
        "colluders": 0,
        "delivery": Delivery.QUORUM,
        "consistency": Consistency.ASSUMED,
    } | changes
    if settings["consistency"] is Consistency.SIGNED and "roster_digest" not in settings:
        settings["roster_digest"] = enrol(settings["cohort"]).digest
    return Session(**settings)


def enrol(clients: Iterable[int]) -> Roster:
    """A roster of these clients, each with the key that its tests know."""
    return roster_of({client: crypto.signing_public(enrolment_secret(client)) for client in clients})


def position_of(client: int, count: int, roster: Roster, log: str = "log") -> Position:
    """Where a client stands after so many rows of its log; another log has other heads."""
    return sign_position(enrolment_secret(client), roster.authority, client, count, head_of(client, count, log))


def head_of(client: int, count: int, log: str = "log") -> bytes:
    return digest(log, client, count)


def one_hot(session: Session, client: int) -> np.ndarray:
    """The vector that shows in the sum whether its client was counted, and how often."""
    vector = np.zeros(session.dimension, np.uint32)
    vector[session.rank(client)] = 1
    return vector


def enrolment_secret(client: int) -> bytes:
    return digest("signing key", client)


@dataclass
class Federation:
    """All clients of a session; `vectors` are what they contribute, one-hot unless given.

    If signed, each client's log has as many rows as `counts` says (one unless given), `known` is what clients remember
    of others, and `colluders` how many each expects in the cohort (the session's unless given).
    """

    session: Session
    seed: bytes = b"federation"
    vectors: Mapping[int, np.ndarray] = field(default_factory=dict)
    roster: Roster | None = None
    counts: Mapping[int, int] = field(default_factory=dict)
    known: Mapping[int, Mapping[int, Position]] = field(default_factory=dict)
    colluders: int | None = None
    opening: object = None
    may_refuse: bool = False

    def __post_init__(self) -> None:
        if self.roster is None and self.session.consistency is Consistency.SIGNED:
            self.roster = enrol(self.session.cohort)
        root = Entropy.replay(self.seed)
        self.clients = {client: self.make_client(client, root.child(client)) for client in self.session.cohort}
        self.group_seeds: dict[int, bytes | None] = {}

    def make_client(self, client: int, entropy: Entropy) -> Client:
        own = self.enrolment(client), self.history(client)
        return Client(self.session, client, self.contribution(client), entropy, *own)

    def restore(self, client: int, saved: bytes) -> Client:
        own = self.enrolment(client), self.history(client)
        return Client.restore(self.session, client, self.contribution(client), saved, *own)

    def enrolment(self, client: int) -> Enrolment | None:
        return None if self.roster is None else Enrolment(enrolment_secret(client), self.roster)

    def history(self, client: int) -> History | None:
        if self.roster is None:
            return None
        rows = self.counts.get(client, 1)
        return History(
            position_of(client, rows, self.roster),
            lambda count, head: count <= rows and head == head_of(client, count),
            self.known.get(client, {}),
            self.session.colluders if self.colluders is None else self.colluders,
        )

    def contribution(self, client: int) -> Callable[[bytes, bytes, bytes | None], np.ndarray]:
        def contribute(task: bytes, model: bytes, group_seed: bytes | None) -> np.ndarray:
            self.group_seeds[client] = group_seed
            return self.vectors[client] if client in self.vectors else one_hot(self.session, client)

        return contribute

    def exchange(self, phase: str, lose: Loss) -> Exchange:
        def run(outbox: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            for client in outbox:
                if lose(phase, client, b"") is None:
                    continue
                try:
                    answer = self.clients[client].receive(outbox[client])
                except PeerError:
                    if self.may_refuse:
                        continue  # as over a network: it is not there any more
                    raise
                if (answer := lose(phase, client, answer)) is not None:
                    yield client, answer

        return run


def keep_all(phase: str, client: int, answer: bytes | None) -> bytes | None:
    return answer


def advertising_of(federation: Federation, remembered: Mapping[int, Position] | None = None) -> Advertising:
    roster, opening = federation.roster, federation.opening
    return Advertising(federation.session, roster, opening=opening, remembered=remembered or {})


def run_round(federation: Federation, lose: Loss = keep_all, model: bytes = MODEL) -> tuple[Sum, tuple[int, ...]]:
    """Run all exchanges; the sum and the survivors, or TooFewClients."""
    unmasking = until_unmasking(federation, lose, model)
    collect(unmasking, federation.exchange("unmask", lose))
    return unmasking.close(), unmasking.survivors


def until_unmasking(federation: Federation, lose: Loss = keep_all, model: bytes = MODEL) -> Unmasking:
    """Run all exchanges but the last."""
    advertising = advertising_of(federation)
    collect(advertising, federation.exchange("advertise", lose))
    sharing = advertising.close()
    collect(sharing, federation.exchange("share", lose))
    masking = sharing.close(TASK, model)
    collect(masking, federation.exchange("mask", lose))
    confirming = masking.close()
    collect(confirming, federation.exchange("confirm", lose))
    return confirming.close()


def change_shares(unmasking: Unmasking, rank: int, answer: bytes, change: Callable[[int, int], int]) -> bytes:
    """A client's unmasking shares, each changed by `change(owner's rank, share)`."""
    joined, sharers = unmasking._aggregate.known.joined, unmasking._aggregate.sharers
    opened = messages.decode_unmasking_shares(joined, rank, sharers, answer)
    changed = {owner: change(owner, share) for owner, share in opened.items() if share is not None}
    return messages.encode_unmasking_shares(joined, rank, sharers, changed)


def expected_sum(session: Session, survivors: Iterable[int], vectors: Mapping | None = None) -> np.ndarray:
    """The sum of the survivors' vectors, by plain integers."""
    given = vectors or {}
    total = sum(
        ((given[client] if client in given else one_hot(session, client)).astype(object) for client in survivors),
        np.zeros(session.dimension, object),
    )
    return np.array([int(value) % session.ring.modulus for value in total], np.uint32)


def again(session: Session) -> Session:
    """The next attempt with the same cohort."""
    return replace(session, attempt=session.attempt + 1)
