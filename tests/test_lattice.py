"""The lattice protocol between honest clients: sums are right whoever vanishes, and nothing opens with too few."""

import numpy as np
import pytest

from campaign_secagg import lattice
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream, derive, digest
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks, messages
from d2pfed.secagg.lattice.client import Participant
from d2pfed.secagg.lattice.opening import Opener
from d2pfed.secagg.lattice.parameters import Committee
from d2pfed.secagg.lattice.server import Convening, Invitations
from d2pfed.secagg.lattice.session import model_digest
from d2pfed.secagg.wire import MessageKind, frame
from support.federation import MODEL, enrol
from support.lattice import EXCHANGES, LatticeFederation, make_session, quick
from support.lattice_sessions import run_lattice


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


WAYS = {"signed": {}, "by slot": {"by_slot": True}, "assumed": {"signed": False}}


@pytest.mark.parametrize(("size", "way"), [*((24, way) for way in WAYS), (66, "assumed")])
def test_the_sum_is_that_of_the_survivors(size, way):
    federation = LatticeFederation(make_session(size, **WAYS[way]))
    agreeing = federation.gather()
    assert agreeing.survivors == tuple(map(federation.identity, federation.session.cohort))
    opened = federation.open(agreeing)
    assert np.array_equal(opened.vector, federation.expected(agreeing.survivors))
    assert opened.blamed == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exchange", EXCHANGES[:5])
def test_a_tenth_may_vanish_at_any_exchange(exchange, way):
    session = make_session(24, **WAYS[way])
    federation = LatticeFederation(session)
    gone = tuple(map(federation.identity, session.members[::12]))
    federation.loss = lambda name, client, answer: None if name == exchange and client in gone else answer
    agreeing = federation.gather()
    assert len(agreeing.survivors) == (22 if exchange == "contribute" else 24)
    assert np.array_equal(federation.open(agreeing).vector, federation.expected(agreeing.survivors))


ENDS = (
    "members of the committee must be there",
    "members must vouch",
    "clients must be left",
    "must sign",
    "members must open a sum",
)


@pytest.mark.parametrize(("exchange", "reason"), list(zip(EXCHANGES[:5], ENDS, strict=True)))
def test_an_attempt_ends_when_too_few_are_left(exchange, reason):
    session = make_session(24)
    left = set(session.members[: session.committee.threshold])
    federation = LatticeFederation(
        session, loss=lambda name, client, answer: None if name == exchange and client not in left else answer
    )
    with pytest.raises(TooFewClients, match=reason):
        federation.open(federation.gather())


def test_random_sessions_give_the_right_sum():
    assert "sum" in {run_lattice(seed) for seed in range(6)}


def test_the_campaign_notices_a_wrong_sum(monkeypatch):
    kept = Opener._unmask
    monkeypatch.setattr(Opener, "_unmask", lambda self, seeds: kept(self, seeds) ^ 1)
    with pytest.raises(AssertionError, match="wrong sum"):
        lattice(3)


def test_the_campaign_notices_an_end_without_a_reason(monkeypatch):
    monkeypatch.setattr(Opener, "_leave_out_liars", lambda _self: False)
    with pytest.raises(AssertionError, match="unfit"):
        lattice(20)


def test_the_campaign_notices_a_cheat_that_nobody_is_blamed_for(monkeypatch):
    monkeypatch.setattr(Opener, "_void", lambda _self, text: TooFewClients(text))
    with pytest.raises(AssertionError, match="named for"):
        lattice(200)


def test_a_contribution_has_the_size_that_is_planned():
    session = make_session(24)
    sizes = set()

    def loss(name, _client, answer):
        if name == "contribute":
            sizes.add(len(answer))
        return answer

    LatticeFederation(session, loss=loss).gather()
    assert sizes == {messages.contribution_bytes(session, session.committee.size)}


def test_a_vector_for_another_model_is_never_in_the_sum():
    session = make_session(24)
    federation = LatticeFederation(session)
    honest, victim = federation.answer, session.cohort[4]
    federation.answer = lambda name, client, data: honest(
        name, client, data, b"another" if client == victim else b"the model of this round"
    )
    agreeing = federation.gather()
    assert victim not in agreeing.survivors
    assert "the one that the request names" in str(federation.refused["contribute"][victim])


@pytest.mark.parametrize("count", [0, 5])
def test_the_shares_of_a_thresholds_members_are_uniform(count):
    """Whatever is shared, the uniform values map onto the shares of any `threshold` members one to one."""
    session = make_session(40)
    threshold, openers = session.committee.threshold, session.committee.openers
    chosen = np.sort(Stream(digest("members", count)).permutation(40)[:threshold])
    uniform = np.arange(session.committee.packed + 1, openers + 1)
    matrix = fields.interpolation(np.arange(1, openers + 1), session.points[chosen])[:, uniform - 1]
    assert rank(matrix) == threshold
    short = fields.interpolation(np.arange(1, openers + 1), session.points[chosen])[:, uniform[1:] - 1]
    assert rank(short) < threshold  # the planted bug: one uniform value too few


def test_random_polynomials_have_a_uniform_value_for_each_of_the_threshold():
    """Read back from the shares: what is shared is the same in two draws, all else is fresh."""
    session = make_session(40)
    committee, count = session.committee, session.polynomials
    secret, seed = np.arange(-24, 24), np.arange(16)
    known = session.points[: committee.openers]
    matrix = fields.interpolation(known, np.arange(1, committee.openers + 1))
    drawn = []
    for name in ("one", "two"):
        shares = masks.split(session, secret, seed, Stream(digest(name)))
        drawn.append(fields.multiply(matrix, shares[: committee.openers]))
    fresh = drawn[0] != drawn[1]
    padded = np.pad(secret % fields.PRIME, (0, committee.packed * count - 48)).reshape(count, -1).T
    assert np.array_equal(drawn[0][: committee.packed, :count], padded)
    assert np.array_equal(drawn[0][:16, count], seed)
    assert not fresh[: committee.packed, :count].any()
    assert fresh[committee.packed :, :count].all()
    assert fresh[16 : 16 + committee.threshold, count].all()
    assert fresh[:, count + 1].all()


def test_a_member_that_does_not_sign_says_why():
    session = make_session(24)
    member = session.members[0]
    data = frame(MessageKind.LATTICE_SIGNATURE, session.digest, member, bytes(64), bytes(3))
    with pytest.raises(PeerError, match="must show the later positions"):
        messages.decode_signature(session, session.rank(member), data)


def rank(matrix) -> int:
    matrix, found = matrix.copy() % fields.PRIME, 0
    for column in range(matrix.shape[1]):
        rows = np.flatnonzero(matrix[found:, column])
        if not rows.size:
            continue
        matrix[[found, found + rows[0]]] = matrix[[found + rows[0], found]]
        matrix[found] = matrix[found] * pow(int(matrix[found, column]), -1, fields.PRIME) % fields.PRIME
        for row in range(found + 1, len(matrix)):
            matrix[row] = (matrix[row] - matrix[row, column] * matrix[found]) % fields.PRIME
        found += 1
        if found == len(matrix):
            break
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quorum": 1}, "quorum must be in"),
        ({"dimension": 0}, "dimension"),
        ({"members": (7, 10)}, "a committee must be"),
        ({"run": ""}, "a run"),
        ({"plan_digest": b""}, "a digest must have"),
        ({"bits": 21}, "bits must be in"),
        ({"secret": 0, "committee": Committee(24, 3, 16, 13, 0)}, "a secret must have"),
        ({"signed": False, "draw": 1}, "only a roster's cohorts"),
        ({"round": -1}, "counters"),
        ({"cohort": (5, 3)}, "strictly increasing"),
        ({"cohort": (5, 5)}, "strictly increasing"),
        ({"cohort": (3, 1 << 64)}, "identities must be in"),
        ({"committee": Committee(24, 3, 21, 13, 0)}, "an attempt needs 26 members"),
        ({"committee": Committee(24, 3, 15, 13, 0)}, "16 numbers must be packed"),
        ({"committee": Committee(24, 3, 16, 25, 0)}, "share an honest member"),
    ],
)
def test_a_session_is_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_session(24, **changes)


def test_who_takes_part_fits_the_session():
    signed, open_to_all = make_session(24), make_session(24, signed=False)
    own = LatticeFederation(signed).participant(7)
    assert own.client == 7
    for session, enrolment, reason in (
        (signed, None, "needs an enrolment"),
        (open_to_all, own.enrolment, "nobody signs"),
        (make_session(24, roster_digest=digest("another")), own.enrolment, "got another one"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Participant(session, 7, enrolment, own.history)
    with pytest.raises(ConfigError, match="not in the cohort"):
        Participant(open_to_all, 8)
    with pytest.raises(ConfigError, match="no other has one"):
        Invitations(session=signed, roster=enrol((1, 2, 3)))


def test_the_server_learns_where_clients_stand():
    session = make_session(24)
    federation = LatticeFederation(session)
    convening = Convening(Invitations(session=session, roster=federation.roster, excluded=session.cohort[:1]))
    federation.collect("convene", convening)
    vouching = convening.close()
    federation.collect("vouch", vouching)
    contributing = vouching.close(b"", model_digest(MODEL))
    federation.collect("contribute", contributing)
    assert {client: position.count for client, position in contributing.positions.items()} == dict.fromkeys(
        session.cohort[1:], 2
    )


def test_nobody_signs_where_nobody_is_enrolled():
    federation = LatticeFederation(make_session(24, signed=False))
    agreeing = federation.gather()
    assert len(agreeing.outbox) == 0
    with pytest.raises(PeerError, match="was not asked"):
        agreeing.receive(federation.session.members[0], b"")


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 16, 17, 20])
def test_the_kernel_multiplies_as_whole_numbers_do(bits):
    session = make_session(24, bits=bits, secret=19, dimension=11)
    secret = np.arange(-9, 10) * 7
    total = session.ring.uniform(Stream(digest("start")), 11)
    word = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<u4")}[session.ring.mask_word.itemsize]
    words = np.frombuffer(
        Stream(derive(bytes(32), "d2pfed lattice matrix")).bytes(11 * 19 * np.dtype(word).itemsize), word
    )
    rows = [[int(number) for number in row] for row in words.reshape(11, 19)]
    expected = [
        (int(start) + sum(a * int(s) for a, s in zip(row, secret, strict=True))) % 2**bits
        for start, row in zip(total, rows, strict=True)
    ]
    masks.add_product(session, bytes(32), total, secret)
    assert total.tolist() == expected


def test_an_element_above_the_prime_is_refused():
    with pytest.raises(PeerError, match="below 65521"):
        fields.unpack(b"\xff\xff")
