"""The client half of a round: from an update, or a silo's records, to the ring vector that is masked and sent.

What a record adds to the sum depends on that record, the model and the attempt alone. Neither the batch nor its size
leaves the silo: the sum is divided by a constant of the plan, and an empty batch sends noise like any other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import RATE_STEPS, BatchSampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.fields import check_arguments, check_fields
from d2pfed.noise.clipping import split_clip
from d2pfed.noise.codec import require_update
from d2pfed.noise.mechanisms import Centered, Share
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.plan import Plan
from d2pfed.round.session import AttemptBinding, AttemptSession, rotation_seed
from d2pfed.secagg import Client, Enrolment, History, Position, lattice
from d2pfed.secagg.crypto import Agree
from d2pfed.secagg.crypto import agree as compute_secret
from d2pfed.secagg.wire import MessageKind, kind_of


@runtime_checkable
class Units(Protocol):
    """What a silo holds, as an attempt sees it: units, each a record or all records of one patient."""

    @property
    def count(self) -> int:
        """How many units there are; it stays in the silo."""

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield rows with the vectors of the chosen units, one for each, in their order.

        A vector depends on its unit and the model alone, to the bit; that of a unit that fails is not finite, or zero.
        What a user has made is not relied on for that: `deploy.client` asks for its units one at a time.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The units that a silo's coins have drawn in one attempt, and the exact sum of their clipped vectors."""

    plan: Plan
    seed: bytes  # of the attempt's rotation, which is public
    entropy: Entropy = field(repr=False)  # of this attempt alone
    chosen: IntVector = field(repr=False)
    total: IntVector = field(repr=False)

    @staticmethod
    def draw(plan: Plan, seed: bytes, count: int, entropy: Entropy) -> "Batch":
        """Toss a coin for each of `count` units."""
        if plan.batches is None:
            raise ConfigError(f"a batch of records is for the unit record, the plan has the unit {plan.unit}")
        chosen = toss(plan.batches, count, entropy.child("coins").stream())
        return Batch(plan, seed, entropy, chosen, np.zeros(plan.codec.length, np.int64))

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Add the vectors of some of the chosen units, each clipped, rotated and rounded by itself.

        Guarantee: what each adds is within the radius, in exact integers; one that is not finite adds nothing.
        Checked: test_records.py::test_removing_a_record_changes_the_centre_by_exactly_its_integers.
        """
        Batches.of([self]).add(np.zeros(len(vectors), np.int64), vectors)

    def encode(self) -> RingVector:
        """Return the ring vector that is masked and sent: one draw of the silo's noise around the sum."""
        mechanism, codec = self.plan.mechanism, self.plan.codec
        if not isinstance(mechanism, Centered):
            raise ConfigError(f"the unit record takes the mechanism centered, got {type(mechanism).__name__}")
        return self.plan.ring.wrap(mechanism.around(self.total, codec.fraction_bits, self.entropy))


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of silos in one process, whose vectors are added together: in one attempt of one plan."""

    each: tuple[Batch, ...]
    totals: NDArray[np.int64] = field(repr=False)  # of each batch, in the batch as well
    dithers: NDArray[np.uint16] = field(repr=False)  # each from its own silo's entropy

    @staticmethod
    def of(batches: Sequence[Batch]) -> "Batches":
        """Return these batches, with their totals side by side."""
        codec = batches[0].plan.codec
        if len({batch.seed for batch in batches}) > 1:
            raise ConfigError("batches that are added together must be of one attempt, got several seeds")
        totals = batches[0].total[None] if len(batches) == 1 else np.stack([batch.total for batch in batches])
        own = tuple(replace(each, total=total) for each, total in zip(batches, totals, strict=True))
        drawn = np.stack([codec.dither(batch.entropy.child("dither").stream()) for batch in batches])
        return Batches(own, totals, drawn)

    def add(self, owners: IntVector, vectors: NDArray[np.float32]) -> None:
        """Add vectors, each to the batch with its owner's number, as `Batch.add` does.

        Where the plan counts failures, a row that is not finite stands for the radius in a coordinate of its own.
        Guarantee: whether a record has failed is told by its own row. Checked: test_failures.py.
        """
        first = self.each[0]
        if first.plan.counts_failures:
            failed = np.asarray(~np.isfinite(vectors).all(axis=1))
            told = failed.astype(np.float32) * np.float32(first.plan.codec.clip)
            vectors = np.column_stack([np.where(failed[:, None], np.float32(0), vectors), told])
        first.plan.codec.add_prepared(self.totals, owners, vectors, first.seed, self.dithers)


def toss(batches: BatchSampling, count: int, stream: Stream) -> IntVector:
    """Return the units whose coin came up: exactly the rate, independently of each other."""
    words = np.empty(count, np.uint32)
    stream.fill(words)
    below = batches.rate.numerator * RATE_STEPS // batches.rate.denominator  # a whole number, at most 2^32
    return np.flatnonzero(words < below).astype(np.int64, copy=False)


Update = NDArray[np.floating] | Units  # a client's vector, or what a silo makes of its records
Train = Callable[[bytes, bytes], Update]  # from the bytes of task and model to a client's update


@dataclass(slots=True, kw_only=True)
class LatticeClient:
    """A client and, if it is in the committee, what it keeps between exchanges.

    Attributes:
        own: the client's half of the protocol.
        contribute: makes the vector, after its charge.
        entropy: of this attempt; a client that may be asked twice brings fresh entropy of the system each time.
        model: what the transport has brought beside the request.
        record: writes down which opening is signed.
        member: what a member keeps: to be stored before its answer leaves.
        met: where survivors stood, to be remembered before the answer leaves.
    """

    own: lattice.Participant
    contribute: lattice.Contribute
    entropy: Entropy
    model: bytes = field(default=b"", repr=False)
    record: lattice.Record = lambda _statement: None  # in this process, what is signed is in memory
    member: lattice.Member | None = None
    met: Mapping[int, Position] = field(default_factory=dict)
    has_spoken: bool = False

    def receive(self, request: bytes) -> bytes:
        """Return the answer to a request of any exchange."""
        kind = kind_of(request)
        if kind == MessageKind.INVITATION:
            if self.member is not None:
                raise PeerError(f"client {self.own.client} has answered the invitation to this attempt")
            answer, self.member = self.own.convene(request, self.entropy)
            return answer
        if kind == MessageKind.LATTICE_REQUEST:
            body = lattice.decode_request(request, self.own.depth)
            if self.has_spoken:
                raise PeerError(f"client {self.own.client} has sent its one message of this attempt")
            self.has_spoken = True
            # Of this request alone: two requests must never get the same masks, whatever becomes of the flag.
            fresh = self.entropy.child("request", request)
            return self.own.contribute(body, self.model, self.contribute, fresh)
        if self.member is None:
            raise PeerError(f"client {self.own.client} has no part in the committee of this attempt")
        if kind == MessageKind.LATTICE_ADVERTS:
            return self.own.vouch(request)
        if kind == MessageKind.LATTICE_TRACE_REQUEST:
            return self.own.trace(self.member, request)
        if kind == MessageKind.LATTICE_CERTIFICATE:
            said = self.own.open(self.member, request)
        else:
            said = self.own.agree(self.member, request, self.record)
        self.member, self.met = said.member, said.met
        return said.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """The client half: what one client brings to an attempt.

    Attributes:
        plan: what client and server have agreed on.
        client: the client's identity.
        entropy: the root of its randomness in this attempt.
        participations: how many contributions it has made before.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> Participant(plan=plan, client=7, entropy=Entropy.system(), participations=0).client
        7
    """

    plan: Plan
    client: int
    entropy: Entropy
    participations: int

    def __post_init__(self) -> None:
        check_fields(self)

    def encode(
        self,
        session: AttemptBinding,
        update: Update,
        group: bytes | None,
        clip: float | None = None,
        *,
        has_failed: bool = False,
    ) -> RingVector:
        """Turn an update into the ring vector that is masked and sent: the only encoder there is.

        At its cap a client sends zero and its noise: staying away would tell that it was chosen, and would bias the
        sampling that the guarantee rests on. `clip` is that of the round, where the plan's clip adapts. Where the unit
        is a record, the update is the silo's records, of which a batch is drawn here. A client that `has_failed` sends
        zero, and where the plan counts failures, the radius in a coordinate of its own.

        Guarantee: whatever fails, the vector before noise is within the plan's radius; at its cap a client does not
        tell that it has failed. Proof: theory.md#failures. Checked: test_failures.py.
        """
        check_arguments(Participant.encode, locals())
        require_clip(self.plan, clip)
        if isinstance(update, Units):
            batch = self.batch(session, update.count)
            for gradients in update.gradients(batch.chosen):
                batch.add(gradients)
            return batch.encode()
        if self.plan.batches is not None:
            raise ConfigError("a plan with the unit record takes a silo's records, got a single vector")
        is_silent = self.participations >= self.plan.max_participations
        own = np.zeros_like(update) if is_silent or has_failed else update
        weighting, adaptive = self.plan.weighting, self.plan.adaptive_clip
        require_update(own, self.plan.dimension + (weighting is not None))  # its weight is the last number
        vector, fresh = own, self._fresh(session)
        if weighting is not None:
            vector = weighting.vector(own)
        elif adaptive is not None and clip is not None:
            vector = adaptive.vector(own, clip)
        if self.plan.counts_failures:
            vector = np.append(vector, np.float32(self.plan.codec.clip if has_failed and not is_silent else 0.0))
        # A bit or a weight may be small beside the grid, so its vector is dithered.
        extended = adaptive is not None or weighting is not None
        dither = self.plan.codec.dither(fresh.child("dither").stream()) if extended else None
        share = None
        if group is not None:
            secret = Entropy(group, self.entropy.is_replayed)
            share = Share(session.rank(self.client), len(session.cohort), secret)
        centers = self.plan.codec.prepare(vector, rotation_seed(session), dither)
        return self.plan.ring.wrap(self.plan.mechanism.encode(centers, share, fresh))

    def batch(self, session: AttemptBinding, count: int) -> Batch:
        """Return this attempt's batch of a silo that holds this many units, drawn by fresh coins."""
        fresh = self._fresh(session)
        is_silent = self.participations >= self.plan.max_participations
        return Batch.draw(self.plan, rotation_seed(session), 0 if is_silent else count, fresh)

    def _fresh(self, session: AttemptBinding) -> Entropy:
        """Return the randomness of this attempt alone."""
        return self.entropy.child("contribution", session.digest, self.client)

    def join(
        self,
        session: AttemptSession,
        train: Train,
        enrolment: Enrolment | None = None,
        history: History | None = None,
        agree: Agree = compute_secret,
        *,
        model: bytes = b"",
    ) -> Client | LatticeClient:
        """Return the machine that answers the server's requests in this attempt; `agree` is for simulations.

        `model` is what a transport brings beside requests of the lattice protocol.
        """
        check_arguments(Participant.join, locals())

        def contribute(task: bytes, model: bytes, group: bytes | None = None) -> RingVector:
            clip, rest = split_clip(self.plan.adaptive_clip, task)
            return self.encode(session, train(rest, model), group, clip)

        if isinstance(session, lattice.Session):
            return LatticeClient(
                own=lattice.Participant(session, self.client, enrolment, history),
                contribute=lambda task, model: (contribute(task, model), None),
                entropy=self.entropy.child("lattice", session.digest, self.client),
                model=model,
            )
        return Client(session, self.client, contribute, self.entropy, enrolment, history, agree)


def require_clip(plan: Plan, clip: float | None) -> None:
    """Refuse a round without its clip where the plan's adapts, one out of its limits, and one where it is fixed."""
    if plan.adaptive_clip is None:
        if clip is not None:
            raise ConfigError(f"the plan's clip is fixed, so a round has none of its own, got {clip}")
    elif clip is None:
        raise PeerError("the plan's clip adapts (clip=auto), and this round came without its clip")
    else:
        plan.adaptive_clip.require(clip)


def require_fixed_clip(plan: Plan, what: str) -> None:
    """Refuse a plan with an adaptive clip where no clip travels with the model."""
    if plan.adaptive_clip is not None:
        raise ConfigError(
            f"{what} takes a fixed clip only, and the plan's adapts (clip=auto): give it as a number"
        )
