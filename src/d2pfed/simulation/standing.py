"""Simulated silos with standing keys: one exchange for each attempt, void and tried again if one is missing."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import PeerError, TooFewClients, VoidStep
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.model_bytes import decode_model, encode_model
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan, require_standing
from d2pfed.round import (
    Attempt,
    Collected,
    Fidelity,
    InProcess,
    OpenSum,
    StandingMemory,
    StandingRun,
    StandingSteps,
    accept_standing_invitation,
    epoch_of,
)
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg import Enrolment, History, Roster, crypto, standing
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.simulation.backend import Backend, Encoder
from d2pfed.simulation.federation import EXCHANGE_OF, Dropouts, encoded_sum, simulated_roster


@dataclass(slots=True, kw_only=True)
class StandingFederation:
    """Silos on this machine's word, all of the plan's population, which are asked in every round."""

    plan: Plan
    run: str
    backend: Backend
    dropouts: Dropouts  # `advertise` and `share` are those of the set-up
    fidelity: Fidelity
    entropy: Entropy  # the root of all silos' randomness
    clip: float | None = None  # of the round, where the plan's adapts
    _roster: Roster = field(init=False, repr=False)
    _silos: dict[int, "_Silo"] = field(init=False, repr=False)
    _standing: StandingRun = field(init=False, repr=False)
    _epoch: standing.Epoch = field(init=False, repr=False)
    _asked: tuple[Encoder, FloatVector] | None = field(init=False, repr=False, default=None)  # for vectors, now
    _lost: set[int] = field(init=False, repr=False, default_factory=set)  # in this round

    def __post_init__(self) -> None:
        require_standing(self.plan, self.plan.sampling.population)
        secrets, self._roster = simulated_roster(self.entropy, self.plan.cohort_size)
        agree = crypto.PairSecrets().agree
        self._silos = {
            client: _Silo(
                federation=self,
                client=client,
                enrolment=Enrolment(secret, self._roster),
                agree=agree,
                account=StandingSteps(self.plan.max_participations),
            )
            for client, secret in secrets.items()
        }
        self._epoch = epoch_of(self.plan, self.run, self._roster, self._roster.clients)
        self._standing = StandingRun(
            plan=self.plan,
            run=self.run,
            roster=self._roster,
            silos=self._roster.clients,
            exchange=InProcess(self._silos.__getitem__, self._left).exchange,
            presence=lambda asked, _epoch: {
                client: self._silos[client].store.state is not None for client in asked if client not in self._lost
            },
        )

    def with_clip(self, clip: float) -> "StandingFederation":
        """Return the federation in a round with this clip."""
        self.clip = clip
        return self

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the silos that are there: one that was lost stays away until the next round."""
        if attempt.number == 0:
            self._lost.clear()
        if self.fidelity is Fidelity.PROTOCOL:
            return self._standing.members(attempt)
        left = tuple(client for client in self._roster.clients if client not in self._lost)
        if len(left) < self.plan.quorum:
            raise TooFewClients(f"at least {self.plan.quorum} silos must be there, got {len(left)}", left)
        return left

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> standing.Step:
        """Return the step of an attempt."""
        if self.fidelity is Fidelity.PROTOCOL:
            return self._standing.step(attempt, cohort)
        members = np.isin(np.array(self._epoch.cohort), cohort)
        return standing.Step(self._epoch, attempt.round, attempt.number, members)

    def collect(self, session: standing.Step, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather the members' vectors; raises VoidStep if one is missing."""
        bits = self.plan.download_bits
        sent = encode_model(model, bits)
        model = decode_model(sent, len(model), bits)  # what silos train from
        encoder = Encoder(
            plan=self.plan,
            session=session,
            group=None,
            entropy=self.entropy,
            participations=participations,
            clip=self.clip,
        )
        if self.fidelity is Fidelity.PROTOCOL:
            self._asked = encoder, model
            try:
                return self._standing.collect(session, sent, with_clip(b"", self.clip))
            except VoidStep as lack:
                self._lost |= set(session.cohort) - set(lack.left)
                raise
            finally:
                self._asked = None
        left = self.dropouts.left(session.cohort, "masked", self.entropy.child("fate", session.digest))
        total, arrived = encoded_sum(self.backend, encoder, model, left)
        if missing := set(session.cohort) - arrived:
            self._lost |= missing
            raise VoidStep(
                f"all {len(session.cohort)} members of a step must answer, got {len(arrived)}",
                tuple(sorted(arrived)),
            )
        return OpenSum(session.cohort, total)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return nothing: no message travels."""
        return ()

    def _left(self, requests: Mapping[int, bytes]) -> tuple[int, ...]:
        """Return who is not lost before an exchange."""
        clients = tuple(requests)
        first = requests[clients[0]]
        bound = digest("exchange", first) if self._asked is None else self._asked[0].session.digest
        name = EXCHANGE_OF[MessageKind(kind_of(first))]
        return self.dropouts.left(clients, name, self.entropy.child("fate", bound))

    def vector(self, client: int) -> RingVector | None:
        """Return a silo's vector, made before the protocol asks for it; None if it was lost."""
        if self._asked is None:
            return None
        total, arrived = encoded_sum(self.backend, *self._asked, (client,))
        return total if arrived else None


@dataclass(slots=True, kw_only=True)
class _Silo:
    """One silo, enrolled by nobody real, and its memory."""

    federation: StandingFederation
    client: int
    enrolment: Enrolment
    agree: crypto.Agree
    account: StandingSteps
    store: StandingMemory = field(default_factory=StandingMemory)
    epoch: standing.Epoch | None = None
    advertised: standing.Advertised | None = None
    begun: int = 0

    def receive(self, request: bytes) -> bytes | None:
        """Answer an invitation, the others' keys, or the request for a vector."""
        name = EXCHANGE_OF[MessageKind(kind_of(request))]
        if name == "advertise":
            self.epoch = accept_standing_invitation(self.federation.plan, request, self.enrolment.roster)
            self.begun += 1
            entropy = self.federation.entropy.child("client", self.client)
            answer, self.advertised = self._standing(self.epoch).advertise(request, entropy)
            self.store.state = None
            return answer
        if self.epoch is None:
            return None
        if name == "share":
            advertised, self.advertised = self.advertised, None
            if advertised is None:
                return None
            ready = self._standing(self.epoch).agree(advertised, request, self.agree)
            self.store.state = ready.state
            return ready.answer
        if (vector := self.federation.vector(self.client)) is None:
            return None

        def contribute(step: standing.Step, _task: bytes, _model: bytes) -> RingVector:
            self.account.charge(step)
            return vector

        with suppress(PeerError):  # a silo without keys, or at its cap, refuses
            return standing.answer_step(self.epoch, self.client, request, store=self.store, contribute=contribute)
        return None

    def _standing(self, epoch: standing.Epoch) -> standing.Client:
        head, roster = digest("simulated log", self.client, self.begun), self.enrolment.roster
        position = sign_position(self.enrolment.secret, roster.authority, self.client, self.begun, head)
        return standing.Client(
            epoch=epoch,
            client=self.client,
            enrolment=self.enrolment,
            history=History(position, lambda *_: True),
            charged=self.account.charged,
        )
