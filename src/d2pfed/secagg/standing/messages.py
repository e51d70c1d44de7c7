"""The messages of standing keys, kinds 11 to 16: what each carries, as bytes and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from d2pfed.errors import PeerError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.pairwise.messages import CONTEXT_BYTES
from d2pfed.secagg.position import NO_POSITION, POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.standing.epoch import Epoch, StandingAdvert, StandingStep
from d2pfed.secagg.wire import (
    BINDING_BYTES,
    HEADER_BYTES,
    ClientId,
    MessageKind,
    Reader,
    frame,
    pack_ids,
    pack_integer,
    pack_subset,
    pack_text,
    subset_of,
    unframe,
    unframe_unbound,
)

_NOT_READY = bytes(BINDING_BYTES)  # in the place of K


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingInvitation:
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
class StandingRequest:
    """The request for one step's vector."""

    step: StandingStep
    task: bytes
    model: bytes = field(repr=False)


def encode_standing_invitation(epoch: Epoch, rank: int, serial: int, remembered: Position | None) -> bytes:
    """Invite a silo to an epoch."""
    return _frame(
        epoch,
        MessageKind.STANDING_INVITATION,
        rank,
        pack_text(epoch.run),
        pack_integer(epoch.epoch, 4),
        pack_integer(epoch.first, 4),
        pack_integer(serial, 8),
        pack_ids(epoch.cohort),
        NO_POSITION if remembered is None else remembered.pack(),
    )


def decode_standing_invitation(data: bytes) -> StandingInvitation:
    """Read an invitation; the receiver builds the epoch from its own plan and roster and checks the binding."""
    reader, client, binding = unframe_unbound(data, MessageKind.STANDING_INVITATION)
    run = reader.text()
    number, first, serial = reader.integer(4), reader.integer(4), reader.integer(8)
    silos, packed = reader.ids(), reader.take(POSITION_BYTES)
    reader.end()
    if not run or client not in silos:
        raise PeerError("an invitation must name a run and invite one of its silos")
    return StandingInvitation(
        client=client,
        binding=binding,
        run=run,
        epoch=number,
        first=first,
        serial=serial,
        silos=silos,
        remembered=None if packed == NO_POSITION else unpack_position(packed),
    )


def encode_standing_advert(epoch: Epoch, rank: int, advert: StandingAdvert) -> bytes:
    """Advertise a silo's key."""
    return _frame(epoch, MessageKind.STANDING_ADVERT, rank, advert.pack())


def decode_standing_advert(epoch: Epoch, rank: int, data: bytes) -> StandingAdvert:
    """Read a silo's advert."""
    reader = _unframe(epoch, MessageKind.STANDING_ADVERT, rank, data)
    advert = _read_advert(reader)
    reader.end()
    return advert


def encode_standing_adverts(epoch: Epoch, rank: int, adverts: Mapping[int, StandingAdvert]) -> bytes:
    """Tell a silo who joined, with all adverts by rank."""
    joined = subset_of(len(epoch.cohort), adverts)
    packed = (adverts[other].pack() for other in sorted(adverts))
    return _frame(epoch, MessageKind.STANDING_ADVERTS, rank, pack_subset(joined), *packed)


def decode_standing_adverts(epoch: Epoch, rank: int, data: bytes) -> dict[int, StandingAdvert]:
    """Read the adverts of all that joined, by rank."""
    reader = _unframe(epoch, MessageKind.STANDING_ADVERTS, rank, data)
    joined = reader.subset(len(epoch.cohort))
    adverts = {int(other): _read_advert(reader) for other in joined.nonzero()[0]}
    reader.end()
    return adverts


def encode_standing_ready(epoch: Epoch, rank: int, keys_digest: bytes) -> bytes:
    """Say that a silo has derived its keys, from these adverts."""
    return _frame(epoch, MessageKind.STANDING_READY, rank, keys_digest)


def encode_standing_claims(epoch: Epoch, rank: int, claims: Mapping[int, Position]) -> bytes:
    """Say that a silo is not ready: it has met these others, by rank, at positions that are not earlier."""
    claimed = subset_of(len(epoch.cohort), claims)
    packed = (claims[other].pack() for other in sorted(claims))
    return _frame(epoch, MessageKind.STANDING_READY, rank, _NOT_READY, pack_subset(claimed), *packed)


def decode_standing_ready(epoch: Epoch, rank: int, data: bytes) -> bytes | dict[int, Position]:
    """Read a silo's digest K, or, where it is zero, the positions that keep the silo from being ready."""
    reader = _unframe(epoch, MessageKind.STANDING_READY, rank, data)
    keys_digest = reader.take(BINDING_BYTES)
    if keys_digest != _NOT_READY:
        reader.end()
        return keys_digest
    claimed = reader.subset(len(epoch.cohort))
    claims = {int(other): unpack_position(reader.take(POSITION_BYTES)) for other in claimed.nonzero()[0]}
    reader.end()
    if not claims:
        raise PeerError("a silo that is not ready must say whom it has met before")
    return claims


def encode_standing_request(epoch: Epoch, rank: int, request: StandingRequest) -> bytes:
    """Ask a member for its vector; the same body for all members."""
    step = request.step
    return _frame(
        epoch,
        MessageKind.STANDING_REQUEST,
        rank,
        pack_integer(step.round, 4),
        pack_integer(step.attempt, 4),
        pack_subset(step.members),
        pack_integer(len(request.task), 4),
        request.task,
        request.model,
    )


def decode_standing_request(epoch: Epoch, rank: int, data: bytes) -> StandingRequest:
    """Read a request for a step's vector."""
    reader = _unframe(epoch, MessageKind.STANDING_REQUEST, rank, data)
    number, attempt, members = reader.integer(4), reader.integer(4), reader.subset(len(epoch.cohort))
    task = reader.take(reader.integer(4))
    return StandingRequest(StandingStep(epoch, number, attempt, members), task, reader.rest())


def encode_standing_masked(epoch: Epoch, rank: int, context: bytes, vector: RingVector) -> bytes:
    """Send a masked vector at `bits` bits per coordinate, and the context of its masks."""
    return _frame(epoch, MessageKind.STANDING_MASKED, rank, context, epoch.ring.pack(vector))


def decode_standing_masked(epoch: Epoch, rank: int, context: bytes, data: bytes) -> RingVector:
    """Read a masked vector; one masked in another context would spoil the sum."""
    reader = _unframe(epoch, MessageKind.STANDING_MASKED, rank, data)
    if reader.take(CONTEXT_BYTES) != context:
        raise PeerError("a vector was masked for another model, task, step or set of members")
    packed = reader.take(epoch.ring.packed_bytes(epoch.dimension))
    reader.end()
    return epoch.ring.unpack(packed, epoch.dimension)


def standing_upload_bytes(epoch: Epoch) -> int:
    """Return what one silo sends in a step."""
    return HEADER_BYTES + CONTEXT_BYTES + epoch.ring.packed_bytes(epoch.dimension)


def _read_advert(reader: Reader) -> StandingAdvert:
    public, position = reader.take(PUBLIC_BYTES), unpack_position(reader.take(POSITION_BYTES))
    return StandingAdvert(public, position, reader.take(SIGNATURE_BYTES))


def _frame(epoch: Epoch, kind: MessageKind, rank: int, *fields: bytes) -> bytes:
    return frame(kind, epoch.digest, epoch.cohort[rank], *fields)


def _unframe(epoch: Epoch, kind: MessageKind, rank: int, data: bytes) -> Reader:
    return unframe(data, kind, epoch.digest, epoch.cohort[rank])
