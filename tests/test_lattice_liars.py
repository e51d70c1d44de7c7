"""Members and clients that lie to an honest server; members that are killed; messages that were changed."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.lattice import checks, masks, messages, opening
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import server as lattice_server
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.client import Member
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.messages import Opened
from d2pfed.secagg.lattice.parameters import Committee
from d2pfed.secagg.lattice.server import Convening, Invitations
from d2pfed.secagg.lattice.session import model_digest
from d2pfed.secagg.wire import MessageKind
from support.evil import LOW_ORDER
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.lattice import LatticeFederation, make_session, quick, small_committee
from support.lattice_server import body_of, reframed

SURVIVORS = 24
WATCHED = Committee(28, 4, 16, 17, 4)  # r + t + 2 c_L members, all of whom answer: cheats are shown


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def nothing(*_given, **_named):
    """A check that was removed."""


def liars_session(**changes):
    return make_session(SURVIVORS, **({"dimension": 5} | changes))


def watched_session():
    return make_session(28, committee=WATCHED, colluders=4, dimension=5)


def traced_session():
    committee = replace(small_committee(30), packed=16, colluders=2, certificate=17)
    return make_session(30, committee=committee, colluders=2, dimension=5)


def lying(session, members, lie):
    """Answers to a certificate that some members change."""

    def change(name, client, answer):
        if name != "open" or client not in members:
            return answer
        opened = messages.decode_opening(session, session.rank(client), len(session.cohort), answer)
        return messages.encode_opening(session, session.rank(client), lie(session.place(client), opened))

    return change


def run(session, loss, **given):
    federation = LatticeFederation(session, loss=loss, **given)
    agreeing = federation.gather()
    return federation, agreeing.survivors, federation.open(agreeing)


def is_right(federation, survivors, opened) -> bool:
    return np.array_equal(opened.vector, federation.expected(survivors))


def off(elements, amount=1):
    return (elements + amount) % PRIME


LIES = {
    "sums": lambda _place, opened: replace(opened, sums=off(opened.sums, 7)),
    "one sum": lambda _place, opened: replace(opened, sums=off(opened.sums, np.eye(1, 3, 1, dtype=int)[0])),
    "seeds": lambda _place, opened: replace(opened, seeds=off(opened.seeds, 7)),
    "a seed": lambda _place, opened: replace(
        opened, seeds=off(opened.seeds, np.eye(1, SURVIVORS, 4, dtype=int)[0])
    ),
    "all": lambda place, opened: Opened(off(opened.sums, place), off(opened.seeds, place)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_few_lying_members_are_corrected(lie):
    session = liars_session()
    liars = session.members[3:5]
    federation, survivors, opened = run(session, lying(session, liars, LIES[lie]))
    assert is_right(federation, survivors, opened)
    # no liar was planned: two members against one client speak against it, against all clients they name nobody
    assert opened.blamed == ((session.cohort[4],) if lie == "a seed" else ())


def test_members_that_lie_about_many_seeds_are_named():
    session = watched_session()
    liars = session.members[2:6]
    federation, survivors, opened = run(
        session, lying(session, liars, lambda _, said: replace(said, seeds=off(said.seeds)))
    )
    assert is_right(federation, survivors, opened)
    assert opened.blamed == liars


def test_a_lie_about_one_seed_names_nobody():
    session = watched_session()
    federation, survivors, opened = run(
        session,
        lying(
            session,
            session.members[2:3],
            lambda _, said: replace(said, seeds=off(said.seeds, np.eye(1, 28, 4, dtype=int)[0])),
        ),
    )
    assert is_right(federation, survivors, opened)
    assert opened.blamed == ()


@pytest.mark.parametrize("liars", [3, 4, 12])
def test_too_many_lying_members_end_the_attempt_and_name_nobody(liars):
    """Also where one answer more came than pairs of answers can be compared."""
    session = liars_session()
    for missing in ((), session.members[-1:]):
        change = lying(
            session, session.members[:liars], lambda place, said: replace(said, sums=off(said.sums, place + 1))
        )

        def loss(name, client, answer, change=change, missing=missing):
            return None if name == "open" and client in missing else change(name, client, answer)

        with pytest.raises(TooFewClients) as found:
            run(session, loss)
        assert found.value.blamed == ()


def other_word(session, liars, size):
    """Values at the members of a polynomial of degree below `size` that vanishes at all but the lying ones."""
    points, roots = (
        session.points,
        session.points[[place for place in range(session.committee.size) if place not in liars]],
    )
    assert len(roots) < size
    values = np.ones(len(points), np.int64)
    for root in roots:
        values = values * (points - root) % PRIME
    return values


def conspiracy(session, part: str):
    """As many liars as shift a word to another one unnoticed."""
    committee = session.committee
    size = committee.openers if part == "sums" else 16 + committee.threshold
    liars = range(committee.size - size + 1)
    shift = other_word(session, liars, size)

    def lie(place, said):
        if part == "sums":
            return replace(said, sums=off(said.sums, shift[place]))
        return replace(said, seeds=off(said.seeds, shift[place]))

    return lying(session, [session.members[place] for place in liars], lie)


@pytest.mark.parametrize(
    ("part", "reason"), [("sums", "somebody has spoilt it"), ("seeds", "committed itself to")]
)
def test_liars_together_do_not_spoil_a_sum_unnoticed(monkeypatch, part, reason):
    session = liars_session()
    with pytest.raises(TooFewClients, match=reason):
        run(session, conspiracy(session, part))
    if part == "sums":
        monkeypatch.setattr(opening, "_SECRET_REACH", PRIME)
        monkeypatch.setattr(opening, "isqrt", lambda _square: PRIME)
    else:
        monkeypatch.setattr(sessions, "commitment", lambda *_given: bytes(32))
    federation, survivors, opened = run(session, conspiracy(session, part))
    assert not is_right(federation, survivors, opened)


def test_a_sum_of_secrets_is_short_or_the_attempt_is_void(monkeypatch):
    """A client's secret that is far too long, on the code and all."""
    kept, session = masks.draw_secret, liars_session()
    monkeypatch.setattr(masks, "draw_secret", lambda *given: kept(*given) * 100)
    with pytest.raises(TooFewClients, match="must be within 627"):
        run(session, lambda _name, _client, answer: answer)


def unseen_lie(session, statements):
    """A member that knows the coefficients of a combination of sums changes two of them so that it stays the same."""

    def lie(_place, said):
        first, second = (int(each) for each in sessions.trace_coefficients(session, statements[0])[:2])
        return replace(said, sums=off(said.sums, np.array([second, -first, 0]) % PRIME))

    return lying(session, session.members[:1], lie)


def test_a_lie_that_fits_the_statements_coefficients_is_found(monkeypatch):
    """A server that combines by what members know leaves the liar in, and the attempt is void for one lie."""
    session, statements = liars_session(), []
    kept = lattice_server.Opener

    def noted(total, answers, entropy):
        statements.append(total.statement)
        return kept(total, answers, entropy)

    monkeypatch.setattr(lattice_server, "Opener", noted)
    probe = run(session, lambda _name, _client, answer: answer)
    assert is_right(*probe)
    assert is_right(*run(session, unseen_lie(session, statements)))

    def by_statement(total, answers, entropy):
        opener = kept(total, answers, entropy)
        opener._coefficients = sessions.trace_coefficients(session, total.statement)
        return opener

    monkeypatch.setattr(lattice_server, "Opener", by_statement)
    with pytest.raises(TooFewClients, match="do not fit together"):
        run(session, unseen_lie(session, statements))


# --- clients off the code ---


def off_the_code(session, client, places, columns=slice(None)):
    """A client whose boxes are wrong for some members; nothing of them is signed."""

    def change(name, sender, answer):
        if name != "contribute" or sender != client:
            return answer
        said = messages.decode_contribution(session, session.rank(client), session.committee.size, answer)
        said.boxes[list(places), columns] = off(
            said.boxes[list(places), columns], np.arange(1, len(places) + 1)[:, None]
        )
        return messages.encode_contribution(session, session.rank(client), said)

    return change


@pytest.mark.parametrize("columns", [slice(0, 3), slice(3, 4), slice(0, 5)])
def test_a_client_off_the_code_at_few_members_does_no_harm(columns):
    session = liars_session()
    loss = off_the_code(session, session.cohort[4], (3, 9), columns)
    federation, survivors, opened = run(session, loss)
    assert is_right(federation, survivors, opened)
    assert opened.blamed in ((), (session.cohort[4],))


def test_a_client_off_the_code_at_more_members_is_traced():
    """The sum does not decode, the client's own word does: it is opened without the members in dispute."""
    session = traced_session()
    cheats = session.cohort[4], session.cohort[9]
    first, second = (
        off_the_code(session, cheat, range(start, start + 3)) for cheat, start in zip(cheats, (2, 9), strict=True)
    )
    federation, survivors, opened = run(session, lambda *given: second(*given[:2], first(*given)))
    assert federation.refused["trace"] == {}
    assert is_right(federation, survivors, opened)
    assert opened.blamed == cheats


def test_a_client_off_the_code_at_many_members_is_left_out():
    session = watched_session()
    with pytest.raises(TooFewClients, match=f"client {session.cohort[4]}, or more than 4 members") as found:
        run(session, off_the_code(session, session.cohort[4], range(3, 13)))
    assert found.value.blamed == (session.cohort[4],)


def test_clients_that_together_spoil_an_attempt_are_left_out_of_the_next():
    """Each spoils its boxes for members of its own: all words decode, too few members are left, nobody is shown."""
    committee = replace(small_committee(30), packed=16, colluders=4, certificate=18)
    session = make_session(30, committee=committee, colluders=3, dimension=5)
    cheats = session.cohort[4:10:2]
    parts = [off_the_code(session, each, range(4 * k, 4 * k + 4)) for k, each in enumerate(cheats)]

    def loss(name, client, answer):
        for part in parts:
            answer = part(name, client, answer)
        return answer

    with pytest.raises(TooFewClients, match="in dispute with nobody") as found:
        run(session, loss)
    assert found.value.blamed == ()
    assert found.value.suspected == cheats[:1]  # without it enough members would be in no dispute
    federation = LatticeFederation(session, loss=loss)
    agreeing = federation.gather(excluded=found.value.suspected)
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))


def test_with_few_answers_a_client_is_left_out_but_not_shown_to_cheat():
    session = liars_session(
        colluders=2, committee=replace(small_committee(24), colluders=3, certificate=14), quorum=13
    )
    with pytest.raises(TooFewClients, match="or more than 2 members") as found:
        run(session, off_the_code(session, session.cohort[4], range(3, 13)))
    assert (found.value.blamed, found.value.suspected) == ((), (session.cohort[4],))


def test_members_cannot_frame_honest_clients_by_lying_in_a_trace():
    """More liars than answers can correct make every client's word fail: nobody is left out for it."""
    session, liars = liars_session(), range(5)

    def loss(name, client, answer):
        if client not in session.members or session.place(client) not in liars:
            return answer
        if name == "open":
            said = messages.decode_opening(session, session.rank(client), SURVIVORS, answer)
            return messages.encode_opening(
                session, session.rank(client), replace(said, sums=off(said.sums, client))
            )
        if name == "trace":
            said = messages.decode_trace(session, session.rank(client), SURVIVORS, answer)
            return messages.encode_trace(
                session, session.rank(client), off(said, np.arange(SURVIVORS) * client + 1)
            )
        return answer

    with pytest.raises(TooFewClients) as found:
        run(session, loss)
    assert (found.value.blamed, found.value.suspected) == ((), ())


def test_members_cannot_frame_an_honest_member():
    """Three liars of 24 shift words so that two honest members seem to lie; with so few answers it proves nothing."""
    session = liars_session(
        colluders=3, committee=replace(small_committee(24), colluders=3, certificate=14), quorum=13
    )
    size = session.committee.openers
    liars, framed = (0, 1, 2, 3), (22, 23)
    shift = other_word(session, (*liars, *framed), size)

    def loss(name, client, answer):
        if name != "open" or session.place(client) not in liars:
            return answer
        said = messages.decode_opening(session, session.rank(client), SURVIVORS, answer)
        return messages.encode_opening(
            session, session.rank(client), replace(said, seeds=off(said.seeds, shift[session.place(client)]))
        )

    with pytest.raises(TooFewClients) as found:
        run(session, loss)
    assert found.value.blamed == ()


def test_a_wrong_commitment_voids_the_attempt_and_names_its_client():
    session = watched_session()
    cheat = session.cohort[4]

    def loss(name, client, answer):
        if name != "contribute" or client != cheat:
            return answer
        said = messages.decode_contribution(session, session.rank(client), session.committee.size, answer)
        return messages.encode_contribution(session, session.rank(client), replace(said, commitment=bytes(32)))

    with pytest.raises(TooFewClients, match="committed itself to") as found:
        run(session, loss)
    assert found.value.blamed == (cheat,)


def test_members_that_are_silent_in_a_trace_are_left_out():
    session = traced_session()
    first = off_the_code(session, session.cohort[4], range(2, 5))
    second = off_the_code(session, session.cohort[9], range(9, 12))

    def loss(name, client, answer):
        if name == "trace" and client in session.members[-3:]:
            return None
        return second(name, client, first(name, client, answer))

    federation, survivors, opened = run(session, loss)
    assert is_right(federation, survivors, opened)
    with pytest.raises(TooFewClients, match="in dispute with nobody"):
        run(session, lambda name, *given: None if name == "trace" else loss(name, *given))


# --- what one bad answer does to an honest server ---


def spoilt(part: str):
    session = liars_session()
    bad = session.members[2]
    exchange = {"advert": "convene", "voucher": "vouch", "contribution": "contribute", "signature": "agree"}[part]

    def loss(name, client, answer):
        if name != exchange or client != bad:
            return answer
        body = bytearray(body_of(answer))
        body[{"advert": 32, "contribution": 32 + 32 + 32 + 104}.get(part, 0)] ^= 1
        return reframed(answer, bytes(body))

    federation, survivors, opened = run(session, loss)
    assert list(federation.refused[exchange]) == [bad]
    return is_right(federation, survivors, opened)


@pytest.mark.parametrize("part", ["advert", "voucher", "contribution", "signature"])
def test_one_bad_signature_stops_nobody(monkeypatch, part):
    assert spoilt(part)
    if part in ("voucher", "signature"):
        monkeypatch.setattr(lattice_server, "require_signed", nothing)
    else:
        name = {"advert": "require_adverts_signed", "contribution": "require_contributions_signed"}[part]
        lax = type(
            "Lax", (), {each: staticmethod(getattr(checks, each)) for each in dir(checks) if "_" in each[1:]}
        )
        setattr(lax, name, nothing)
        monkeypatch.setattr(lattice_server, "checks", lax)
    with pytest.raises(TooFewClients):
        spoilt(part)


def test_a_bad_voucher_is_named_only_while_vouchers_are_needed():
    session = liars_session()
    bad = {session.members[0]: "vouch", session.members[-1]: "vouch"}

    def spoil(name, client, answer):
        if name != "agree" and bad.get(client) != name:
            return answer
        body = body_of(answer)
        return reframed(answer, bytes([body[0] ^ (client in bad)]) + body[1:])

    federation, survivors, opened = run(session, spoil)
    assert is_right(federation, survivors, opened)
    assert list(federation.refused["vouch"]) == [session.members[0]]
    assert list(federation.refused["agree"]) == sorted(bad)  # nothing is left unchecked here


def test_a_client_that_came_no_further_is_not_in_the_sum():
    session = liars_session()
    federation = LatticeFederation(session)
    client = session.cohort[4]
    later = {client: position_of(client, 2, federation.roster)}
    federation.counts = {client: 1}
    federation.participant = lambda each, kept=federation.participant: kept(each)
    convening = Convening(Invitations(session=session, roster=federation.roster))
    federation.collect("convene", convening)
    vouching = convening.close()
    federation.collect("vouch", vouching)
    contributing = vouching.close(TASK, model_digest(MODEL))
    vouchers = {place: vouching._vouchers[place] for place in range(session.committee.vouchers)}
    contributing._invitations = replace(contributing._invitations, remembered=later)
    answers = {
        each: federation.answer("contribute", each, data)
        for each, data in contributing.outbox.items()
        if each != client
    }
    request = messages.encode_request(contributing._request, session.rank(client), vouchers, None, None)
    for each, data in answers.items():
        contributing.receive(each, data)
    with pytest.raises(PeerError, match="left out"):
        contributing.receive(client, federation.answer("contribute", client, request))
    agreeing = contributing.close(Entropy.replay(b"server"))
    assert client not in agreeing.survivors
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))


def test_claims_of_members_are_there_to_be_remembered():
    """Members that met a client later do not sign; the others are enough, and the server learns what they know."""
    session = liars_session()
    roster, client = LatticeFederation(session).roster, session.cohort[4]
    known = {
        member: {client: position_of(client, 7 + place, roster)}
        for place, member in enumerate(session.members[:4])
    }
    federation = LatticeFederation(session, known=known)
    agreeing = federation.gather()
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))
    assert {name: position.count for name, position in agreeing.claims.items()} == {client: 10}
    known = {member: {client: position_of(client, 7, roster)} for member in session.members[:12]}
    federation = LatticeFederation(session, known=known)
    agreeing = federation.gather()
    with pytest.raises(TooFewClients, match="must sign the survivors"):
        federation.open(agreeing)


def test_a_claim_of_an_older_position_is_refused():
    """It is no reason not to sign, and nothing to be remembered."""
    session = liars_session()
    client, stranger = session.cohort[4], session.cohort[9]

    def loss(name, sender, answer):
        if name == "contribute" and sender == stranger:
            return None
        if name != "agree" or sender not in session.members[:3]:
            return answer
        place, roster = session.place(sender), federation.roster
        claimed = {0: (client, 1), 1: (stranger, 9), 2: (client, 2)}[place]
        claims = {session.rank(claimed[0]): position_of(*claimed, roster)}
        return messages.encode_claims(session, session.rank(sender), claims)

    federation = LatticeFederation(session, loss=loss)
    agreeing = federation.gather()
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))
    assert set(federation.refused["agree"]) == set(session.members[:2])
    assert {name: position.count for name, position in agreeing.claims.items()} == {client: 2}


def changed_contribution(change):
    """A session in which one client changes its contribution, and signs it again."""
    session = liars_session()
    cheat = session.cohort[4]

    def loss(name, client, answer):
        if name != "contribute" or client != cheat:
            return answer
        said = change(messages.decode_contribution(session, session.rank(client), session.committee.size, answer))
        bound = session, said.context, client, said.signed.key, said.signed.position
        signature = crypto.sign(enrolment_secret(client), sessions.contribution_statement(*bound))
        said = replace(said, signed=replace(said.signed, signature=signature))
        return messages.encode_contribution(session, session.rank(client), said)

    federation = LatticeFederation(session, loss=loss)
    agreeing = federation.gather()
    assert cheat not in agreeing.survivors
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))
    return str(federation.refused["contribute"][cheat])


def test_a_contribution_for_another_context_is_refused():
    assert "another model" in changed_contribution(lambda said: replace(said, context=bytes(32)))


def test_a_clients_key_of_low_order_stops_nobody():
    """With it in the set of survivors no honest member would open."""

    def lowered(said):
        return replace(said, signed=replace(said.signed, key=bytes.fromhex(LOW_ORDER[0])))

    assert "low order" in changed_contribution(lowered)


def test_a_members_key_of_low_order_stops_nobody():
    """With it among the adverts every client would refuse the request."""
    session = liars_session()
    bad, key = session.members[2], bytes.fromhex(LOW_ORDER[0])
    signature = crypto.sign(enrolment_secret(bad), sessions.advert_statement(session, bad, key))

    def loss(name, client, answer):
        is_bad = name == "convene" and client == bad
        return reframed(answer, key + signature) if is_bad else answer

    federation, survivors, opened = run(session, loss)
    assert "low order" in str(federation.refused["convene"][bad])
    assert is_right(federation, survivors, opened)


# --- a member that is killed ---


def test_a_member_killed_at_any_step_answers_the_same():
    """Each step is done twice from the bytes that were kept before it, and gives the same answer and state."""
    session = liars_session()
    federation = LatticeFederation(session)
    member, answer = session.members[6], federation.answer
    sizes = {}

    def twice(name, client, data):
        if client != member or name in ("convene", "vouch", "contribute"):
            return answer(name, client, data)
        before = federation.members[member].encode(session, member)
        first, after = answer(name, client, data), federation.members[member].encode(session, member)
        federation.members[member] = Member.decode(session, member, before)
        second = answer(name, client, data)
        assert (first, after) == (second, federation.members[member].encode(session, member))
        assert answer(name, client, data) == first  # once more, from the state after it
        sizes[name] = federation.members[member]
        return first

    federation.answer = twice
    agreeing = federation.gather()
    key = federation.members[member].secret
    assert len(key) == 32
    assert is_right(federation, agreeing.survivors, federation.open(agreeing))
    assert list(sizes) == ["agree", "open"]
    kept = sizes["open"].encode(session, member)
    assert key in sizes["agree"].encode(session, member)
    assert key not in kept
    assert sizes["open"] == Member(
        statement=sizes["agree"].statement, opening=sizes["open"].opening, trace=sizes["open"].trace
    )


def test_a_members_state_is_that_of_one_session():
    session = liars_session()
    federation = LatticeFederation(session, known={})
    federation.gather()
    member = session.members[0]
    kept = federation.members[member].encode(session, member)
    assert Member.decode(session, member, kept) == federation.members[member]
    for other in (replace(session, attempt=1), session):
        with pytest.raises(PeerError):
            Member.decode(other, session.members[other is session], kept)
    assert crypto.Agreement(federation.members[member].secret)


# --- changed messages ---


@pytest.fixture(scope="module")
def conversation():
    """Every message of a session with a trace, by kind, and what reads it."""
    session = make_session(24, dimension=5, secret=17)
    found, federation = {}, LatticeFederation(session, loss=off_the_code(session, 7, range(2, 12)))
    inner = federation.answer

    def noting(name, client, data):
        answer = inner(name, client, data)
        if client == session.members[1]:
            found[name] = data, answer
        return answer

    federation.answer = noting
    agreeing = federation.gather()
    federation.keys = {member: federation.members[member].secret for member in session.members}
    with pytest.raises(TooFewClients):
        federation.open(agreeing)
    return session, federation, found


def readers(session, federation, client):
    """What a client and the server do with a message of each exchange, without changing anything."""
    own, members = federation.participant(client), session.committee.size
    state = replace(federation.members[client], opening=b"", secret=bytes(31) + b"k")
    survivors = len(session.cohort)

    def contribute(data):
        body = messages.decode_request(data, own.depth)
        own.contribute(
            body,
            MODEL,
            lambda *_: (federation.vector(client), federation.position(client, 1)),
            Entropy.replay(b"x"),
        )

    def advert(data):
        with wire.opened(session, MessageKind.LATTICE_ADVERT, session.rank(client), data) as reader:
            said = messages.read_advert(session, reader)
        checks.require_adverts_signed(session, federation.roster, {session.place(client): said})

    def contribution(data):
        said = messages.decode_contribution(session, session.rank(client), members, data)
        one = {session.rank(client): said.signed}
        checks.require_contributions_signed(session, federation.roster, said.context, one)

    return {
        "convene": (lambda data: own.convene(data, Entropy.replay(b"any")), advert),
        "vouch": (own.vouch, lambda data: vouched(session, federation, client, data)),
        "contribute": (contribute, contribution),
        "agree": (
            lambda data: own.agree(replace(state, statement=b""), data, nothing),
            lambda data: signed(session, federation, client, data),
        ),
        "open": (
            lambda data: own.open(federation.members[client], data),
            lambda data: messages.decode_opening(session, session.rank(client), survivors, data),
        ),
        "trace": (
            lambda data: own.trace(federation.members[client], data),
            lambda data: messages.decode_trace(session, session.rank(client), survivors, data),
        ),
    }


def vouched(session, federation, client, data):
    keys = {session.place(member): crypto.Agreement(federation.keys[member]).public for member in session.members}
    with wire.opened(session, MessageKind.LATTICE_VOUCHER, session.rank(client), data) as reader:
        said, statement = reader.take(64), sessions.adverts_statement(session, keys)
    crypto.require_signature(federation.roster.key(client), said, statement)


def signed(session, federation, client, data):
    said = messages.decode_signature(session, session.rank(client), data)
    if not isinstance(said, bytes):
        raise PeerError("claims")
    crypto.require_signature(federation.roster.key(client), said, federation.members[client].statement)


def unsigned_parts(session, body: bytes, exchange: str, *, is_answer: bool) -> list[range]:
    """Bytes of a body that a liar may change at its own expense: they are its own, and bind nobody else."""
    size, task = len(body), len(TASK)
    if is_answer:
        signed = 32 + 32 + 32 + 104 + 64
        return {
            "contribute": [range(64, 96), range(signed, size)],
            "open": [range(size)],
            "trace": [range(size)],
        }.get(exchange, [])
    start = 1 + len(session.run) + 4 * 4
    remembered = range(start, start + 104)  # ignored unless the client itself has signed it
    of_task = range(size - 32 - task, size - 32)  # gives another context
    return {"convene": [remembered], "contribute": [remembered, of_task], "agree": [range(32, 64)]}.get(
        exchange, []
    )


@pytest.mark.parametrize("exchange", ["convene", "vouch", "contribute", "agree", "open", "trace"])
def test_a_changed_message_is_refused(conversation, exchange):
    """Any byte, any length: of the frame by its checksum, of a body with a right checksum by what reads it."""
    session, federation, found = conversation
    client = session.members[1]
    for data, read in zip(found[exchange], readers(session, federation, client)[exchange], strict=True):
        read(data)
        stream, body = Stream(digest("fuzz", exchange)), body_of(data)
        for place in range(0, len(data), 1 + len(data) // 300):
            changed = bytearray(data)
            changed[place] ^= 1 + stream.below(255)
            for bad in (bytes(changed), data[:place]):
                with pytest.raises(PeerError):
                    read(bad)
        with pytest.raises(PeerError):
            read(reframed(data, body + b"\0"))
        free = unsigned_parts(session, body, exchange, is_answer=data is found[exchange][1])
        for place in range(0, len(body), 1 + len(body) // 60):
            with pytest.raises(PeerError):
                read(reframed(data, body[:place]))
            changed = bytearray(body)
            changed[place] ^= 1 + stream.below(255)
            try:
                read(reframed(data, bytes(changed)))
            except PeerError:
                continue
            assert any(place in part for part in free), place


def test_a_decoder_finds_wrong_values_up_to_half_the_excess():
    stream = Stream(digest("words"))
    for points in range(9, 15):
        places = np.arange(40, 40 + points)
        matrix = fields.interpolation(np.arange(1, 7), places)
        words = fields.multiply(matrix, fields.elements(stream, 6 * 9).reshape(6, 9))
        wrong = np.zeros(words.shape, bool)
        for column in range(1, 8):
            wrong[stream.subset(points, column % ((points - 6) // 2 + 1)), column] = True
        spoilt = (words + wrong * 5) % PRIME
        spoilt[:, 8] = fields.elements(stream, points)
        found, lost = fields.decode_words(places, spoilt, 6, 1)
        assert lost == [8], points
        assert np.array_equal(found[:, :8], wrong[:, :8])
        assert fields.decode(places, spoilt[:, 8], 6) is None
