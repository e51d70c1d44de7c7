"""The client's machine: bytes in, bytes out, each phase once, any error final."""

from collections.abc import Mapping

from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg.desk import Contribute, Desk
from d2pfed.secagg.history import History
from d2pfed.secagg.phases import Finished, Invited, Phase, Shared
from d2pfed.secagg.position import Position
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.saved import decode_phase, encode_phase
from d2pfed.secagg.session import Session
from d2pfed.secagg.wire import ClientId


class Client:
    """One client in one attempt at a sum; a signed session needs its enrolment and its history.

    Guarantee: whatever the server sends, this client opens at most one kind of share per peer, only for a set of
    survivors that it checked, and never after an error. Checked: test_malicious_server.py, test_secagg_machine.py.
    """

    def __init__(  # noqa: PLR0917 - a client has the parts it has
        self,
        session: Session,
        client: ClientId,
        contribute: Contribute,
        entropy: Entropy,
        enrolment: Enrolment | None = None,
        history: History | None = None,
    ) -> None:
        self._desk = Desk(session, session.rank(client), contribute, enrolment, history)
        self._phase: Phase = Invited(entropy)

    @property
    def met(self) -> Mapping[ClientId, Position]:
        """Return where others stood in this session, right after the answer with encrypted shares; else nothing.

        To be kept beyond the session: of each client the position with the highest count.
        """
        return self._phase.met if isinstance(self._phase, Shared) else {}

    def receive(self, request: bytes) -> bytes:
        """Return the answer to a request, or refuse it and every later one.

        Raises RolledBack, a PeerError, if somebody has met this client at a position that its log does not have.
        """
        phase, self._phase = self._phase, Finished()  # spent, whatever happens on the next lines
        answer, self._phase = phase.answer(self._desk, request)
        return answer

    def save(self) -> bytes:
        """Return what `restore` continues from, secrets included; this client is finished."""
        phase, self._phase = self._phase, Finished()
        return encode_phase(self._desk.session, self._desk.rank, phase)

    @staticmethod
    def restore(  # noqa: PLR0917 - the same parts
        session: Session,
        client: ClientId,
        contribute: Contribute,
        saved: bytes,
        enrolment: Enrolment | None = None,
        history: History | None = None,
    ) -> "Client":
        """Continue from saved bytes. The caller makes sure that they are used once, by removing them first."""
        restored = Client.__new__(Client)
        restored._desk = Desk(session, session.rank(client), contribute, enrolment, history)  # noqa: SLF001 - our own
        restored._phase = decode_phase(session, restored._desk.rank, saved)  # noqa: SLF001 - our own
        return restored
