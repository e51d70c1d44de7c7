"""Standing keys: what silos agree on once an epoch, every key of a step that follows from it, and the messages.

A fixed set of enrolled silos agrees on pairwise keys once. Each step (one attempt at one round) is then one exchange:
the request brings the model and the set of members, the answer is the vector under the pairwise masks of that set and
step. No key is ever opened: if a member is missing, nothing of the step can be opened, and the next one has fresh
masks. Keys move on with every step by a one-way function, so a key seized later opens no earlier answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import derive, digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg import crypto, roster, wire
from d2pfed.secagg.checks import check_named, check_rules
from d2pfed.secagg.roster import Position
from d2pfed.secagg.wire import BINDING_BYTES, COUNTER_LIMIT, ClientId, MessageKind, Reader, Subset

FEWEST_SILOS, MOST_SILOS = 3, 128
LEAST_QUORUM = 3
MOST_ATTEMPTS = 8
MOST_STEPS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A stretch of a run with the same standing keys.

    Attributes:
        epoch: number of the epoch in its run.
        first: first step of the epoch; a step is round * attempts + attempt.
        cohort: the silos that are invited, strictly increasing.
        quorum: fewest members of a step: the noise is enough for these.
        colluders: how many of the silos may help the server.
        rounds: of the run.
        attempts: how often a round may be tried.
        digest: E, what all messages of the epoch are bound to.
    """

    plan_digest: bytes
    run: str
    epoch: int
    first: int
    roster_digest: bytes
    cohort: tuple[ClientId, ...]
    dimension: int
    bits: int
    quorum: int
    colluders: int
    rounds: int
    attempts: int
    ring: Ring = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_named(self.run, self.plan_digest, self.roster_digest, self.cohort, self.dimension)
        silos, steps = len(self.cohort), self.rounds * self.attempts
        check_rules(
            (self.roster_digest != roster.NO_ROSTER, "standing keys are for enrolled silos, got no roster"),
            (
                FEWEST_SILOS <= silos <= MOST_SILOS,
                f"standing keys are for {FEWEST_SILOS} to {MOST_SILOS} silos, got {silos}",
            ),
            (0 <= self.epoch < COUNTER_LIMIT, f"epoch must be in [0, {COUNTER_LIMIT}), got {self.epoch}"),
        )
        require_carried(silos, self.quorum, self.colluders, self.rounds, self.attempts)
        if not 0 <= self.first < steps:
            raise ConfigError(f"an epoch's first step must be in [0, {steps}), got {self.first}")
        name = (self.plan_digest, self.run, self.epoch, self.first, self.roster_digest, wire.pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.quorum, self.colluders, self.rounds, self.attempts)
        object.__setattr__(self, "ring", Ring(self.bits))
        object.__setattr__(self, "digest", digest("d2pfed standing epoch", *name, *limits))

    def step(self, number: int, attempt: int) -> int:
        """Return the step of an attempt at a round."""
        return number * self.attempts + attempt

    rank, names = wire.rank_of, wire.names_of


def require_carried(silos: int, quorum: int, colluders: int, rounds: int, attempts: int) -> None:
    """Refuse a quorum that leaves no second honest member to hide behind, and a run with too many steps for its keys.

    Two quorums need not overlap, as they must in the main protocol: no share is ever opened here.
    """
    least, steps = max(LEAST_QUORUM, colluders + 2), rounds * attempts
    named = f"with {colluders} colluders, got {quorum}"
    check_rules(
        (colluders >= 0, f"colluders must be at least 0, got {colluders}"),
        (least <= quorum <= silos, f"standing keys need a quorum in [{least}, {silos}] {named}"),
        (
            1 <= attempts <= MOST_ATTEMPTS,
            f"standing keys allow 1 to {MOST_ATTEMPTS} attempts, got {attempts}",
        ),
        (rounds >= 1 and steps <= MOST_STEPS, f"standing keys allow at most {MOST_STEPS} steps, got {steps}"),
    )


@dataclass(frozen=True, slots=True)
class Advert:
    """A silo's public key for one epoch and where its log stands, signed."""

    public: bytes
    position: Position
    signature: bytes = b""

    def pack(self) -> bytes:
        """Return the advert's bytes."""
        return self.public + self.position.pack() + self.signature

    def statement(self, epoch: Epoch, client: ClientId) -> bytes:
        """Return what the silo signs."""
        return digest("d2pfed standing advert", epoch.digest, client, self.public, self.position.pack())


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Who joined an epoch, and the digest K of all of their adverts."""

    epoch: Epoch
    joined: Subset
    digest: bytes

    @staticmethod
    def of(epoch: Epoch, adverts: Mapping[int, Advert]) -> "Keys":
        """Return the keys that follow from the adverts of all that joined, by rank."""
        joined = wire.subset_of(len(epoch.cohort), adverts)
        packed = [adverts[rank].pack() for rank in sorted(adverts)]
        return Keys(epoch, joined, digest("d2pfed standing keys", epoch.digest, wire.pack_subset(joined), *packed))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One attempt at one round, with its members: what a client's vector is encoded for.

    Attributes:
        number: t, the number of the step in its run.
        cohort: the members, increasing. This and the fields after it are those of a session.
    """

    epoch: Epoch
    round: int
    attempt: int
    members: Subset
    number: int = field(init=False)
    cohort: tuple[ClientId, ...] = field(init=False)
    plan_digest: bytes = field(init=False, repr=False)
    run: str = field(init=False)
    ring: Ring = field(init=False, repr=False)
    dimension: int = field(init=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.epoch.step(self.round, self.attempt))
        object.__setattr__(self, "cohort", self.epoch.names(wire.ranks_of(self.members)))
        for name in ("plan_digest", "run", "ring", "dimension"):
            object.__setattr__(self, name, getattr(self.epoch, name))
        numbers = self.round, self.attempt, wire.pack_subset(self.members)
        object.__setattr__(self, "digest", digest("d2pfed standing step", self.epoch.digest, *numbers))

    rank = wire.rank_of


def pair_key(shared: bytes, keys_digest: bytes, pair: tuple[ClientId, ClientId]) -> bytes:
    """Return the key of a pair at the first step of an epoch."""
    return crypto.hkdf(shared, "d2pfed standing pair", keys_digest, min(pair), max(pair))


def next_pair_key(key: bytes) -> bytes:
    """Return a pair's key at the next step; the way back is closed.

    Guarantee: the key of a step says nothing about keys and masks of earlier steps.
    Checked: test_standing_malicious.py (a state that is seized later).
    """
    return derive(key, "d2pfed standing next")


def context(keys_digest: bytes, step: Step, model: bytes, task: bytes) -> bytes:
    """Return C, the hash of all that members must have seen alike before they mask.

    Guarantee: masks of two clients cancel only if both saw these adverts, this round and attempt, these members, this
    model and this task. Checked: test_standing_malicious.py (each of them different for the victim).
    """
    numbers = step.round, step.attempt, wire.pack_subset(step.members)
    trained = digest("d2pfed model", model), digest("d2pfed task", task)
    return digest("d2pfed standing context", keys_digest, *numbers, *trained)


def mask_key(key: bytes, step_context: bytes, pair: tuple[ClientId, ClientId]) -> bytes:
    """Return the key of the mask that the lower client of a pair adds and the higher one subtracts."""
    return derive(key, "d2pfed standing mask", step_context, min(pair), max(pair))


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The first request of an epoch, read before there is an epoch.

    Attributes:
        binding: E, which the receiver recomputes from its own plan and roster.
        serial: of the roster.
        silos: who is invited.
        remembered: the latest position of the receiver that the server or a peer has met, if any.
    """

    client: ClientId
    binding: bytes
    run: str
    epoch: int
    first: int
    serial: int
    silos: tuple[ClientId, ...]
    remembered: Position | None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The request for one step's vector."""

    step: Step
    task: bytes
    model: bytes = field(repr=False)


def encode_invitation(epoch: Epoch, rank: int, serial: int, remembered: Position | None) -> bytes:
    """Invite a silo to an epoch."""
    numbers = wire.pack_integer(epoch.epoch, 4), wire.pack_integer(epoch.first, 4), wire.pack_integer(serial, 8)
    fields = wire.pack_text(epoch.run), *numbers, wire.pack_ids(epoch.cohort), roster.pack_remembered(remembered)
    return wire.message(epoch, MessageKind.STANDING_INVITATION, rank, *fields)


def decode_invitation(data: bytes) -> Invitation:
    """Read an invitation; the receiver builds the epoch from its own plan and roster and checks the binding."""
    reader, client, binding = wire.unframe_unbound(data, MessageKind.STANDING_INVITATION)
    with reader:
        invited = Invitation(
            client=client,
            binding=binding,
            run=reader.text(),
            epoch=reader.integer(4),
            first=reader.integer(4),
            serial=reader.integer(8),
            silos=reader.ids(),
            remembered=roster.read_remembered(reader),
        )
    if not invited.run or client not in invited.silos:
        raise PeerError("an invitation must name a run and invite one of its silos")
    return invited


def read_advert(reader: Reader) -> Advert:
    """Read the next advert of a body."""
    public, position = reader.take(crypto.PUBLIC_BYTES), roster.unpack_position(reader.take(roster.POSITION_BYTES))
    return Advert(public, position, reader.take(crypto.SIGNATURE_BYTES))


def encode_adverts(epoch: Epoch, rank: int, adverts: Mapping[int, Advert]) -> bytes:
    """Tell a silo who joined, with all adverts by rank."""
    packed = wire.pack_ranked(len(epoch.cohort), {other: advert.pack() for other, advert in adverts.items()})
    return wire.message(epoch, MessageKind.STANDING_ADVERTS, rank, packed)


def decode_adverts(epoch: Epoch, rank: int, data: bytes) -> dict[int, Advert]:
    """Read the adverts of all that joined, by rank."""
    with wire.opened(epoch, MessageKind.STANDING_ADVERTS, rank, data) as reader:
        return reader.ranked(len(epoch.cohort), lambda: read_advert(reader))


def encode_claims(epoch: Epoch, rank: int, claims: Mapping[int, Position]) -> bytes:
    """Say that a silo is not ready: it has met these others, by rank, at positions that are not earlier."""
    return roster.encode_claims(epoch, MessageKind.STANDING_READY, rank, BINDING_BYTES, claims)


def decode_ready(epoch: Epoch, rank: int, data: bytes) -> bytes | dict[int, Position]:
    """Read a silo's digest K, or, where it is zero, the positions that keep the silo from being ready."""
    return roster.decode_claims(epoch, MessageKind.STANDING_READY, rank, BINDING_BYTES, data)


def encode_request(epoch: Epoch, rank: int, request: Request) -> bytes:
    """Ask a member for its vector; the same body for all members."""
    step, task_size = request.step, wire.pack_integer(len(request.task), 4)
    numbers = wire.pack_integer(step.round, 4), wire.pack_integer(step.attempt, 4), wire.pack_subset(step.members)
    return wire.message(
        epoch, MessageKind.STANDING_REQUEST, rank, *numbers, task_size, request.task, request.model
    )


def decode_request(epoch: Epoch, rank: int, data: bytes) -> Request:
    """Read a request for a step's vector."""
    reader = wire.opened(epoch, MessageKind.STANDING_REQUEST, rank, data)
    number, attempt, members = reader.integer(4), reader.integer(4), reader.subset(len(epoch.cohort))
    return Request(Step(epoch, number, attempt, members), reader.take(reader.integer(4)), reader.rest())
