"""The client's machine: bytes in, bytes out, each phase once, any error final; and its phases as saved bytes."""

from collections.abc import Mapping

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.secagg.crypto import Agree
from d2pfed.secagg.crypto import agree as compute_secret
from d2pfed.secagg.draws import SEED_BYTES
from d2pfed.secagg.pairwise.checks import ClientSession, Contribute
from d2pfed.secagg.pairwise.keys import DIGEST_BYTES, JoinedClients
from d2pfed.secagg.pairwise.messages import CONTEXT_BYTES
from d2pfed.secagg.pairwise.phases import Advertised, Confirmed, Finished, Invited, Masked, Peer, Phase, Shared
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.position import POSITION_BYTES, History, Position, unpack_position
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import (
    ClientId,
    MessageKind,
    Reader,
    frame,
    kind_of,
    pack_integer,
    pack_subset,
    subset_of,
    unframe,
)

_KINDS: Mapping[type, MessageKind] = {
    Invited: MessageKind.SAVED_INVITED,
    Advertised: MessageKind.SAVED_ADVERTISED,
    Shared: MessageKind.SAVED_SHARED,
    Masked: MessageKind.SAVED_MASKED,
    Confirmed: MessageKind.SAVED_CONFIRMED,
}
SavedPhase = Invited | Advertised | Shared | Masked | Confirmed


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
        contribute: Contribute,
        entropy: Entropy,
        enrolment: Enrolment | None = None,
        history: History | None = None,
        agree: Agree = compute_secret,
    ) -> None:
        self._local = ClientSession(session, session.rank(client), contribute, enrolment, history, agree)
        self._phase: Phase = Invited(entropy)

    @property
    def phase(self) -> Phase:
        """Return the phase that this client is in."""
        return self._phase

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
        answer, self._phase = phase.answer(self._local, request)
        return answer

    def save(self) -> bytes:
        """Return what `restore` continues from, secrets included; this client is finished."""
        phase, self._phase = self._phase, Finished()
        return encode_phase(self._local.session, self._local.rank, phase)

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
        restored._local = ClientSession(session, session.rank(client), contribute, enrolment, history)  # noqa: SLF001 - our own
        restored._phase = decode_phase(session, restored._local.rank, saved)  # noqa: SLF001 - our own
        return restored


def encode_phase(session: Session, rank: int, phase: Phase) -> bytes:
    """Return a phase and its secrets as bytes; restoring them twice breaks the protocol's guarantee."""
    if not isinstance(phase, SavedPhase):
        raise ConfigError("a finished client has nothing to save")
    return frame(_KINDS[type(phase)], session.digest, session.cohort[rank], _pack(phase))


def decode_phase(session: Session, rank: int, data: bytes) -> SavedPhase:
    """Return the saved phase of this client in this session."""
    kind = kind_of(data)
    reader = unframe(data, kind, session.digest, session.cohort[rank])
    phase = _read(kind, session, rank, reader)
    reader.end()
    return phase


def _pack(phase: SavedPhase) -> bytes:
    match phase:
        case Invited():
            return _pack_entropy(phase.entropy)
        case Advertised():
            secrets = phase.seal_secret + phase.mask_secret + phase.seed + _pack_entropy(phase.entropy)
            return secrets + (b"" if phase.position is None else phase.position.pack())
        case Shared():
            own = phase.seed + pack_shares([phase.own_seed_share]) + phase.contribution
            peers = (peer.share_key + peer.mask_shared for _, peer in sorted(phase.peers.items()))
            return b"".join((own, _pack_joined(phase.joined), *peers))
        case Masked():
            held = pack_subset(subset_of(len(phase.sharers), phase.seed_shares))
            shares = _pack_by_rank(phase.seed_shares) + _pack_by_rank(phase.key_shares)
            return phase.context + _pack_joined(phase.joined) + pack_subset(phase.sharers) + held + shares
        case Confirmed():
            return pack_subset(phase.survivors) + _pack(phase.masked)


def _read(kind: int, session: Session, rank: int, reader: Reader) -> SavedPhase:
    match kind:
        case MessageKind.SAVED_INVITED:
            return Invited(_read_entropy(reader))
        case MessageKind.SAVED_ADVERTISED:
            secrets = reader.take(KEY_BYTES), reader.take(KEY_BYTES), reader.take(SEED_BYTES)
            entropy = _read_entropy(reader)
            position = unpack_position(reader.take(POSITION_BYTES)) if session.is_signed else None
            return Advertised(*secrets, entropy, position)
        case MessageKind.SAVED_SHARED:
            return _read_shared(session, rank, reader)
        case MessageKind.SAVED_MASKED:
            return _read_masked(session, rank, reader)
        case MessageKind.SAVED_CONFIRMED:
            survivors = reader.subset(len(session.cohort))
            return Confirmed(_read_masked(session, rank, reader), survivors)
        case _:
            raise PeerError(f"a saved phase was expected, got kind {kind}")


def _read_shared(session: Session, rank: int, reader: Reader) -> Shared:
    seed, own = reader.take(SEED_BYTES), unpack_share(reader.take(SHARE_BYTES))
    contribution = reader.take(SEED_BYTES if session.delivery is Delivery.EVERYONE else 0)
    joined = _read_joined(session, reader)
    partners = joined.partners(rank, joined.present)
    peers = {peer: Peer(reader.take(KEY_BYTES), reader.take(KEY_BYTES)) for peer in partners}
    return Shared(seed, own, contribution, joined, peers)


def _read_masked(session: Session, rank: int, reader: Reader) -> Masked:
    context, joined = reader.take(CONTEXT_BYTES), _read_joined(session, reader)
    sharers, held = reader.subset(len(session.cohort)), reader.subset(len(session.cohort))
    owners = [int(owner) for owner in held.nonzero()[0]]
    if not held[rank] or not set(owners) <= set(joined.owners(rank, sharers)):
        raise PeerError("saved shares must be this client's own and of others that have sent it some")
    seeds = {owner: unpack_share(reader.take(SHARE_BYTES)) for owner in owners}
    mask_keys = {owner: unpack_share(reader.take(SHARE_BYTES)) for owner in owners if owner != rank}
    return Masked(context, joined, sharers, seeds, mask_keys)


def _pack_joined(joined: JoinedClients) -> bytes:
    return pack_subset(joined.present) + joined.digest


def _read_joined(session: Session, reader: Reader) -> JoinedClients:
    return JoinedClients(session, reader.subset(len(session.cohort)), reader.take(DIGEST_BYTES))


def _pack_by_rank(shares: Mapping[int, int]) -> bytes:
    return pack_shares(shares[rank] for rank in sorted(shares))


def _pack_entropy(entropy: Entropy) -> bytes:
    return entropy.key + pack_integer(int(entropy.is_replayed), 1)


def _read_entropy(reader: Reader) -> Entropy:
    key, mark = reader.take(KEY_BYTES), reader.integer(1)
    if mark > 1:
        raise PeerError(f"the mark of replayed entropy must be 0 or 1, got {mark}")
    return Entropy(key, is_replayed=mark == 1)
