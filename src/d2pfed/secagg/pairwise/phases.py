"""The phases of a client: each holds only what it may still use, and answers one request.

Theory of operation. A client is in one phase at a time. A phase accepts one kind of message, answers it with one
message, and gives way to the next phase, which receives only the secrets listed here; all others are forgotten. The
rounds of Bonawitz et al. (2017) are those of the server's requests: AdvertiseKeys, ShareKeys, MaskedInputCollection,
ConsistencyCheck (if signed) and Unmasking.

    phase       may use                               accepts             answers with            next
    ----------  ------------------------------------  ------------------  ----------------------  ----------
    Invited     its entropy                           INVITATION          KEY_ADVERTISEMENT       Advertised
    Advertised  both private keys, self-mask seed     KEY_ADVERTISEMENTS  ENCRYPTED_SHARES        Shared
    Shared      self-mask seed, its own share of it,  MASK_REQUEST        MASKED_VECTOR           Masked
                agreed secrets of its partners
    Masked      the shares it holds for others        UNMASK_REQUEST      UNMASKING_SHARES        Finished
                                          if signed:  SURVIVORS           SURVIVORS_SIGNATURE     Confirmed
    Confirmed   the same, and the set it has signed   UNMASK_REQUEST      UNMASKING_SHARES        Finished
    Finished    nothing                               nothing

Whatever else arrives, and whatever fails a check, leads to Finished. So a client answers each request once, and never
reveals both secrets of another client: a phase that still holds shares has one way out, for one set of survivors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, crypto, shamir
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import Enrolment, History, Position
from d2pfed.secagg.wire import ClientId, MessageKind, Subset, message, opened, ranks_of, subset_of

# From the bytes of task and model and, under Delivery.EVERYONE, the group seed, to the vector to be summed.
Contribute = Callable[[bytes, bytes, bytes | None], RingVector]


@dataclass(frozen=True, slots=True)
class ClientSession:
    """What a client has in every phase of a session: it does not change from one to the next.

    `signed` is what a signed session needs, and what there is in no other.
    """

    session: Session
    rank: int
    contribute: Contribute
    enrolment: Enrolment | None
    history: History | None
    agree: crypto.Agree = crypto.agree
    client: ClientId = field(init=False)
    signed: tuple[Enrolment, History] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "client", self.session.cohort[self.rank])
        signed = checks.enrolled(self.session.roster_digest, self.client, self.enrolment, self.history)
        object.__setattr__(self, "signed", signed)

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nothing is signed."""
        return b"" if self.signed is None else crypto.sign(self.signed[0].secret, statement)

    def check_remaining(self, present: Subset) -> None:
        """Check what must hold for the clients that are left, whichever exchange it is."""
        checks.require_self(self.rank, present)
        checks.require_quorum(self.session.quorum, int(present.sum()))


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to use: the attempt is over for this client, well or badly."""

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:  # noqa: ARG002 - a phase's signature
        """Refuse whatever comes."""
        raise PeerError("this client has finished this attempt")


@dataclass(frozen=True, slots=True)
class Invited:
    """Waits for the invitation; answers with fresh keys."""

    entropy: Entropy

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Advertise keys that belong to this session alone, and where this client stands."""
        session = local.session
        depth = None if local.enrolment is None else local.enrolment.roster.depth
        invited = messages.decode_invitation(data, depth)
        invited.require_agreed(session, local.client)
        if local.signed is not None:
            checks.require_in_chain(*local.signed, local.client, invited.remembered, "the server")
        fresh = self.entropy.child("d2pfed client", session.digest, local.client)
        secrets = Advertised(
            fresh.child("seal").key,
            fresh.child("mask").key,
            fresh.child("self").key,
            fresh.child("shares"),
            None if local.signed is None else local.signed[1].position,
        )
        packed = secrets.advertisement(local).pack()
        return message(session, MessageKind.KEY_ADVERTISEMENT, local.rank, packed), secrets


@dataclass(frozen=True, slots=True)
class Advertised:
    """Waits for the others' keys; answers with its secrets in sealed shares."""

    seal_secret: bytes = field(repr=False)
    mask_secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    entropy: Entropy
    position: Position | None

    def advertisement(self, local: ClientSession) -> KeyAdvertisement:
        """Return the public side of the secrets."""
        publics = crypto.Agreement(self.seal_secret).public, crypto.Agreement(self.mask_secret).public
        committed = keys.commitment(local.session, local.client, self.seed)
        unsigned = KeyAdvertisement(*publics, committed, self.position)
        return replace(unsigned, signature=local.sign(unsigned.statement(local.session, local.client)))

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Split both secrets among the holders that joined, agree on keys with them, forget the private keys."""
        session, client = local.session, local.client
        joined, leaves, shown = messages.decode_advertisements(session, local.rank, data)
        local.check_remaining(joined.present)
        own = self.advertisement(local).statement(session, client)
        checks.require_own(leaves[local.rank], own)
        checks.require_distinct_keys(
            chain.from_iterable((each.seal_public, each.mask_public) for each in shown.values())
        )
        if local.signed is not None:
            statements = {rank: (leaf, shown[rank].signature) for rank, leaf in leaves.items()}
            checks.require_signed(session, local.signed[0].roster, statements)
        contribution = self.entropy.child("group").key if session.delivery is Delivery.EVERYONE else b""
        shares = self._split(joined)
        seal, mask = crypto.Agreement(self.seal_secret), crypto.Agreement(self.mask_secret)
        known = {} if local.signed is None else local.signed[1].known
        sealed, peers = dict[int, bytes](), dict[int, Peer]()
        for rank in keys.others(local.rank, joined.present):
            advertisement, peer = shown[rank], session.cohort[rank]
            shared = local.agree(seal, advertisement.seal_public)
            inbound = keys.share_key(session, shared, peer, client)
            peers[rank] = Peer(inbound, local.agree(mask, advertisement.mask_public))
            if rank in shares:
                outbound = keys.share_key(session, shared, client, peer)
                content = keys.ShareContent(*shares[rank], contribution, known.get(peer))
                sealed[rank] = crypto.seal(outbound, content.pack())
        claims = subset_of(len(session.cohort), [rank for rank in sealed if session.cohort[rank] in known])
        # Each checks what is said about itself, so nobody checks it for them.
        met = {
            session.cohort[rank]: advertisement.position
            for rank, advertisement in shown.items()
            if advertisement.position is not None and rank != local.rank
        }
        state = Shared(self.seed, shares[local.rank][0], contribution, joined, peers, met)
        return messages.encode_encrypted_shares(joined, local.rank, EncryptedShares(sealed, claims)), state

    def _split(self, joined: JoinedClients) -> dict[int, tuple[int, int]]:
        """Return (share of the seed, share of the mask key) by client that joined, this one included."""
        holders = ranks_of(joined.present)
        stream = self.entropy.child("coefficients").stream()
        secrets = [int.from_bytes(secret, "little") for secret in (self.seed, self.mask_secret)]
        columns = shamir.split(secrets, joined.session.threshold, [holder + 1 for holder in holders], stream)
        return dict(zip(holders, zip(*columns, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Peer:
    """What a client keeps about a partner: the key of the ciphertext to come, and the secret their mask grows from."""

    share_key: bytes = field(repr=False)
    mask_shared: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Waits for the others' ciphertexts and the model; answers with the masked vector.

    `met` is where others stood when they joined, to be remembered beyond this session; it is not saved with it.
    """

    seed: bytes = field(repr=False)
    own_seed_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    joined: JoinedClients
    peers: Mapping[int, Peer] = field(repr=False)
    met: Mapping[ClientId, Position] = field(default_factory=dict, repr=False)

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Open the ciphertexts, mask the contribution, and forget all that could unmask it."""
        session, joined = local.session, self.joined
        sharers, sent, task, model = messages.decode_mask_request(joined, local.rank, data)
        checks.require_within(sharers, joined.present)
        local.check_remaining(sharers)
        # Where a ciphertext does not open, its sender or the server will be asked about it. Where the server keeps to
        # the protocol no claims are made, and any number of ciphertexts may be bad.
        read = {
            rank: keys.decrypt_shares(session, self.peers[rank].share_key, ciphertext)
            for rank, ciphertext in sent.ciphertexts.items()
        }
        contents = {rank: content for rank, content in read.items() if content is not None}
        if local.signed is not None:
            checks.require_few_unopened(session.colluders, local.signed[1].colluders, len(read) - len(contents))
            for content in contents.values():
                checks.require_in_chain(*local.signed, local.client, content.claim, "another client")
        group = None
        if session.delivery is Delivery.EVERYONE:
            if len(contents) != int(sharers.sum()) - 1:
                raise PeerError(
                    "every client's part of the group seed is needed, got a ciphertext that does not open"
                )
            everyone = {rank: content.contribution for rank, content in contents.items()}
            everyone[local.rank] = self.contribution
            group = keys.group_seed(session, [everyone[rank] for rank in sorted(everyone)])
        context = keys.context(joined, task, model, sharers)
        vector = checks.ring_copy(session.ring, session.dimension, local.contribute(task, model, group))
        # The hash goes into the mask keys, and to the server, which compares.
        hashed = keys.NO_GROUP if group is None else digest("d2pfed group hash", group)
        added, subtracted = [Stream(keys.self_mask_key(self.seed, context, local.client))], list[Stream]()
        # With all sharers, even those whose ciphertext did not open: a server could spoil some for fewer masks.
        for rank in keys.others(local.rank, sharers):
            pair = local.client, session.cohort[rank]
            key = keys.pair_mask_key(self.peers[rank].mask_shared, context, pair, hashed)
            (added if local.rank < rank else subtracted).append(Stream(key))
        session.ring.add_masks_into(vector, added, subtracted)
        seed_shares = {rank: content.seed_share for rank, content in contents.items()}
        key_shares = {rank: content.key_share for rank, content in contents.items()}
        seed_shares[local.rank] = self.own_seed_share
        state = Masked(context, joined, sharers, seed_shares, key_shares)
        fields = context, hashed, session.ring.pack(vector)
        return message(session, MessageKind.MASKED_VECTOR, local.rank, *fields), state


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Waits to learn whose vectors arrived; answers with its signature, or with one share per client."""

    context: bytes
    joined: JoinedClients
    sharers: Subset
    seed_shares: Mapping[int, int] = field(repr=False)
    key_shares: Mapping[int, int] = field(repr=False)

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Confirm the survivors if the session is signed, else open the shares."""
        session = local.session
        kind = MessageKind.SURVIVORS if session.is_signed else MessageKind.UNMASK_REQUEST
        with opened(session, kind, local.rank, data) as reader:
            survivors = reader.subset(len(session.cohort))
        checks.require_within(survivors, self.sharers)
        local.check_remaining(survivors)
        if not session.is_signed:
            return self.unmasking_shares(local, survivors), Finished()
        signature = local.sign(keys.survivors_statement(self.context, survivors))
        answer = message(session, MessageKind.SURVIVORS_SIGNATURE, local.rank, signature)
        return answer, Confirmed(self, survivors)

    def unmasking_shares(self, local: ClientSession, survivors: Subset) -> bytes:
        """Return one share per client: of the self-mask seed if its vector arrived, of the mask key if not.

        Guarantee: a survivor's mask key and a dropped client's seed stay closed; both would open its vector.
        Checked: test_malicious_server.py (both kinds of share), test_secagg_machine.py (I1).
        """
        shares = {
            owner: seed_share if survivors[owner] else self.key_shares[owner]
            for owner, seed_share in self.seed_shares.items()
        }
        return messages.encode_unmasking_shares(self.joined, local.rank, self.sharers, shares)


@dataclass(frozen=True, slots=True, eq=False)
class Confirmed:
    """Waits for the others' signatures under the same survivors; answers with one share per client."""

    masked: Masked
    survivors: Subset

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Open the shares once enough clients have signed what this one has signed."""
        signatures = messages.decode_signatures(local.session, local.rank, data)
        statement = keys.survivors_statement(self.masked.context, self.survivors)
        checks.require_quorum(local.session.quorum, len(signatures))
        if local.signed is None:
            raise PeerError("survivors are confirmed in signed sessions only")
        signed = {rank: (statement, signature) for rank, signature in signatures.items()}
        checks.require_signed(local.session, local.signed[0].roster, signed)
        return self.masked.unmasking_shares(local, self.survivors), Finished()


Phase = Finished | Invited | Advertised | Shared | Masked | Confirmed


def group_seed_of(session: Session, entropies: Mapping[int, Entropy]) -> bytes:
    """Return the group seed that clients with these entropies agree on, for a simulation that skips the exchange."""
    fresh = (entropies[client].child("d2pfed client", session.digest, client) for client in session.cohort)
    return keys.group_seed(session, [entropy.child("shares").child("group").key for entropy in fresh])
