"""The sizes at which secure aggregation is measured."""

from dataclasses import dataclass

from benchmarks.crowd import signing_secret
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import Delivery, Roster, Session, crypto, issue_roster
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import ClientId


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of one measured round; dropouts happen where they hurt most, after the keys were shared."""

    clients: int
    dimension: int
    bits: int
    dropouts: int
    consistency: Consistency = Consistency.ASSUMED

    def session(self) -> Session:
        """Return the session of this size, with a tenth of the clients colluding."""
        tolerated, colluders = max(self.dropouts, self.clients // 10), self.clients // 10
        is_signed = self.consistency is Consistency.SIGNED
        return Session(
            plan_digest=digest("bench"),
            run="bench",
            round=0,
            attempt=0,
            roster_digest=self.roster().digest if is_signed else NO_ROSTER,
            cohort=tuple(range(self.clients)),
            dimension=self.dimension,
            bits=self.bits,
            threshold=least_threshold(self.clients, colluders),
            quorum=self.clients - tolerated,
            colluders=colluders,
            delivery=Delivery.QUORUM,
            consistency=self.consistency,
        )

    def roster(self) -> Roster:
        """Return the enrolment of all clients, with keys that everyone can make."""
        keys = {client: crypto.signing_public(signing_secret(client)) for client in range(self.clients)}
        authority = crypto.signing_public(digest("bench authority"))
        return issue_roster(keys, authority, serial=1, issued=0, entropy=Entropy.replay(b"bench"))

    @property
    def lost(self) -> frozenset[ClientId]:
        """Return the clients whose vectors get lost, evenly spread; never the first."""
        return frozenset(place * self.clients // self.dropouts + 1 for place in range(self.dropouts))

    @property
    def is_crowd(self) -> bool:
        """Say whether one real client is measured among a crowd that one helper plays."""
        return self.clients**2 > _MOST_PAIRS


_MOST_PAIRS = 600_000  # a thousand real clients of a complete graph would take most of an hour
_COMPLETE = (
    Scale(clients=1_000, dimension=dimension, bits=16, dropouts=100, consistency=consistency)
    for dimension in (100_000, 1_000_000)
    for consistency in Consistency
)
BESIDE_FLOWER = (
    Scale(clients=100, dimension=100_000, bits=16, dropouts=0),
    Scale(clients=100, dimension=100_000, bits=16, dropouts=10),
    Scale(clients=32, dimension=996_298, bits=8, dropouts=0),
)
COMPLETE = tuple(_COMPLETE)
ALONE = (
    Scale(clients=20, dimension=1 << 24, bits=16, dropouts=2),
    *COMPLETE,
)
MODEST = (
    Scale(clients=32, dimension=32_768, bits=16, dropouts=3),
    Scale(clients=32, dimension=32_768, bits=16, dropouts=3, consistency=Consistency.SIGNED),
)  # of `scripts/bench all`
SILOS = tuple(
    Scale(clients=20, dimension=dimension, bits=16, dropouts=0, consistency=Consistency.SIGNED)
    for dimension in (20_000, 1_000_000)
)
ESTIMATED_FLOWER = COMPLETE[:1]  # Flower's functions take hours here: one client and three secrets, scaled
GROWTH = (
    *(
        Scale(clients=clients, dimension=10_000, bits=16, dropouts=clients // 10)
        for clients in (20, 50, 100, 200, 500)
    ),
    *(Scale(clients=50, dimension=1 << power, bits=16, dropouts=5) for power in (12, 14, 16, 18, 20, 22)),
)
