"""Scripts of a malicious server. Each is refused; each recovers an update once the one check it meets is gone."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import Client, Consistency, Delivery, Enrolment, Roster, Session, crypto, decode_roster
from d2pfed.secagg.pairwise import keys
from d2pfed.secagg.pairwise.phases import Confirmed, Finished, Masked, Shared
from d2pfed.secagg.wire import MessageKind, kind_of
from support.decoding import decode_survivors
from support.evil import LOW_ORDER, VICTIM, Evil, TooFewShares
from support.federation import MODEL, TASK, enrol, enrolment_secret, make_session, run_round
from support.rosters import sign_anything
from support.twins import twin

SIGNED = Consistency.SIGNED


def small(**changes: object) -> Session:
    """Eight clients, five shares open a secret, six must survive: safe against three colluders even if split."""
    shape = {"threshold": 5, "quorum": 6, "colluders": 3, "dimension": 12, "bits": 16}
    return make_session(8, **(shape | changes))


# --- scripts: each returns the update that the server got ---


def alone_from(phase: str) -> Callable[[Evil], np.ndarray]:
    """Leave the victim alone with colluders from some exchange on, below the quorum."""

    def script(evil: Evil) -> np.ndarray:
        few = evil.subset([VICTIM, *evil.colluders])
        everyone = evil.subset(evil.everyone)
        joined = few if phase == "share" else everyone
        sharers = few if phase in ("share", "mask") else everyone
        ranks = {"joined": np.flatnonzero(joined), "sharers": np.flatnonzero(sharers)}
        evil.advertise(ranks["joined"])
        evil.share(ranks["joined"], joined)
        evil.mask(ranks["sharers"], sharers)
        evil.open(np.flatnonzero(few), sharers, few)
        return evil.without(evil.sum_of(sharers, few), evil.colluders)

    return script


def padded_survivors(evil: Evil) -> np.ndarray:
    """Reach the quorum with clients that never shared keys."""
    sharers = evil.subset([VICTIM, 1, *evil.colluders])
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    evil.mask(np.flatnonzero(sharers), sharers)
    real = evil.subset([VICTIM, *evil.colluders])
    evil.open(np.flatnonzero(real), sharers, real | evil.subset([2]))
    return evil.without(evil.sum_of(sharers, real), evil.colluders)


def alone_in_a_group(evil: Evil) -> np.ndarray:
    """Call everyone dropped but the victim and colluders, who know the group seed; all had delivered."""
    evil.until_masked()
    everyone, few = evil.subset(evil.everyone), evil.subset([VICTIM, *evil.colluders])
    evil.open(np.flatnonzero(few), everyone, few)
    group = evil.federation.group_seeds[evil.session.cohort[evil.colluders[0]]]
    return evil.strip(everyone, evil.shared_with_victim, digest("d2pfed group hash", group))


def forged_mask_keys(forge: Callable[[Evil, int], bytes], agree: Callable[[Evil], bytes]):
    """Show the victim other mask keys for its honest peers, whose shared secrets the server knows."""

    def script(evil: Evil) -> np.ndarray:
        everyone = evil.subset(evil.everyone)
        honest = [rank for rank in evil.everyone if rank != VICTIM and rank not in evil.colluders]
        evil.advertise(evil.everyone)
        forged = {
            rank: replace(evil.advertisements[rank], mask_public=forge(evil, place))
            for place, rank in enumerate(honest)
        }
        evil.share(evil.everyone, everyone, forged)
        evil.mask(evil.everyone, everyone)
        evil.open(evil.everyone, everyone, everyone)
        known = {rank: agree(evil) for rank in honest}
        return evil.strip(everyone, lambda peer: known.get(peer) or evil.shared_with_victim(peer))

    return script


def low_order_seal_keys(evil: Evil) -> np.ndarray:
    """Show the victim sealing keys of low order, and read its shares on their way."""
    everyone = evil.subset(evil.everyone)
    honest = [rank for rank in evil.everyone if rank != VICTIM and rank not in evil.colluders]
    evil.advertise(evil.everyone)
    forged = {
        rank: replace(evil.advertisements[rank], seal_public=bytes.fromhex(point))
        for rank, point in zip(honest, LOW_ORDER, strict=False)
    }
    evil.share(evil.everyone, everyone, forged)
    client = evil.session.cohort[VICTIM]
    for rank in honest:
        key = keys.share_key(evil.session, bytes(32), client, evil.session.cohort[rank])
        plain = crypto.unseal(key, evil.ciphertexts[VICTIM][rank])
        evil.seed_shares[rank], evil.key_shares[rank] = (
            int.from_bytes(plain[at : at + 33], "little") for at in (0, 33)
        )

    def ciphertext(receiver: int, sender: int) -> bytes:
        if receiver != VICTIM or sender not in honest:
            return evil.ciphertexts[sender][receiver]
        return crypto.seal(keys.share_key(evil.session, bytes(32), evil.session.cohort[sender], client), bytes(66))

    evil.mask([VICTIM, *evil.colluders], everyone, ciphertext=ciphertext)
    evil.use_colluders()
    return evil.strip_by_key(everyone)


def reflected_ciphertexts(evil: Evil) -> np.ndarray:
    """Give the victim its own ciphertexts back under the names of two peers, then call the two dropped."""
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    reflected = (1, 2)
    evil.mask(
        evil.everyone,
        everyone,
        ciphertext=lambda receiver, sender: (
            evil.ciphertexts[VICTIM][sender]
            if receiver == VICTIM and sender in reflected
            else evil.ciphertexts[sender][receiver]
        ),
    )
    evil.use_colluders()
    left = evil.subset(set(evil.everyone) - set(reflected))
    evil.open(np.flatnonzero(left), everyone, left)
    for rank in reflected:
        if VICTIM in evil.all_shares[rank]:
            evil.key_shares[rank] = evil.all_shares[rank][VICTIM]
    return evil.strip_by_key(everyone)


def withheld_ciphertexts(evil: Evil) -> np.ndarray:
    """Name all sharers, but withhold the ciphertexts of the honest ones, so that no mask of theirs is added."""
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    evil.mask(
        evil.everyone,
        everyone,
        ciphertext=lambda receiver, sender: (
            bytes(82)
            if receiver == VICTIM and sender not in evil.colluders
            else evil.ciphertexts[sender][receiver]
        ),
    )
    honest = [rank for rank in evil.everyone if rank != VICTIM and rank not in evil.colluders]
    evil.use_colluders()
    evil.open(honest, everyone, everyone)
    return evil.strip(everyone, lambda peer: None if peer in honest else evil.shared_with_victim(peer))


def for_the_victim_only(told: str) -> Callable[[Evil], np.ndarray]:
    """Give everyone but the victim a model, or a task, on which they contribute nothing."""

    def script(evil: Evil) -> np.ndarray:
        everyone = evil.subset(evil.everyone)
        dead = b"nothing moves"
        quiet = evil.federation.contribution

        def contribution(client):
            def contribute(task, model, group_seed):
                vector = quiet(client)(task, model, group_seed)
                return np.zeros_like(vector) if dead in (task, model) else vector

            return contribute

        for client, machine in evil.federation.clients.items():
            machine._local = replace(machine._local, contribute=contribution(client))
        evil.advertise(evil.everyone)
        evil.share(evil.everyone, everyone)
        live = {"model": MODEL, "task": TASK}[told]
        evil.mask(evil.everyone, everyone, **{told: lambda rank: live if rank == VICTIM else dead})
        signatures = evil.confirm(evil.everyone, everyone)
        evil.open_signed(evil.everyone, everyone, everyone, signatures)
        return evil.sum_of(everyone, everyone)

    return script


def split_view(fill: Callable[[Evil, dict[int, bytes]], dict[int, bytes]]) -> Callable[[Evil], np.ndarray]:
    """Tell two clients that the victim dropped out and the others that it did not, and fill up the signatures."""

    def script(evil: Evil) -> np.ndarray:
        evil.until_masked()
        evil.use_colluders()
        everyone = evil.subset(evil.everyone)
        without = evil.subset(set(evil.everyone) - {VICTIM})
        fooled, others = [1, 3], [VICTIM, 2, 4]
        few = evil.confirm(fooled, without)
        enough = evil.confirm([*others, *evil.colluders], everyone)
        few |= signatures_of_colluders(evil, everyone, without)
        evil.open_signed(fooled, everyone, without, fill(evil, few))
        evil.open_signed(others, everyone, everyone, enough)
        return evil.strip_by_key(everyone)

    return script


def signatures_of_colluders(evil, sharers, survivors):
    statement = keys.survivors_statement(evil.context(VICTIM, sharers), survivors)
    return {rank: crypto.sign(enrolment_secret(evil.session.cohort[rank]), statement) for rank in evil.colluders}


def forged_signatures(evil: Evil, few: dict[int, bytes]) -> dict[int, bytes]:
    return few | {2: bytes(64), 4: bytes(64)}


def replayed_signatures(evil: Evil, few: dict[int, bytes]) -> dict[int, bytes]:
    """Use what clients 2 and 4 signed in the attempt before, in which the victim did drop out."""
    before = Evil(replace(evil.session, attempt=7), evil.colluders)
    before.until_masked()
    without = before.subset(set(before.everyone) - {VICTIM})
    return before.confirm([2, 4], without) | few


def second_request(evil: Evil) -> np.ndarray:
    """Ask twice: for the sum, and once more with the victim called dropped."""
    evil.until_masked()
    evil.use_colluders()
    everyone = evil.subset(evil.everyone)
    evil.open([1, 2, 3, 4], everyone, everyone)
    evil.shares_sent = 0
    evil.open([1, 2, 3, 4], everyone, evil.subset(set(evil.everyone) - {VICTIM}))
    return evil.strip_by_key(everyone)


def second_life(evil: Evil) -> np.ndarray:
    """Have a client saved, and ask both the saved one and the one that went on."""
    evil.until_masked()
    evil.use_colluders()
    everyone = evil.subset(evil.everyone)
    clients = evil.federation.clients
    saved = {rank: clients[evil.session.cohort[rank]].save() for rank in (1, 2)}
    evil.open([1, 2], everyone, everyone)
    for rank, data in saved.items():
        client = evil.session.cohort[rank]
        clients[client] = evil.federation.restore(client, data)
    evil.open([1, 2], everyone, evil.subset(set(evil.everyone) - {VICTIM}))
    return evil.strip_by_key(everyone)


def skipped_confirmation(evil: Evil) -> np.ndarray:
    """Ask for shares as if the session were not signed, telling two clients of other survivors."""
    evil.until_masked()
    evil.use_colluders()
    everyone = evil.subset(evil.everyone)
    evil.open([1, 3], everyone, evil.subset(set(evil.everyone) - {VICTIM}))
    evil.open([2, 4], everyone, everyone)
    return evil.strip_by_key(everyone)


def two_confirmations(evil: Evil) -> np.ndarray:
    """Have the same clients sign two sets of survivors."""
    evil.until_masked()
    evil.use_colluders()
    everyone = evil.subset(evil.everyone)
    without = evil.subset(set(evil.everyone) - {VICTIM})
    first = evil.confirm([1, 3], everyone)
    second = evil.confirm([2, 4], without)
    second |= evil.confirm([1, 3], without) | signatures_of_colluders(evil, everyone, without)
    first |= evil.confirm([2, 4], everyone) | signatures_of_colluders(evil, everyone, everyone)
    evil.open_signed([1, 3], everyone, without, second)
    evil.open_signed([2, 4], everyone, everyone, first)
    return evil.strip_by_key(everyone)


class LooseRoster:
    """A roster without rules, for the server's own clients; it passes for the victim's."""

    depth = None

    def __init__(self, keys_by_client: dict[int, bytes]) -> None:
        self.keys = keys_by_client
        self.authority = crypto.signing_public(AUTHORITY)
        self.digest = bytes(32)

    def key(self, client: int) -> bytes:
        return self.keys[client]


def among_sybils(
    victims_roster: Callable[[Session, LooseRoster], Roster], secret: Callable[[Session, int], bytes]
):
    """Run the whole session by the book, with every client but the victim played by the server."""

    def script(evil: Evil) -> np.ndarray:
        victim, others = evil.session.cohort[VICTIM], evil.session.cohort[1:]
        played = {client: crypto.signing_public(secret(evil.session, client)) for client in others}
        loose = LooseRoster(played | {victim: crypto.signing_public(enrolment_secret(victim))})
        roster = victims_roster(evil.session, loose)
        loose.digest = roster.digest
        session = evil.session = replace(evil.session, roster_digest=roster.digest)
        federation = evil.federation
        federation.session, federation.roster = session, loose
        for client in others:
            own = Enrolment(secret(session, client), loose), federation.history(client)
            entropy = Entropy.replay(b"sybil").child(client)
            federation.clients[client] = Client(session, client, federation.contribution(client), entropy, *own)
        own = Enrolment(enrolment_secret(victim), roster), federation.history(victim)
        federation.clients[victim] = Client(
            session, victim, federation.contribution(victim), Entropy.replay(b"victim"), *own
        )

        def ask_the_victim_no_more(phase: str, client: int, answer: bytes | None) -> bytes | None:
            return None if client == victim and phase in ("confirm", "unmask") else answer

        total, _ = run_round(federation, ask_the_victim_no_more)
        return evil.without(total.vector, range(1, len(session.cohort)))

    return script


AUTHORITY, SERVER = digest("the authority's secret"), digest("the server's secret")


def honest_roster(session: Session, loose: LooseRoster) -> Roster:
    return enrol(session.cohort)


def roster_of_one(session: Session, loose: LooseRoster) -> Roster:
    return enrol(session.cohort[:1])


def roster_by_server(session: Session, loose: LooseRoster) -> Roster:
    return decode_roster(sign_anything(loose.keys, SERVER), crypto.signing_public(AUTHORITY))


def roster_by_authority(session: Session, loose: LooseRoster) -> Roster:
    return decode_roster(sign_anything(loose.keys, AUTHORITY), crypto.signing_public(AUTHORITY))


def made_up(session: Session, client: int) -> bytes:
    return digest("made up", client)


def one_colluder(session: Session, client: int) -> bytes:
    return enrolment_secret(session.cohort[-1])


# --- the same client with one check gone ---


def nothing(*inputs: object) -> None:
    """The check is not made."""


KEPT = {
    "agree": crypto.Agreement.agree,
    "share_key": keys.share_key,
    "context": keys.context,
    "save": Client.save,
    "masked_answer": Masked.answer,
    "confirmed_answer": Confirmed.answer,
    "survivors_statement": keys.survivors_statement,
}


def agree_with_anything(self, public):
    try:
        return KEPT["agree"](self, public)
    except PeerError:
        return bytes(32)


def ciphertext_key_for_both_ways(session, shared, sender, receiver):
    return KEPT["share_key"](session, shared, min(sender, receiver), max(sender, receiver))


def context_without_the_model(joined, task, model, sharers):
    return KEPT["context"](joined, task, b"", sharers)


def context_without_the_task(joined, task, model, sharers):
    return KEPT["context"](joined, b"", model, sharers)


def context_without_the_sharers(joined, task, model, sharers):
    return KEPT["context"](joined, task, model, np.zeros_like(sharers))


def statement_without_the_context(context, survivors):
    return KEPT["survivors_statement"](bytes(32), survivors)


masks_with_whose_ciphertext_opened = twin(
    Shared.answer, "in keys.others(local.rank, sharers):", "in list(contents):"
)


def signed_by_any_enrolled(session, roster, signed):
    for statement, signature in signed.values():
        for key in roster.keys.values():
            try:
                crypto.require_signature(key, signature, statement)
            except PeerError:
                continue
            break
        else:
            raise PeerError("nobody signed this")


def signed_where_enrolled(session, roster, signed):
    for rank, (statement, signature) in signed.items():
        if session.cohort[rank] in roster.keys:
            crypto.require_signature(roster.key(session.cohort[rank]), signature, statement)


def receive_again_and_again(self, request):
    answer, after = self.phase.answer(self._local, request)
    if not isinstance(after, Finished):
        self.phase = after
    return answer


def save_and_go_on(self):
    phase, saved = self.phase, KEPT["save"](self)
    self.phase = phase
    return saved


def unmask_without_confirmation(self, local, data):
    if kind_of(data) != MessageKind.UNMASK_REQUEST:
        return KEPT["masked_answer"](self, local, data)
    survivors = decode_survivors(local.session, MessageKind.UNMASK_REQUEST, local.rank, data)
    return self.unmasking_shares(local, survivors), Finished()


def confirm_once_more(self, local, data):
    if kind_of(data) == MessageKind.SURVIVORS:
        return self.masked.answer(local, data)
    return KEPT["confirmed_answer"](self, local, data)


# --- the table: name, session, colluders, script, the check it meets, what stands for its absence ---


@dataclass(frozen=True)
class Attack:
    name: str
    session: Session
    colluders: tuple[int, ...]
    script: Callable[[Evil], np.ndarray]
    check: str
    gone: Callable
    is_refused: bool = True  # else the client goes on, and what it sends is of no use

    def __str__(self) -> str:
        return self.name


FEW, MORE = (5, 6, 7), (4, 5, 6, 7)
PLAIN, GROUP = small(), small(delivery=Delivery.EVERYONE, quorum=8)
ENROLLED = small(consistency=SIGNED)
CHECKS = "d2pfed.secagg.checks."

low_order_masks = forged_mask_keys(lambda evil, place: bytes.fromhex(LOW_ORDER[place]), lambda evil: bytes(32))
one_key_for_all = forged_mask_keys(
    lambda evil, place: evil.advertisements[evil.colluders[0]].mask_public,
    lambda evil: evil.shared_with_victim(evil.colluders[0]),
)

ATTACKS = [
    *(
        Attack(f"alone from {phase} on", PLAIN, MORE, alone_from(phase), CHECKS + "require_quorum", nothing)
        for phase in ("share", "mask", "unmask")
    ),
    Attack("alone in a group", GROUP, MORE, alone_in_a_group, CHECKS + "require_quorum", nothing),
    Attack("a quorum of strangers", PLAIN, MORE, padded_survivors, CHECKS + "require_within", nothing),
    Attack(
        "mask keys of low order",
        PLAIN,
        FEW,
        low_order_masks,
        "d2pfed.secagg.crypto.Agreement.agree",
        agree_with_anything,
    ),
    Attack(
        "sealing keys of low order",
        PLAIN,
        FEW,
        low_order_seal_keys,
        "d2pfed.secagg.crypto.Agreement.agree",
        agree_with_anything,
    ),
    Attack("one mask key for all", PLAIN, FEW, one_key_for_all, CHECKS + "require_distinct_keys", nothing),
    Attack(
        "ciphertexts sent back",
        PLAIN,
        FEW,
        reflected_ciphertexts,
        "d2pfed.secagg.pairwise.keys.share_key",
        ciphertext_key_for_both_ways,
        is_refused=False,
    ),
    Attack(
        "ciphertexts withheld",
        PLAIN,
        FEW,
        withheld_ciphertexts,
        "d2pfed.secagg.pairwise.phases.Shared.answer",
        masks_with_whose_ciphertext_opened,
        is_refused=False,
    ),
    Attack(
        "another model",
        ENROLLED,
        FEW,
        for_the_victim_only("model"),
        "d2pfed.secagg.pairwise.keys.context",
        context_without_the_model,
    ),
    Attack(
        "another task",
        ENROLLED,
        FEW,
        for_the_victim_only("task"),
        "d2pfed.secagg.pairwise.keys.context",
        context_without_the_task,
    ),
    Attack(
        "two views, too few signatures",
        ENROLLED,
        FEW,
        split_view(lambda evil, few: few),
        CHECKS + "require_quorum",
        nothing,
    ),
    Attack(
        "two views, forged signatures",
        ENROLLED,
        FEW,
        split_view(forged_signatures),
        CHECKS + "require_signed",
        nothing,
    ),
    Attack(
        "two views, replayed signatures",
        ENROLLED,
        FEW,
        split_view(replayed_signatures),
        "d2pfed.secagg.pairwise.keys.survivors_statement",
        statement_without_the_context,
    ),
    Attack(
        "two views, nothing to sign",
        ENROLLED,
        FEW,
        skipped_confirmation,
        "d2pfed.secagg.pairwise.phases.Masked.answer",
        unmask_without_confirmation,
    ),
    Attack(
        "two views, both signed by all",
        ENROLLED,
        FEW,
        two_confirmations,
        "d2pfed.secagg.pairwise.phases.Confirmed.answer",
        confirm_once_more,
    ),
    Attack(
        "asked twice",
        PLAIN,
        FEW,
        second_request,
        "d2pfed.secagg.pairwise.client.Client.receive",
        receive_again_and_again,
    ),
    Attack(
        "saved, and went on", PLAIN, FEW, second_life, "d2pfed.secagg.pairwise.client.Client.save", save_and_go_on
    ),
    Attack(
        "sybils that nobody signed for",
        ENROLLED,
        FEW,
        among_sybils(honest_roster, made_up),
        CHECKS + "require_signed",
        nothing,
    ),
    Attack(
        "sybils signed by a colluder",
        ENROLLED,
        FEW,
        among_sybils(honest_roster, one_colluder),
        CHECKS + "require_signed",
        signed_by_any_enrolled,
    ),
    Attack(
        "sybils that are not enrolled",
        ENROLLED,
        FEW,
        among_sybils(roster_of_one, made_up),
        CHECKS + "require_signed",
        signed_where_enrolled,
    ),
    Attack(
        "sybils enrolled by the server",
        ENROLLED,
        FEW,
        among_sybils(roster_by_server, made_up),
        "d2pfed.secagg.roster.require_authority",
        nothing,
    ),
    Attack(
        "one sybil enrolled under all names",
        ENROLLED,
        FEW,
        among_sybils(roster_by_authority, one_colluder),
        "d2pfed.secagg.roster.require_one_key_each",
        nothing,
    ),
]


def test_every_script_has_its_own_name():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 24


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.is_refused], ids=str)
def test_a_malicious_server_is_refused_and_gets_no_share(attack):
    evil = Evil(attack.session, attack.colluders)
    with pytest.raises(PeerError):
        attack.script(evil)
    assert evil.shares_sent == 0


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if not attack.is_refused], ids=str)
def test_an_attack_that_is_not_refused_recovers_nothing(attack):
    evil = Evil(attack.session, attack.colluders)
    try:
        recovered = attack.script(evil)
    except TooFewShares:
        return
    assert not np.array_equal(recovered, evil.victims_update)


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_without_the_one_check_it_recovers_the_update(attack, monkeypatch):
    monkeypatch.setattr(attack.check, attack.gone)
    evil = Evil(attack.session, attack.colluders)
    recovered = attack.script(evil)
    print(f"{attack.name}: recovered {recovered.tolist()}")
    assert np.array_equal(recovered, evil.victims_update)


# --- rules that keep clients of one mind; breaking them bares nobody by itself ---


def other_sharers(evil: Evil) -> None:
    """Tell the victim of fewer sharers than the others, and all of the same survivors."""
    everyone, fewer = evil.subset(evil.everyone), evil.subset(evil.everyone[:-1])
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    evil.mask([VICTIM], fewer)
    evil.mask(range(1, 7), everyone)
    signatures = evil.confirm(range(7), fewer)
    evil.open_signed(range(1, 7), everyone, fewer, signatures)


def test_clients_that_were_told_of_different_sharers_open_nothing():
    evil = Evil(ENROLLED, ())
    with pytest.raises(PeerError, match="signature"):
        other_sharers(evil)
    assert evil.shares_sent == 0


def test_without_sharers_in_the_context_masks_do_not_cancel(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.pairwise.keys.context", context_without_the_sharers)
    evil = Evil(ENROLLED, ())
    other_sharers(evil)
    assert evil.shares_sent == 6


def left_out_of(phase: str) -> Callable[[Evil], None]:
    """Ask the victim to work for a sum that it is not in."""

    def script(evil: Evil) -> None:
        everyone, others = evil.subset(evil.everyone), evil.subset(evil.everyone[1:])
        evil.advertise(evil.everyone)
        evil.share(evil.everyone, everyone)
        if phase == "sharers":
            evil.mask([VICTIM], others)
            return
        evil.mask(evil.everyone, everyone)
        evil.confirm([VICTIM], others)

    return script


@pytest.mark.parametrize("phase", ["sharers", "survivors"])
def test_a_client_does_not_work_for_a_sum_that_it_is_not_in(phase):
    with pytest.raises(PeerError, match="itself is missing"):
        left_out_of(phase)(Evil(ENROLLED, ()))


@pytest.mark.parametrize("phase", ["sharers", "survivors"])
def test_without_the_self_check_an_excluded_client_still_answers(phase, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_self", nothing)
    left_out_of(phase)(Evil(ENROLLED, ()))


# --- 2 quorum > cohort + colluders ---


def fifteen() -> Session:
    return make_session(15, threshold=8, quorum=8, colluders=1, consistency=SIGNED, dimension=12, bits=16)


def two_quorums(evil: Evil) -> np.ndarray:
    """Have the victim confirmed by one half and its loss by the other, with the one colluder in both."""
    evil.until_masked()
    everyone = evil.subset(evil.everyone)
    without = evil.subset(set(evil.everyone) - {VICTIM})
    colluder = evil.colluders[0]
    secret = enrolment_secret(evil.session.cohort[colluder])
    evil.use_colluders()
    for ranks, view in ((range(7), everyone), (range(7, 14), without)):
        signatures = evil.confirm(ranks, view)
        signatures[colluder] = crypto.sign(secret, keys.survivors_statement(evil.context(VICTIM, everyone), view))
        evil.open_signed(ranks, everyone, view, signatures)
    return evil.strip_by_key(everyone)


def test_a_quorum_that_leaves_room_for_two_views_is_refused():
    with pytest.raises(ConfigError, match="quorum of at least 9 of 15 clients with 1 colluders, got 8"):
        fifteen()


def test_a_quorum_for_two_views_lets_one_colluder_recover_the_update(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.pairwise.session.require_one_view", nothing)
    evil = Evil(fifteen(), (14,))
    assert np.array_equal(two_quorums(evil), evil.victims_update)
