"""Key advertisements: what each client publishes, and what follows from all of them together, the graph above all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from d2pfed.numerics.randomness import digest
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.graph import Graph, Ranks
from d2pfed.secagg.position import POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.session import Session
from d2pfed.secagg.wire import ClientId, Reader, Subset, pack_subset

COMMITMENT_BYTES = 32
LEAF_BYTES = 32
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyAdvertisement:
    """A client's public keys for one session and the commitment to its self-mask seed; if signed, its position too."""

    seal_public: bytes
    mask_public: bytes
    commitment: bytes
    position: Position | None = None
    signature: bytes = b""

    def pack(self) -> bytes:
        """Return the advertisement's bytes."""
        return self.seal_public + self.mask_public + self.commitment + self.packed_position + self.signature

    @property
    def packed_position(self) -> bytes:
        """Return the position's bytes, none where nothing is signed."""
        return b"" if self.position is None else self.position.pack()


def leaf(session: Session, client: ClientId, advertisement: KeyAdvertisement) -> bytes:
    """Return what an enrolled client signs about its keys, and what stands for the advertisement among all others."""
    keys = advertisement.seal_public, advertisement.mask_public, advertisement.commitment
    return digest("d2pfed advert", session.digest, client, *keys, advertisement.packed_position)


def read_advertisement(session: Session, reader: Reader) -> KeyAdvertisement:
    """Read the next advertisement of a body."""
    public = reader.take(PUBLIC_BYTES), reader.take(PUBLIC_BYTES), reader.take(COMMITMENT_BYTES)
    if not session.is_signed:
        return KeyAdvertisement(*public)
    return KeyAdvertisement(*public, unpack_position(reader.take(POSITION_BYTES)), reader.take(SIGNATURE_BYTES))


def advertisement_bytes(session: Session) -> int:
    """Return the size of an advertisement."""
    signed = POSITION_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    return 2 * PUBLIC_BYTES + COMMITMENT_BYTES + signed


def binds_all(session: Session) -> bool:
    """Say whether every client learns every leaf: from all advertisements in a complete graph, or a list if signed."""
    return session.is_complete or session.is_signed


def lists_leaves(session: Session) -> bool:
    """Say whether leaves are sent, since not everyone gets everyone's advertisement."""
    return session.is_signed and not session.is_complete


def advertisements_digest(session: Session, joined: Subset, leaves: Mapping[int, bytes]) -> bytes:
    """Return the digest A of who joined and, where all clients know them, of their advertisements."""
    ordered = [leaves[int(rank)] for rank in np.flatnonzero(joined)] if binds_all(session) else []
    return digest("d2pfed adverts", pack_subset(joined), *ordered)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedClients:
    """Who joined a session, the digest A of their advertisements, and the graph that follows from it."""

    session: Session
    present: Subset
    digest: bytes
    graph: Graph = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", self.session.graph(self.digest))

    @staticmethod
    def of(session: Session, present: Subset, leaves: Mapping[int, bytes]) -> "JoinedClients":
        """Return what the advertisements behind these leaves lead to."""
        return JoinedClients(session, present, advertisements_digest(session, present, leaves))

    def receivers(self, rank: int) -> list[int]:
        """Return to whom a client sends its shares: the holders of its secrets that joined, without itself."""
        return _others(rank, self.graph.holders(rank), self.present)

    def senders(self, rank: int, present: Subset) -> list[int]:
        """Return who of a subset sends shares to a client."""
        return _others(rank, self.graph.held_by(rank), present)

    def owners(self, rank: int, present: Subset) -> list[int]:
        """Return of whom in a subset a client holds shares, itself included."""
        return _within(self.graph.held_by(rank), present)

    def partners(self, rank: int, present: Subset) -> list[int]:
        """Return with whom of a subset a client shares a pair mask."""
        return _others(rank, self.graph.partners(rank), present)

    def shown(self, rank: int) -> list[int]:
        """Return whose advertisements a client is sent: its partners' that joined, and its own."""
        return sorted([*self.partners(rank, self.present), *([rank] if self.present[rank] else [])])

    def count_holders(self, rank: int, present: Subset) -> int:
        """Return how many others that hold shares of a client's secrets are in a subset."""
        return len(_others(rank, self.graph.holders(rank), present))

    def points(self, owner: int, holders: list[int]) -> list[int]:
        """Return the points of an owner's shares: places among all of its holders, joined or not, from 1."""
        return [int(place) + 1 for place in np.searchsorted(self.graph.holders(owner), holders)]


def _within(ranks: Ranks, present: Subset) -> list[int]:
    chosen: list[int] = ranks[present[ranks]].tolist()
    return chosen


def _others(rank: int, ranks: Ranks, present: Subset) -> list[int]:
    return [other for other in _within(ranks, present) if other != rank]
