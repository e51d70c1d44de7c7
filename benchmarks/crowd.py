"""A round of one real client among a crowd that one helper plays, for sizes at which a real crowd takes too long."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import Client, Enrolment, History, Roster, Session, crypto, shamir
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import CONTEXT_BYTES, HEADER_BYTES, ClientId, MessageKind, message, subset_of

REAL = 0  # the rank of the one client that works as clients do
CHECKED = 64  # coordinates of the sum that are held against the truth: all that the helper takes masks off

Make = Callable[[ClientId, Entropy], Client]
Answers = Iterator[tuple[ClientId, bytes]]


class Crowd:
    """All clients but one. They know each other's secrets, so that nothing between them is sealed or masked.

    What the server and the real client do is what they would do among real clients: as many key advertisements,
    signatures, encrypted shares and masks. Only ciphertexts within the crowd hold noise, and masks within it are left
    out of the vectors.
    Each method gets the server's requests and the real client's answer, and yields the answers of the others.
    """

    def __init__(self, session: Session, lost: frozenset[ClientId], make: Make, root: Entropy) -> None:
        if session.cohort[REAL] in lost:
            raise ConfigError("a crowd does not lose its real client")
        self._session = session
        self._survivors = subset_of(
            len(session.cohort), [rank for rank, client in enumerate(session.cohort) if client not in lost]
        )
        self._clients = {
            rank: make(client, root.child(client)) for rank, client in enumerate(session.cohort) if rank
        }
        self._root = root
        self._shares: dict[int, list[int]] = {}  # by owner: of the secret that will be opened, for each holder
        self._joined: JoinedClients | None = None
        self._advertisements: Mapping[int, KeyAdvertisement] = {}
        self._context = b""

    def advertise(self, requests: Mapping[ClientId, bytes], _answer: bytes) -> Answers:
        """Advertise as anyone does."""
        for rank, machine in self._clients.items():
            client = self._session.cohort[rank]
            yield client, machine.receive(requests[client])

    def share(self, requests: Mapping[ClientId, bytes], answer: bytes) -> Answers:
        """Seal shares for the real client, noise for all others, and open what the real client has sealed."""
        session, size = self._session, len(self._session.cohort)
        joined, _, advertisements = messages.decode_advertisements(session, REAL, requests[session.cohort[REAL]])
        self._joined, self._advertisements = joined, advertisements
        sent, noise = messages.decode_encrypted_shares(joined, REAL, answer), self._root.child("noise").stream()
        self._shares[REAL] = [0] * size
        for rank in self._clients:
            shares = self._shares[rank] = self._split(rank)
            inward, outward = self._ciphertext_keys(rank)
            opened = keys.decrypt_shares(session, inward, sent.ciphertexts[rank])
            self._shares[REAL][rank] = 0 if opened is None else opened.seed_share
            ciphertext = crypto.seal(outward, keys.ShareContent(shares[REAL], shares[REAL], b"").pack())
            filler = noise.bytes(messages.ciphertext_bytes(session))
            sealed = {other: filler if other else ciphertext for other in range(size) if other != rank}
            packed = messages.encode_encrypted_shares(joined, rank, EncryptedShares(sealed, subset_of(size, ())))
            yield session.cohort[rank], packed

    def mask(self, _requests: Mapping[ClientId, bytes], answer: bytes) -> Answers:
        """Send vectors of zero; the first one carries all masks that do not cancel, where the sum is checked."""
        session = self._session
        self._context = answer[HEADER_BYTES : HEADER_BYTES + CONTEXT_BYTES]
        pending = self._masks()
        for rank in self._left():
            vector = np.zeros(session.dimension, np.uint32)
            vector[: pending.size], pending = pending, pending[:0]
            yield (
                session.cohort[rank],
                message(session, MessageKind.MASKED_VECTOR, rank, self._context, session.ring.pack(vector)),
            )

    def confirm(self, _requests: Mapping[ClientId, bytes], _answer: bytes) -> Answers:
        """Sign what the server says about the survivors."""
        statement = keys.survivors_statement(self._context, self._survivors)
        for rank in self._left():
            client = self._session.cohort[rank]
            signature = crypto.sign(signing_secret(client), statement)
            yield client, message(self._session, MessageKind.SURVIVORS_SIGNATURE, rank, signature)

    def unmask(self, _requests: Mapping[ClientId, bytes], _answer: bytes) -> Answers:
        """Open one share of everyone."""
        if self._joined is None:
            raise ConfigError("shares are opened after they were dealt")
        for rank in self._left():
            shares = {owner: held[rank] for owner, held in self._shares.items()}
            opened = messages.encode_unmasking_shares(self._joined, rank, self._joined.present, shares)
            yield self._session.cohort[rank], opened

    def _left(self) -> list[int]:
        return [rank for rank in self._clients if self._survivors[rank]]

    def _secret(self, rank: int, purpose: str) -> bytes:
        client = self._session.cohort[rank]
        return self._root.child(client).child("d2pfed client", self._session.digest, client).child(purpose).key

    def _split(self, rank: int) -> list[int]:
        secret = self._secret(rank, "self" if self._survivors[rank] else "mask")
        points, stream = range(1, len(self._session.cohort) + 1), self._root.child("coefficients", rank).stream()
        return shamir.split([int.from_bytes(secret, "little")], self._session.threshold, points, stream)[0]

    def _ciphertext_keys(self, rank: int) -> tuple[bytes, bytes]:
        """Return the keys of the ciphertexts from and to the real client."""
        shared = crypto.Agreement(self._secret(rank, "seal")).agree(self._advertisements[REAL].seal_public)
        real, client = self._session.cohort[REAL], self._session.cohort[rank]
        return keys.share_key(self._session, shared, real, client), keys.share_key(
            self._session, shared, client, real
        )

    def _masks(self) -> RingVector:
        """Return what the crowd's survivors would have added beside their updates: the beginning of it."""
        session, ring = self._session, self._session.ring
        total = np.zeros(min(CHECKED, session.dimension), np.uint32)
        outside = [REAL, *(rank for rank in self._clients if not self._survivors[rank])]
        for rank in self._left():
            client, agreement = session.cohort[rank], crypto.Agreement(self._secret(rank, "mask"))
            own = keys.self_mask_key(self._secret(rank, "self"), self._context, client)
            ring.add_masks_into(total, (Stream(own),), ())
            for other in outside:
                shared, pair = (
                    agreement.agree(self._advertisements[other].mask_public),
                    (client, session.cohort[other]),
                )
                key = keys.pair_mask_key(shared, self._context, pair, keys.NO_GROUP)
                masks = (Stream(key),), ()
                ring.add_masks_into(total, *(masks if rank < other else masks[::-1]))
        return total


def signing_secret(client: ClientId) -> bytes:
    """Return a client's signing key, which is no secret in a benchmark."""
    return digest("bench signing", client)


def enrolled(roster: Roster | None, client: ClientId) -> tuple[Enrolment | None, History | None]:
    """Return what a client brings to a signed session; nothing where nobody is enrolled."""
    if roster is None:
        return None, None
    secret = signing_secret(client)
    position = sign_position(secret, roster.authority, client, 1, bytes(32))
    return Enrolment(secret, roster), History(position, lambda _count, _head: True)
