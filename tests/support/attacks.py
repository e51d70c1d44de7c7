"""What a server does to a victim: it plays all others, honest peers with the real code and colluders that send zeros.

It keeps to no rule of its own, and names cohorts, silos and members as badly as the victim allows. A sum that it opens
is that of the honest members' vectors.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from d2pfed.accounting import Unit
from d2pfed.deploy.client import Purpose
from d2pfed.deploy.layout import Layout
from d2pfed.deploy.requests import RunAnnouncement
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.noise.mechanisms import Shared
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, Participant, gather, session_of
from d2pfed.round.session import AttemptBinding
from d2pfed.secagg import Advertising, Client, Enrolment, Exchange, History, Session, collect, standing
from d2pfed.secagg.crypto import PairSecrets, sign
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.server import Masking
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.wire import MessageKind, kind_of, message, pack_subset, subset_of
from support.attacked_clients import Group, Life
from support.federation import enrolment_secret, position_of
from support.rings import subtract_into
from support.standing import Silo

Receive = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Opened:
    """A sum with the victim in it that the server could open: how many honest vectors it has, and which.

    `total` is what was opened, `own` the victim's part of it; None where only the consent to open it was asked for.
    """

    protocol: str
    honest: int
    row: int  # how many vectors the victim's log had charged when it was asked for this one
    total: IntVector | None = None
    own: IntVector | None = None


class Nothing:
    """Units of a silo that holds no records."""

    count = 0

    def gradients(self, _chosen: IntVector) -> Iterator[np.ndarray]:
        return iter(())


@dataclass
class Attack:
    """A server and its colluders, against one victim under one plan."""

    plan: Plan
    life: Life
    witness: Life | None
    colluders: frozenset[int]
    run: str
    first_draw: int = 0
    opened: list[Opened] = field(default_factory=list)
    silos: dict[int, Silo] = field(default_factory=dict)
    sent: dict[int, RingVector] = field(default_factory=dict)  # by the peers, in the attempt that runs

    @property
    def group(self) -> Group:
        return self.life.group

    @cached_property
    def layout(self) -> Layout:
        return Layout.of({"params": np.zeros(self.plan.dimension, np.float32)})

    @cached_property
    def model(self) -> bytes:
        return encode_model(np.zeros(self.layout.dimension, np.float32))

    def announcement(self, text: str, **changes: object) -> RunAnnouncement:
        fields = {"plan": text, "layout": self.layout.encode(), "first_draw": self.first_draw}
        return RunAnnouncement(run=self.run, roster=self.group.signed.data, **(fields | changes))

    def worst(self, size: int) -> tuple[int, ...]:
        """So many clients with the victim and as many colluders as there are, in the order of identities."""
        honest = [self.group.witness] if self.witness is not None else []
        honest += [client for client in self.group.others if client not in {*self.colluders, *honest}]
        bribed = [client for client in self.group.others if client in self.colluders]
        return tuple(sorted([self.group.victim, *bribed, *honest][:size]))

    # ---- the pairwise protocol

    def session(self, number: int, attempt: int, draw: int, block: int) -> Session:
        roster = self.group.roster
        if roster.depth is None:
            cohort = self.worst(self.plan.cohort_size)
        else:
            cohort = self.group.drawn(self.plan.sampling, draw, block)
        where = Attempt(self.run, number, attempt)
        return session_of(self.plan, where, cohort, roster=roster, draw=draw, block=block)

    def pairwise(self, session: Session, task: bytes, purpose: Purpose, gone: MessageKind) -> None:
        """An attempt with as few survivors as the plan allows; the others are gone from one request on."""
        self.sent.clear()
        before = self._charges()
        lost = self._dropped(session)
        exchange = self._exchange(self._peers(session, purpose), lambda who, kind: who in lost and kind == gone)
        masked = gather(
            session,
            self.model,
            exchange,
            task=task,
            invite=Invite(roster=self.group.roster, opening=self._opening(session)),
        )
        total = masked.unmask().vector
        self._note("pairwise", masked.survivors, before, total)

    def too_few(self, session: Session, task: bytes, purpose: Purpose, *, survivors_only: bool) -> None:
        """One survivor less than the quorum, among those who shared keys or only among those who delivered.

        What is missing in signatures comes from colluders, and from clients that would be as careless as the victim.
        """
        self.sent.clear()
        before, exchange = self._charges(), self._exchange(self._peers(session, purpose), lambda *_: False)
        advertising = Advertising(session, self.group.roster, opening=self._opening(session))
        collect(advertising, exchange)
        sharing = advertising.close()
        collect(sharing, exchange)
        few = self._fewest(session, session.quorum - 1)
        present = subset_of(len(session.cohort), map(session.rank, few))
        sharers = np.ones(len(session.cohort), np.bool_) if survivors_only else present
        masking = Masking(sharing._known, sharers, sharing._sent, task, self.model)
        collect(masking, exchange)
        victim = session.rank(self.group.victim)
        self.life.receive(message(session, MessageKind.SURVIVORS, victim, pack_subset(present)), purpose)
        statement = keys.survivors_statement(masking._context, present)
        signers = self._fewest(session, session.quorum + 1)[1:]
        signatures = {session.rank(client): sign(enrolment_secret(client), statement) for client in signers}
        self.life.receive(messages.encode_signatures(session, victim, signatures), purpose)
        self._note("pairwise", few, before, None)

    def _fewest(self, session: Session, count: int) -> list[int]:
        """So many of a cohort: the victim, its colluders, then others."""
        rest = sorted(set(session.cohort) - {self.group.victim}, key=lambda client: client not in self.colluders)
        return [self.group.victim, *rest][:count]

    def _dropped(self, session: Session) -> set[int]:
        if isinstance(self.plan.mechanism, Shared):
            return set()
        real = {self.group.victim} | ({self.group.witness} if self.witness else set())
        rest = [client for client in session.cohort if client not in real]
        rest.sort(key=lambda client: client in self.colluders)
        return set(rest[: len(session.cohort) - session.quorum])

    def _opening(self, session: Session) -> Opening | None:
        return None if self.group.roster.depth is None else self.group.openings[session.draw]

    def _peers(self, session: Session, purpose: Purpose) -> dict[int, Receive]:
        pairs, roster = PairSecrets(), self.group.roster
        peers: dict[int, Receive] = {}
        for client in session.cohort:
            if (life := self._real(client)) is not None:
                peers[client] = lambda frame, life=life: life.receive(frame, purpose)
                continue

            def contribute(task: bytes, model: bytes, seed: bytes | None, client: int = client) -> RingVector:
                return self._vector(client, session, seed)

            enrolment = Enrolment(enrolment_secret(client), roster)
            history = History(position_of(client, 1, roster), lambda *_: True)
            peers[client] = Client(
                session, client, contribute, Entropy.system(), enrolment, history, pairs.agree
            ).receive
        return peers

    # ---- standing keys

    def epoch(self, silos: tuple[int, ...], number: int, first: int) -> standing.Epoch:
        plan = self.plan
        return standing.Epoch(
            plan_digest=plan.digest,
            run=self.run,
            epoch=number,
            first=first,
            roster_digest=self.group.roster.digest,
            cohort=silos,
            dimension=plan.codec.length,
            bits=plan.ring.bits,
            quorum=plan.quorum,
            colluders=plan.colluders,
            rounds=plan.rounds,
            attempts=plan.attempts_per_round,
        )

    def set_up(self, epoch: standing.Epoch) -> standing.ReadyEpoch:
        exchange = self._exchange(self._silos(epoch, Purpose.TRAINING), lambda *_: False)
        advertising = standing.Advertising(epoch, self.group.roster)
        collect(advertising, exchange)
        agreeing = advertising.close()
        collect(agreeing, exchange)
        return agreeing.close()

    def step(self, current: standing.ReadyEpoch, step: standing.Step, task: bytes, purpose: Purpose) -> None:
        """A step; one whose members are too few is put to the victim alone."""
        self.sent.clear()
        before, epoch = self._charges(), current.epoch
        if step.members.sum() < epoch.quorum:
            request = epochs.Request(step, task, self.model)
            self.life.receive(epochs.encode_request(epoch, epoch.rank(self.group.victim), request), purpose)
            self._note("standing", step.cohort, before, None)
            return
        collecting = standing.Collecting(current.keys, step, task, self.model)
        collect(collecting, self._exchange(self._silos(epoch, purpose), lambda *_: False))
        self._note("standing", step.cohort, before, collecting.close())

    def _silos(self, epoch: standing.Epoch, purpose: Purpose) -> dict[int, Receive]:
        return {client: self._silo(client, epoch, purpose) for client in epoch.cohort}

    def _silo(self, client: int, epoch: standing.Epoch, purpose: Purpose) -> Receive:
        if (life := self._real(client)) is not None:
            return lambda frame: life.receive(frame, purpose)
        silo = self.silos.setdefault(client, Silo(client, self.group.roster))
        silo.contribute = lambda step, task, model: self._vector(client, step, None)

        def receive(frame: bytes) -> bytes:
            match kind_of(frame):
                case MessageKind.STANDING_INVITATION:
                    return silo.invite(epoch, frame)
                case MessageKind.STANDING_ADVERTS:
                    return silo.agree(frame)
            return silo.answer(frame)

        return receive

    # ---- both

    def _real(self, client: int) -> Life | None:
        if client == self.group.victim:
            return self.life
        return self.witness if client == self.group.witness else None

    def _vector(self, client: int, session: AttemptBinding, seed: bytes | None) -> RingVector:
        """What a peer sends: zeros if it colludes, else what the real code makes of a zero update."""
        if client in self.colluders:
            vector = np.zeros(session.dimension, np.uint32)
        else:
            participant = Participant(plan=self.plan, client=client, entropy=Entropy.system(), participations=0)
            update = Nothing() if self.plan.unit is Unit.RECORD else np.zeros(self.layout.dimension, np.float32)
            vector = participant.encode(session, update, seed)
        self.sent[client] = vector
        return vector

    def _exchange(self, peers: Mapping[int, Receive], lost: Callable[[int, int], bool]) -> Exchange:
        """Asks the victim first: what it refuses ends the attempt. A witness that refuses is not there."""

        def run(outbox: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            for client in sorted(outbox, key=lambda client: client != self.group.victim):
                if lost(client, kind_of(outbox[client])):
                    continue
                try:
                    answer = peers[client](outbox[client])
                except (PeerError, ConfigError):
                    if client == self.group.victim:
                        raise
                    continue
                yield client, answer

        return run

    def _charges(self) -> int:
        return len(self.life.history().bodies(Entry.CHARGE))

    def _note(self, protocol: str, members: tuple[int, ...], before: int, total: RingVector | None) -> None:
        """Keep a sum that the victim has helped to open."""
        if self.group.victim not in members:
            return
        honest, ring = set(members) - self.colluders, self.plan.ring
        own = None
        if total is not None and self._real(self.group.witness) is None:
            rest = total.copy()
            for client in honest - {self.group.victim}:
                subtract_into(ring, rest, self.sent[client])
            own = ring.center(rest)
        opened = None if total is None else ring.center(total)
        self.opened.append(Opened(protocol, len(honest), before, opened, own))
