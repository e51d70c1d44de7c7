"""What a client has at hand in every phase of a session."""

from collections.abc import Callable
from dataclasses import dataclass

from d2pfed.errors import ConfigError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, crypto
from d2pfed.secagg.adverts import Joined
from d2pfed.secagg.history import History
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.session import Session
from d2pfed.secagg.wire import ClientId, Subset

# From the bytes of task and model and, under Delivery.EVERYONE, the group seed, to the vector to be summed.
Contribute = Callable[[bytes, bytes, bytes | None], RingVector]


@dataclass(frozen=True, slots=True)
class Desk:
    """What does not change from phase to phase."""

    session: Session
    rank: int
    contribute: Contribute
    enrolment: Enrolment | None
    history: History | None

    def __post_init__(self) -> None:
        if self.session.is_signed:
            self.enrolled.require_self(self.client)
            if self.enrolled.roster.digest != self.session.roster_digest:
                raise ConfigError("a signed session belongs to the roster of its clients, got another one")
            if self.history is None:
                raise ConfigError("signed consistency needs a history, got none")

    @property
    def client(self) -> ClientId:
        """Return this client's identity."""
        return self.session.cohort[self.rank]

    @property
    def enrolled(self) -> Enrolment:
        """Return the enrolment that signed consistency needs."""
        if self.enrolment is None:
            raise ConfigError("signed consistency needs an enrolment, got none")
        return self.enrolment

    @property
    def depth(self) -> int | None:
        """Return the depth of the tree that cohorts are drawn from, if they are drawn verifiably."""
        return None if self.enrolment is None else self.enrolment.roster.depth

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nothing is signed."""
        return crypto.sign(self.enrolled.secret, statement) if self.session.is_signed else b""

    def check_left(self, joined: Joined, present: Subset) -> None:
        """Check what must hold for the clients that are left, whichever exchange it is."""
        checks.require_self(self.rank, present)
        checks.require_quorum(self.session, present)
        checks.require_holders(joined, self.rank, present)
        checks.require_designated(self.session, present)
