"""Heads and certificates: what a client needs that does not hold the roster, and what a server could do with others."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import History, crypto, heads
from d2pfed.secagg.draws import DrawTree
from d2pfed.secagg.heads import (
    CERTIFICATE_BYTES,
    Certificate,
    Certified,
    CertifiedRoster,
    Head,
    SlotEnrolment,
    certify,
    decode_certificates,
    decode_head,
    decode_slip,
    encode_head,
    head_of,
    require_certified,
)
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.client import Participant
from d2pfed.secagg.lattice.messages import Advert
from d2pfed.secagg.lattice.parameters import choose_committee
from d2pfed.secagg.lattice.server import Invitations
from d2pfed.secagg.lattice.session import Request, Session, model_digest
from d2pfed.secagg.roster import require_serial, require_unexpired, sign_position
from d2pfed.secagg.wire import HEADER_BYTES, frame, kind_of
from support.federation import MODEL, TASK, enrol, enrolment_secret, position_of
from support.lattice import LatticeFederation, certified, identities_of, make_session, quick
from support.lattice_server import Server, opened_alone
from support.rosters import AUTHORITY, EXPIRES, roster_of

CLIENTS = (3, 5, 8, 13)
PUBLIC = crypto.signing_public(AUTHORITY)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def changed_bodies(data: bytes, party: int):
    """The same message with one byte of its body changed, each in turn, and the checksum that belongs to it."""
    for place in range(HEADER_BYTES, len(data)):
        body = bytearray(data[HEADER_BYTES:])
        body[place - HEADER_BYTES] ^= 1
        yield frame(kind_of(data), data[24:56], party, bytes(body))


def test_a_head_is_read_as_it_was_signed():
    for roster in (enrol(CLIENTS), roster_of(dict(enrol(CLIENTS).keys), depth=3, root=digest("root"))):
        head = head_of(roster)
        assert decode_head(encode_head(head, AUTHORITY), PUBLIC) == head
        assert (head.population, head.digest) == (4, roster.digest)
        assert list(Certified(head).clients) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="the authority that it names"):
        encode_head(head, digest("another"))
    with pytest.raises(PeerError, match="signature"):
        decode_head(encode_head(head, AUTHORITY), crypto.signing_public(digest("another")))


def test_no_byte_of_a_head_can_be_changed():
    for data in changed_bodies(encode_head(head_of(enrol(CLIENTS)), AUTHORITY), 0):
        with pytest.raises(PeerError):
            decode_head(data, PUBLIC)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"population": 0}, "1 to"), ({"depth": 21}, "depth in"), ({"root": digest("root")}, "root of zero")],
)
def test_a_head_is_checked(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(head_of(enrol(CLIENTS)), **changes)
    lax = head_of(enrol(CLIENTS))
    for name, value in changes.items():
        object.__setattr__(lax, name, value)
    with pytest.raises(PeerError, match=reason):
        decode_head(encode_head(lax, AUTHORITY), PUBLIC)


def test_a_slip_shows_slot_key_and_floor():
    roster = roster_of(
        dict(enrol(CLIENTS).keys), floors={client: (client, digest("log", client)) for client in CLIENTS}
    )
    issued, head = certify(roster, AUTHORITY), head_of(roster)
    issued = decode_certificates(issued.encode(), roster)
    for slot, client in enumerate(CLIENTS):
        own, floor = decode_slip(issued.slip(slot), head, client)
        assert (own.name(client), own.identity(slot), own.key(slot)) == (slot, client, roster.keys[client])
        assert floor == (client, digest("log", client))
        SlotEnrolment(enrolment_secret(client), own).require_self(client)
        with pytest.raises(ConfigError, match="another key"):
            SlotEnrolment(enrolment_secret(1), own).require_self(client)
        with pytest.raises(PeerError, match="no certificate"):
            own.name(1)
    with pytest.raises(PeerError, match="no certificate of slot 0"):
        own.key(0)


def test_no_byte_of_a_slip_can_be_changed():
    roster = enrol(CLIENTS)
    for data in changed_bodies(certify(roster, AUTHORITY).slip(2), 8):
        with pytest.raises(PeerError):
            decode_slip(data, head_of(roster), 8)


def test_a_slip_is_for_its_client():
    issued, head = certify(enrol(CLIENTS), AUTHORITY), head_of(enrol(CLIENTS))
    with pytest.raises(PeerError, match="client 5 was expected"):
        decode_slip(issued.slip(2), head, 5)
    relabeled = frame(34, head.digest, 5, issued.slip(2)[HEADER_BYTES:])
    with pytest.raises(PeerError, match="client 5 was expected"):
        decode_slip(relabeled, head, 5)


def test_certificates_belong_to_a_roster_and_its_authority():
    roster = enrol(CLIENTS)
    issued = certify(roster, AUTHORITY)
    with pytest.raises(ConfigError, match="the authority that enrolled"):
        certify(roster, digest("another"))
    with pytest.raises(PeerError, match="another session"):
        decode_certificates(issued.encode(), enrol((3, 5, 8)))
    with pytest.raises(PeerError, match="must have 512 bytes"):
        decode_certificates(frame(35, roster.digest, 0, issued.signatures[1:]), roster)
    with pytest.raises(PeerError, match="no slot 4"):
        issued.key(4)
    assert issued.key(1) == roster.keys[5]


# --- what certificates prevent ---


def test_a_certificate_is_for_one_slot():
    roster = enrol(CLIENTS)
    issued, head = certify(roster, AUTHORITY), head_of(roster)
    for slot in range(4):
        require_certified(head, slot, issued.certificate(slot))
        with pytest.raises(PeerError, match="signature"):
            require_certified(head, (slot + 1) % 4, issued.certificate(slot))


def next_roster(**changes):
    """The authority drops client 3, so that all slots move; client 8 has a new key."""
    keys = {client: crypto.signing_public(enrolment_secret(client)) for client in CLIENTS[1:]}
    return roster_of(keys | {8: crypto.signing_public(digest("new key"))}, serial=2, **changes)


def test_a_certificate_of_another_head_is_refused():
    """A dropped client, a replaced key and a slot that has moved: nothing of the roster before is taken."""
    before, after = enrol(CLIENTS), next_roster()
    old, new, head = certify(before, AUTHORITY), certify(after, AUTHORITY), head_of(after)
    for slot, client in enumerate(CLIENTS):
        for place in range(3):
            with pytest.raises(PeerError, match="signature"):
                require_certified(head, place, old.certificate(slot))
        with pytest.raises(PeerError, match="another session"):
            decode_slip(old.slip(slot), head, client)
    assert decode_slip(new.slip(0), head, 5)[0].name(5) == 0
    assert decode_slip(old.slip(1), head_of(before), 5)[0].name(5) == 1


def test_a_stale_head_is_refused():
    before, after = head_of(enrol(CLIENTS)), head_of(next_roster())
    require_serial(after, before.serial, before.digest)
    with pytest.raises(PeerError, match="serial 2 or later"):
        require_serial(before, after.serial, after.digest)
    with pytest.raises(PeerError, match="two rosters of serial 2"):
        require_serial(head_of(next_roster(nonce=bytes(32))), after.serial, after.digest)
    require_unexpired(after, EXPIRES - 1)
    with pytest.raises(PeerError, match="expired"):
        require_unexpired(after, EXPIRES)


def test_a_session_by_slots_is_that_of_its_roster():
    """Slots move between rosters: what is signed in a session of one is of no use in one of the other."""
    session = make_session(24, by_slot=True)
    other = replace(session, roster_digest=digest("the roster after"))
    assert session.digest != other.digest
    federation = LatticeFederation(session)
    own = federation.participant(federation.roster.clients[session.cohort[0]])
    with pytest.raises(ConfigError, match="got another one"):
        Participant(other, own.client, own.enrolment, own.history)


def forged(server: Server, kind: str) -> tuple[dict[int, bytes], dict[int, Advert]]:
    """Adverts of the server's own members: keys that it certifies itself, or colluders' certificates of other slots."""
    session, roster = server.session, server.federation.certified
    secrets = {place: digest("a member of the server's", place) for place in server.adverts}
    adverts = {}
    others = [slot for slot in range(len(roster.roster.clients)) if slot not in session.cohort]
    for place, slot in enumerate(session.members):
        key, true = crypto.Agreement(secrets[place]).public, roster.certificate(slot)
        if kind == "own keys":
            signer, shown = digest("the server"), None
            shown = Certificate(true.client, crypto.signing_public(signer), true.signature)
        else:
            shown = roster.certificate(others[place])
            signer = enrolment_secret(shown.client)
        signature = crypto.sign(signer, sessions.advert_statement(session, slot, key))
        adverts[place] = Advert(key, signature, shown)
    return secrets, adverts


def own_committee(kind: str) -> bool:
    server = Server(make_session(24, by_slot=True, dimension=5))
    victim = server.federation.roster.clients[server.session.cohort[5]]
    secrets, server.adverts = forged(server, kind)
    contribution, name = server.ask(victim), server.session.cohort[5]
    answers = opened_alone(server, secrets, name, contribution)
    found = server.add_up([(name, contribution)], answers)
    return np.array_equal(found, server.federation.vector(victim))


@pytest.mark.parametrize("kind", ["own keys", "colluders of other slots"])
def test_a_server_cannot_certify_keys_of_its_own(monkeypatch, kind):
    with pytest.raises(PeerError, match="signature"):
        own_committee(kind)
    monkeypatch.setattr(heads, "require_certified", lambda *_given: None)
    assert own_committee(kind)


def test_members_go_by_certificates_too():
    """A survivor's key that another enrolled client has signed, under its own certificate, is not the survivor's."""
    server = Server(make_session(24, by_slot=True, dimension=5))
    session, roster = server.session, server.federation.certified
    for slot in session.cohort:
        server.ask(roster.identity(slot))
    signed = {
        rank: replace(each.signed, certificate=roster.certificate(session.cohort[rank]))
        for rank, each in server.contributions.items()
    }
    member = session.members[0]
    honest = messages.Survivors(server.request.context, digest("z"), signed)
    stranger = next(slot for slot in range(48) if slot not in session.cohort)
    liar, key = roster.identity(stranger), crypto.Agreement(digest("the server's")).public
    position = position_of(liar, 9, roster.roster)
    bound = server.request.context, session.cohort[5], key, position
    signature = crypto.sign(enrolment_secret(liar), sessions.contribution_statement(session, *bound))
    false = messages.SignedKey(key, position, signature, roster.certificate(stranger))
    replaced = replace(honest, signed=signed | {5: false})
    rank, client = session.rank(member), roster.identity(member)
    with pytest.raises(PeerError, match="signature"):
        server.federation.answer("agree", client, messages.encode_survivors(session, rank, replaced))
    answer = server.federation.answer("agree", client, messages.encode_survivors(session, rank, honest))
    said = messages.decode_signature(session, rank, answer)
    assert isinstance(said, bytes)
    missing = {place: messages.Signer(said, false.certificate) for place in range(session.committee.size)}
    with pytest.raises(PeerError, match="signature"):
        server.federation.answer("open", client, messages.encode_certificate(session, rank, missing))


def test_members_remember_clients_and_not_slots():
    """A client that was put back is noticed in whatever slot the roster of today has it."""
    session = make_session(24, by_slot=True)
    roster = certified(identities_of(24)).roster
    victim = roster.clients[session.cohort[7]]
    known = {roster.clients[slot]: {victim: position_of(victim, 2, roster)} for slot in session.members}
    federation = LatticeFederation(session, known=known)
    agreeing = federation.gather()
    federation.collect("agree", agreeing)
    assert agreeing.claims == {victim: position_of(victim, 2, roster)}
    federation = LatticeFederation(session, known=known, counts={victim: 2})
    agreeing = federation.gather()
    assert np.array_equal(federation.open(agreeing).vector, federation.expected(agreeing.survivors))


def test_roster_and_session_fit():
    session, roster = make_session(24, by_slot=True), certified(identities_of(24))
    assert Invitations(session=session, roster=roster).identities == identities_of(24)
    with pytest.raises(ConfigError, match="needs its roster's certificates"):
        Invitations(session=session, roster=roster.roster)
    with pytest.raises(ConfigError, match="and no other"):
        Participant(make_session(24), 7, LatticeFederation(session).enrolment(7), None)
    with pytest.raises(ConfigError, match="only a roster has slots"):
        make_session(24, signed=False, is_by_slot=True)
    with pytest.raises(ConfigError, match="certificates must have"):
        CertifiedRoster(roster.roster, b"")


# --- what a client downloads ---


def certificate_of(head: Head, slot: int) -> Certificate:
    """One certificate of a roster that is too large for a test."""
    client, key = 10**12 + 3 * slot, crypto.signing_public(enrolment_secret(slot))
    statement = digest("d2pfed enrolment", head.digest, slot, client, key)
    return Certificate(client, key, crypto.sign(AUTHORITY, statement))


def test_a_client_of_100000_downloads_at_most_40_kb():
    """Head, its own slip, and the request with a whole committee's keys and who vouches for them, as they are sent."""
    population, size, tree = 100_000, 1_000, DrawTree(Entropy.replay(b"draws"), 12)
    small = head_of(roster_of(dict(enrol(CLIENTS).keys), depth=12, root=tree.root))
    head = decode_head(encode_head(replace(small, population=population), AUTHORITY), PUBLIC)
    committee = choose_committee(
        size, Fraction(1, 10), 576, population=population, colluding=10_000, draws=100 * 4 << 12
    )
    slots = tuple(97 * rank + 11 for rank in range(size))
    session = Session(
        plan_digest=digest("a plan"),
        run="a run with a name of some length",
        round=3,
        attempt=0,
        roster_digest=head.digest,
        draw=3,
        block=0,
        cohort=slots,
        members=slots[: committee.size],
        dimension=8,
        bits=11,
        secret=576,
        committee=committee,
        quorum=900,
        colluders=100,
        is_by_slot=True,
    )
    keys = {place: crypto.Agreement(digest("member", slot)).public for place, slot in enumerate(session.members)}
    statement = sessions.adverts_statement(session, keys)
    vouchers = {
        place: messages.Signer(crypto.sign(enrolment_secret(slot), statement), certificate_of(head, slot))
        for place, slot in enumerate(session.members[: committee.vouchers])
    }
    own, slot = certificate_of(head, slots[-1]), slots[-1]
    secret = enrolment_secret(slot)
    position = sign_position(secret, PUBLIC, own.client, 7, digest("log"))
    request = Request(session, keys, TASK, model_digest(MODEL))
    data = messages.encode_request(request, size - 1, vouchers, tree.open(3), position)

    enrolment = SlotEnrolment(secret, Certified(head).admit({slot: own}))
    client = Participant(session, own.client, enrolment, History(position, lambda _count, _head: True))
    after = sign_position(secret, PUBLIC, own.client, 8, digest("later"))
    answer = client.contribute(
        messages.decode_request(data, head.depth),
        MODEL,
        lambda _task, _model: (np.zeros(8, np.uint32), after),
        Entropy.replay(b"any"),
    )
    assert len(answer) == messages.contribution_bytes(session, committee.size)
    slip = HEADER_BYTES + 4 + CERTIFICATE_BYTES + 40 + crypto.SIGNATURE_BYTES
    assert len(certify(enrol(CLIENTS), AUTHORITY).slip(0)) == slip
    downloaded = len(encode_head(head, AUTHORITY)) + slip + len(data) - len(TASK)
    assert committee.size == 192
    assert 17_000 < downloaded <= 20_000, downloaded
