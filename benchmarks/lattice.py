"""What the lattice protocol costs beside pair masks and Flower: the server in full, one client and one member in full.

A helper plays all other clients and members. It knows their secrets, so that boxes between them hide nothing, and it
masks the first coordinates only: those are held against the true sum. What server, client and member do is what they
would do among real ones.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from statistics import median

import numpy as np

from benchmarks.crowd import CHECKED, enrolled, signing_secret
from benchmarks.deployment import DeploymentGoal
from benchmarks.flower_secagg import FlowerCost, estimate_flower, measure_flower
from benchmarks.peers import attempt
from benchmarks.scales import Scale
from benchmarks.secagg import Cost, crowd_cost
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import Consistency, ServerPhase, crypto, wire
from d2pfed.secagg.draws import DrawTree
from d2pfed.secagg.heads import Certified, CertifiedRoster, SlotEnrolment, certify, head_of
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks, messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.client import Member, Participant
from d2pfed.secagg.lattice.field import PRIME, Elements
from d2pfed.secagg.lattice.messages import Contribution, Opened, SignedKey
from d2pfed.secagg.lattice.parameters import choose_committee, secret_length
from d2pfed.secagg.lattice.server import Convening, Invitations, Tracing
from d2pfed.secagg.lattice.session import SEED_ELEMENTS, Session
from d2pfed.secagg.roster import Position, sign_position
from d2pfed.secagg.wire import ClientId, MessageKind

BITS = 11
LATTICE, BY_SLOT = "lattice", "lattice by slot"  # clients hold the roster, or its head
CLIENTS = {LATTICE: (100, 1_000), BY_SLOT: (1_000, 10_000), "pairwise": (1_000, 100)}
DIMENSIONS = (20_000, 100_000, 1_000_000)
FLOWER_CLIENTS, FLOWER_DIMENSIONS = (32, 100), (20_000, 100_000)
GOAL = (1_000, 100_000, 100)  # clients, coordinates and lost clients of the goals

_POPULATION, _COLLUDING, _DRAWS = 100_000, 10_000, 1_638_400  # a tenth of the enrolled; blocks of 16,384 draws
_MOST_NUMBERS = 2_000_000_000  # clients times coordinates; beyond it a row is scaled from a tenth of the clients
_MOST_REPEATED = 2.0  # processor seconds of a server; of shorter rounds three are measured
_MOST_MASKED = 500_000_000  # clients times coordinates; beyond it a row with pair masks is scaled in coordinates
_TASK = b"task"
_DEPTH = 12  # of the tree of draws

Size = tuple[int, int, int]  # clients, coordinates, lost clients


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRow:
    """One signed round; processor seconds, and bytes beside the model; None: there is no such thing, or it failed."""

    protocol: str
    clients: int
    dimension: int
    bits: int
    dropouts: int
    client_up: int | None = None
    client_down: int | None = None
    client_seconds: float | None = None
    member_up: int | None = None
    member_down: int | None = None
    member_seconds: float | None = None
    server_seconds: float | None = None
    note: str = ""

    @property
    def size(self) -> Size:
        """Return clients, coordinates and lost clients."""
        return self.clients, self.dimension, self.dropouts


def bench_protocols(
    clients: Mapping[str, Iterable[int]] = CLIENTS, dimensions: Iterable[int] = DIMENSIONS
) -> Iterator[ProtocolRow]:
    """Measure the lattice protocol, pair masks up to 1,000 clients, and Flower's functions at 32 and 100."""
    for protocol, counts in clients.items():
        found: dict[Size, ProtocolRow] = {}
        for size in ((count, each, lost) for count in counts for each in dimensions for lost in (0, count // 10)):
            if protocol == "pairwise":
                found[size] = _scaled_pairwise(size, found) or steady(partial(_pairwise, *size))
            else:
                found[size] = scaled_lattice(size, found) or steady(partial(measure_lattice, protocol, *size))
            yield found[size]
    for count in FLOWER_CLIENTS:
        for dimension in FLOWER_DIMENSIONS:
            for lost in (0, count // 10):
                yield _flower(Scale(count, dimension, BITS, lost))


def steady(measure: Callable[[], ProtocolRow]) -> ProtocolRow:
    """Return a row; where a server works for moments only, the medians of three rounds, for short times vary most."""
    rows = [measure()]
    if (rows[0].server_seconds or 0.0) >= _MOST_REPEATED:
        return rows[0]
    rows += [measure(), measure()]

    def middle(name: str) -> float | None:
        seconds = [found for found in (getattr(row, name) for row in rows) if found is not None]
        return median(seconds) if seconds else None

    client, member, server = map(middle, ("client_seconds", "member_seconds", "server_seconds"))
    note = ", ".join(filter(None, (rows[0].note, "median of three rounds")))
    return replace(rows[0], client_seconds=client, member_seconds=member, server_seconds=server, note=note)


def goals(rows: Iterable[ProtocolRow]) -> list[DeploymentGoal]:
    """Hold the lattice protocol against pair masks at 1,000 clients, and its growth against theirs."""
    found = {(row.protocol, row.size): row for row in rows}
    lattice, pairwise, by_slot = (found.get((name, GOAL)) for name in (LATTICE, "pairwise", BY_SLOT))
    large = found.get((BY_SLOT, (10 * GOAL[0], GOAL[1], 10 * GOAL[2])))
    vector = (GOAL[1] * BITS + 7) // 8

    def ratio(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    def keys(row: ProtocolRow | None) -> float | None:
        return None if row is None or row.client_up is None else row.client_up - vector

    def seconds(row: ProtocolRow | None, name: str) -> float | None:
        return None if row is None else getattr(row, name)

    names = "client_seconds", "server_seconds"
    client, server = (ratio(seconds(lattice, name), seconds(pairwise, name)) for name in names)
    growth = ratio(seconds(large, "server_seconds"), seconds(by_slot, "server_seconds"))
    at = f"{GOAL[0]:,} clients, {GOAL[1]:,} coordinates of {BITS} bits, {GOAL[2]} lost"
    held = [
        (f"keys and shares that a client sends, bytes ({at})", keys(lattice), 3_800),
        ("the same over pair masks", ratio(keys(lattice), keys(pairwise)), 1 / 30),
        ("a client's processor time over pair masks", client, 1 / 8),
        ("the server's processor time over pair masks", server, 1 / 25),
        ("the server's processor time at 10,000 clients over 1,000", growth, 12),
    ]
    return [DeploymentGoal(what=what, value=value, limit=limit) for what, value, limit in held]


def _flower(scale: Scale) -> ProtocolRow:
    measure = partial(measure_flower, scale.clients, scale.dimension, scale.lost)
    estimate = partial(estimate_flower, scale.clients, scale.dimension, scale.dropouts)
    is_whole = scale.clients <= FLOWER_CLIENTS[0]
    cost, error = attempt(("flwr",), measure if is_whole else estimate)
    note = "not signed" if is_whole else "not signed; scaled from one client and three secrets"
    return _row_of("flower", scale, 64, cost, error or note)


def _pairwise(clients: int, dimension: int, dropouts: int) -> ProtocolRow:
    scale = Scale(clients, dimension, BITS, dropouts, Consistency.SIGNED)
    return _row_of("pairwise", scale, BITS, crowd_cost(scale), "")


def _row_of(name: str, scale: Scale, bits: int, cost: Cost | FlowerCost | None, note: str) -> ProtocolRow:
    return ProtocolRow(
        protocol=name,
        clients=scale.clients,
        dimension=scale.dimension,
        bits=bits,
        dropouts=scale.dropouts,
        client_up=None if cost is None else cost.upload_bytes,
        client_down=cost.download_bytes if isinstance(cost, Cost) else None,
        client_seconds=None if cost is None else cost.client_seconds,
        server_seconds=None if cost is None else cost.server_seconds,
        note=note,
    )


def _scaled_pairwise(size: Size, found: Mapping[Size, ProtocolRow]) -> ProtocolRow | None:
    """Return a row scaled in coordinates from the two dimensions before it, if it would take minutes."""
    clients, dimension, lost = size
    before = [row for row in found.values() if (row.clients, row.dropouts) == (clients, lost)]
    if clients * dimension <= _MOST_MASKED or len(before) < 2:
        return None
    first, last = before[-2:]
    part = (dimension - last.dimension) / (last.dimension - first.dimension)

    def along(name: str) -> float:
        return float(getattr(last, name) + part * (getattr(last, name) - getattr(first, name)))

    return replace(
        last,
        dimension=dimension,
        client_up=round(along("client_up")),
        client_seconds=along("client_seconds"),
        server_seconds=along("server_seconds"),
        note=f"scaled from {first.dimension:,} and {last.dimension:,} coordinates",
    )


def scaled_lattice(size: Size, found: Mapping[Size, ProtocolRow]) -> ProtocolRow | None:
    """Return a row whose server is scaled from a tenth of the clients, if all of them would take minutes.

    What the server does in a cohort of the same size with few coordinates is measured; the coordinates beyond these
    cost ten times what they cost with a tenth of the clients.
    """
    clients, dimension, lost = size
    few = min((at for at in found if (at[0], at[2]) == (clients, lost)), default=None)
    tenth = [(clients // 10, each, lost // 10) for each in (dimension, 0 if few is None else few[1])]
    if clients * dimension <= _MOST_NUMBERS or few is None or any(at not in found for at in tenth):
        return None
    wide, narrow, base = found[tenth[0]], found[tenth[1]], found[few]
    seconds = base.server_seconds, wide.server_seconds, narrow.server_seconds
    if None in seconds or base.client_up is None:
        raise ConfigError(f"{size} is scaled from rows that were measured")
    bits = BITS * (dimension - few[1])
    return replace(
        base,
        dimension=dimension,
        client_up=base.client_up + bits // 8,
        client_seconds=wide.client_seconds,
        server_seconds=seconds[0] + 10 * (seconds[1] - seconds[2]),  # type: ignore[operator]
        note=f"vectors scaled from {clients // 10:,} clients",
    )


@lru_cache(maxsize=1)
def _draws() -> DrawTree:
    return DrawTree(Entropy.replay(b"bench"), _DEPTH)


@lru_cache(maxsize=2)
def _certified(clients: int) -> CertifiedRoster:
    roster = replace(Scale(clients, 1, BITS, 0).roster(), depth=_DEPTH, root=_draws().root)
    return certify(roster, digest("bench authority"))


def lattice_session(protocol: str, clients: int, dimension: int) -> Session:
    """Return a signed session at the least noise that is allowed; its committee is spread over the cohort.

    All enrolled clients are asked: slots and identities are the same numbers.
    """
    secret = secret_length(BITS, Fraction(2))
    committee = choose_committee(
        clients, Fraction(1, 10), secret, population=_POPULATION, colluding=_COLLUDING, draws=_DRAWS
    )
    return Session(
        plan_digest=digest("bench"),
        run="bench",
        round=0,
        attempt=0,
        roster_digest=_certified(clients).digest,
        cohort=tuple(range(clients)),
        members=tuple(place * clients // committee.size for place in range(committee.size)),
        dimension=dimension,
        bits=BITS,
        secret=secret,
        committee=committee,
        quorum=clients - clients // 10,
        colluders=clients // 10,
        is_by_slot=protocol == BY_SLOT,
    )


@dataclass
class _Watch:
    """Processor seconds of the server, and what the measured client and member do, send and receive."""

    client: ClientId
    member: ClientId
    server_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"client": 0.0, "member": 0.0})
    sent: dict[str, int] = field(default_factory=lambda: {"client": 0, "member": 0})
    received: dict[str, int] = field(default_factory=lambda: {"client": 0, "member": 0})

    @contextmanager
    def server(self) -> Iterator[None]:
        """Count what the server does inside."""
        begun = time.process_time()
        yield
        self.server_seconds += time.process_time() - begun

    def ask(self, who: str, request: bytes, work: Callable[[], bytes]) -> bytes:
        """Count what the measured client or member does for one answer."""
        begun = time.process_time()
        answer = work()
        self.seconds[who] += time.process_time() - begun
        self.sent[who] += len(answer)
        self.received[who] += len(request)
        return answer

    def exchange(self, phase: ServerPhase, answer: Callable[[ClientId, bytes], bytes | None]) -> None:
        """Build every request and take every answer, one after the other."""
        for client in phase.outbox:
            with self.server():
                request = phase.outbox[client]
            said = answer(client, request)
            if said is not None:
                with self.server():
                    phase.receive(client, said)


def measure_lattice(protocol: str, clients: int, dimension: int, dropouts: int) -> ProtocolRow:
    """Run one round and check its sum; lost members vanish after their adverts, where it hurts most."""
    session, roster = lattice_session(protocol, clients, dimension), _certified(clients)
    lost = Scale(clients, dimension, BITS, dropouts).lost
    left = [client for client in session.cohort if client not in lost]
    ordinary = next((client for client in left if client not in session.members), left[1])
    watch = _Watch(ordinary, next(member for member in session.members if member in left))
    model = bytes(4 * dimension)
    crowd = _Crowd(session, roster, watch, lost, model)
    crowd.warm_up()
    with watch.server():
        enrolled_by = roster if session.is_by_slot else roster.roster
        convening = Convening(Invitations(session=session, roster=enrolled_by, opening=_draws().open(0)))
    watch.exchange(convening, crowd.convene)
    with watch.server():
        vouching = convening.close()
    watch.exchange(vouching, crowd.vouch)
    with watch.server():
        contributing = vouching.close(_TASK, sessions.model_digest(model))
    watch.exchange(contributing, crowd.contribute)
    with watch.server():
        agreeing = contributing.close(Entropy.system())
    watch.exchange(agreeing, crowd.agree)
    with watch.server():
        opening = agreeing.close()
    watch.exchange(opening, crowd.open)
    with watch.server():
        opened = opening.close()
    if isinstance(opened, Tracing) or bool((opened.vector[:CHECKED] != len(left) % session.ring.modulus).any()):
        raise ConfigError(f"the sum of {clients} clients is wrong, so its cost means nothing")
    return ProtocolRow(
        protocol=protocol,
        clients=clients,
        dimension=dimension,
        bits=BITS,
        dropouts=dropouts,
        client_up=watch.sent["client"],
        client_down=watch.received["client"],
        client_seconds=watch.seconds["client"],
        member_up=watch.sent["member"],
        member_down=watch.received["member"],
        member_seconds=watch.seconds["member"],
        server_seconds=watch.server_seconds,
        note=f"committee of {session.committee.size}",
    )


class _Crowd:
    """All clients and members but the measured two, whose answers it takes from them."""

    def __init__(
        self,
        session: Session,
        roster: CertifiedRoster,
        watch: _Watch,
        lost: frozenset[ClientId],
        model: bytes,
    ) -> None:
        self._session, self._roster, self._watch, self._lost = session, roster, watch, lost
        self._model = model
        self._root = Entropy.system()
        self._members = dict[ClientId, crypto.Agreement]()
        self._state = Member()  # of the measured member
        self._context, self._statement, self._vouched = b"", b"", b""
        self._pads = dict[ClientId, Elements]()  # of each survivor: a row for each member, a column a polynomial

    def participant(self, client: ClientId) -> Participant:
        """Return a real client."""
        enrolment, history = enrolled(self._roster.roster, client)
        if not self._session.is_by_slot:
            return Participant(self._session, client, enrolment, history)
        own = Certified(head_of(self._roster.roster), {client: self._roster.certificate(client)})
        return Participant(self._session, client, SlotEnrolment(signing_secret(client), own), history)

    def warm_up(self) -> None:
        """Compile and fill tables before a clock runs."""
        session, small = self._session, np.zeros(64, np.uint32)
        masks.add_product(session, bytes(32), small, masks.draw_secret(session, self._root))
        shares = masks.split(
            session, np.zeros(session.secret, np.int64), np.arange(SEED_ELEMENTS), self._root.stream()
        )
        fields.interpolation(session.points[: shares.shape[1]], np.arange(1, 3))
        session.ring.add_packed_into(small, session.ring.pack(small))

    def convene(self, member: ClientId, request: bytes) -> bytes:
        """Advertise as anyone does, the measured member too."""
        entropy, own, state = self._root.child(member), self.participant(member), list[Member]()

        def work() -> bytes:
            answer, kept = own.convene(request, entropy)
            state.append(kept)
            return answer

        answer = self._watch.ask("member", request, work) if member == self._watch.member else work()
        self._members[member] = crypto.Agreement(state[0].secret)
        if member == self._watch.member:
            self._state = state[0]
        return answer

    def vouch(self, member: ClientId, request: bytes) -> bytes:
        """Vouch for all adverts, the measured member in earnest."""
        own = self.participant(member)
        if member == self._watch.member:
            return self._watch.ask("member", request, lambda: own.vouch(request))
        if not self._vouched:
            adverts = messages.decode_adverts(self._session, own.rank, request)
            keys = {place: advert.key for place, advert in adverts.items()}
            self._vouched = sessions.adverts_statement(self._session, keys)
        return wire.message(self._session, MessageKind.LATTICE_VOUCHER, own.rank, own.sign(self._vouched))

    def contribute(self, client: ClientId, request: bytes) -> bytes | None:
        """Contribute in earnest, as the measured client, or with masks in the first coordinates only."""
        if client in self._lost:
            return None
        if client == self._watch.client:
            return self._measured(client, request)
        session, rank = self._session, self._session.rank(client)
        if not self._context:
            body = messages.decode_request(request, _DEPTH)
            self._context = messages.read_request(session, body)[0].context
        entropy = self._root.child("client", client)
        own, stream = crypto.Agreement(entropy.key), entropy.child("shares").stream()
        secret = masks.draw_secret(session, entropy.child("secret"))
        seed = fields.elements(stream, SEED_ELEMENTS)
        vector = np.ones(min(CHECKED, session.dimension), np.uint32)
        masks.add_product(session, self._context, vector, secret)
        session.ring.add_masks_into(vector, [masks.veil(self._context, client, fields.pack(seed))], [])
        shares = masks.split(session, secret, seed, stream)
        pads = fields.elements(stream, shares.size).reshape(shares.shape)
        member = self._watch.member
        shared = own.agree(self._members[member].public)
        pads[session.place(member)] = masks.pads(session, self._context, [(shared, client, member)])[0]
        self._pads[client] = pads.astype(np.uint16)
        position = self._position(client, 2)
        signature = crypto.sign(
            signing_secret(client),
            sessions.contribution_statement(session, self._context, client, own.public, position),
        )
        signed = SignedKey(own.public, position, signature)
        commitment = sessions.commitment(self._context, client, fields.pack(seed))
        packed = session.ring.pack(vector).ljust(session.ring.packed_bytes(session.dimension), b"\0")
        shown = self._context, signed.key, commitment, signed.proof, fields.pack((shares + pads) % PRIME)
        return wire.message(session, MessageKind.LATTICE_CONTRIBUTION, rank, *shown, packed)

    def _measured(self, client: ClientId, request: bytes) -> bytes:
        session, own = self._session, self.participant(client)
        after = self._position(client, 2)
        vector = np.ones(session.dimension, np.uint32)

        def work() -> bytes:
            body = messages.decode_request(request, own.depth)
            return own.contribute(body, self._model, lambda _task, _model: (vector, after), Entropy.system())

        answer = self._watch.ask("client", request, work)
        said: Contribution = messages.decode_contribution(
            session, session.rank(client), len(session.members), answer
        )
        self._context = said.context
        ends = ((self._members[member].agree(said.signed.key), client, member) for member in session.members)
        self._pads[client] = masks.pads(session, said.context, ends).astype(np.uint16)
        return answer

    def _position(self, client: ClientId, count: int) -> Position:
        return sign_position(signing_secret(client), self._roster.authority, client, count, bytes(32))

    def agree(self, member: ClientId, request: bytes) -> bytes | None:
        """Sign the survivors; the measured member checks them first."""
        session, rank = self._session, self._session.rank(member)
        if member in self._lost:
            return None
        if not self._statement:
            shown = messages.decode_survivors(session, rank, request)
            keys = {other: signed.key for other, signed in shown.signed.items()}
            self._statement = sessions.opening_statement(session, shown.context, shown.nonce, keys)
        if member != self._watch.member:
            signature = crypto.sign(signing_secret(member), self._statement)
            return wire.message(session, MessageKind.LATTICE_SIGNATURE, rank, signature)
        own, state = self.participant(member), list[Member]()

        def work() -> bytes:
            said = own.agree(self._state, request, lambda _statement: None)
            state.append(said.member)
            return said.answer

        answer = self._watch.ask("member", request, work)
        self._state = state[0]
        return answer

    def open(self, member: ClientId, request: bytes) -> bytes:
        """Add up pads; the measured member finds them first."""
        session, rank, place = self._session, self._session.rank(member), self._session.place(member)
        if member == self._watch.member:
            own = self.participant(member)
            return self._watch.ask("member", request, lambda: own.open(self._state, request).answer)
        pads = np.array([self._pads[client][place] for client in sorted(self._pads)], np.int64)
        count = session.polynomials
        return messages.encode_opening(session, rank, Opened(pads[:, :count].sum(axis=0) % PRIME, pads[:, count]))
