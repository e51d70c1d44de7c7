"""Standing keys: set-up, steps, dropouts, void and retry, the lemma, and values that must be refused."""

import itertools

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.numerics.randomness import Stream
from d2pfed.secagg import collect, standing
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.standing.client import MOST_SKIPPED
from support.federation import MODEL, TASK, position_of
from support.standing import SILOS, Silos, make_epoch, update_of


def ready(**changes) -> Silos:
    silos = Silos(make_epoch(**changes))
    silos.set_up()
    return silos


def test_a_step_gives_the_exact_sum():
    silos = ready()
    assert silos.current.members == SILOS
    for number, attempt in ((0, 0), (0, 1), (1, 1), (9, 3)):  # the last ones skip steps
        assert np.array_equal(silos.step(number, attempt), silos.expected(number, attempt))


def test_all_requests_of_a_step_have_the_same_body():
    silos = ready()
    silos.log.clear()
    silos.step(0, 0)
    bodies = {entry["request"][72:] for entry in silos.log}
    assert len(bodies) == 1


def test_a_request_shows_its_step_and_not_the_model():
    step = standing.Step(make_epoch(), 2, 1, np.ones(len(SILOS), np.bool_))
    assert repr(epochs.Request(step, b"task", b"weights")) == f"Request(step={step!r}, task=b'task')"


@pytest.mark.parametrize("silos", [3, 4, 8, 20])
@pytest.mark.parametrize("where", ["invite", "agree", "answer"])
@pytest.mark.parametrize("count", [0, 1, "quorum", "more"])
def test_dropouts_give_the_exact_sum_or_a_void_step(silos, where, count):
    """A silo lost in the set-up is no member; one lost in a step makes it void, and the next has those who are left."""
    cohort = tuple(range(3, 3 + 2 * silos, 2))
    quorum = max(3, silos // 2)
    lost = cohort[: {"quorum": silos - quorum, "more": silos - quorum + 1}.get(count, count)]
    federation = Silos(make_epoch(cohort, quorum=quorum))
    if where != "answer":
        places = {"invite": {"lost_first": lost}, "agree": {"lost_second": lost}}[where]
        if silos - len(lost) < quorum:
            with pytest.raises(TooFewClients):
                federation.set_up(**places)
            return
        federation.set_up(**places)
        assert federation.current.members == cohort[len(lost) :]
        assert np.array_equal(federation.step(0, 0), federation.expected(0, 0))
        return
    federation.set_up()
    if not lost:
        assert np.array_equal(federation.step(0, 0), federation.expected(0, 0))
        return
    with pytest.raises(VoidStep) as void:
        federation.step(0, 0, lost=lost)
    left = void.value.left
    assert left == cohort[len(lost) :]
    if len(left) < quorum:
        with pytest.raises(TooFewClients):
            federation.step(0, 1, left)
        return
    assert np.array_equal(federation.step(0, 1, left), federation.expected(0, 1, left))
    # Who was missing has skipped a step, and is back with everyone.
    assert np.array_equal(federation.step(1, 0), federation.expected(1, 0))


def test_the_dropout_matrix_notices_a_mask_of_the_wrong_sign(monkeypatch):
    silos = ready()
    monkeypatch.setattr(epochs, "mask_key", lambda key, context, pair: epochs.derive(key, context, pair[0]))
    assert not np.array_equal(silos.step(0, 0), silos.expected(0, 0))


def test_a_late_vector_is_refused_and_a_void_sum_is_gone():
    silos = ready()
    step = silos.current.step(0, 0, SILOS)
    collecting = standing.Collecting(silos.current.keys, step, TASK, MODEL)
    late = {client: silos.by_client[client].answer(collecting.outbox[client]) for client in SILOS}
    for client in SILOS[1:]:
        collecting.receive(client, late[client])
    with pytest.raises(VoidStep):
        collecting.close()
    with pytest.raises(PeerError, match="too late"):
        collecting.receive(SILOS[0], late[SILOS[0]])
    with pytest.raises(ConfigError, match="over"):
        collecting.close()


def test_a_silo_answers_a_step_once_and_never_an_earlier_one():
    silos = ready()
    silos.step(2, 0)
    for number, attempt in ((2, 0), (1, 3), (0, 0)):
        with pytest.raises(VoidStep):
            silos.step(number, attempt)
    assert all("refused" in entry for entry in silos.log[-4:])


def test_a_silo_without_keys_says_so_and_a_new_epoch_serves_it():
    silos = ready()
    silos.step(0, 0)
    silos.by_client[SILOS[1]].store.state = None  # its machine was started again
    with pytest.raises(VoidStep):
        silos.step(0, 1)
    assert any("needs a new one" in entry.get("refused", "") for entry in silos.log)
    again = Silos(make_epoch(epoch=1, first=2), by_client=silos.by_client)
    again.set_up()
    assert np.array_equal(again.step(0, 2), again.expected(0, 2))


def test_states_survive_their_bytes():
    silos = Silos(make_epoch())
    silos.adverts_by_hand()
    silo = silos.by_client[SILOS[0]]
    saved = silo.advertised.encode(silos.epoch, silo.client)
    assert standing.Advertised.decode(silos.epoch, silo.client, saved) == silo.advertised
    assert silo.advertised.secret.hex() not in repr(silo.advertised)
    silos = ready()
    state = silos.by_client[SILOS[2]].store.state
    found = standing.State.decode(silos.epoch, SILOS[2], state.encode())
    assert (found.following, found.pair_keys, found.keys.digest) == (
        state.following,
        state.pair_keys,
        state.keys.digest,
    )
    with pytest.raises(PeerError):
        standing.State.decode(make_epoch(epoch=1), SILOS[2], state.encode())


def test_keys_move_on_alike_in_one_go_or_step_by_step():
    state = ready().by_client[SILOS[0]].store.state
    assert state.at(7).pair_keys == state.at(3).at(7).pair_keys != state.pair_keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silos": (1, 2)}, "3 to 128 silos"),
        ({"silos": tuple(range(129))}, "3 to 128 silos"),
        ({"cohort": (3, 3, 4)}, "strictly increasing"),
        ({"cohort": (3, 4, 1 << 64)}, "identities"),
        ({"quorum": 2}, "quorum in"),
        ({"quorum": 5}, "quorum in"),
        ({"colluders": 2}, "quorum in"),
        ({"attempts": 9}, "1 to 8 attempts"),
        ({"rounds": 1 << 19}, "at most 1048576 steps"),
        ({"first": 40}, "first step"),
        ({"epoch": 1 << 32}, "epoch must be"),
        ({"dimension": 0}, "dimension"),
        ({"bits": 33}, "bits"),
        ({"run": ""}, "name"),
        ({"plan_digest": b""}, "32 bytes"),
        ({"roster_digest": bytes(32)}, "no roster"),
    ],
)
def test_an_epoch_refuses_what_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_epoch(**changes)


def test_every_number_of_an_epoch_is_in_its_digest():
    base = make_epoch(colluders=1, quorum=3)
    changes = {
        "plan_digest": bytes(31) + b"1",
        "run": "other",
        "epoch": 1,
        "first": 1,
        "roster_digest": bytes(31) + b"2",
        "cohort": (7, 10, 13, 17),
        "dimension": 6,
        "bits": 17,
        "quorum": 4,
        "colluders": 0,
        "rounds": 11,
        "attempts": 5,
    }
    digests = {
        make_epoch(**({"colluders": 1, "quorum": 3} | {name: value})).digest for name, value in changes.items()
    }
    assert len(digests | {base.digest}) == len(changes) + 1


def test_steps_beyond_the_plan_and_far_skips_are_refused():
    silos = ready(rounds=2000, attempts=4)
    for number, attempt, text in (
        (2000, 0, "no round"),
        (0, 4, "no round"),
        ((MOST_SKIPPED // 4) + 1, 0, "skipped"),
    ):
        silos.log.clear()
        with pytest.raises(VoidStep):
            silos.step(number, attempt)
        assert all(text in entry["refused"] for entry in silos.log)
    assert np.array_equal(silos.step(MOST_SKIPPED // 4, 0), silos.expected(MOST_SKIPPED // 4, 0))


def test_a_silo_at_its_cap_refuses():
    silos = ready()
    silos.by_client[SILOS[0]].account.most = 1
    silos.step(0, 0)
    with pytest.raises(VoidStep):
        silos.step(1, 0)
    assert any("its plan allows 1" in entry.get("refused", "") for entry in silos.log)


def test_a_peer_that_was_rolled_back_is_met_by_nobody_and_hears_of_it():
    silos = ready()
    victim = silos.by_client[SILOS[0]]
    victim.count = 0  # its whole home was put back
    again = Silos(make_epoch(epoch=1, first=1), by_client=silos.by_client)
    with pytest.raises(TooFewClients):
        again.set_up()
    assert again.claims[victim.client].count == 2
    victim.count = 0
    invited = Silos(make_epoch(epoch=2, first=1), by_client=silos.by_client)
    invited.set_up(remembered=again.claims)
    assert victim.client not in invited.current.members
    assert any("restored" in entry.get("refused", "") for entry in invited.log)


def test_a_forged_claim_is_ignored_by_the_server():
    silos = ready()
    liar, victim = silos.by_client[SILOS[1]], silos.by_client[SILOS[0]]
    claim = position_of(SILOS[2], 50, silos.roster)  # somebody else's signature
    liar.known[victim.client] = claim
    again = Silos(make_epoch(epoch=1, first=1), by_client=silos.by_client)
    again.set_up()
    assert again.claims == {}
    assert again.current.members == tuple(client for client in SILOS if client != liar.client)


# --- the lemma: all or nothing, by all pads of a ring of four numbers ---

MODULUS, FOUR = 4, 4
PAIRS = tuple(itertools.combinations(range(FOUR), 2))


def answers(vectors, pads, skipped=frozenset()):
    """What each silo sends, one coordinate; `skipped` pads are forgotten, for the planted twin."""
    sent = list(vectors)
    for (low, high), pad in zip(PAIRS, pads, strict=True):
        if (low, high) not in skipped:
            sent[low] += pad
            sent[high] -= pad
    return tuple(value % MODULUS for value in sent)


def law(vectors, seen, known=(), skipped=frozenset()):
    """How often each view occurs over all pads of honest pairs; pads with colluders are known and taken off."""
    free = [place for place, pair in enumerate(PAIRS) if not set(pair) & set(known)]
    counts = {}
    for drawn in itertools.product(range(MODULUS), repeat=len(free)):
        pads = [0] * len(PAIRS)
        for place, pad in zip(free, drawn, strict=True):
            pads[place] = pad
        view = tuple(answers(vectors, pads, skipped)[place] for place in seen)
        counts[view] = counts.get(view, 0) + 1
    return counts


VECTORS = [(0, 0, 0, 0), (1, 2, 3, 0), (3, 3, 3, 1), (2, 0, 0, 2)]


@pytest.mark.parametrize("known", [(), (3,)])
def test_complete_answers_are_uniform_given_their_sum(known):
    honest = [place for place in range(FOUR) if place not in known]
    for vectors in VECTORS:
        found = law(vectors, honest, known)
        total = sum(vectors[place] for place in honest) % MODULUS
        assert all(sum(view) % MODULUS == total for view in found)
        assert len(found) == MODULUS ** (len(honest) - 1)
        assert len(set(found.values())) == 1
    same_sum = [law(vectors, honest, known) for vectors in ((1, 2, 3, 0), (2, 2, 2, 0), (0, 0, 2, 0))]
    assert same_sum[0] == same_sum[1]
    assert set(same_sum[0]) == set(same_sum[2])


@pytest.mark.parametrize("known", [(), (3,)])
def test_incomplete_answers_are_uniform_whatever_was_sent(known):
    honest = [place for place in range(FOUR) if place not in known]
    for size in range(1, len(honest)):
        for seen in itertools.combinations(honest, size):
            laws = [law(vectors, seen, known) for vectors in VECTORS]
            assert all(found == laws[0] for found in laws)
            assert len(laws[0]) == MODULUS**size


def test_the_lemma_notices_a_pad_that_is_left_out():
    planted = frozenset({(0, 1), (0, 2)})
    laws = [law(vectors, (0,), (), planted | {(0, 3)}) for vectors in VECTORS]
    assert any(found != laws[0] for found in laws)


def test_the_machine_masks_as_the_lemma_does():
    """Over one coordinate of two bits: taking all pads off gives the vectors, with the lemma's signs."""
    silos = ready(dimension=1, bits=2, quorum=4)
    step = silos.current.step(0, 0, SILOS)
    context = epochs.context(silos.current.keys.digest, step, MODEL, TASK)
    states = {client: silos.by_client[client].store.state for client in SILOS}
    collecting = standing.Collecting(silos.current.keys, step, TASK, MODEL)
    collect(collecting, silos.exchange("answer"))
    sent = [int(silos.epoch.ring.unpack(entry["answer"][-1:], 1)[0]) for entry in silos.log[-4:]]
    pads = []
    for low, high in PAIRS:
        key = epochs.mask_key(states[SILOS[low]].pair_keys[high], context, (SILOS[low], SILOS[high]))
        pads.append(int(silos.epoch.ring.uniform(Stream(key), 1)[0]))
    vectors = [int(update_of(silos.epoch, client, step)[0]) for client in SILOS]
    assert answers(vectors, pads) == tuple(sent)
