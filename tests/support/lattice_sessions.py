"""Random sessions of the lattice protocol: any size and ring, dropouts anywhere, members and clients that cheat."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from unittest.mock import patch

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import crypto, heads
from d2pfed.secagg.lattice import checks, masks, messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.parameters import Committee, choose_committee
from d2pfed.secagg.lattice.session import SEED_ELEMENTS, Session
from d2pfed.secagg.wire import HEADER_BYTES
from support.lattice import EXCHANGES, LatticeFederation, certified, make_session

CHEATS = ("sums", "seeds", "sums and traces", "boxes", "commitment")
LEAST_SIZE = 19  # a polynomial packs 16 numbers, one value hides them, and two members are to spare
VOIDS = {  # what an attempt is void for, by the words of its error
    "absent": "members of the committee must be there",
    "quorum": "clients must be left",
    "unsigned": "members must sign the survivors",
    "closed": "members must open a sum",
    "dispute": "members in dispute with nobody",
    "unfit": "sums of pads that do not fit together",
    "seed": "a seed is not the one",
    "long": "a sum of secrets must be within",
}

public_of = lru_cache(maxsize=1 << 12)(crypto.signing_public)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Hashes in the place of key agreement, signatures and pads; what all clients are sent is read and checked once.

    Sums and blame are none the wiser. Keys of low order are refused as ever.
    """

    def begin(own: crypto.Agreement, secret: bytes) -> None:
        own.public = sha256(secret).digest()
        own._number = int.from_bytes(own.public, "little")

    def agree(own: crypto.Agreement, public: bytes) -> bytes:
        return (own._number ^ int.from_bytes(public, "little")).to_bytes(32, "little")

    def sign(secret: bytes, statement: bytes) -> bytes:
        return 2 * sha256(public_of(secret) + statement).digest()

    def require_signature(public: bytes, signature: bytes, statement: bytes) -> None:
        if signature != 2 * sha256(public + statement).digest():
            raise PeerError("a signature does not match its statement")

    def pads(session: Session, context: bytes, ends: Iterator[tuple[bytes, int, int]]) -> np.ndarray:
        listed = list(ends)
        seeds = np.frombuffer(b"".join(shared[:8] for shared, _, _ in listed), "<u8")
        named = np.array([client * 0x9E3779B1 + member for _, client, member in listed], np.uint64)
        steps = np.frombuffer(context[:8], "<u8") * np.arange(1, session.polynomials + 3, dtype=np.uint64)
        words = (seeds + named * np.uint64(0xD1342543DE82EF95))[:, None] ^ steps
        for shift in (30, 27):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
        return ((words >> np.uint64(31)) % np.uint64(PRIME)).astype(np.int64)

    kept, current = dict[tuple[object, ...], object](), list[bytes]()

    def once(work: Callable[..., object], name: Callable[..., tuple[object, ...]]) -> Callable[..., object]:
        """Remember a result, and its arguments, for as long as a session lasts."""

        def remembered(first: object, *rest: object) -> object:
            key = work, *name(first, *rest)
            if key not in kept:
                kept[key] = work(first, *rest), rest
            return kept[key][0]

        return remembered

    def fresh(session: Session) -> bytes:
        if current != [session.digest]:
            kept.clear()
            current[:] = [session.digest]
        return session.digest

    def last(_first: object, *rest: object) -> tuple[object, ...]:
        return (id(rest[-1]),)  # equal objects were read once, and are one

    hashing = lru_cache(maxsize=1 << 14)(digest)  # every client hashes what every other has signed
    replaced = {
        crypto: {"sign": sign, "require_signature": require_signature, "signing_public": public_of},
        crypto.Agreement: {"__init__": begin, "agree": agree},
        masks: {"pads": pads},
        messages: {
            "decode_adverts": once(
                messages.decode_adverts, lambda *given: (fresh(given[0]), given[2][HEADER_BYTES:])
            ),
            "read_request": once(messages.read_request, lambda session, body: (fresh(session), body.rest)),
            "decode_survivors": once(messages.decode_survivors, lambda *given: (given[2][HEADER_BYTES:],)),
            "decode_certificate": once(messages.decode_certificate, lambda *given: (given[2][HEADER_BYTES:],)),
        },
        checks: {
            name: once(getattr(checks, name), last)
            for name in ("require_adverts_signed", "require_contributions_signed", "require_certificate")
        },
        heads: {"digest": hashing, "require_certified": once(heads.require_certified, last)},
        sessions: {"digest": hashing},
    }
    certified.cache_clear()  # what hashes have signed, and what was signed in earnest, is of no use to the other
    with ExitStack() as stack:
        for target, changes in replaced.items():
            stack.enter_context(patch.multiple(target, **changes))
        yield
    certified.cache_clear()


def draw_session(stream: Stream, size: int | None) -> Session:
    """A session of 19 to 80 clients, small ones more often, of whom up to three collude.

    Most committees are as small as can open anything; the others are those that the rule chooses, from 23 clients on.
    """
    by_rule = size is not None or stream.below(8) == 0
    if size is None:
        size = (23 if by_rule else LEAST_SIZE) + min(stream.below(58) for _ in range(3 if by_rule else 8))
    way = ({}, {"by_slot": True}, {"signed": False})[stream.below(3)]
    colluders = stream.below(4 if by_rule else min(4, size - 17))
    return make_session(
        size,
        dropouts=Fraction(1, 24 if size > 64 and stream.below(2) else 12),  # a committee smaller than the cohort
        colluders=colluders,
        bits=1 + stream.below(20),
        dimension=1 + stream.below(40),
        secret=(48 if size > 64 else 16) + stream.below(40),  # a smaller committee packs 48 numbers
        attempt=stream.below(1000),
        committee=None if by_rule else draw_committee(stream, size, colluders),
        **way,
    )


def draw_committee(stream: Stream, size: int, colluders: int) -> Committee:
    """A committee that packs 16 numbers, with at most six members to spare for the missing and for liars."""
    threshold = max(1, colluders)
    members = min(size, 18 + threshold + stream.below(7))
    return Committee(members, threshold, 16, (members + colluders) // 2 + 1, colluders)


@dataclass
class Fates:
    """What becomes of a session: who is lost from which exchange on, who cheats how, and whose boxes are spoilt."""

    federation: LatticeFederation
    stream: Stream
    lost: dict[int, str] = field(default_factory=dict)
    cheats: dict[int, str] = field(default_factory=dict)
    spoilt: dict[int, set[int]] = field(default_factory=dict)  # by client: the places of boxes that it has changed

    def __post_init__(self) -> None:
        session, stream = self.federation.session, self.stream
        clients = [self.federation.identity(name) for name in session.cohort]
        self.members = [self.federation.identity(name) for name in session.members]
        # About one in a session, sometimes too many.
        self.lost = {each: EXCHANGES[stream.below(4)] for each in clients if stream.below(24) == 0}
        cheats = stream.subset(len(clients), stream.below(session.colluders + 1))
        self.cheats = {clients[rank]: CHEATS[stream.below(len(CHEATS))] for rank in cheats}
        self.survivors = [each for each in clients if not self.is_gone(each, "contribute")]

    def is_gone(self, client: int, exchange: str) -> bool:
        return client in self.lost and EXCHANGES.index(self.lost[client]) <= EXCHANGES.index(exchange)

    def places(self, exchange: str, *cheats: str) -> set[int]:
        """The members that are there in an exchange; those that cheat so, if ways to cheat are given."""
        there = enumerate(self.members)
        return {
            place
            for place, member in there
            if not self.is_gone(member, exchange) and (not cheats or self.cheats.get(member) in cheats)
        }

    def loss(self, exchange: str, client: int, answer: bytes) -> bytes | None:
        if self.is_gone(client, exchange):
            return None
        cheat, session, rank = self.cheats.get(client), self.federation.session, self.federation.rank(client)
        if exchange == "contribute" and cheat in ("boxes", "commitment"):
            present = sorted(self.places("convene"))
            said = messages.decode_contribution(session, rank, len(present), answer)
            if cheat == "commitment":
                return messages.encode_contribution(session, rank, replace(said, commitment=bytes(32)))
            rows = self.stream.subset(len(present), 1 + self.stream.below(8))
            said.boxes[rows] = (said.boxes[rows] + self._noise(len(rows))[:, None]) % PRIME
            self.spoilt[client] = {present[row] for row in rows}
            return messages.encode_contribution(session, rank, said)
        count = len(self.survivors)
        if exchange == "trace" and cheat == "sums and traces":
            said = messages.decode_trace(session, rank, count, answer)
            return messages.encode_trace(session, rank, (said + self._noise(count)) % PRIME)
        if exchange == "open" and cheat in ("sums", "seeds", "sums and traces"):
            said = messages.decode_opening(session, rank, count, answer)
            if cheat == "seeds":
                said = replace(said, seeds=(said.seeds + self._noise(count)) % PRIME)
            else:
                said = replace(said, sums=(said.sums + self._noise(1)) % PRIME)
            return messages.encode_opening(session, rank, said)
        return answer

    def _noise(self, count: int) -> np.ndarray:
        return 1 + self.stream.below_each(PRIME - 1, count)

    def foretold(self) -> str:
        """How the session must end: `sum`, or one of `VOIDS`; but for a lie that fits by chance, one in thousands."""
        session, committee = self.federation.session, self.federation.session.committee
        there = self.places("open")
        if len(self.places("convene")) < committee.least:
            return "absent"
        if len(self.survivors) < session.quorum:
            return "quorum"
        if session.is_signed and len(self.places("agree")) < committee.certificate:
            return "unsigned"
        if len(there) < committee.openers:
            return "closed"
        spoilt = [self.spoilt.get(client, set()) & there for client in self.survivors]
        liars = self.places("open", "sums", "sums and traces").union(*spoilt)
        first = self._opened(there, liars, spoilt)
        if first in ("sum", "long"):
            return first
        spare, disputed = len(there) - committee.openers, set[int]()
        if spare:  # else every word fits
            traces = self.places("open", "sums and traces")
            if any(2 * len(traces | places) > spare for places in spoilt):
                return "dispute"
            disputed = traces.union(*spoilt)
        if len(disputed) > spare:
            return "dispute"
        return self._opened(there - disputed, liars - disputed, spoilt)

    def _opened(self, left: set[int], liars: set[int], spoilt: list[set[int]]) -> str:
        """How it ends by the answers of some members, of whom some have wrong sums."""
        committee = self.federation.session.committee
        spare = len(left) - committee.openers
        if 2 * len(liars) > spare > 0:
            return "unfit"
        left = left - liars if spare else left
        spare_of_seeds = len(left) - SEED_ELEMENTS - committee.threshold
        false = self.places("open", "seeds") & left
        is_false = any(2 * len(false | (places & left)) > spare_of_seeds for places in spoilt)
        if is_false or any(self.cheats.get(client) == "commitment" for client in self.survivors):
            return "seed"
        return "long" if liars & left else "sum"

    def blame(self, outcome: str) -> set[int] | None:
        """Who must be named where one client cheats and the attempt comes as far; None: any cheats, or nobody."""
        if outcome not in ("sum", "dispute", "unfit", "seed", "long") or len(self.cheats) != 1:
            return None
        (client, cheat), committee = next(iter(self.cheats.items())), self.federation.session.committee
        if outcome == "sum" and cheat == "seeds" and self.members.count(client) and client not in self.lost:
            spare = len(self.places("open")) - SEED_ELEMENTS - committee.threshold
            return {client} if spare // 2 >= committee.colluders else set()
        is_shown = (cheat == "boxes" and outcome in ("dispute", "seed")) or (
            cheat == "commitment" and outcome == "seed"
        )
        return {client} if is_shown else set()


def run_lattice(seed: int, size: int | None = None) -> str:
    """Run one session and return how it ended; a wrong sum, another end than foretold or wrong blame fails.

    One in fifty has fewer clients than can open anything: it is refused. `by chance`: a lie that fitted, where another
    void was foretold.
    """
    stream = Stream(digest("lattice session", seed))
    if size is None and stream.below(50) == 0:
        return refused(3 + stream.below(LEAST_SIZE - 3))
    session = draw_session(stream, size)
    federation = LatticeFederation(session, seed=digest(seed))
    federation.participant = lru_cache(None)(federation.participant)
    fates = Fates(federation, stream)
    federation.loss = fates.loss
    try:
        agreeing = federation.gather()
        opened = federation.open(agreeing)
        outcome, blamed, suspected = "sum", set(opened.blamed), set[int]()
        assert list(agreeing.survivors) == fates.survivors, f"{seed}: {agreeing.survivors} survived"
        assert np.array_equal(opened.vector, federation.expected(agreeing.survivors)), f"{seed}: wrong sum"
    except TooFewClients as void:
        outcome = next(name for name, words in VOIDS.items() if words in str(void))
        blamed, suspected = set(void.blamed), set(void.suspected)
    foretold = fates.foretold()
    if outcome != foretold:
        assert fates.cheats, f"{seed}: {outcome}"
        assert outcome in ("sum", "dispute", "unfit", "seed", "long"), f"{seed}: {outcome}, not {foretold}"
        return f"by chance, {foretold}, {outcome}"
    assert blamed <= set(fates.cheats), f"{seed}: {blamed} blamed for {fates.cheats}"
    must = fates.blame(outcome)
    named = blamed | suspected
    assert must is None or named == must, f"{seed}: {named} named for {fates.cheats}, {outcome}"
    return outcome


def refused(size: int) -> str:
    """A cohort that no committee opens: neither the rule nor a session takes it."""
    try:
        choose_committee(size, Fraction(0), 16, population=size, colluding=0, draws=0)
    except ConfigError:
        pass
    else:
        raise AssertionError(f"a committee of {size}")
    try:
        make_session(size, committee=Committee(size, 1, SEED_ELEMENTS, size // 2 + 1, 0))
    except ConfigError:
        return "refused"
    raise AssertionError(f"a session of {size}")
