"""Damaged messages of every kind: refused with a PeerError, never accepted, never another exception."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.secagg import Consistency, Delivery, decode_invitation, decode_roster, encode_roster, standing
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.client import decode_phase
from d2pfed.secagg.pairwise.keys import JoinedClients
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, frame, kind_of, message, pack_subset, subset_of
from support.decoding import (
    decode_advert,
    decode_advertisement,
    decode_confirmation,
    decode_masked,
    decode_survivors,
)
from support.federation import MODEL, TASK, Federation, make_session, run_round
from support.rosters import AUTHORITY
from support.standing import SILOS, Silos, make_epoch
from support.vectors_secagg import make_federation

SESSIONS = [
    make_session(5),
    make_session(9, bits=11),
    make_session(5, delivery=Delivery.EVERYONE, quorum=5),
    make_session(5, consistency=Consistency.SIGNED),
    make_federation("drawn").session,
    make_federation("claims").session,
]
FEDERATIONS = {4: partial(make_federation, "drawn"), 5: partial(make_federation, "claims")}


@dataclass(frozen=True)
class Sample:
    """A valid message, how it is read, and where its fixed part ends (a model may have any length)."""

    data: bytes
    decode: object
    fixed_bytes: int

    @property
    def kind(self):
        return kind_of(self.data)


def federation_of(session):
    place = next(place for place, known in enumerate(SESSIONS) if known is session)
    return FEDERATIONS[place]() if place in FEDERATIONS else Federation(session)


def decoders(session, rank, joined, depth):
    everyone = subset_of(len(session.cohort), range(len(session.cohort)))
    context = keys.context(joined, TASK, MODEL, everyone)
    if session.consistency is Consistency.ASSUMED:
        last = partial(decode_survivors, session, MessageKind.UNMASK_REQUEST, rank)
    else:
        last = partial(messages.decode_signatures, session, rank)
    return {
        MessageKind.INVITATION: partial(decode_invitation, depth=depth),
        MessageKind.KEY_ADVERTISEMENT: partial(decode_advertisement, session, rank),
        MessageKind.KEY_ADVERTISEMENTS: partial(messages.decode_advertisements, session, rank),
        MessageKind.ENCRYPTED_SHARES: partial(messages.decode_encrypted_shares, joined, rank),
        MessageKind.MASK_REQUEST: partial(messages.decode_mask_request, joined, rank),
        MessageKind.MASKED_VECTOR: partial(messages.decode_masked_vector, session, rank, context),
        MessageKind.SURVIVORS: partial(decode_survivors, session, MessageKind.SURVIVORS, rank),
        MessageKind.SURVIVORS_SIGNATURE: partial(decode_confirmation, session, rank),
        MessageKind.UNMASK_REQUEST: last,
        MessageKind.UNMASKING_SHARES: partial(messages.decode_unmasking_shares, joined, rank, everyone),
    }


def samples_of(session):
    federation = federation_of(session)
    client, rank = session.cohort[1], 1
    depth = federation.roster.depth if federation.roster else None
    readers = None
    kept, found = federation.clients[client], []

    class Recorder:
        def receive(self, request):
            nonlocal kept, readers
            saved = kept.save()
            found.append(Sample(saved, partial(decode_phase, session, rank), len(saved)))
            kept = federation.restore(client, saved)
            answer = kept.receive(request)
            joined = getattr(kept.phase, "joined", None) or JoinedClients(
                session, np.ones(len(session.cohort), bool), b""
            )
            readers = (
                readers
                if kind_of(request) > MessageKind.KEY_ADVERTISEMENTS
                else decoders(session, rank, joined, depth)
            )
            for data in (request, answer):
                fixed = len(data) - (len(MODEL) if kind_of(data) == MessageKind.MASK_REQUEST else 0)
                found.append(Sample(data, readers[kind_of(data)], fixed))
            return answer

    federation.clients[client] = Recorder()
    run_round(federation)
    if federation.roster is not None:
        roster = encode_roster(federation.roster, AUTHORITY)
        found.append(Sample(roster, lambda data: decode_roster(data, signing_public(AUTHORITY)), len(roster)))
    return found


def standing_samples():
    """One message of each kind of standing keys, and what silos save."""
    silos, client, rank = Silos(make_epoch()), SILOS[1], 1
    silos.adverts_by_hand()
    advertised = silos.by_client[client].advertised.encode(silos.epoch, client)
    silos.set_up()
    silos.known = silos.by_client[client].known
    state = silos.by_client[client].store.state.encode()
    silos.step(0, 0)
    epoch, keys_digest = silos.epoch, silos.current.keys.digest
    step = silos.current.step(0, 0, SILOS)
    readers = {
        MessageKind.STANDING_INVITATION: epochs.decode_invitation,
        MessageKind.STANDING_ADVERT: partial(decode_advert, epoch, rank),
        MessageKind.STANDING_ADVERTS: partial(epochs.decode_adverts, epoch, rank),
        MessageKind.STANDING_READY: partial(epochs.decode_ready, epoch, rank),
        MessageKind.STANDING_REQUEST: partial(epochs.decode_request, epoch, rank),
        MessageKind.STANDING_MASKED: partial(
            decode_masked, epoch, rank, epochs.context(keys_digest, step, MODEL, TASK)
        ),
        MessageKind.SAVED_STANDING_ADVERTISED: partial(standing.Advertised.decode, epoch, client),
        MessageKind.SAVED_STANDING: partial(standing.State.decode, epoch, client),
    }
    own = [entry[side] for entry in silos.log if entry["client"] == client for side in ("request", "answer")]
    claims = epochs.encode_claims(epoch, rank, {0: silos.known[SILOS[0]]})
    for data in (*own, claims, advertised, state):
        fixed = len(data) - (len(MODEL) if kind_of(data) == MessageKind.STANDING_REQUEST else 0)
        yield Sample(data, readers[kind_of(data)], fixed)


SAMPLES = [*(sample for session in SESSIONS for sample in samples_of(session)), *standing_samples()]


def test_the_samples_are_of_every_kind_and_all_are_read():
    lattice = {kind for kind in MessageKind if "LATTICE" in kind.name}  # damaged in test_lattice_liars.py
    heads = {MessageKind.ROSTER_HEAD, MessageKind.CERTIFICATE, MessageKind.CERTIFICATES}  # and in test_heads.py
    assert {sample.kind for sample in SAMPLES} == set(MessageKind) - lattice - heads
    for sample in SAMPLES:
        sample.decode(sample.data)


class Damage:
    """Random damage of messages, from a stream, so that a failure repeats."""

    def __init__(self, *path):
        self.stream = Stream(digest("damage", *path))

    def pick(self, bound):
        return self.stream.below(bound)

    def raw(self, data):
        """Damage on the way: nobody mends the checksum."""
        way = self.pick(6)
        if way == 0:
            return self._flip(data)
        if way == 1:
            return data[: self.pick(len(data))]
        if way == 2:
            return data + self.stream.bytes(1 + self.pick(40))
        if way == 3:  # cut a piece out
            start = self.pick(len(data))
            return data[:start] + data[start + 1 + self.pick(30) :]
        if way == 4:  # overwrite eight bytes by an extreme number
            start = self.pick(len(data) - 7)
            extreme = (0, 1, 2**63, 2**64 - 1, len(data))[self.pick(5)]
            return data[:start] + extreme.to_bytes(8, "little") + data[start + 8 :]
        other = SAMPLES[self.pick(len(SAMPLES))].data  # the head of one and the tail of another
        return data[: self.pick(len(data))] + other[self.pick(len(other)) :]

    def structural(self, sample):
        """Damage by a liar: header and lengths are wrong, the checksum is right."""
        data = sample.data
        kind, binding = kind_of(data), data[24:56]
        party = int.from_bytes(data[8:16], "little")
        body, fixed = data[HEADER_BYTES:], sample.fixed_bytes - HEADER_BYTES
        way = self.pick(5)
        if way == 0:
            return frame(kind ^ (1 << self.pick(7)), binding, party, body)
        # An invitation is read before its binding is known, and its receiver.
        is_bound = kind not in (MessageKind.INVITATION, MessageKind.STANDING_INVITATION)
        if way == 1 and is_bound:
            return frame(kind, self._flip(binding), party, body)
        if way == 2 and is_bound:
            return frame(kind, binding, party ^ (1 << self.pick(64)), body)
        if way == 3 or len(body) > fixed:
            return frame(kind, binding, party, body[: self.pick(max(fixed, 1))])
        return frame(kind, binding, party, body + self.stream.bytes(1 + self.pick(50)))

    def _flip(self, data):
        bit = self.pick(8 * len(data))
        return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def accepted(count, *path):
    """Damage so many messages and return those that were accepted; anything but a PeerError fails."""
    damage, participations = Damage(*path), []
    for number in range(count):
        sample = SAMPLES[number % len(SAMPLES)]
        damaged = damage.raw(sample.data) if number // len(SAMPLES) % 2 else damage.structural(sample)
        if damaged == sample.data:
            continue
        try:
            sample.decode(damaged)
        except PeerError:
            continue
        participations.append((sample.kind, damaged))
    return participations


def damage(count: int) -> str:
    """The same by campaign, from fresh seeds, with whatever count."""
    participations = accepted(count, Stream(Entropy.system().key).below(2**64))
    assert participations == [], participations[:3]
    return f"{count} damaged messages: 0 accepted, 0 unexpected exceptions"


@pytest.mark.parametrize("part", range(4))
def test_no_damaged_message_is_accepted(part):
    assert accepted(50_000, part) == []


def test_the_damage_finds_a_reader_that_forgets_leftovers(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.wire.Reader.end", lambda self: None)
    assert accepted(5_000, "leftovers")


def test_the_damage_finds_a_missing_checksum(monkeypatch):
    class Agreeable(bytes):
        __hash__ = bytes.__hash__

        def __ne__(self, other):
            return False

    monkeypatch.setattr("d2pfed.secagg.wire._checksum", lambda *parts: Agreeable(16))
    assert accepted(5_000, "checksum")


@pytest.mark.parametrize("session", SESSIONS, ids=["plain", "larger", "everyone", "signed", "drawn", "claims"])
def test_a_liars_values_leave_a_client_with_a_refusal_or_an_answer(session):
    """Whatever a peer writes into the fields of a well-formed request, nothing but PeerError comes out."""
    damage = Damage("values", session.digest)
    requests = []
    federation = federation_of(session)
    client = session.cohort[1]
    kept = federation.clients[client].receive
    federation.clients[client] = type(
        "R", (), {"receive": lambda self, data: (requests.append(data), kept(data))[1]}
    )()
    run_round(federation)
    for number in range(240):
        machine = federation_of(session).clients[client]
        phase = number % len(requests)
        for request in requests[:phase]:
            machine.receive(request)
        body = bytearray(requests[phase][HEADER_BYTES:])
        for _ in range(1 + damage.pick(3)):
            body[damage.pick(len(body))] = damage.pick(256)
        try:
            machine.receive(frame(kind_of(requests[phase]), session.digest, client, bytes(body)))
        except PeerError:
            with pytest.raises(PeerError, match="finished"):
                machine.receive(requests[phase])


def test_decoded_subsets_cannot_be_changed_by_later_messages():
    session = SESSIONS[0]
    data = message(session, MessageKind.SURVIVORS, 1, pack_subset(np.ones(5, np.bool_)))
    first, second = (decode_survivors(session, MessageKind.SURVIVORS, 1, data) for _ in range(2))
    first[:] = False
    assert second.all()


WHOLE = [sample for sample in SAMPLES if sample.fixed_bytes == len(sample.data)]  # no model of any length is last


@pytest.mark.parametrize("sample", WHOLE, ids=lambda sample: str(sample.kind))
def test_no_message_has_a_byte_more_than_it_says(sample):
    """Under a right checksum, as a liar sends it."""
    body, party = sample.data[HEADER_BYTES:], int.from_bytes(sample.data[8:16], "little")
    with pytest.raises(PeerError):
        sample.decode(frame(sample.kind, sample.data[24:56], party, body + bytes(1)))
