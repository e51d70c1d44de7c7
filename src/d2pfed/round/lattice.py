"""A client's machine in one attempt of the lattice protocol: asked once, or again and again as a member."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Position, lattice
from d2pfed.secagg.wire import MessageKind, kind_of


def record_nothing(_statement: bytes) -> None:
    """Write nothing down: what a member in this process has signed is in its memory."""


@dataclass(slots=True, kw_only=True)
class LatticeClient:
    """A client and, if it is in the committee, what it keeps between exchanges.

    Attributes:
        own: the client's half of the protocol.
        contribute: makes the vector, after its charge.
        entropy: of this attempt; a client that may be asked twice brings fresh entropy of the system each time.
        model: what the transport has brought beside the request.
        record: writes down which opening is signed.
        member: what a member keeps: to be stored before its answer leaves.
        met: where survivors stood, to be remembered before the answer leaves.
    """

    own: lattice.Participant
    contribute: lattice.Contribute
    entropy: Entropy
    model: bytes = field(default=b"", repr=False)
    record: lattice.Record = record_nothing
    member: lattice.Member | None = None
    met: Mapping[int, Position] = field(default_factory=dict)
    has_spoken: bool = False

    def receive(self, request: bytes) -> bytes:
        """Return the answer to a request of any exchange."""
        kind = kind_of(request)
        if kind == MessageKind.INVITATION:
            if self.member is not None:
                raise PeerError(f"client {self.own.client} has answered the invitation to this attempt")
            answer, self.member = self.own.convene(request, self.entropy)
            return answer
        if kind == MessageKind.LATTICE_REQUEST:
            body = lattice.decode_request(request, self.own.depth)
            if self.has_spoken:
                raise PeerError(f"client {self.own.client} has sent its one message of this attempt")
            self.has_spoken = True
            # Of this request alone: two requests must never get the same masks, whatever becomes of the flag.
            fresh = self.entropy.child("request", request)
            return self.own.contribute(body, self.model, self.contribute, fresh)
        if self.member is None:
            raise PeerError(f"client {self.own.client} has no part in the committee of this attempt")
        if kind == MessageKind.LATTICE_TRACE_REQUEST:
            return self.own.trace(self.member, request)
        if kind == MessageKind.LATTICE_CERTIFICATE:
            said = self.own.open(self.member, request)
        else:
            said = self.own.agree(self.member, request, self.record)
        self.member, self.met = said.member, said.met
        return said.answer
