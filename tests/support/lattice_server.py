"""A server of the lattice protocol that asks for what it pleases, and opens by hand without any check."""

from collections.abc import Iterable, Mapping

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks, messages
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.messages import Advert, Contribution, Opened, SignedKey, Signer, Survivors
from d2pfed.secagg.lattice.parameters import Committee
from d2pfed.secagg.lattice.server import Convening, Invitations
from d2pfed.secagg.lattice.session import Request, Session, model_digest
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, frame, kind_of
from support.federation import MODEL, TASK
from support.lattice import LatticeFederation, make_session

TWO_HALVES = Committee(34, 1, 16, 18, 0)  # each half could open by itself


class Server:
    """Has convened the committee; the rest is up to the script."""

    def __init__(self, session: Session | None = None, **federation) -> None:
        self.session = session or make_session(24, dimension=5)
        self.federation = LatticeFederation(self.session, **federation)
        roster = self.federation.certified or self.federation.roster
        convening = Convening(Invitations(session=self.session, roster=roster))
        self.federation.collect("convene", convening)
        self.adverts = dict(convening._adverts)
        self.contributions: dict[int, Contribution] = {}

    def vouched(self, adverts) -> dict[int, Signer]:
        """What as many members as a client wants say of some adverts."""
        session, roster = self.session, self.federation.certified
        packed, signers = messages.pack_adverts(session, adverts), {}
        for place, member in enumerate(session.members[: session.committee.vouchers]):
            rank, certificate = session.rank(member), None if roster is None else roster.certificate(member)
            data = wire.message(session, MessageKind.LATTICE_ADVERTS, rank, packed)
            said = self.federation.answer("vouch", self.federation.identity(member), data)
            signers[place] = Signer(body_of(said), certificate)
        return signers

    @property
    def request(self) -> Request:
        return self.request_of()

    def request_of(self, adverts=None, task=TASK, model=MODEL) -> Request:
        keys = {place: advert.key for place, advert in (adverts or self.adverts).items()}
        return Request(self.session, keys, task, model_digest(model))

    def ask(
        self, client: int, *, adverts=None, vouchers=None, task=TASK, model=MODEL, remembered=None, keep=True
    ) -> Contribution:
        """Ask a client for its contribution, with whatever adverts, vouchers, task and model."""
        adverts = adverts or self.adverts
        request = self.request_of(adverts, task, model)
        rank = self.federation.rank(client)
        vouchers = self.vouched(adverts) if vouchers is None else vouchers
        data = messages.encode_request(request, rank, vouchers, None, remembered)
        answer = self.federation.answer("contribute", client, data, model)
        contribution = messages.decode_contribution(self.session, rank, len(adverts), answer)
        if keep:
            self.contributions[rank] = contribution
        return contribution

    def ask_all(self, *but: int) -> None:
        for client in self.session.cohort:
            if client not in but:
                self.ask(client)

    def survivors(
        self, ranks: Iterable[int] | None = None, keys: Mapping[int, SignedKey] | None = None
    ) -> Survivors:
        """What members are shown: these contributions, with other keys where the script has some."""
        chosen = self.contributions if ranks is None else ranks
        signed = {rank: self.contributions[rank].signed for rank in chosen} | dict(keys or {})
        return Survivors(self.request.context, digest("z", len(signed)), signed)

    def agree(self, member: int, survivors: Survivors) -> bytes:
        data = messages.encode_survivors(self.session, self.session.rank(member), survivors)
        said = messages.decode_signature(
            self.session, self.session.rank(member), self.federation.answer("agree", member, data)
        )
        if not isinstance(said, bytes):
            raise PeerError(f"member {member} claims that {sorted(said)} were met later")
        return said

    def sign(self, members: Iterable[int], survivors: Survivors) -> dict[int, bytes]:
        return {self.session.place(member): self.agree(member, survivors) for member in members}

    def open(self, members: Iterable[int], signatures: Mapping[int, bytes], count: int) -> dict[int, Opened]:
        """Show a certificate to members, and return their pads for so many survivors."""
        answers, signers = {}, {place: Signer(signature) for place, signature in signatures.items()}
        for member in members:
            data = messages.encode_certificate(self.session, self.session.rank(member), signers)
            answer = self.federation.answer("open", member, data)
            answers[self.session.place(member)] = messages.decode_opening(
                self.session, self.session.rank(member), count, answer
            )
        return answers

    def trace(self, member: int, count: int) -> np.ndarray:
        data = wire.message(self.session, MessageKind.LATTICE_TRACE_REQUEST, self.session.rank(member))
        return messages.decode_trace(
            self.session, self.session.rank(member), count, self.federation.answer("trace", member, data)
        )

    def pads_of(self, secret: bytes, client: int, place: int, key: bytes, context=None) -> np.ndarray:
        """The pads of one box, for somebody who has one of its two secrets."""
        shared, member = crypto.Agreement(secret).agree(key), self.session.members[place]
        return masks.pads(self.session, context or self.request.context, [(shared, client, member)])[0]

    def add_up(
        self, parts: list[tuple[int, Contribution]], answers: Mapping[int, Opened], context=None, present=None
    ) -> np.ndarray:
        """Open the sum of some contributions, each by the client that its veil belongs to, without any check."""
        session, context = self.session, context or self.request.context
        committee, count, places = session.committee, session.polynomials, sorted(answers)
        present = sorted(present or self.adverts)
        rows = [present.index(place) for place in places]
        boxes = np.array([contribution.boxes[rows] for _, contribution in parts])
        points = session.points[places]
        sums = (boxes[:, :, :count].sum(axis=0) - np.array([answers[place].sums for place in places])) % PRIME
        at_secret = fields.interpolation(points[: committee.openers], np.arange(1, committee.packed + 1))
        secrets = fields.multiply(at_secret, sums[: committee.openers]).T.reshape(-1)[: session.secret]
        secrets = (secrets + PRIME // 2) % PRIME - PRIME // 2
        total = np.zeros(session.dimension, np.uint32)
        for index, (client, contribution) in enumerate(parts):
            session.ring.add_packed_into(total, contribution.vector)
            words = (boxes[index, :, count] - np.array([answers[place].seeds[index] for place in places])) % PRIME
            seed = fields.pack(self.seed_of(points, words))
            session.ring.add_masks_into(total, [], [masks.veil(context, client, seed)])
        masks.add_product(session, context, total, -secrets)
        return total

    def seed_of(self, points: np.ndarray, words: np.ndarray) -> np.ndarray:
        size = 16 + self.session.committee.threshold
        matrix = fields.interpolation(points[:size], np.arange(1, 17))
        return fields.multiply(matrix, words[:size, None])[:, 0]


def opened_alone(server: Server, secrets: Mapping[int, bytes], client: int, contribution: Contribution) -> Opened:
    """The pads of one client, by those who have members' secrets, by place."""
    pads = {
        place: server.pads_of(secret, client, place, contribution.signed.key) for place, secret in secrets.items()
    }
    count = server.session.polynomials
    return {place: Opened(found[:count], found[count : count + 1]) for place, found in pads.items()}


def subtract(session: Session, left: np.ndarray, *right: np.ndarray) -> np.ndarray:
    total = left.astype(np.int64) - sum(each.astype(np.int64) for each in right)
    return session.ring.wrap(total)


def split_server() -> Server:
    """A committee of two halves, each of which could open a sum by itself."""
    return Server(make_session(34, committee=TWO_HALVES, dimension=5, secret=32, quorum=18))


def forged_adverts(server: Server, secrets: Mapping[int, bytes]) -> dict[int, Advert]:
    return {place: Advert(crypto.Agreement(secret).public, bytes(64)) for place, secret in secrets.items()}


def reframed(data: bytes, body: bytes) -> bytes:
    """A message with another body, and the checksum that belongs to it."""
    party = int.from_bytes(data[8:16], "little")
    return frame(kind_of(data), data[24 : 24 + 32], party, body)


def body_of(data: bytes) -> bytes:
    return data[HEADER_BYTES:]
