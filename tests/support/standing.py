"""Silos with standing keys in one process, and what their server does with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.round import StandingMemory, StandingSteps
from d2pfed.secagg import Enrolment, History, Position, Roster, collect, crypto, standing
from d2pfed.secagg.standing import epoch as epochs
from support.decoding import decode_advert
from support.federation import MODEL, TASK, enrolment_secret, head_of, position_of
from support.rosters import roster_of

SILOS = (7, 10, 13, 16)


def roster_for(silos=SILOS) -> Roster:
    return roster_of({client: crypto.signing_public(enrolment_secret(client)) for client in silos})


def make_epoch(silos=SILOS, **changes) -> standing.Epoch:
    """An epoch of a small run."""
    fields = {
        "plan_digest": digest("plan"),
        "run": "run",
        "epoch": 0,
        "first": 0,
        "roster_digest": roster_for(silos).digest,
        "cohort": tuple(silos),
        "dimension": 5,
        "bits": 16,
        "quorum": 3,
        "colluders": 0,
        "rounds": 10,
        "attempts": 4,
    }
    return standing.Epoch(**(fields | changes))


def update_of(epoch: standing.Epoch, client: int, step: standing.Step) -> np.ndarray:
    """A vector that tells client and step."""
    return epoch.ring.uniform(Stream(digest("update", client, step.number)), epoch.dimension)


@dataclass
class Silo:
    """One silo: its keys, its account, and what it sends."""

    client: int
    roster: Roster
    count: int = 1  # rows of its log
    known: dict[int, Position] = field(default_factory=dict)
    store: StandingMemory = field(default_factory=StandingMemory)
    account: StandingSteps = field(default_factory=lambda: StandingSteps(1000))
    epoch: standing.Epoch | None = None
    advertised: object = None
    contribute: Callable[[standing.Step, bytes, bytes], np.ndarray] | None = None
    seed: bytes = b"silo"

    def silo(self, epoch: standing.Epoch) -> standing.Client:
        counts = {(count, head_of(self.client, count)) for count in range(self.count + 1)}
        position = position_of(self.client, self.count, self.roster)
        return standing.Client(
            epoch=epoch,
            client=self.client,
            enrolment=Enrolment(enrolment_secret(self.client), self.roster),
            history=History(position, lambda *seen: seen in counts, dict(self.known)),
            charged=self.account.charged,
        )

    def invite(self, epoch: standing.Epoch, invitation: bytes) -> bytes:
        self.count += 1  # the row that says that the epoch has begun
        entropy = Entropy.replay(self.seed).child(self.client, self.count)
        answer, self.advertised = self.silo(epoch).advertise(invitation, entropy)
        self.epoch, self.store.state = epoch, None
        return answer

    def agree(self, data: bytes) -> bytes:
        advertised, self.advertised = self.advertised, None
        ready = self.silo(self.epoch).agree(advertised, data)
        self.store.state = ready.state
        self.known |= ready.met
        return ready.answer

    def answer(self, data: bytes) -> bytes:
        def contribute(step: standing.Step, task: bytes, model: bytes) -> np.ndarray:
            self.account.charge(step)
            made = self.contribute
            return update_of(self.epoch, self.client, step) if made is None else made(step, task, model)

        return standing.answer_step(self.epoch, self.client, data, store=self.store, contribute=contribute)


@dataclass
class Silos:
    """All silos of one epoch after the other, with an honest server's moves."""

    epoch: standing.Epoch
    roster: Roster = None
    by_client: dict[int, Silo] = field(default_factory=dict)
    current: standing.ReadyEpoch | None = None
    log: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roster = self.roster or roster_for(self.epoch.cohort)
        self.by_client = self.by_client or {client: Silo(client, self.roster) for client in self.epoch.cohort}

    def exchange(self, name: str, lost=()):
        """A transport that loses some, and a silo's refusal is an answer that does not come."""

        def run(outbox: Mapping[int, bytes]):
            for client in outbox:
                if client in lost:
                    continue
                silo = self.by_client[client]
                try:
                    if name == "invite":
                        answer = silo.invite(self.epoch, outbox[client])
                    else:
                        answer = getattr(silo, name)(outbox[client])
                except PeerError as error:
                    self.log.append({"client": client, "refused": str(error)})
                    continue
                self.log.append({"client": client, "request": outbox[client], "answer": answer})
                yield client, answer

        return run

    def set_up(self, lost_first=(), lost_second=(), remembered=None) -> standing.ReadyEpoch:
        advertising = standing.Advertising(self.epoch, self.roster, remembered or {})
        collect(advertising, self.exchange("invite", lost_first))
        agreeing = advertising.close()
        collect(agreeing, self.exchange("agree", lost_second))
        self.claims = dict(agreeing.claims)
        self.current = agreeing.close()
        return self.current

    def step(self, number, attempt, members=None, lost=(), model=MODEL, task=TASK) -> np.ndarray:
        step = self.current.step(number, attempt, members or self.current.members)
        collecting = standing.Collecting(self.current.keys, step, task, model)
        collect(collecting, self.exchange("answer", lost))
        return collecting.close()

    def expected(self, number, attempt, members=None) -> np.ndarray:
        step = self.current.step(number, attempt, members or self.current.members)
        total = np.zeros(self.epoch.dimension, np.uint32)
        for client in step.cohort:
            self.epoch.ring.add_into(total, update_of(self.epoch, client, step))
        return total

    def adverts_by_hand(self, clients=None) -> dict[int, epochs.Advert]:
        """Invite silos, and return their adverts by rank."""
        adverts = {}
        for client in clients or self.epoch.cohort:
            rank = self.epoch.rank(client)
            invitation = epochs.encode_invitation(self.epoch, rank, self.roster.serial, None)
            answer = self.by_client[client].invite(self.epoch, invitation)
            adverts[rank] = decode_advert(self.epoch, rank, answer)
        return adverts

    def agree_by_hand(self, client: int, adverts: Mapping[int, epochs.Advert]) -> standing.Keys:
        """Show a silo some adverts."""
        self.by_client[client].agree(epochs.encode_adverts(self.epoch, self.epoch.rank(client), adverts))
        return standing.Keys.of(self.epoch, adverts)
