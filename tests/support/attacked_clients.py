"""Real clients in real directories, and a server that plays all others: honest peers with the real code, and colluders.

The server keeps to no rule of its own: it names cohorts, silos and members as badly as the victim allows. Colluders
send zeros, so that a sum is that of the honest members' vectors.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from d2pfed.accounting import CohortSampling, Sampling, Unit
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.client_config import ClientConfig, init_client, read_client_config
from d2pfed.flower.enrolment import Draws, make_draws, make_secret
from d2pfed.flower.layout import Layout, encode_model
from d2pfed.flower.private_client import PrivateClient, Purpose, TrainArrays
from d2pfed.flower.requests import ExchangeRequest, RequestKind, RunAnnouncement
from d2pfed.flower.rosters import SignedRoster
from d2pfed.ledger.client_history import ClientHistory
from d2pfed.ledger.files import create_file, make_directory
from d2pfed.noise.mechanisms import Shared
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, Participant, gather, session_of
from d2pfed.round.session import AttemptBinding
from d2pfed.secagg import (
    Advertising,
    Client,
    Enrolment,
    Epoch,
    Exchange,
    History,
    Masking,
    Roster,
    Session,
    StandingAdvertising,
    StandingCollecting,
    StandingEpoch,
    StandingStep,
    collect,
    keys,
    messages,
)
from d2pfed.secagg.crypto import PairSecrets, sign, signing_public
from d2pfed.secagg.draws import Opening, draw_cohort, draw_key
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.standing_messages import StandingRequest, encode_standing_request
from d2pfed.secagg.wire import kind_of, subset_of
from support.enrolled_clients import anchor_in, directory_of, sign_roster, write_settings
from support.federation import enrolment_secret, position_of
from support.standing import Silo

Settings = Mapping[str, object]
Receive = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Group:
    """A roster with its draws; who would collude, and in which order, was settled before the authority's nonce."""

    home: Path
    signed: SignedRoster
    authority: bytes
    victim: int
    witness: int
    others: tuple[int, ...]  # in the order in which they are bribed; the witness last
    _worst: dict[object, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def roster(self) -> Roster:
        return self.signed.roster

    @cached_property
    def openings(self) -> list[Opening]:
        depth = self.roster.depth
        if depth is None:
            return []
        tree = Draws(self.home / "draws", self.roster).tree
        return [tree.open(draw) for draw in range(1 << depth)]

    def drawn(self, sampling: CohortSampling, draw: int, block: int) -> tuple[int, ...]:
        key = draw_key(self.roster.digest, draw, self.openings[draw].seed)
        return draw_cohort(key, self.roster.clients, sampling, block)

    def worst_draws(self, sampling: CohortSampling, colluders: frozenset[int]) -> list[tuple[int, int]]:
        """The draws and blocks with the victim in their cohort, those with most colluders first."""
        if (found := self._worst.get((sampling, colluders))) is not None:
            return found
        blocks = sampling.population // sampling.cohort_size if sampling.method is Sampling.ONCE else 1
        places = [(draw, block) for draw in range(len(self.openings)) for block in range(blocks)]
        cohorts = {place: self.drawn(sampling, *place) for place in places}
        joined = [place for place in places if self.victim in cohorts[place]]
        joined.sort(key=lambda place: -len(colluders.intersection(cohorts[place])))
        self._worst[sampling, colluders] = joined
        return joined


def make_group(home: Path, size: int, depth: int | None, stream: Stream) -> Group:
    """Enrol two real clients and others whose keys the server knows."""
    home.mkdir()
    authority = make_secret(home / "authority.key")
    identities = [int(each) for each in stream.subset(5 * size, size)]
    shuffled = [identities.pop(stream.below(len(identities))) for _ in range(size)]
    victim, witness, *bribed = shuffled
    known = {client: signing_public(enrolment_secret(client)) for client in bribed}
    make_directory(directory_of(home, witness))
    create_file(directory_of(home, witness) / "key", enrolment_secret(witness))  # where it is a peer as well
    for client in (victim, witness):
        known[client] = init_client(directory_of(home, client), client, authority, anchor_in(home, client))
    committed = None if depth is None else make_draws(home / "draws", depth)
    signed = sign_roster(home, known, None, committed)
    return Group(home, signed, authority, victim, witness, (*bribed, witness))


@dataclass
class Life:
    """One life of a real client: a copy of its directory, its data, and all that a server sees of it."""

    group: Group
    client: int
    home: Path
    train: TrainArrays
    seen: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)  # that it was sent
    vectors: int = 0  # that it has sent

    @staticmethod
    def begin(group: Group, client: int, home: Path, settings: Settings, train: TrainArrays) -> "Life":
        for place in (directory_of, anchor_in):
            shutil.copytree(place(group.home, client), place(home, client))
        write_settings(home, client, group.authority, settings)
        file = directory_of(home, client) / "client.toml"
        file.write_text(f'state = "{home}/keys-{client}"\nkeys_on_disk = true\n{file.read_text()}')
        return Life(group, client, home, train)

    def announce(self, announcement: RunAnnouncement) -> None:
        self._ask(RequestKind.ANNOUNCEMENT, announcement.encode(), Purpose.TRAINING)

    def receive(self, frame: bytes, purpose: Purpose = Purpose.TRAINING) -> bytes:
        """The answer to one frame; a refusal is a PeerError, and so is what must never come out."""
        self.frames.append(frame)
        answer = self._ask(RequestKind.EXCHANGE, ExchangeRequest(frame, 60.0, 300.0).encode(), purpose)
        self.vectors += kind_of(answer) in (MessageKind.MASKED_VECTOR, MessageKind.STANDING_MASKED)
        return answer

    def _ask(self, kind: RequestKind, data: bytes, purpose: Purpose) -> bytes:
        try:
            answer = PrivateClient(self.config, 7, {}, self.train, purpose).answer(kind, data)
        except (PeerError, ConfigError) as error:
            self.refusals.append(str(error))
            self.seen.append(f"refused: {error}")
            raise PeerError(str(error)) from None
        except BaseException as error:
            self.seen.append(f"ESCAPED: {error!r}")
            raise PeerError("escaped") from None
        self.seen.append(f"{len(answer)} bytes" if kind is not RequestKind.EXCHANGE else _shape(answer))
        return answer

    @cached_property
    def config(self) -> ClientConfig:
        return read_client_config(directory_of(self.home, self.client))

    def history(self) -> ClientHistory:
        return self.config.log.read()


def _shape(answer: bytes) -> str:
    return f"{MessageKind(kind_of(answer)).name} of {len(answer)} bytes"


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
        return Layout.of({"params": np.zeros(self.plan.codec.rotation.dimension, np.float32)})

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
        self._new_sum()
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
        self._new_sum()
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
        self.life.receive(messages.encode_survivors(session, MessageKind.SURVIVORS, victim, present), purpose)
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

    def epoch(self, silos: tuple[int, ...], number: int, first: int) -> Epoch:
        plan = self.plan
        return Epoch(
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

    def set_up(self, epoch: Epoch) -> StandingEpoch:
        exchange = self._exchange(self._silos(epoch, Purpose.TRAINING), lambda *_: False)
        advertising = StandingAdvertising(epoch, self.group.roster)
        collect(advertising, exchange)
        agreeing = advertising.close()
        collect(agreeing, exchange)
        return agreeing.close()

    def step(self, current: StandingEpoch, step: StandingStep, task: bytes, purpose: Purpose) -> None:
        """A step; one whose members are too few is put to the victim alone."""
        self._new_sum()
        before, epoch = self._charges(), current.epoch
        if step.members.sum() < epoch.quorum:
            request = StandingRequest(step, task, self.model)
            self.life.receive(encode_standing_request(epoch, epoch.rank(self.group.victim), request), purpose)
            self._note("standing", step.cohort, before, None)
            return
        collecting = StandingCollecting(current.keys, step, task, self.model)
        collect(collecting, self._exchange(self._silos(epoch, purpose), lambda *_: False))
        self._note("standing", step.cohort, before, collecting.close())

    def _silos(self, epoch: Epoch, purpose: Purpose) -> dict[int, Receive]:
        return {client: self._silo(client, epoch, purpose) for client in epoch.cohort}

    def _silo(self, client: int, epoch: Epoch, purpose: Purpose) -> Receive:
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

    def _new_sum(self) -> None:
        self.sent.clear()

    def _charges(self) -> int:
        return sum(row.entry == "charge" for row in self.life.history().rows)

    def _note(self, protocol: str, members: tuple[int, ...], before: int, total: RingVector | None) -> None:
        """Keep a sum that the victim has helped to open."""
        if self.group.victim not in members:
            return
        honest, ring = set(members) - self.colluders, self.plan.ring
        own = None
        if total is not None and self._real(self.group.witness) is None:
            rest = total.copy()
            for client in honest - {self.group.victim}:
                ring.subtract_into(rest, self.sent[client])
            own = ring.centre(rest)
        opened = None if total is None else ring.centre(total)
        self.opened.append(Opened(protocol, len(honest), before, opened, own))
