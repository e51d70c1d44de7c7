"""A client's half of the lattice protocol in a deployment: what it logs, and what a member keeps until it has opened.

An ordinary client has nothing to keep: its secrets live within one answer. A member's key is in memory that no backup
restores, until its answer takes the key's place.
"""

from collections.abc import Callable
from dataclasses import replace

from d2pfed.deploy.attempt import ClientAttempt, marking_rollbacks, peers_of
from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.requests import ExchangeRequest
from d2pfed.deploy.standing import KeyFile, key_place
from d2pfed.deploy.state import SavedPhase
from d2pfed.errors import PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.round import LatticeClient
from d2pfed.secagg import Position, lattice
from d2pfed.secagg.lattice.messages import decode_survivors
from d2pfed.secagg.wire import MessageKind, binding_of, kind_of

LATTICE_REQUESTS = (
    MessageKind.LATTICE_ADVERTS,
    MessageKind.LATTICE_REQUEST,
    MessageKind.LATTICE_SURVIVORS,
    MessageKind.LATTICE_CERTIFICATE,
    MessageKind.LATTICE_TRACE_REQUEST,
)

# Charges an attempt, trains for it with the bytes of task and model, and returns the vector that is masked.
ContributeOnce = Callable[[ClientAttempt, bytes, bytes], RingVector]


def answer_lattice(config: ClientConfig, request: ExchangeRequest, contribute: ContributeOnce) -> bytes:
    """Answer a request for this client's one message, or one for a member of the committee."""
    frame = request.frame
    sweep_members(config)
    if kind_of(frame) != MessageKind.LATTICE_REQUEST:
        return _answer_as_member(config, member_keys(config, binding_of(frame)), frame)
    attempt = ClientAttempt.resume(config, SavedPhase("", frame, 0.0, 0.0, b""))

    def charged(task: bytes, model: bytes) -> tuple[RingVector, Position | None]:
        vector = contribute(attempt, task, model)
        return vector, attempt.position()  # after the charge: who is put back to before it is found out

    client = machine(attempt, charged)
    client.model = request.model
    with marking_rollbacks(config):
        return client.receive(frame)


def convene(attempt: ClientAttempt, invitation: bytes) -> bytes:
    """Answer an invitation, whose attempt has begun, as a member; its key is kept before the answer leaves."""
    client = machine(attempt)
    with marking_rollbacks(attempt.config):
        answer = client.receive(invitation)
    keys, run = member_keys(attempt.config, attempt.session.digest), attempt.session.run
    keys.begin(kept(attempt, client), lambda data: is_over(data, run))
    return answer


def _answer_as_member(config: ClientConfig, keys: KeyFile, frame: bytes) -> bytes:
    """Answer from what this member has kept, and keep what follows before the answer leaves; a refusal is final."""

    def advance(data: bytes) -> tuple[bytes, bytes | PeerError]:
        saved = SavedPhase.decode(data)
        try:
            attempt = ClientAttempt.resume(config, saved)
            client = machine(attempt)
            answer = client.receive(frame)
        except PeerError as refusal:
            return replace(saved, state=b"").encode(), refusal
        if attempt.enrolment is not None and client.met:
            shown = decode_survivors(client.own.session, client.own.rank, frame).signed.values()
            keys = {
                each.certificate.client: each.certificate.key for each in shown if each.certificate is not None
            }
            peers_of(config, attempt.enrolment).keep(client.met, keys)
        return kept(attempt, client), answer

    if not keys.holds_any():
        raise PeerError("this client has no key of this attempt's committee, or has erased it")
    answer = keys.update(advance)
    if isinstance(answer, PeerError):
        raise answer
    return answer


def machine(attempt: ClientAttempt, contribute: lattice.Contribute | None = None) -> LatticeClient:
    """Return this client's machine as it was kept, with fresh entropy: nobody can ask for the same answer twice."""
    config, session, saved = attempt.config, attempt.session, attempt.saved.state
    if not isinstance(session, lattice.Session):
        raise PeerError("this attempt is of another protocol, got a request of the lattice protocol")

    def record(statement: bytes) -> None:
        """Write down, once for each attempt, which opening this member signs."""
        body = {"session": session.digest.hex(), "opening": statement.hex()}
        while True:
            history = config.log.read()
            rows = [row for row in history.bodies(Entry.SIGNED) if row["session"] == body["session"]]
            for row in rows:
                lattice.require_one_statement(bytes.fromhex(str(row["opening"])), statement)
            if rows or config.log.append(history, Entry.SIGNED, body) is not None:
                return

    def refuse(*_asked: bytes) -> tuple[RingVector, None]:
        raise PeerError("a request to a committee member must not ask for its vector")

    return LatticeClient(
        own=lattice.Participant(session, config.client, attempt.enrolment, attempt.memory()),
        contribute=contribute or refuse,
        entropy=Entropy.system().require_system(),
        record=record,
        member=lattice.Member.decode(session, config.client, saved) if saved else None,
    )


def kept(attempt: ClientAttempt, client: LatticeClient) -> bytes:
    """Return the bytes that a member keeps until its next request, or until the attempt expires."""
    session, member = client.own.session, client.member
    state = b"" if member is None else member.encode(session, client.own.client)
    return replace(attempt.saved, run=session.run, state=state).encode()


def member_keys(config: ClientConfig, session: bytes) -> KeyFile:
    """Return the file of a member's key in one attempt."""
    return KeyFile.of(config, session, *_own(config))


def sweep_members(config: ClientConfig) -> None:
    """Erase the keys of attempts that have expired; a client that was in no committee has none."""
    place = key_place(config, *_own(config))
    if place is not None and place.exists():
        member_keys(config, bytes(32)).sweep(is_over)


def _own(config: ClientConfig) -> tuple[str, str]:
    # Of simulated clients many have the same name, and one must not erase another's key.
    return "lattice", str(config.directory.resolve())


def is_over(data: bytes, run: str = "") -> bool:
    """Say whether a member's key is useless: its attempt has expired, or another one of its run has begun."""
    try:
        return SavedPhase.decode(data).run == run
    except PeerError:
        return True
