"""Simulated silos with standing keys: one exchange for each attempt, void and tried again if one is missing."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import PeerError, TooFewClients, VoidStep
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan, require_standing
from d2pfed.round import (
    Attempt,
    Collected,
    Fidelity,
    StandingMemory,
    StandingRun,
    StandingSteps,
    StandingSum,
    epoch_of,
    invited_epoch,
)
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg import (
    Enrolment,
    Epoch,
    History,
    Roster,
    StandingAdvertised,
    StandingSilo,
    StandingStep,
    answer_step,
    crypto,
    issue_roster,
)
from d2pfed.secagg.position import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.simulation.backend import Backend, Encoder
from d2pfed.simulation.dropouts import Dropouts
from d2pfed.training import shuffle_seed

_ISSUED = 0  # a simulation has no clock, and nobody asks whether its roster has expired
_EXCHANGES = {
    MessageKind.STANDING_INVITATION: "advertise",
    MessageKind.STANDING_ADVERTS: "share",
    MessageKind.STANDING_REQUEST: "masked",
}


@dataclass(slots=True, kw_only=True)
class StandingFederation:
    """Silos on this machine's word, all of the plan's population, which are asked in every round.

    Attributes:
        plan: what all of the silos have agreed on.
        run: the name of the run.
        backend: where silos are trained and encoded.
        dropouts: who is lost before which exchange; `advertise` and `share` are those of the set-up.
        fidelity: how much of the protocol is simulated.
        entropy: the root of all silos' randomness.
        clip: that of the round, where the plan's adapts.
    """

    plan: Plan
    run: str
    backend: Backend
    dropouts: Dropouts
    fidelity: Fidelity
    entropy: Entropy
    clip: float | None = None
    _silos: "_Silos" = field(init=False, repr=False)
    _standing: StandingRun = field(init=False, repr=False)
    _epoch: Epoch = field(init=False, repr=False)
    _void: int = 0

    def __post_init__(self) -> None:
        require_standing(self.plan, self.plan.sampling.population)
        self._silos = _Silos(self.plan, self.dropouts, self.entropy)
        self._epoch = epoch_of(self.plan, self.run, self._silos.roster, self._silos.roster.clients)
        self._standing = StandingRun(
            plan=self.plan,
            run=self.run,
            roster=self._silos.roster,
            silos=self._silos.roster.clients,
            exchange=self._silos.exchange,
            presence=self._silos.presence,
        )

    @property
    def void(self) -> int:
        """How many attempts were void; they are charged all the same."""
        return self._standing.void + self._void

    def with_clip(self, clip: float) -> "StandingFederation":
        """Return the federation in a round with this clip."""
        self.clip = clip
        return self

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the silos that are there: one that was lost stays away until the next round."""
        if attempt.number == 0:
            self._silos.lost.clear()
        if self.fidelity is Fidelity.PROTOCOL:
            return self._standing.members(attempt)
        left = tuple(client for client in self._silos.roster.clients if client not in self._silos.lost)
        if len(left) < self.plan.quorum:
            raise TooFewClients(f"at least {self.plan.quorum} silos must be there, got {len(left)}", left)
        return left

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> StandingStep:
        """Return the step of an attempt."""
        if self.fidelity is Fidelity.PROTOCOL:
            return self._standing.step(attempt, cohort)
        members = np.isin(np.array(self._epoch.cohort), cohort)
        return StandingStep(self._epoch, attempt.round, attempt.number, members)

    def collect(self, session: StandingStep, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather the members' vectors; raises VoidStep if one is missing."""
        encoding = _Encoding(self.backend, self._encoder(session, participations), model)
        if self.fidelity is Fidelity.PROTOCOL:
            return self._silos.collect(self._standing, session, encoding, with_clip(b"", self.clip))
        total, arrived = encoding.total(self._silos.left(session.cohort, "masked", session.digest))
        if missing := set(session.cohort) - arrived:
            self._void += 1
            self._silos.lost |= missing
            raise VoidStep(
                f"all {len(session.cohort)} members of a step must answer, got {len(arrived)}",
                tuple(sorted(arrived)),
            )
        return StandingSum(session.cohort, total)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return nothing: no message travels."""
        return ()

    def _encoder(self, step: StandingStep, participations: Mapping[int, int]) -> Encoder:
        return Encoder(
            plan=self.plan,
            session=step,
            group=None,
            entropy=self.entropy,
            participations=participations,
            clip=self.clip,
        )


@dataclass(frozen=True, slots=True)
class _Encoding:
    """The vectors of one step, made by the backend: the only encoder there is."""

    backend: Backend
    encoder: Encoder
    model: FloatVector = field(repr=False)

    def total(self, clients: tuple[int, ...]) -> tuple[RingVector, set[int]]:
        """Return the sum of some silos' vectors, and whose are in it."""
        session, arrived = self.encoder.session, set[int]()
        total = np.zeros(session.dimension, np.uint32)
        seed = shuffle_seed(session.run, session.round)
        for done, vector in self.backend.encode(self.encoder, self.model, clients, seed):
            session.ring.add_into(total, vector)
            arrived.update(done)
        return total, arrived


@dataclass(slots=True)
class _Silo:
    """One silo's memory."""

    store: StandingMemory
    account: StandingSteps
    epoch: Epoch | None = None
    advertised: StandingAdvertised | None = None
    begun: int = 0


class _Silos:
    """All silos in this process, enrolled by nobody real, and who is lost before which exchange."""

    def __init__(self, plan: Plan, dropouts: Dropouts, entropy: Entropy) -> None:
        self._plan = plan
        self._dropouts = dropouts
        self._entropy = entropy
        self._pairs = crypto.PairSecrets()
        clients = range(plan.cohort_size)
        self._memory = {
            client: _Silo(StandingMemory(), StandingSteps(plan.max_participations)) for client in clients
        }
        self._secrets = {client: entropy.child("signing key", client).key for client in clients}
        keys = {client: crypto.signing_public(secret) for client, secret in self._secrets.items()}
        authority = crypto.signing_public(entropy.child("authority").key)
        nonce = entropy.child("nonce")
        self.roster: Roster = issue_roster(keys, authority, serial=1, issued=_ISSUED, entropy=nonce)
        self.encoding: _Encoding | None = None
        self.lost: set[int] = set()  # in this round

    def left(self, clients: tuple[int, ...], exchange: str, bound: bytes) -> tuple[int, ...]:
        """Return who is not lost before an exchange."""
        return self._dropouts.left(clients, exchange, self._entropy.child("fate", bound))

    def collect(self, standing: StandingRun, step: StandingStep, encoding: _Encoding, task: bytes) -> StandingSum:
        """Run a step in which these vectors are asked for."""
        self.encoding = encoding
        try:
            return standing.collect(step, encoding.model.tobytes(), task)
        finally:
            self.encoding = None

    def presence(self, asked: Collection[int], _epoch: bytes) -> Mapping[int, bool]:
        """Return who is there, and whether with its keys."""
        there = [client for client in asked if client not in self.lost]
        return {client: self._memory[client].store.state is not None for client in there}

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its silo and yield the answers of those who are not lost."""
        clients = tuple(requests)
        first = requests[clients[0]]
        name = _EXCHANGES[MessageKind(kind_of(first))]
        bound = digest("exchange", first) if self.encoding is None else self.encoding.encoder.session.digest
        left = self.left(clients, name, bound)
        for client in clients:
            answer = self._answer(client, name, requests[client]) if client in left else None
            if answer is not None:
                yield client, answer
            elif name == "masked":
                self.lost.add(client)

    def _answer(self, client: int, name: str, request: bytes) -> bytes | None:
        silo = self._memory[client]
        if name == "advertise":
            silo.epoch, silo.begun = invited_epoch(self._plan, request, self.roster), silo.begun + 1
            entropy = self._entropy.child("client", client)
            answer, silo.advertised = self._silo(client, silo.epoch).advertise(request, entropy)
            silo.store.state = None
            return answer
        if silo.epoch is None:
            return None
        if name == "share":
            advertised, silo.advertised = silo.advertised, None
            if advertised is None:
                return None
            ready = self._silo(client, silo.epoch).agree(advertised, request, self._pairs.agree)
            silo.store.state = ready.state
            return ready.answer
        vector = self._vector(client)
        if vector is None:
            return None

        def contribute(step: StandingStep, _task: bytes, _model: bytes) -> RingVector:
            silo.account.charge(step)
            return vector

        with suppress(PeerError):  # a silo without keys, or at its cap, refuses
            return answer_step(silo.epoch, client, request, store=silo.store, contribute=contribute)
        return None

    def _vector(self, client: int) -> RingVector | None:
        """Return a silo's vector, made before the protocol asks for it; None if it was lost."""
        if self.encoding is None:
            return None
        total, arrived = self.encoding.total((client,))
        return total if arrived else None

    def _silo(self, client: int, epoch: Epoch) -> StandingSilo:
        count, head = self._memory[client].begun, digest("simulated log", client, self._memory[client].begun)
        position = sign_position(self._secrets[client], self.roster.authority, client, count, head)
        return StandingSilo(
            epoch=epoch,
            client=client,
            enrolment=Enrolment(self._secrets[client], self.roster),
            history=History(position, lambda *_: True),
            charged=self._memory[client].account.charged,
        )
