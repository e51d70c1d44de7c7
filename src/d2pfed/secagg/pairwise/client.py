"""The client's machine: bytes in, bytes out, each phase once, any error final; and its phases as saved bytes."""

from collections.abc import Mapping

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.draws import SEED_BYTES
from d2pfed.secagg.pairwise import phases
from d2pfed.secagg.pairwise.keys import JoinedClients, others
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import POSITION_BYTES, Enrolment, History, Position, unpack_position
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import BINDING_BYTES, CONTEXT_BYTES, ClientId, MessageKind, Reader

_KINDS: Mapping[type, MessageKind] = {
    phases.Invited: MessageKind.SAVED_INVITED,
    phases.Advertised: MessageKind.SAVED_ADVERTISED,
    phases.Shared: MessageKind.SAVED_SHARED,
    phases.Masked: MessageKind.SAVED_MASKED,
    phases.Confirmed: MessageKind.SAVED_CONFIRMED,
}
# Restored twice, it breaks the guarantee.
SavedPhase = phases.Invited | phases.Advertised | phases.Shared | phases.Masked | phases.Confirmed


class Client:
    """One client in one attempt at a sum; a signed session needs its enrolment and its history.

    `agree` is for simulations, whose clients may share a `PairSecrets`; a deployment leaves it alone.

    Guarantee: whatever the server sends, this client opens at most one kind of share per peer, only for a set of
    survivors that it checked, and never after an error. Checked: test_malicious_server.py, test_secagg_machine.py.
    """

    def __init__(  # noqa: PLR0917 - a client has the parts it has
        self,
        session: Session,
        client: ClientId,
        contribute: phases.Contribute,
        entropy: Entropy,
        enrolment: Enrolment | None = None,
        history: History | None = None,
        agree: crypto.Agree = crypto.agree,
    ) -> None:
        self._local = phases.ClientSession(session, session.rank(client), contribute, enrolment, history, agree)
        self.phase: phases.Phase = phases.Invited(entropy)

    @property
    def met(self) -> Mapping[ClientId, Position]:
        """Return where others stood in this session, right after the answer with encrypted shares; else nothing.

        To be kept beyond the session: of each client the position with the highest count.
        """
        return self.phase.met if isinstance(self.phase, phases.Shared) else {}

    def receive(self, request: bytes) -> bytes:
        """Return the answer to a request, or refuse it and every later one.

        Raises RolledBack, a PeerError, if somebody has met this client at a position that its log does not have.
        """
        phase, self.phase = self.phase, phases.Finished()  # spent, whatever happens on the next lines
        answer, self.phase = phase.answer(self._local, request)
        return answer

    def save(self) -> bytes:
        """Return what `restore` continues from, secrets included; this client is finished."""
        phase, self.phase = self.phase, phases.Finished()
        if not isinstance(phase, SavedPhase):
            raise ConfigError("a finished client has nothing to save")
        return wire.message(self._local.session, _KINDS[type(phase)], self._local.rank, _pack(phase))

    @staticmethod
    def restore(  # noqa: PLR0917 - the same parts
        session: Session,
        client: ClientId,
        contribute: phases.Contribute,
        saved: bytes,
        enrolment: Enrolment | None = None,
        history: History | None = None,
    ) -> "Client":
        """Continue from saved bytes. The caller makes sure that they are used once, by removing them first."""
        restored, rank = Client.__new__(Client), session.rank(client)
        restored._local = phases.ClientSession(session, rank, contribute, enrolment, history)  # noqa: SLF001 - our own
        restored.phase = decode_phase(session, rank, saved)
        return restored


def decode_phase(session: Session, rank: int, data: bytes) -> SavedPhase:
    """Return the saved phase of this client in this session."""
    kind = wire.kind_of(data)
    if kind not in _KINDS.values():
        raise PeerError(f"a saved phase was expected, got kind {kind}")
    with wire.opened(session, MessageKind(kind), rank, data) as reader:
        match kind:
            case MessageKind.SAVED_INVITED:
                return phases.Invited(_read_entropy(reader))
            case MessageKind.SAVED_ADVERTISED:
                secrets = reader.take(KEY_BYTES), reader.take(KEY_BYTES), reader.take(SEED_BYTES)
                entropy = _read_entropy(reader)
                position = unpack_position(reader.take(POSITION_BYTES)) if session.is_signed else None
                return phases.Advertised(*secrets, entropy, position)
            case MessageKind.SAVED_SHARED:
                seed, own = reader.take(SEED_BYTES), unpack_share(reader.take(SHARE_BYTES))
                contribution = reader.take(SEED_BYTES if session.delivery is Delivery.EVERYONE else 0)
                joined = JoinedClients(session, reader.subset(len(session.cohort)), reader.take(BINDING_BYTES))
                partners = others(rank, joined.present)
                peers = {peer: phases.Peer(reader.take(KEY_BYTES), reader.take(KEY_BYTES)) for peer in partners}
                return phases.Shared(seed, own, contribution, joined, peers)
            case MessageKind.SAVED_CONFIRMED:
                survivors = reader.subset(len(session.cohort))
                return phases.Confirmed(_read_masked(session, rank, reader), survivors)
            case _:
                return _read_masked(session, rank, reader)


def _pack(phase: SavedPhase) -> bytes:
    match phase:
        case phases.Invited():
            return phase.entropy.key + bytes([phase.entropy.is_replayed])
        case phases.Advertised():
            entropy = phase.entropy.key + bytes([phase.entropy.is_replayed])
            position = b"" if phase.position is None else phase.position.pack()
            return phase.seal_secret + phase.mask_secret + phase.seed + entropy + position
        case phases.Shared():
            own = phase.seed + pack_shares([phase.own_seed_share]) + phase.contribution
            joined = wire.pack_subset(phase.joined.present) + phase.joined.digest
            peers = (peer.share_key + peer.mask_shared for _, peer in sorted(phase.peers.items()))
            return b"".join((own, joined, *peers))
        case phases.Masked():
            sets = phase.joined.present, phase.sharers, wire.subset_of(len(phase.sharers), phase.seed_shares)
            present, sharers, held = map(wire.pack_subset, sets)
            ordered = (each[rank] for each in (phase.seed_shares, phase.key_shares) for rank in sorted(each))
            return b"".join((phase.context, present, phase.joined.digest, sharers, held, pack_shares(ordered)))
        case phases.Confirmed():
            return wire.pack_subset(phase.survivors) + _pack(phase.masked)


def _read_masked(session: Session, rank: int, reader: Reader) -> phases.Masked:
    size, context = len(session.cohort), reader.take(CONTEXT_BYTES)
    joined = JoinedClients(session, reader.subset(size), reader.take(BINDING_BYTES))
    sharers, held = reader.subset(size), reader.subset(size)
    owners = wire.ranks_of(held)
    if not held[rank] or not set(owners) <= set(wire.ranks_of(sharers)):
        raise PeerError("saved shares must be this client's own and of others that have sent it some")
    seeds = {owner: unpack_share(reader.take(SHARE_BYTES)) for owner in owners}
    mask_keys = {owner: unpack_share(reader.take(SHARE_BYTES)) for owner in owners if owner != rank}
    return phases.Masked(context, joined, sharers, seeds, mask_keys)


def _read_entropy(reader: Reader) -> Entropy:
    key, mark = reader.take(KEY_BYTES), reader.integer(1)
    if mark > 1:
        raise PeerError(f"the mark of replayed entropy must be 0 or 1, got {mark}")
    return Entropy(key, is_replayed=mark == 1)
