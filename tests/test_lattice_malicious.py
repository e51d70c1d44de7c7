"""Scripts against the lattice protocol. Each fails against the checks; each succeeds once its check is gone."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError, RolledBack
from d2pfed.numerics.randomness import Entropy, Stream, derive, digest
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.lattice import checks, masks, messages
from d2pfed.secagg.lattice import client as lattice_client
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.client import Participant
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.messages import Opened, SignedKey, Signer
from d2pfed.secagg.lattice.parameters import Committee
from d2pfed.secagg.lattice.session import Request
from d2pfed.secagg.wire import MessageKind
from support.evil import LOW_ORDER
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.lattice import make_session, quick, small_committee
from support.lattice_server import Server, forged_adverts, opened_alone, split_server, subtract


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def nothing(*_given, **_named):
    """A check that was removed."""


def drop(monkeypatch, *names):
    for name in names:
        monkeypatch.setattr(checks, name, nothing)


def victim_of(server) -> int:
    return server.session.cohort[5]


def is_victims(server, found, client=None) -> bool:
    return np.array_equal(found, server.federation.vector(client or victim_of(server)))


# --- keys ---


def own_keys_for_the_others(server) -> bool:
    """The server shows members keys of its own for everybody but the victim, and takes its own pads off."""
    session, victim = server.session, victim_of(server)
    rank, contribution = session.rank(victim), server.ask(victim)
    secrets = {place: digest("the server's", place) for place in range(len(session.cohort)) if place != rank}
    position = position_of(victim, 9, server.federation.roster)
    keys = {each: SignedKey(crypto.Agreement(key).public, position, bytes(64)) for each, key in secrets.items()}
    survivors = server.survivors([rank], keys)
    signatures = server.sign(session.members, survivors)
    answers = server.open(session.members, signatures, len(session.cohort))
    alone = {}
    for place, opened in answers.items():
        key = server.adverts[place].key
        others = sum(server.pads_of(secrets[each], session.cohort[each], place, key) for each in secrets)
        alone[place] = Opened((opened.sums - others[: session.polynomials]) % PRIME, opened.seeds[[rank]])
    return is_victims(server, server.add_up([(victim, contribution)], alone))


def test_a_server_cannot_bring_keys_for_all_but_the_victim(monkeypatch):
    with pytest.raises(PeerError, match="signature"):
        own_keys_for_the_others(Server())
    drop(monkeypatch, "require_contributions_signed")
    assert own_keys_for_the_others(Server())


def own_committee(server, vouchers=None) -> bool:
    """The server's own keys stand for the members."""
    victim = victim_of(server)
    secrets = {place: digest("a member of the server's", place) for place in server.adverts}
    adverts = forged_adverts(server, secrets)
    contribution = server.ask(victim, adverts=adverts, vouchers=vouchers and vouchers(server, adverts))
    server.adverts = adverts
    answers = opened_alone(server, secrets, victim, contribution)
    return is_victims(server, server.add_up([(victim, contribution)], answers))


def test_a_server_cannot_play_the_members(monkeypatch):
    with pytest.raises(PeerError, match="signature"):
        own_committee(Server())
    drop(monkeypatch, "require_adverts_signed")
    assert own_committee(Server())


def vouched_by(server, adverts, members: int) -> dict:
    """Colluding members vouch for whatever the server likes."""
    statement = sessions.adverts_statement(server.session, {place: each.key for place, each in adverts.items()})
    secrets = map(enrolment_secret, server.session.members[:members])
    return {place: Signer(crypto.sign(secret, statement)) for place, secret in enumerate(secrets)}


def test_colluding_members_cannot_vouch_for_the_servers_own(monkeypatch):
    """As many as the threshold are not enough; one more would be."""
    threshold = Server().session.committee.threshold

    def colluders(server, adverts):
        return vouched_by(server, adverts, threshold)

    with pytest.raises(PeerError, match=f"{threshold + 1} members must vouch"):
        own_committee(Server(), colluders)
    monkeypatch.setattr(Committee, "vouchers", property(lambda committee: committee.threshold))
    assert own_committee(Server(), colluders)


def test_a_server_cannot_vouch_in_the_members_place(monkeypatch):
    """Signatures that are no member's, and those of adverts that were shown to members before."""

    def forged(server, _adverts):
        return {place: Signer(bytes(64)) for place in range(server.session.committee.vouchers)}

    def of_others(server, _adverts):
        return server.vouched(server.adverts)

    for vouchers in (forged, of_others):
        with pytest.raises(PeerError, match="signature"):
            own_committee(Server(), vouchers)
    drop(monkeypatch, "require_vouched")
    assert own_committee(Server(), forged)


def chosen_committee(*, believed: bool) -> bool:
    """The server names a committee of colluders; the victim answers for the one that it has computed, or for that."""
    drawn = make_session(30, committee=small_committee(24), dimension=5)
    colluders = tuple(sorted(drawn.cohort[-24:]))
    server = Server(replace(drawn, members=colluders))
    victim = drawn.cohort[0]
    assert victim not in colluders
    if not believed:
        vouchers = server.vouched(server.adverts)
        data = messages.encode_request(server.request, server.session.rank(victim), vouchers, None, None)
        server.federation.session = drawn
        server.federation.answer("contribute", victim, data)
    contribution = server.ask(victim)
    secrets = {place: server.federation.members[member].secret for place, member in enumerate(colluders)}
    found = server.add_up([(victim, contribution)], opened_alone(server, secrets, victim, contribution))
    return is_victims(server, found, victim)


def test_a_server_cannot_choose_the_committee():
    """A client recomputes the committee from the draw, so the session that the request names is another one."""
    with pytest.raises(PeerError, match="agreed session"):
        chosen_committee(believed=False)
    assert chosen_committee(believed=True)


def test_a_client_that_is_not_a_member_advertises_nothing():
    session = make_session(30, committee=small_committee(24), dimension=5)
    server = Server(session)
    other = next(client for client in session.cohort if client not in session.members)
    with pytest.raises(PeerError, match="not in the committee"):
        server.federation.answer("convene", other, b"")


class _Lax(crypto.Agreement):
    """A library that computes a shared secret of zero without a word."""

    def agree(self, public: bytes) -> bytes:
        try:
            return super().agree(public)
        except PeerError:
            return bytes(32)


def members_of_low_order(server) -> bool:
    """Colluding members sign keys of low order: everyone knows the pads of their boxes."""
    session, victim = server.session, victim_of(server)
    for place, member in enumerate(session.members):
        key = bytes.fromhex(LOW_ORDER[place % len(LOW_ORDER)])
        signature = crypto.sign(enrolment_secret(member), sessions.advert_statement(session, member, key))
        server.adverts[place] = messages.Advert(key, signature)
    contribution = server.ask(victim)
    context, count = server.request.context, session.polynomials
    answers = {}
    for place, member in enumerate(session.members):
        pads = masks.pads(session, context, [(bytes(32), victim, member)])[0]
        answers[place] = Opened(pads[:count], pads[count : count + 1])
    return is_victims(server, server.add_up([(victim, contribution)], answers))


def test_keys_of_low_order_are_refused(monkeypatch):
    server = Server()
    monkeypatch.setattr(crypto, "Agreement", _Lax)
    with pytest.raises(PeerError, match="low order"):
        members_of_low_order(server)
    drop(monkeypatch, "require_order")
    assert members_of_low_order(server)


# --- what shares say ---


def share_equations(session, places):
    """Combinations of some members' shares from which all uniform values cancel, and what they say of the secret."""
    packed, openers = session.committee.packed, session.committee.openers
    matrix = fields.interpolation(np.arange(1, openers + 1), session.points[list(places)])
    return left_kernel(matrix[:, packed:]), matrix[:, :packed]


def left_kernel(matrix):
    """Vectors u with u M = 0, by elimination."""
    rows = np.hstack((matrix % PRIME, np.eye(len(matrix), dtype=np.int64)))
    row = 0
    for column in range(matrix.shape[1]):
        found = np.flatnonzero(rows[row:, column])
        if found.size:
            rows[[row, row + found[0]]] = rows[[row + found[0], row]]
            rows[row] = rows[row] * pow(int(rows[row, column]), -1, PRIME) % PRIME
            factors = rows[row + 1 :, column].copy()
            rows[row + 1 :] = (rows[row + 1 :] - factors[:, None] * rows[row]) % PRIME
            row += 1
    return rows[row:, matrix.shape[1] :]


def watch_secrets(monkeypatch) -> list:
    drawn, kept = [], masks.draw_secret
    monkeypatch.setattr(masks, "draw_secret", lambda *given: drawn.append(kept(*given)) or drawn[-1])
    return drawn


def stolen_shares(server, places, client, contribution):
    """The shares in the boxes of some members whose keys are known."""
    secrets = {place: server.federation.members[server.session.members[place]].secret for place in places}
    pads = [server.pads_of(secret, client, place, contribution.signed.key) for place, secret in secrets.items()]
    return (contribution.boxes[list(places)] - np.array(pads)) % PRIME


def colluders_learn(monkeypatch, server, colluders: int) -> int:
    """How many equations on the victim's secret the first colluders of the committee have."""
    session, victim = server.session, victim_of(server)
    drawn = watch_secrets(monkeypatch)
    contribution, places = server.ask(victim), range(colluders)
    shares = stolen_shares(server, places, victim, contribution)[:, : session.polynomials]
    kernel, on_secret = share_equations(session, places)
    packed = session.committee.packed
    columns = np.pad(drawn[-1], (0, packed * session.polynomials - session.secret)).reshape(-1, packed).T % PRIME
    said, true = kernel @ shares % PRIME, (kernel @ on_secret % PRIME) @ columns % PRIME
    assert np.array_equal(said, true)
    return said.size


def test_a_threshold_below_the_colluders_is_refused(monkeypatch):
    """One colluder more than the threshold learns an equation on every polynomial of the secret."""
    committee = small_committee(24)
    with pytest.raises(ConfigError, match="threshold must be its colluders"):
        make_session(24, committee=replace(committee, colluders=4, certificate=15))
    assert colluders_learn(monkeypatch, Server(), committee.threshold) == 0
    assert colluders_learn(monkeypatch, Server(), committee.threshold + 1) == 3


def test_one_uniform_value_too_few_gives_an_equation(monkeypatch):
    """The planted bug: polynomials of one degree less, while as many members collude as before."""
    server, short = Server(), small_committee(24)
    colluders = short.threshold
    planted = Server(make_session(24, committee=replace(short, threshold=colluders - 1), dimension=5))
    assert colluders_learn(monkeypatch, server, colluders) == 0
    assert colluders_learn(monkeypatch, planted, colluders) > 0


def test_two_certificates_must_share_an_honest_member():
    committee = small_committee(24)
    with pytest.raises(ConfigError, match="share an honest member"):
        make_session(24, committee=replace(committee, certificate=12))


# --- one opening ---


def with_and_without(server, victim) -> tuple[list, list]:
    rank, ranks = server.session.rank(victim), list(range(len(server.session.cohort)))
    return ranks, [each for each in ranks if each != rank]


def difference(server, first, second) -> np.ndarray:
    """Two halves of the committee have opened two sets of survivors."""
    sums = []
    for ranks, answers in (first, second):
        sums.append(server.add_up([(server.session.cohort[r], server.contributions[r]) for r in ranks], answers))
    return subtract(server.session, sums[0], sums[1])


def two_small_certificates(server) -> bool:
    """Each half of the committee is shown another set of survivors."""
    server.ask_all()
    members, victim = server.session.members, victim_of(server)
    opened = []
    for half, ranks in zip((members[::2], members[1::2]), with_and_without(server, victim), strict=True):
        survivors = server.survivors(ranks)
        opened.append((ranks, server.open(half, server.sign(half, survivors), len(ranks))))
    return is_victims(server, difference(server, *opened))


def test_half_a_committee_certifies_nothing(monkeypatch):
    with pytest.raises(PeerError, match="must have signed"):
        two_small_certificates(split_server())
    drop(monkeypatch, "require_certificate")
    assert two_small_certificates(split_server())


def signed_twice(server) -> bool:
    """All members sign both sets; each half opens one."""
    server.ask_all()
    members, victim = server.session.members, victim_of(server)
    whole, fewer = with_and_without(server, victim)
    signatures = server.sign(members, server.survivors(whole))
    first = whole, server.open(members[::2], signatures, len(whole))
    again = server.sign(members, server.survivors(fewer))
    second = fewer, server.open(members[1::2], again, len(fewer))
    return is_victims(server, difference(server, first, second))


def test_a_member_signs_one_set_of_survivors(monkeypatch):
    """Two guards, each enough by itself: its saved phase, and its log."""

    def forgetful() -> Server:
        server = split_server()
        server.federation.record = nothing
        return server

    with pytest.raises(PeerError, match="signs one set"):
        signed_twice(forgetful())
    drop(monkeypatch, "require_one_statement")
    with pytest.raises(PeerError, match="signs one set"):
        signed_twice(split_server())
    assert signed_twice(forgetful())


def seized_later(server) -> bool:
    """The states of all members are seized after they have opened a sum without the victim."""
    server.ask_all()
    session, victim = server.session, victim_of(server)
    _, fewer = with_and_without(server, victim)
    signatures = server.sign(session.members, server.survivors(fewer))
    server.open(session.members, signatures, len(fewer))
    secrets = {place: server.federation.members[member].secret for place, member in enumerate(session.members)}
    if not all(secrets.values()):
        return False
    contribution = server.contributions[session.rank(victim)]
    answers = opened_alone(server, secrets, victim, contribution)
    return is_victims(server, server.add_up([(victim, contribution)], answers))


def test_a_state_after_the_opening_holds_no_key(monkeypatch):
    assert not seized_later(Server())
    kept = Participant._open

    def keeping(self, member):
        said = kept(self, member)
        return replace(said, member=replace(said.member, secret=member.secret))

    monkeypatch.setattr(Participant, "_open", keeping)
    assert seized_later(Server())


def answered_twice(server) -> bool:
    """A restored client answers twice; each half of the committee is shown another key of it."""
    session, victim = server.session, victim_of(server)
    server.ask_all()
    rank, made = session.rank(victim), [server.federation.vector(victim)]
    server.federation.vectors = {victim: session.ring.uniform(Stream(digest("again")), session.dimension)}
    server.federation.seed = b"fresh coins"
    first, again = server.contributions[rank], server.ask(victim, keep=False)
    made.append(server.federation.vector(victim))
    opened, signatures, views = [], {}, (first, again)
    for half, view in zip((session.members[::2], session.members[1::2]), views, strict=True):
        server.contributions[rank] = view
        signatures |= server.sign(half, server.survivors())
    for half, view in zip((session.members[::2], session.members[1::2]), views, strict=True):
        server.contributions[rank] = view
        answers = server.open(half, signatures, len(session.cohort))
        parts = [(session.cohort[each], server.contributions[each]) for each in sorted(server.contributions)]
        opened.append(server.add_up(parts, answers))
    return np.array_equal(subtract(session, *opened), subtract(session, *made))


def test_a_client_that_answered_twice_is_opened_once(monkeypatch):
    with pytest.raises(PeerError, match="signature"):
        answered_twice(split_server())
    kept = sessions.opening_statement
    monkeypatch.setattr(
        sessions,
        "opening_statement",
        lambda session, context, nonce, keys: kept(session, context, nonce, dict.fromkeys(keys, b"")),
    )
    assert answered_twice(split_server())


def test_fresh_secrets_hide_two_answers_of_one_client():
    """The planted bug: secrets that follow from the context, in a client that is asked twice."""

    def bare(server, *, fresh: bool) -> bool:
        session, victim = server.session, victim_of(server)
        first, made = server.ask(victim), [server.federation.vector(victim)]
        server.federation.vectors = {victim: session.ring.uniform(Stream(digest("again")), session.dimension)}
        if fresh:
            server.federation.seed = b"fresh coins"
        again = server.ask(victim)
        made.append(server.federation.vector(victim))
        masked = (session.ring.unpack(each.vector, session.dimension) for each in (first, again))
        return np.array_equal(subtract(session, *masked), subtract(session, *made))

    assert not bare(Server(), fresh=True)
    assert bare(Server(), fresh=False)


# --- who is in the sum ---


def victim_and_colluders(server) -> bool:
    """A set of survivors below the quorum, all but one of them colluders, who say what they sent."""
    session, victim = server.session, victim_of(server)
    colluders = session.cohort[:2]
    for client in (victim, *colluders):
        server.ask(client)
    signatures = server.sign(session.members, server.survivors())
    answers = server.open(session.members, signatures, 3)
    parts = [(session.cohort[rank], server.contributions[rank]) for rank in sorted(server.contributions)]
    known = [server.federation.vector(client) for client in colluders]
    return is_victims(server, subtract(session, server.add_up(parts, answers), *known))


def test_a_sum_of_fewer_than_the_quorum_is_not_opened(monkeypatch):
    with pytest.raises(PeerError, match="must be left"):
        victim_and_colluders(Server())
    monkeypatch.setattr(lattice_client, "require_quorum", nothing)
    assert victim_and_colluders(Server())


def copied_keys(server) -> bool:
    """Colluders sign the victim's key as theirs, and the server counts the victim's boxes for them too."""
    session, victim = server.session, victim_of(server)
    server.ask_all()
    rank, colluders = session.rank(victim), (1, 2)
    contribution, context = server.contributions[rank], server.request.context
    for each in colluders:
        client, own = session.cohort[each], server.contributions[each]
        position = own.signed.position
        statement = sessions.contribution_statement(session, context, client, contribution.signed.key, position)
        signature = crypto.sign(enrolment_secret(client), statement)
        server.contributions[each] = replace(
            contribution, signed=SignedKey(contribution.signed.key, position, signature)
        )
    signatures = server.sign(session.members, server.survivors())
    answers = server.open(session.members, signatures, len(session.cohort))
    parts = [(session.cohort[each], server.contributions[each]) for each in range(len(session.cohort))]
    parts = [(victim if each in colluders else client, sent) for each, (client, sent) in enumerate(parts)]
    others = [server.federation.vector(client) for client, _ in parts if client != victim]
    left = subtract(session, server.add_up(parts, answers), *others)
    return np.array_equal(left, session.ring.wrap(3 * server.federation.vector(victim).astype(np.int64)))


def test_a_copied_key_gives_another_pad(monkeypatch):
    assert not copied_keys(Server())
    kept = masks.pads

    def unnamed(session, context, ends):
        return kept(session, context, [(shared, 0, member) for shared, _, member in ends])

    monkeypatch.setattr(masks, "pads", unnamed)
    assert copied_keys(Server())


# --- different views ---


def other_view(server, **shown) -> bool:
    """The victim is shown something else than the others; is it in one sum with them all the same?"""
    session, victim = server.session, victim_of(server)
    server.ask_all(victim)
    server.ask(victim, **shown)
    signatures = server.sign(session.members, server.survivors())
    places = shown.get("adverts", server.adverts)
    answers = server.open([session.members[place] for place in places], signatures, len(session.cohort))
    parts = []
    for rank in sorted(server.contributions):
        contribution = server.contributions[rank]
        if len(contribution.boxes) < len(server.adverts):  # boxes for fewer members than the others'
            boxes = np.zeros((len(server.adverts), contribution.boxes.shape[1]), np.int64)
            boxes[sorted(places)] = contribution.boxes
            contribution = replace(contribution, boxes=boxes)
        parts.append((session.cohort[rank], contribution))
    total = server.add_up(parts, answers)
    return np.array_equal(total, server.federation.expected(session.cohort))


def _context_without(part):
    def post_init(request):
        session = request.session
        keys = () if part == "members" else (request.keys[place] for place in sorted(request.keys))
        trained = b"" if part == "model" else request.model_digest, b"" if part == "task" else request.task
        object.__setattr__(request, "context", digest("d2pfed lattice context", session.digest, *keys, *trained))

    return post_init


@pytest.mark.parametrize("part", ["model", "task", "members"])
def test_clients_with_different_views_are_never_in_one_sum(monkeypatch, part):
    server = Server()
    fewer = {place: advert for place, advert in server.adverts.items() if place != 3}
    shown = {"model": {"model": b"another model"}, "task": {"task": b"another"}, "members": {"adverts": fewer}}[
        part
    ]
    with pytest.raises(PeerError, match="signature"):
        other_view(server, **shown)
    monkeypatch.setattr(Request, "__post_init__", _context_without(part))
    assert other_view(Server(), **shown)


@pytest.mark.parametrize("name", ["run", "round", "attempt", "plan_digest"])
def test_a_request_of_another_session_is_refused(monkeypatch, name):
    """Asked in the name of another attempt, a client would charge one and answer in the other."""
    server = Server()
    other = {"run": "another", "round": 4, "attempt": 1, "plan_digest": digest("a lax plan")}[name]
    session, client = replace(server.session, **{name: other}), victim_of(server)
    request = Request(session, server.request.keys, TASK, sessions.model_digest(MODEL))
    vouchers = server.vouched(server.adverts)
    data = messages.encode_request(request, request.session.rank(client), vouchers, None, None)
    with pytest.raises(PeerError, match="agreed session"):
        server.federation.answer("contribute", client, data)
    monkeypatch.setattr("d2pfed.secagg.checks.require_agreed", nothing)
    assert server.federation.answer("contribute", client, data)


def test_survivors_of_another_session_are_refused():
    server = Server()
    server.ask_all()
    other = replace(server.session, attempt=1)
    data = messages.encode_survivors(other, other.rank(server.session.members[0]), server.survivors())
    with pytest.raises(PeerError, match="another session"):
        server.federation.answer("agree", server.session.members[0], data)


def test_too_few_members_are_refused_before_the_charge(monkeypatch):
    server = Server()
    fewer = {place: server.adverts[place] for place in range(server.session.committee.openers - 1)}
    with pytest.raises(PeerError, match="members must be there"):
        server.ask(victim_of(server), adverts=fewer)
    drop(monkeypatch, "require_members")
    assert server.ask(victim_of(server), adverts=fewer)  # a charge for what nobody can open


def test_another_model_than_the_request_names_is_refused(monkeypatch):
    server, client = Server(), victim_of(Server())
    vouchers = server.vouched(server.adverts)
    data = messages.encode_request(server.request, server.session.rank(client), vouchers, None, None)
    with pytest.raises(PeerError, match="request names"):
        server.federation.answer("contribute", client, data, b"another model")
    drop(monkeypatch, "require_model")
    assert server.federation.answer("contribute", client, data, b"another model")


BAD_REQUESTS = {
    "session": lambda server: ({}, replace(server.session, attempt=1)),
    "members": lambda server: ({place: server.adverts[place] for place in range(10)}, server.session),
    "adverts": lambda server: (
        forged_adverts(server, dict.fromkeys(server.adverts, bytes(31) + b"x")),
        server.session,
    ),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
def test_nothing_is_charged_for_a_request_that_is_refused(bad):
    server, charged = Server(), []
    adverts, session = BAD_REQUESTS[bad](server)
    adverts, client = adverts or server.adverts, victim_of(server)
    keys = {place: advert.key for place, advert in adverts.items()}
    request = Request(session, keys, TASK, sessions.model_digest(MODEL))
    body = messages.decode_request(
        messages.encode_request(request, request.session.rank(client), server.vouched(server.adverts), None, None),
        None,
    )
    with pytest.raises(PeerError):
        server.federation.participant(client).contribute(
            body, MODEL, lambda *given: charged.append(given), Entropy.replay(b"any")
        )
    assert not charged


# --- clients that were put back ---


def rolled_back(server, **known) -> bool:
    """A client contributes from an older log than a member has met it with."""
    server.ask_all()
    return len(server.sign(server.session.members, server.survivors())) == len(server.session.members)


def remembering(count: int) -> Server:
    server = Server()
    victim, roster = victim_of(server), server.federation.roster
    known = {member: {victim: position_of(victim, count, roster)} for member in server.session.members}
    return Server(known=known)


def test_members_notice_a_client_that_was_put_back(monkeypatch):
    assert rolled_back(remembering(1))
    with pytest.raises(PeerError, match="met later"):
        rolled_back(remembering(2))
    monkeypatch.setattr(checks, "not_later", lambda *_given: {})
    assert rolled_back(remembering(2))


def test_a_position_that_its_owner_did_not_sign_stops_nobody(monkeypatch):
    """A colluder could otherwise plant one in members' memories, and no server could read their claims."""

    def planted():
        server = remembering(9)
        for member, state in server.federation.members.items():
            known = {rank: replace(position, signature=bytes(64)) for rank, position in state.known.items()}
            server.federation.members[member] = replace(state, known=known)
        return server

    assert rolled_back(planted())
    monkeypatch.setattr(checks, "is_own", lambda *_given: True)
    with pytest.raises(PeerError, match="met later"):
        rolled_back(planted())


def charged_and_put_back(server) -> bool:
    """The server shows a client the position with which it contributed, and the client's log lacks the charge."""
    victim = victim_of(server)
    sent = server.ask(victim)
    return bool(server.ask(victim, remembered=sent.signed.position))


def test_a_client_put_back_to_before_its_charge_notices(monkeypatch):
    with pytest.raises(RolledBack):
        charged_and_put_back(Server())
    server = Server()
    kept = server.federation.position
    server.federation.position = lambda client, _after=0: kept(client)  # the planted bug: signed before the charge
    with pytest.raises(ConfigError, match="after its charge"):
        charged_and_put_back(server)
    drop(monkeypatch, "require_after_charge")
    assert charged_and_put_back(server)


def test_a_position_of_the_server_that_the_log_lacks_is_refused(monkeypatch):
    server = Server()
    later = position_of(victim_of(server), 5, server.federation.roster)
    with pytest.raises(RolledBack):
        server.ask(victim_of(server), remembered=later)
    monkeypatch.setattr(lattice_client, "require_in_chain", nothing)
    assert server.ask(victim_of(server), remembered=later)


# --- what masks a vector ---


def opened_honestly(server):
    """All contribute and all members open; returns each client's vector without its veil, by rank."""
    session = server.session
    server.ask_all()
    signatures = server.sign(session.members, server.survivors())
    answers = server.open(session.members, signatures, len(session.cohort))
    bare, count = {}, session.polynomials
    for rank, contribution in server.contributions.items():
        words = contribution.boxes[:, count] - np.array([answers[place].seeds[rank] for place in range(24)])
        seed = fields.pack(server.seed_of(session.points, words % PRIME))
        vector = session.ring.unpack(contribution.vector, session.dimension)
        session.ring.add_masks_into(vector, [], [masks.veil(server.request.context, session.cohort[rank], seed)])
        bare[rank] = vector
    return bare


def test_a_survivors_vector_stays_behind_its_secret(monkeypatch):
    server = Server()
    rank = server.session.rank(victim_of(server))
    assert not is_victims(server, opened_honestly(server)[rank])
    monkeypatch.setattr(masks, "add_product", nothing)
    assert is_victims(server, opened_honestly(server)[rank])


def solve(session, context, values):
    """A secret with A s = values modulo 2^bits in all of these coordinates, by elimination; None if there is none."""
    modulus, count, length = session.ring.modulus, len(values), session.secret
    words = np.empty((count, length), session.ring.mask_word)
    Stream(derive(context, "d2pfed lattice matrix")).fill(words)
    rows = np.hstack((words.astype(np.int64), values[:, None].astype(np.int64))) % modulus
    for column in range(length):
        odd = np.flatnonzero(rows[column:, column] % 2)
        if not odd.size:
            return None
        rows[[column, column + odd[0]]] = rows[[column + odd[0], column]]
        rows[column] = rows[column] * pow(int(rows[column, column]), -1, modulus) % modulus
        factors = rows[:, column].copy()
        factors[column] = 0
        rows = (rows - factors[:, None] * rows[column]) % modulus
    return None if rows[length:, length].any() else rows[:length, length]


def test_coordinates_without_noise_give_the_secret():
    """Why every coordinate needs noise: a few more of them than the secret has numbers are a linear system."""
    session = make_session(24, secret=24, dimension=41)
    quiet = 36

    def attack(*, noisy: bool) -> bool:
        server = Server(session)
        victim, rank = victim_of(server), session.rank(victim_of(server))
        vector = server.federation.vector(victim).copy()
        vector[:quiet] = session.ring.uniform(Stream(digest("noise")), quiet) % 8 if noisy else 0
        server.federation.vectors = {victim: vector}
        bare = opened_honestly(server)[rank]
        secret = solve(session, server.request.context, bare[:quiet])
        if secret is None:
            return False
        masks.add_product(session, server.request.context, bare, -secret)
        return np.array_equal(bare, vector)

    assert not attack(noisy=True)
    assert attack(noisy=False)


# --- traces ---


def traced_words(server, rank: int):
    """What a trace says of one client, at all members, and the coefficients that were used."""
    session = server.session
    server.ask_all()
    survivors = server.survivors()
    signatures = server.sign(session.members, survivors)
    server.open(session.members, signatures, len(session.cohort))
    keys = {each: signed.key for each, signed in survivors.signed.items()}
    statement = sessions.opening_statement(session, survivors.context, survivors.nonce, keys)
    coefficients = np.append(sessions.trace_coefficients(session, statement), (0, 1))
    said = np.array([server.trace(member, len(session.cohort))[rank] for member in session.members])
    return (server.contributions[rank].boxes @ coefficients - said) % PRIME, coefficients


def trace_opens(monkeypatch, server) -> bool:
    """Does the victim's traced word show combinations of its secret?"""
    session, drawn = server.session, watch_secrets(monkeypatch)
    rank, packed, openers = session.rank(victim_of(server)), session.committee.packed, session.committee.openers
    words, coefficients = traced_words(server, rank)
    matrix = fields.interpolation(session.points[:openers], np.arange(1, packed + 1))
    shown = fields.multiply(matrix, words[:openers, None])[:, 0]
    columns = drawn[rank].reshape(session.polynomials, packed) % PRIME
    return np.array_equal(shown, coefficients[: session.polynomials] @ columns % PRIME)


def test_a_trace_says_nothing_of_a_secret(monkeypatch):
    assert not trace_opens(monkeypatch, Server())
    kept = masks.split

    def unblinded(*given):
        shares = kept(*given)
        shares[:, -1] = 0
        return shares

    monkeypatch.setattr(masks, "split", unblinded)
    assert trace_opens(monkeypatch, Server())


def test_coefficients_of_a_trace_are_the_same_for_all_members(monkeypatch):
    """With others for each member, combinations in which the blinding cancels say something of the secret's shares."""

    def combined(server) -> np.ndarray:
        session = server.session
        words, _ = traced_words(server, 5)
        openers = session.committee.openers
        powers = np.array(
            [[pow(int(point), degree, PRIME) for degree in range(openers)] for point in session.points]
        )
        return left_kernel(powers) @ words % PRIME  # zero for every polynomial of the right degree

    assert not combined(Server()).any()
    kept, asked = sessions.trace_coefficients, iter(range(10_000))
    monkeypatch.setattr(
        sessions, "trace_coefficients", lambda session, statement: kept(session, digest(statement, next(asked)))
    )
    assert combined(Server()).any()


def test_a_member_traces_only_what_it_has_opened(monkeypatch):
    server = Server()
    server.ask_all()
    member = server.session.members[0]
    server.agree(member, server.survivors())
    with pytest.raises(PeerError, match="traces what it has opened"):
        server.trace(member, 24)
    with pytest.raises(PeerError, match="at least 13 members must have signed"):
        server.open([member], {}, 24)


def test_nothing_is_certified_or_vouched_for_where_nobody_is_enrolled():
    """A server's bytes: a refusal of them is final for a member, and an error of configuration is not."""
    server = Server(make_session(24, signed=False, dimension=5))
    session, member = server.session, server.session.members[0]
    own, packed = server.federation.participant(member), messages.pack_adverts(session, server.adverts)
    with pytest.raises(PeerError, match="nobody is enrolled"):
        own.open(server.federation.members[member], b"")
    with pytest.raises(PeerError, match="nobody is enrolled"):
        own.vouch(wire.message(session, MessageKind.LATTICE_ADVERTS, session.rank(member), packed))


def test_a_committee_of_two_halves_is_what_the_scripts_say():
    committee = split_server().session.committee
    assert committee == Committee(34, 1, 16, 18, 0)
    assert 2 * committee.openers <= committee.size
