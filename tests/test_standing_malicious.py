"""Scripts against standing keys. Each fails against the checks; each succeeds once the check it meets is gone."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from d2pfed.errors import PeerError
from d2pfed.ledger import keystore
from d2pfed.ledger.keystore import VolatileFile
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.round import StandingMemory
from d2pfed.secagg import checks, crypto, standing
from d2pfed.secagg.standing import client as standing_client
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.wire import MessageKind, message, subset_of
from support.decoding import decode_masked
from support.evil import LOW_ORDER
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.rings import subtract_into
from support.standing import SILOS, Silos, make_epoch, update_of
from support.twins import twin

VICTIM = SILOS[0]


def nothing(*_given, **_named):
    """A check that was removed."""


def drop(monkeypatch, *names):
    """Remove checks, wherever they are used from."""
    for name in names:
        for module in (checks, crypto, standing, standing_client):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, nothing)


def ready(**changes) -> Silos:
    silos = Silos(make_epoch(**changes))
    silos.set_up()
    return silos


def request(silos, client, number, attempt, members=None, model=MODEL, task=TASK) -> bytes:
    epoch = silos.epoch
    chosen = subset_of(len(epoch.cohort), [epoch.rank(member) for member in members or epoch.cohort])
    step = standing.Step(epoch, number, attempt, chosen)
    return epochs.encode_request(epoch, epoch.rank(client), epochs.Request(step, task, model))


def ask(silos, client, number=0, attempt=0, **seen) -> np.ndarray:
    """Ask a silo for a step's vector as it pleases the server, and return what came, masked."""
    answer = silos.by_client[client].answer(request(silos, client, number, attempt, **seen))
    return unmasked_frame(silos, client, answer)


def unmasked_frame(silos, client, answer) -> np.ndarray:
    return decode_masked(silos.epoch, silos.epoch.rank(client), answer[72:104], answer)


def difference(silos, left, right) -> np.ndarray:
    found = left.copy()
    subtract_into(silos.epoch.ring, found, right)
    return found


def fresh_vectors(silo):
    """A silo whose every training gives another vector, as fresh coins and noise do; what it made is kept."""
    made = []

    def contribute(step, task, model):
        made.append(silo.epoch.ring.uniform(Stream(digest("fresh", len(made))), silo.epoch.dimension))
        return made[-1]

    silo.contribute = contribute
    return made


# --- the same step twice ---


def same_request_twice(silos) -> bool:
    made = fresh_vectors(silos.by_client[VICTIM])
    first, second = ask(silos, VICTIM), ask(silos, VICTIM)
    return np.array_equal(difference(silos, first, second), difference(silos, made[0], made[1]))


def test_the_same_request_twice_is_refused():
    with pytest.raises(PeerError, match="is over"):
        same_request_twice(ready())


@pytest.mark.parametrize("kept", ["require_step_forward", "require_charge_once"])
def test_either_guard_alone_refuses_the_same_request_twice(monkeypatch, kept):
    """The ratchet itself is a third: keys that have moved on cannot come back."""
    drop(monkeypatch, *({"require_step_forward", "require_charge_once"} - {kept}))
    with pytest.raises(PeerError):
        same_request_twice(ready())


def test_without_both_guards_and_the_ratchet_the_masks_are_gone(monkeypatch):
    drop(monkeypatch, "require_step_forward", "require_charge_once")
    monkeypatch.setattr(epochs, "next_pair_key", lambda key: key)
    assert same_request_twice(ready())


def state_put_back(silos) -> bool:
    """Somebody restores the memory of a silo, and the server asks again."""
    silo, made = silos.by_client[VICTIM], fresh_vectors(silos.by_client[VICTIM])
    before = silo.store.state
    first = ask(silos, VICTIM)
    silo.store.state = before
    second = ask(silos, VICTIM)
    return np.array_equal(difference(silos, first, second), difference(silos, made[0], made[1]))


def test_a_state_that_is_put_back_answers_nothing_that_was_charged(monkeypatch):
    with pytest.raises(PeerError, match="charged before"):
        state_put_back(ready())
    drop(monkeypatch, "require_charge_once")
    assert state_put_back(ready())


def test_a_kill_after_sending_is_no_second_chance(monkeypatch):
    """Two guards, each enough by itself: the keys have moved on, and the step has its row."""

    def restarted(silos, *, keeps_state: bool) -> bool:
        made = fresh_vectors(silos.by_client[VICTIM])
        if (
            not keeps_state
        ):  # advance-before-send removed: the new state is written after the answer has left, never
            monkeypatch.setattr(StandingMemory, "advance", lambda self, move: move(self.state)[1])
        first = ask(silos, VICTIM)
        second = ask(silos, VICTIM)
        return len(made) == 2 and not np.array_equal(first, second)

    with pytest.raises(PeerError, match="charged before"):
        restarted(ready(), keeps_state=False)
    monkeypatch.undo()
    drop(monkeypatch, "require_charge_once")
    with pytest.raises(PeerError, match="is over"):
        restarted(ready(), keeps_state=True)
    assert restarted(ready(), keeps_state=False)


def test_two_attempts_never_share_noise_and_shared_noise_would_cancel():
    """The server asks twice, once with a silo and once without: what is left is that silo's vector and noise."""
    silos = ready()
    quiet = SILOS[-1]

    def noised(step_noise):
        def contribute(step, task, model):
            value = update_of(silos.epoch, 0, standing.Step(silos.epoch, 0, 0, step.members))
            total = value.copy()
            silos.epoch.ring.add_into(total, step_noise(step))
            return total

        return contribute

    def attack(step_noise) -> bool:
        federation = ready()
        for client in SILOS[:-1]:
            federation.by_client[client].contribute = noised(step_noise)
        federation.by_client[quiet].contribute = lambda step, task, model: update_of(silos.epoch, quiet, step)
        whole, part = federation.step(0, 0), federation.step(0, 1, SILOS[:-1])
        expected = update_of(silos.epoch, quiet, federation.current.step(0, 0, SILOS))
        return np.array_equal(difference(silos, whole, part), expected)

    fresh = iter(range(1000))
    assert not attack(lambda step: silos.epoch.ring.uniform(Stream(digest("noise", next(fresh))), 5))
    assert attack(lambda step: silos.epoch.ring.uniform(Stream(digest("noise")), 5))


# --- epochs ---


def older_step_again(silos) -> int:
    """An epoch that begins at a step that was charged: a second vector under the same row."""
    silos.step(0, 0)
    again = Silos(make_epoch(epoch=1, first=0), by_client=silos.by_client)
    again.set_up()
    again.step(0, 0)
    return len(silos.by_client[VICTIM].account.charged)


def test_an_epoch_that_begins_at_a_charged_step_is_refused(monkeypatch):
    with pytest.raises(Exception, match="must be left"):
        older_step_again(ready())
    drop(monkeypatch, "require_first_is_new", "require_charge_once")
    assert older_step_again(ready()) == 1  # two vectors, one row


def other_plan(silos) -> bool:
    """An invitation to an epoch that the silo's own plan does not lead to."""
    lax = make_epoch(plan_digest=digest("a lax plan"))
    invitation = epochs.encode_invitation(lax, 0, silos.roster.serial, None)
    answer, _ = silos.by_client[VICTIM].silo(silos.epoch).advertise(invitation, Entropy.replay(b"any"))
    return bool(answer)


def test_an_invitation_to_another_plan_is_refused(monkeypatch):
    with pytest.raises(PeerError, match="own plan and roster"):
        other_plan(ready())
    drop(monkeypatch, "require_agreed")
    assert other_plan(ready())


# --- who the peers are ---


def forged(silos, secrets, public=None) -> dict[int, epochs.Advert]:
    """Adverts in which the server plays every peer of the victim."""
    adverts = silos.adverts_by_hand((VICTIM,))
    for place, client in enumerate(SILOS[1:]):
        key = crypto.Agreement(secrets[client]).public if public is None else public(place)
        adverts[silos.epoch.rank(client)] = epochs.Advert(key, position_of(client, 9, silos.roster), bytes(64))
    return adverts


def strip(silos, keys, shared, sent, members=SILOS) -> np.ndarray:
    """Take off the victim's masks, given its secrets shared with each peer."""
    epoch = silos.epoch
    step = standing.Step(epoch, 0, 0, subset_of(len(epoch.cohort), [epoch.rank(member) for member in members]))
    context, bare = epochs.context(keys.digest, step, MODEL, TASK), sent.copy()
    for client in members:
        if client == VICTIM or client not in shared:
            continue
        pair = epochs.pair_key(shared[client], keys.digest, (VICTIM, client))
        mask = epoch.ring.uniform(Stream(epochs.mask_key(pair, context, (VICTIM, client))), epoch.dimension)
        subtract_into(epoch.ring, bare, mask)
    return bare


def server_plays_all_peers(silos) -> bool:
    secrets = {client: digest("the server's", client) for client in SILOS[1:]}
    adverts = forged(silos, secrets)
    own = adverts[0].public
    keys = silos.agree_by_hand(VICTIM, adverts)
    shared = {client: crypto.Agreement(secret).agree(own) for client, secret in secrets.items()}
    bare = strip(silos, keys, shared, ask(silos, VICTIM))
    return np.array_equal(bare, update_of(silos.epoch, VICTIM, standing.Step(silos.epoch, 0, 0, keys.joined)))


def test_a_server_cannot_play_the_peers(monkeypatch):
    with pytest.raises(PeerError, match="signature"):
        server_plays_all_peers(Silos(make_epoch()))
    drop(monkeypatch, "require_signed")
    assert server_plays_all_peers(Silos(make_epoch()))


def peers_of_low_order(silos) -> bool:
    """Colluders sign keys of low order: the pad of the victim with them is known to everyone."""
    adverts = silos.adverts_by_hand((VICTIM,))
    for place, client in enumerate(SILOS[1:]):
        advert = epochs.Advert(bytes.fromhex(LOW_ORDER[place]), position_of(client, 9, silos.roster))
        signature = crypto.sign(enrolment_secret(client), advert.statement(silos.epoch, client))
        adverts[silos.epoch.rank(client)] = replace(advert, signature=signature)
    keys = silos.agree_by_hand(VICTIM, adverts)
    shared = dict.fromkeys(SILOS[1:], bytes(32))
    bare = strip(silos, keys, shared, ask(silos, VICTIM))
    return np.array_equal(bare, update_of(silos.epoch, VICTIM, standing.Step(silos.epoch, 0, 0, keys.joined)))


class _Lax(crypto.Agreement):
    """A library that computes a shared secret of zero without a word."""

    def agree(self, public: bytes) -> bytes:
        with suppress(PeerError):
            return super().agree(public)
        return bytes(32)


def test_keys_of_low_order_are_refused(monkeypatch):
    monkeypatch.setattr(crypto, "Agreement", _Lax)
    with pytest.raises(PeerError, match="low order"):
        peers_of_low_order(Silos(make_epoch()))
    drop(monkeypatch, "require_order")
    assert peers_of_low_order(Silos(make_epoch()))


def test_one_key_under_two_names_is_refused(monkeypatch):
    def copied(silos):
        adverts = silos.adverts_by_hand()
        for client in SILOS[2:]:
            rank = silos.epoch.rank(client)
            advert = epochs.Advert(adverts[1].public, adverts[rank].position)
            signature = crypto.sign(enrolment_secret(client), advert.statement(silos.epoch, client))
            adverts[rank] = replace(advert, signature=signature)
        silos.agree_by_hand(VICTIM, adverts)
        return silos.by_client[VICTIM].store.state is not None

    with pytest.raises(PeerError, match="distinct"):
        copied(Silos(make_epoch()))
    drop(monkeypatch, "require_distinct_keys")
    assert copied(Silos(make_epoch()))


def test_a_servers_honest_half_takes_no_key_twice():
    """A silo that copies another's key drops out by itself; the others would all refuse the adverts with it."""
    silos = Silos(make_epoch())
    adverts = silos.adverts_by_hand()
    advertising = standing.Advertising(silos.epoch, silos.roster)
    advertising.receive(SILOS[0], message(silos.epoch, MessageKind.STANDING_ADVERT, 0, adverts[0].pack()))
    copied = epochs.Advert(adverts[0].public, adverts[1].position)
    signature = crypto.sign(enrolment_secret(SILOS[1]), copied.statement(silos.epoch, SILOS[1]))
    with pytest.raises(PeerError, match="distinct"):
        advertising.receive(
            SILOS[1],
            message(silos.epoch, MessageKind.STANDING_ADVERT, 1, replace(copied, signature=signature).pack()),
        )


def test_an_advert_that_was_swapped_is_refused(monkeypatch):
    """The server shows the victim an older advert of its own, whose secret is gone."""

    def swapped(silos):
        adverts = silos.adverts_by_hand()
        newer = silos.adverts_by_hand()
        silos.agree_by_hand(VICTIM, newer | {0: adverts[0]})
        return silos.by_client[VICTIM].store.state is not None

    with pytest.raises(PeerError, match="own advert"):
        swapped(Silos(make_epoch()))
    drop(monkeypatch, "require_own")
    assert swapped(Silos(make_epoch()))


# --- who the members are ---


def few_members(silos) -> int:
    """The victim, another honest silo and nobody else: noise of two where a quorum was promised."""
    two = SILOS[:2]
    total = ask(silos, two[0], members=two)
    silos.epoch.ring.add_into(total, ask(silos, two[1], members=two))
    step = standing.Step(silos.epoch, 0, 0, subset_of(4, [0, 1]))
    expected = update_of(silos.epoch, two[0], step)
    silos.epoch.ring.add_into(expected, update_of(silos.epoch, two[1], step))
    return int(np.array_equal(total, expected)) * len(two)


def test_a_sum_of_fewer_than_a_quorum_is_refused(monkeypatch):
    with pytest.raises(PeerError, match="at least 3 clients"):
        few_members(ready())
    drop(monkeypatch, "require_quorum")
    assert few_members(ready()) == 2


def test_a_set_up_of_fewer_than_a_quorum_is_refused(monkeypatch):
    def few(silos):
        adverts = silos.adverts_by_hand(SILOS[:2])
        silos.agree_by_hand(VICTIM, adverts)
        return silos.by_client[VICTIM].store.state is not None

    with pytest.raises(PeerError, match="at least 3 clients"):
        few(Silos(make_epoch()))
    drop(monkeypatch, "require_quorum")
    assert few(Silos(make_epoch()))


def unknown_members(silos) -> bool:
    """The quorum is padded with silos that never joined: only the colluder's pad covers the victim."""
    joined = SILOS[:3]
    adverts = silos.adverts_by_hand(joined)
    keys = silos.agree_by_hand(VICTIM, adverts)
    colluders = SILOS[2:3]
    members = (VICTIM, *colluders, SILOS[3])
    shared = {
        client: crypto.Agreement(silos.by_client[client].advertised.secret).agree(adverts[0].public)
        for client in colluders
    }
    bare = strip(silos, keys, shared, ask(silos, VICTIM, members=members), members)
    step = standing.Step(silos.epoch, 0, 0, subset_of(4, [0, 2, 3]))
    return np.array_equal(bare, update_of(silos.epoch, VICTIM, step))


def test_members_that_never_joined_pad_no_quorum(monkeypatch):
    with pytest.raises(PeerError, match="not in the set before"):
        unknown_members(Silos(make_epoch()))
    drop(monkeypatch, "require_within")
    assert unknown_members(Silos(make_epoch()))


def test_a_step_without_the_silo_itself_is_refused(monkeypatch):
    """Its masks would be those of members that never share one with it."""
    silos = ready()
    with pytest.raises(PeerError, match="itself is missing"):
        ask(silos, VICTIM, members=SILOS[1:])
    drop(monkeypatch, "require_self")
    ask(silos, VICTIM, members=SILOS[1:])


def test_rounds_beyond_the_plan_are_refused(monkeypatch):
    silos = ready()
    for number, attempt in ((10, 0), (0, 4)):
        with pytest.raises(PeerError, match="no round"):
            ask(silos, VICTIM, number, attempt)
    planned = "if step.round >= epoch.rounds or step.attempt >= epoch.attempts:"
    monkeypatch.setattr(standing, "answer_step", twin(standing.answer_step, planned, "if False:"))
    ask(silos, VICTIM, 0, 4)  # the attempt that is called 4 here is a second one at step 4


# --- different views ---

VIEWS = {
    "model": {"model": b"another model"},
    "task": {"task": b"another task"},
    "members": {"members": SILOS[:3]},
    "round": {"number": 1},
    "attempt": {"attempt": 1},
}


def split_view(silos, view) -> bool:
    """One silo is shown something else than the others; do the masks still cancel?"""
    told = dict(VIEWS[view])
    others = [client for client in SILOS if client != VICTIM]
    number, attempt = told.pop("number", 0), told.pop("attempt", 0)
    if view == "members":
        others = others[:2]  # everyone has masks with these three only
        told = {"members": None}
        answers = [ask(silos, VICTIM, members=SILOS[:3])]
        answers += [ask(silos, client, members=SILOS) for client in others]
        return _is_sum(silos, answers, [VICTIM, *others], unknown=SILOS[3])
    answers = [ask(silos, VICTIM, number, attempt, **told)]
    answers += [ask(silos, client) for client in others]
    return _is_sum(silos, answers, SILOS)


def _is_sum(silos, answers, clients, unknown=None) -> bool:
    total = np.zeros(silos.epoch.dimension, np.uint32)
    for answer in answers:
        silos.epoch.ring.add_into(total, answer)
    for client in clients:
        silo = silos.by_client[client]
        subtract_into(silos.epoch.ring, total, silo.sent)
        if unknown is not None and client != VICTIM:  # a colluder says what it shares with this one
            state = silos.by_client[unknown].store.state
            key = state.pair_keys[silos.epoch.rank(client)]
            mask = epochs.mask_key(key, silos.seen_context, (client, unknown))
            stream = Stream(mask)
            pad = silos.epoch.ring.uniform(stream, silos.epoch.dimension)
            (partial(subtract_into, silos.epoch.ring) if client < unknown else silos.epoch.ring.add_into)(
                total, pad
            )
    return not total.any()


def watched(**changes) -> Silos:
    """Silos whose vectors the test knows."""
    silos = ready(**changes)
    for client, silo in silos.by_client.items():

        def contribute(step, task, model, silo=silo, client=client):
            silo.sent = update_of(silos.epoch, client, step)
            return silo.sent.copy()

        silo.contribute = contribute
    return silos


@pytest.mark.parametrize("view", VIEWS)
def test_silos_with_different_views_never_cancel(monkeypatch, view):
    kept, silos = epochs.context, watched()
    monkeypatch.setattr(epochs, "context", _noting(kept, silos))
    assert not split_view(silos, view)
    silos = watched()
    monkeypatch.setattr(epochs, "context", _noting(_without(kept, view), silos))
    if view in ("round", "attempt"):
        monkeypatch.setattr(epochs, "next_pair_key", lambda key: key)  # the keys of a step are another guard
    assert split_view(silos, view)


def _noting(context, silos):
    def noted(*given):
        silos.seen_context = context(*given)
        return silos.seen_context

    return noted


def _without(kept, view):
    """The context with one of its parts left out."""

    def context(keys_digest, step, model, task):
        number = 0 if view == "round" else step.round
        attempt = 0 if view == "attempt" else step.attempt
        members = np.ones_like(step.members) if view == "members" else step.members
        bound = standing.Step(step.epoch, number, attempt, members)
        return kept(keys_digest, bound, b"" if view == "model" else model, b"" if view == "task" else task)

    return context


@pytest.mark.parametrize("view", ["round", "attempt"])
def test_the_ratchet_alone_separates_steps(monkeypatch, view):
    silos = watched()
    monkeypatch.setattr(epochs, "context", _noting(_without(epochs.context, view), silos))
    assert not split_view(silos, view)


def test_different_adverts_give_different_keys():
    """Two groups are told of different peers: K differs, and so does every mask."""
    adverts = Silos(make_epoch()).adverts_by_hand()
    whole = standing.Keys.of(make_epoch(), adverts)
    fewer = standing.Keys.of(make_epoch(), {rank: adverts[rank] for rank in (0, 1, 2)})
    moved = standing.Keys.of(make_epoch(), adverts | {3: replace(adverts[3], signature=bytes(64))})
    assert len({whole.digest, fewer.digest, moved.digest}) == 3


# --- a silo that is seized later ---


def seized_later(silos) -> bool:
    """The answer to step 0 was recorded; the state after it is seized, and everyone else's too."""
    sent = ask(silos, VICTIM)
    state = silos.by_client[VICTIM].store.state
    step = standing.Step(silos.epoch, 0, 0, np.ones(4, np.bool_))
    context, bare = epochs.context(state.keys.digest, step, MODEL, TASK), sent.copy()
    for rank, key in state.pair_keys.items():
        pair = VICTIM, SILOS[rank]
        mask = silos.epoch.ring.uniform(Stream(epochs.mask_key(key, context, pair)), silos.epoch.dimension)
        subtract_into(silos.epoch.ring, bare, mask)
    return np.array_equal(bare, update_of(silos.epoch, VICTIM, step))


def test_a_state_that_is_seized_later_opens_no_earlier_answer(monkeypatch):
    assert not seized_later(ready())
    monkeypatch.setattr(epochs, "next_pair_key", lambda key: key)
    assert seized_later(ready())


# --- where the state lives ---


class FileStore:
    """A silo's state in a file, as a deployment keeps it."""

    def __init__(self, file: VolatileFile, epoch, client, head) -> None:
        self.file, self.epoch, self.client, self.head = file, epoch, client, head

    def read(self):
        data = self.file.read(lambda found: found == self.head())
        return None if data is None else standing.State.decode(self.epoch, self.client, data)

    def advance(self, move):
        def change(data):
            state, result = move(standing.State.decode(self.epoch, self.client, data))
            return state.encode(), result

        return self.file.update(lambda found: found == self.head(), change, self.head)


def copied_back(tmp_path, monkeypatch, *, boots, heads) -> bool:
    """Home, anchor and state directory are copied back, and the silo asked again; rows that were lost bind nobody."""
    silos = ready()
    silo, made = silos.by_client[VICTIM], fresh_vectors(silos.by_client[VICTIM])
    position = [Head(1, bytes(32))]
    monkeypatch.setattr(keystore, "boot", lambda: boots[0])
    place = tmp_path / f"state-{len(list(tmp_path.iterdir()))}"
    file = VolatileFile(place, "keys", keys_on_disk=True)
    file.write(silo.store.state.encode(), position[0])
    saved = (place / "keys").read_bytes()
    silo.store = FileStore(file, silos.epoch, VICTIM, lambda: position[0])
    first = ask(silos, VICTIM)
    (place / "keys").write_bytes(saved)
    silo.account.charged.clear()  # the home was put back
    monkeypatch.setattr(keystore, "boot", lambda: boots[1])
    position[0] = Head(heads, bytes(32))
    second = ask(silos, VICTIM)
    return np.array_equal(difference(silos, first, second), difference(silos, made[0], made[1]))


def test_everything_copied_back_after_a_reboot_finds_no_keys(tmp_path, monkeypatch):
    with pytest.raises(PeerError, match="needs a new one"):
        copied_back(tmp_path, monkeypatch, boots=("one", "two"), heads=1)
    monkeypatch.setattr(keystore, "require_boot", nothing)
    assert copied_back(tmp_path, monkeypatch, boots=("one", "two"), heads=1)


def test_a_state_that_does_not_fit_the_log_is_erased(tmp_path, monkeypatch):
    with pytest.raises(PeerError, match="needs a new one"):
        copied_back(tmp_path, monkeypatch, boots=("one", "one"), heads=2)
    monkeypatch.setattr(keystore, "require_fits_log", nothing)
    assert copied_back(tmp_path, monkeypatch, boots=("one", "one"), heads=2)


def test_every_mask_key_of_a_run_is_used_once(monkeypatch):
    """Retries and epochs included: each key occurs at the two ends of its pair and nowhere else."""
    kept, seen = epochs.mask_key, []
    monkeypatch.setattr(epochs, "mask_key", lambda *given: seen.append(kept(*given)) or seen[-1])
    silos = ready()
    silos.step(0, 0)
    with suppress(Exception):
        silos.step(0, 1, lost=SILOS[:1])
    silos.step(0, 2, SILOS[1:])
    again = Silos(make_epoch(epoch=1, first=4), by_client=silos.by_client)
    again.set_up()
    for step in ((1, 0), (1, 1), (5, 3)):
        again.step(*step)
    pairs = 6 + 6 + 3 + 3 * 6
    assert len(set(seen)) == pairs
    assert max(seen.count(key) for key in seen) == 2
    monkeypatch.setattr(epochs, "next_pair_key", lambda key: key)
    monkeypatch.setattr(epochs, "context", lambda keys_digest, *given: keys_digest)
    seen.clear()
    planted = ready()
    planted.step(0, 0)
    planted.step(0, 1)
    assert len(set(seen)) == 6
