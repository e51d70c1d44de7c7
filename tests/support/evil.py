"""A server that sends whatever it likes, with some clients on its side; for attacks on the others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.secagg import Session, crypto
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares, encode_invitation
from d2pfed.secagg.pairwise.phases import Confirmed, Masked
from d2pfed.secagg.pairwise.server import Aggregate, Known, unmask
from d2pfed.secagg.shamir import Interpolation
from d2pfed.secagg.wire import MessageKind, Subset, message, pack_subset, subset_of
from support.decoding import decode_advertisement, decode_confirmation
from support.federation import MODEL, TASK, Federation
from support.rings import subtract_into

VICTIM = 0
LOW_ORDER = [  # the points of small order on Curve25519, as any implementation must refuse them
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


class TooFewShares(Exception):  # noqa: N818 - the name of the event
    """The server cannot open what it is after."""


def secret_vectors(session: Session) -> dict[int, np.ndarray]:
    """A random update for every client."""
    return {
        client: session.ring.uniform(Stream(digest("update", client)), session.dimension)
        for client in session.cohort
    }


@dataclass
class Evil:
    """Runs a session by hand. `colluders` are ranks whose secrets and vectors the server knows."""

    session: Session
    colluders: tuple[int, ...]
    seed: bytes = b"evil"
    federation: Federation = field(init=False)
    advertisements: dict[int, KeyAdvertisement] = field(default_factory=dict)
    joined: dict[int, JoinedClients] = field(default_factory=dict)  # as each client sees it
    ciphertexts: dict[int, dict[int, bytes]] = field(default_factory=dict)
    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    seed_shares: dict[int, int] = field(default_factory=dict)  # of the victim's seed, by holder
    key_shares: dict[int, int] = field(default_factory=dict)  # of the victim's mask key, by holder
    all_shares: dict[int, dict[int, int]] = field(default_factory=dict)
    shares_sent: int = 0  # answers of honest clients to requests for shares

    def __post_init__(self) -> None:
        self.federation = Federation(self.session, seed=self.seed, vectors=secret_vectors(self.session))

    @property
    def everyone(self) -> list[int]:
        return list(range(len(self.session.cohort)))

    @property
    def victims_update(self) -> np.ndarray:
        return self.federation.vectors[self.session.cohort[VICTIM]]

    def subset(self, ranks: Iterable[int]) -> Subset:
        return subset_of(len(self.session.cohort), ranks)

    def ask(self, rank: int, request: bytes) -> bytes:
        return self.federation.clients[self.session.cohort[rank]].receive(request)

    def advertise(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            answer = self.ask(rank, encode_invitation(self.session, rank))
            self.advertisements[rank] = decode_advertisement(self.session, rank, answer)

    def share(
        self,
        ranks: Iterable[int],
        told: Subset,
        forged: Mapping[int, KeyAdvertisement] | None = None,
    ) -> None:
        """Pass the advertisements on; the victim is shown the forged ones."""
        for rank in ranks:
            shown = self.advertisements | (dict(forged or {}) if rank == VICTIM else {})
            self.joined[rank] = JoinedClients.of(self.session, self.leaves(told, shown))
            answer = self.ask(rank, messages.encode_advertisements(self.joined[rank], rank, shown))
            self.ciphertexts[rank] = dict(
                messages.decode_encrypted_shares(self.joined[rank], rank, answer).ciphertexts
            )

    def leaves(self, told: Subset, advertisements: Mapping[int, KeyAdvertisement]) -> dict[int, bytes]:
        return {
            rank: advertisements[rank].statement(self.session, self.session.cohort[rank])
            for rank in self.everyone
            if told[rank] and rank in advertisements
        }

    def mask(
        self,
        ranks: Iterable[int],
        told: Subset,
        model: Callable[[int], bytes] = lambda rank: MODEL,
        ciphertext: Callable[[int, int], bytes] | None = None,
        task: Callable[[int], bytes] = lambda rank: TASK,
    ) -> None:
        """Ask for masked vectors; `ciphertext(receiver, sender)` replaces what the sender has sent."""
        for rank in ranks:
            joined = self.joined[rank]
            peers = keys.others(rank, told)
            ciphertexts = {
                peer: ciphertext(rank, peer) if ciphertext else self.ciphertexts[peer][rank] for peer in peers
            }
            shares = EncryptedShares(ciphertexts, self.subset([]))
            request = messages.encode_mask_request(joined, rank, told, shares, task(rank), model(rank))
            context = keys.context(joined, task(rank), model(rank), told)
            answer = self.ask(rank, request)
            self.vectors[rank] = messages.decode_masked_vector(self.session, rank, context, answer)[1]

    def until_masked(self) -> None:
        """Three exchanges by the book."""
        told = self.subset(self.everyone)
        self.advertise(self.everyone)
        self.share(self.everyone, told)
        self.mask(self.everyone, told)

    def confirm(self, ranks: Iterable[int], told: Subset) -> dict[int, bytes]:
        """Collect signatures under a set of survivors."""
        signatures = {}
        for rank in ranks:
            request = message(self.session, MessageKind.SURVIVORS, rank, pack_subset(told))
            signatures[rank] = decode_confirmation(self.session, rank, self.ask(rank, request))
        return signatures

    def open(self, ranks: Iterable[int], sharers: Subset, told: Subset) -> None:
        """Ask for shares, given a set of survivors."""
        for rank in ranks:
            request = message(self.session, MessageKind.UNMASK_REQUEST, rank, pack_subset(told))
            self._take(rank, sharers, told, self.ask(rank, request))

    def open_signed(
        self, ranks: Iterable[int], sharers: Subset, told: Subset, signatures: dict[int, bytes]
    ) -> None:
        """Ask for shares, given signatures under the set of survivors that the clients were told."""
        for rank in ranks:
            request = messages.encode_signatures(self.session, rank, signatures)
            self._take(rank, sharers, told, self.ask(rank, request))

    def _take(self, rank: int, sharers: Subset, told: Subset, answer: bytes) -> None:
        opened = messages.decode_unmasking_shares(self.joined[rank], rank, sharers, answer)
        self.shares_sent += rank not in self.colluders
        opened = {owner: share for owner, share in opened.items() if share is not None}
        for owner, share in opened.items():
            self.all_shares.setdefault(owner, {})[int(rank)] = share
        if VICTIM in opened:
            (self.seed_shares if told[VICTIM] else self.key_shares)[rank] = opened[VICTIM]

    def use_colluders(self) -> None:
        """Take what colluders hold of the victim: a share of each kind."""
        for rank in self.colluders:
            phase = self.federation.clients[self.session.cohort[rank]].phase
            held = phase.masked if isinstance(phase, Confirmed) else phase
            if isinstance(held, Masked) and VICTIM in held.key_shares:
                self.seed_shares[rank] = held.seed_shares[VICTIM]
                self.key_shares[rank] = held.key_shares[VICTIM]

    def join(self, owner: int, shares: Mapping[int, int]) -> bytes:
        """Open a secret from shares by holder."""
        holders = sorted(shares)[: self.session.threshold]
        if len(holders) < self.session.threshold:
            raise TooFewShares
        joined = Interpolation([int(holder) + 1 for holder in holders]).join(
            [shares[holder] for holder in holders]
        )
        return joined.to_bytes(33, "little")[:32]

    def shared_with_victim(self, rank: int) -> bytes:
        """The secret that a colluder, or a client whose mask key was opened, shares with the victim."""
        return self.mask_agreement(rank).agree(self.advertisements[VICTIM].mask_public)

    def mask_agreement(self, rank: int) -> crypto.Agreement:
        """The mask key of a colluder, or of a client whose key was opened."""
        if rank in self.colluders:
            return self.agreement_of(rank, "mask")
        return crypto.Agreement(self.join(rank, self.all_shares[rank]))

    def agreement_of(self, rank: int, purpose: str) -> crypto.Agreement:
        """A colluder's private key: for masks ("mask") or for ciphertexts ("seal")."""
        client = self.session.cohort[rank]
        root = Entropy.replay(self.seed).child(client)
        return crypto.Agreement(root.child("d2pfed client", self.session.digest, client).child(purpose).key)

    def ciphertext_of(self, sender: int, receiver: int) -> bytes:
        """A colluder's ciphertext, with shares of no use."""
        shared = self.agreement_of(sender, "seal").agree(self.advertisements[receiver].seal_public)
        names = self.session.cohort[sender], self.session.cohort[receiver]
        return crypto.seal(keys.share_key(self.session, shared, *names), bytes(66))

    def context(self, rank: int, sharers: Subset) -> bytes:
        return keys.context(self.joined[rank], TASK, MODEL, sharers)

    def strip(
        self, sharers: Subset, shared: Callable[[int], bytes | None], group: bytes = keys.NO_GROUP
    ) -> np.ndarray:
        """Take the masks off the victim's own vector, given its secrets shared with each peer (None: no mask)."""
        session, ring, client = self.session, self.session.ring, self.session.cohort[VICTIM]
        context, seed = self.context(VICTIM, sharers), self.join(VICTIM, self.seed_shares)
        bare = self.vectors[VICTIM].copy()
        own = Stream(keys.self_mask_key(seed, context, client))
        subtract_into(ring, bare, ring.uniform(own, session.dimension))
        for peer in keys.others(VICTIM, sharers):
            if (secret := shared(peer)) is None:
                continue
            key = keys.pair_mask_key(secret, context, (client, session.cohort[peer]), group)
            undo = partial(subtract_into, ring) if peer > VICTIM else ring.add_into
            undo(bare, ring.uniform(Stream(key), session.dimension))
        return bare

    def strip_by_key(self, sharers: Subset) -> np.ndarray:
        """Take the masks off, given both of the victim's secrets."""
        agreement = crypto.Agreement(self.join(VICTIM, self.key_shares))
        return self.strip(sharers, lambda peer: agreement.agree(self.advertisements[peer].mask_public))

    def sum_of(self, sharers: Subset, survivors: Subset) -> np.ndarray:
        """Unmask the sum of some vectors from the shares collected so far."""
        total = np.zeros(self.session.dimension, np.uint32)
        for rank in np.flatnonzero(survivors):
            self.session.ring.add_into(total, self.vectors[rank])
        first = int(np.flatnonzero(survivors)[0])
        known = Known(self.joined[first], None, self.advertisements)
        aggregate = Aggregate(known, self.context(first, sharers), sharers, survivors, total)
        return unmask(aggregate, self.all_shares).vector

    def without(self, total: np.ndarray, ranks: Iterable[int]) -> np.ndarray:
        """Subtract vectors that the server knows."""
        left = total.copy()
        for rank in ranks:
            subtract_into(self.session.ring, left, self.federation.vectors[self.session.cohort[rank]])
        return left
