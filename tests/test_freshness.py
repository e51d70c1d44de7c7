"""Noise, masks, keys, rotations and cohorts are never shared between two rounds, attempts, runs or clients.

Every key that two runs derive is recorded, and each property is looked at by itself: where only results are compared,
one thing that is fresh hides another that is not.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from d2pfed import round as rounds
from d2pfed.accounting import SERVER, Sampling
from d2pfed.errors import TooFewClients
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import Codec
from d2pfed.numerics import randomness
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Attempt, Participant, aggregate, aggregation, participant, run_plan
from d2pfed.secagg import crypto
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import Cohorts
from support.simulations import NO_MODEL, Attempting, Simulation

D, CLIENTS = 5, 6
PLAN = calibrate(
    PrivacyTarget(
        dimension=D,
        population=40,
        cohort_size=CLIENTS,
        rounds=2,
        epsilon=50.0,
        delta=1e-3,
        against=SERVER,
        spare=4,
    )
)
SESSIONS = 2 * 2 * 2  # runs, rounds, attempts
DERIVE, HKDF = randomness.derive, crypto.hkdf


@dataclass
class Record:
    """Every key by what it is for; rotations by their seed; which attempt a session's digest stands for."""

    keys: dict[str, list[bytes]] = field(default_factory=dict)
    rotations: set[bytes] = field(default_factory=set)
    sessions: dict[bytes, tuple[str, int, int]] = field(default_factory=dict)
    cohorts: list[tuple[int, ...]] = field(default_factory=list)

    def note(self, purpose: object, key: bytes) -> bytes:
        self.keys.setdefault(str(purpose), []).append(key)
        return key

    def most(self, purpose: str) -> int:
        """How often the key that is derived most often for a purpose is derived."""
        return max(Counter(self.keys[purpose]).values())


class _Shut:
    def __init__(self, collected):
        self.survivors = collected.survivors
        collected.unmask()

    def unmask(self):
        raise TooFewClients("opened, and then lost")


def recorded(tmp_path, monkeypatch, *, drawn=None) -> Record:
    """Carry out two runs of two rounds, each in two attempts, with one and the same root of entropy."""
    record, prepare, session_of = Record(), Codec.prepare, rounds.session_of

    def noted_session(*arguments, **further):
        session = session_of(*arguments, **further)
        record.sessions[session.digest] = (session.run, session.round, session.attempt)
        return session

    def noted_prepare(self, values, seed, dither=None):
        record.rotations.add(seed)
        return prepare(self, values, seed, dither)

    derive, hkdf = randomness.derive, crypto.hkdf  # planted bugs, if any, are in place already
    monkeypatch.setattr(randomness, "derive", lambda key, *path: record.note(path[0], derive(key, *path)))
    monkeypatch.setattr(
        crypto, "hkdf", lambda shared, label, *path: record.note(label, hkdf(shared, label, *path))
    )
    monkeypatch.setattr(Codec, "prepare", noted_prepare)
    monkeypatch.setattr(rounds, "session_of", noted_session)
    monkeypatch.setattr("test_freshness.CURRENT", record, raising=False)
    root, budget = Entropy.replay(b"freshness"), replace(run_plan(PLAN).budget, epsilon=1e4)
    cohorts = Cohorts(PLAN.sampling, root.child("cohorts"))
    with Ledger.create(tmp_path / "ledger", budget) as book:
        for run in ("a", "b"):
            book.begin(run, run, run_plan(PLAN))
            for number in range(2):
                _round(record, book, root, cohorts, run, number, drawn)
    assert len(record.sessions) == SESSIONS
    return record


CURRENT = Record()


def _round(record, book, root, cohorts, run, number, drawn):
    tries = []

    def collect(session, participations):
        collected = Simulation(
            plan=PLAN,
            updates=lambda clients: (np.zeros(D, np.float32) for _ in clients),
            dropouts=Dropouts(),
            entropy=root.child("clients"),
            participations=participations,
        ).collect(session, Fidelity.PROTOCOL)
        tries.append(session)
        return _Shut(collected) if len(tries) == 1 else collected

    def draw(attempt):
        cohort = (drawn or cohorts.draw)(number, attempt, 0)
        record.cohorts.append(cohort)
        return tuple(range(CLIENTS))  # the same clients each time: what is fresh must not come from them

    aggregate(PLAN, Attempt(run, number, 0), NO_MODEL, Attempting(PLAN, draw, collect), book)


# One property each


def noise_is_fresh(record):
    assert len(record.keys["noise"]) == SESSIONS * CLIENTS
    assert record.most("noise") == 1


def keys_are_fresh(record):
    for purpose in ("seal", "mask", "self", "coefficients"):
        assert len(set(record.keys[purpose])) == SESSIONS * CLIENTS, purpose
        assert record.most(purpose) == 1, purpose


def pair_masks_are_fresh(record):
    pairs = CLIENTS * (CLIENTS - 1) // 2
    assert len(set(record.keys["d2pfed pair mask"])) == SESSIONS * pairs
    assert record.most("d2pfed pair mask") == 2  # at both ends


def self_masks_are_fresh(record):
    assert len(set(record.keys["d2pfed self mask"])) == SESSIONS * CLIENTS
    assert record.most("d2pfed self mask") == 2  # at the client, and at the server that opens it


def ciphertexts_are_fresh(record):
    assert len(set(record.keys["d2pfed box"])) == SESSIONS * CLIENTS * (CLIENTS - 1)
    assert record.most("d2pfed box") == 2  # at both ends


def rotations_are_fresh(record):
    assert len(record.rotations) == SESSIONS


def cohorts_are_fresh(record):
    assert len(set(record.cohorts[:4])) == 4  # of one run; the second has the same secret here


PROPERTIES = (
    noise_is_fresh,
    keys_are_fresh,
    pair_masks_are_fresh,
    self_masks_are_fresh,
    ciphertexts_are_fresh,
    rotations_are_fresh,
    cohorts_are_fresh,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        return recorded(tmp_path_factory.mktemp("sound"), patched)


@pytest.mark.parametrize("holds", PROPERTIES)
def test_nothing_repeats_in_two_runs_of_two_rounds_of_two_attempts(sound, holds):
    holds(sound)


# The defects that would break one of them, and no other


def forgetting(what, purposes):
    """Return a derivation that, for some purposes, leaves a part of the attempt's name out."""

    def derive(key, *path):
        if path[0] in purposes and path[1] in CURRENT.sessions:
            run, number, attempt = CURRENT.sessions[path[1]]
            kept = {"run": run, "round": number, "attempt": attempt}
            path = (path[0], *(part for name, part in kept.items() if name != what), *path[2:])
        return DERIVE(key, *path)

    return derive


def broken(record):
    """Return which properties do not hold."""
    found = set()
    for holds in PROPERTIES:
        try:
            holds(record)
        except AssertionError:
            found.add(holds)
    return found


@pytest.mark.parametrize("what", ["run", "round", "attempt"])
def test_noise_that_two_attempts_share_is_caught_by_itself(tmp_path, monkeypatch, what):
    monkeypatch.setattr(randomness, "derive", forgetting(what, {"contribution"}))
    assert broken(recorded(tmp_path, monkeypatch)) == {noise_is_fresh}


@pytest.mark.parametrize("what", ["run", "round", "attempt"])
def test_keys_that_two_attempts_share_are_caught(tmp_path, monkeypatch, what):
    monkeypatch.setattr(randomness, "derive", forgetting(what, {"d2pfed client"}))
    assert keys_are_fresh in broken(recorded(tmp_path, monkeypatch))


def test_noise_that_two_clients_share_is_caught(tmp_path, monkeypatch):
    encode = Participant.encode

    def same(self, session, update, group, clip=None):
        return encode(
            replace(self, client=session.cohort[0], entropy=Entropy.replay(b"all")), session, update, group
        )

    monkeypatch.setattr(Participant, "encode", same)
    assert broken(recorded(tmp_path, monkeypatch)) == {noise_is_fresh}


@pytest.mark.parametrize("kept", [("round", "attempt"), ("run", "attempt"), ("run", "round")])
def test_a_rotation_that_two_attempts_share_is_caught_by_itself(tmp_path, monkeypatch, kept):
    for half in (participant, aggregation):
        monkeypatch.setattr(
            half, "rotation_seed", lambda session: digest("rotation", *(getattr(session, name) for name in kept))
        )
    assert broken(recorded(tmp_path, monkeypatch)) == {rotations_are_fresh}


@pytest.mark.parametrize("label", ["d2pfed pair mask", "d2pfed self mask", "d2pfed box"])
def test_unbound_masks_and_ciphertexts_are_caught(tmp_path, monkeypatch, label):
    def unbound(shared, name, *path):
        return HKDF(bytes(32), name, *path[1:]) if name == label else HKDF(shared, name, *path)

    monkeypatch.setattr(crypto, "hkdf", unbound)
    expected = {
        "d2pfed pair mask": pair_masks_are_fresh,
        "d2pfed self mask": self_masks_are_fresh,
        "d2pfed box": ciphertexts_are_fresh,
    }
    assert broken(recorded(tmp_path, monkeypatch)) == {expected[label]}


@pytest.mark.parametrize("kept", [lambda number, _attempt: (number, 0), lambda _number, attempt: (0, attempt)])
def test_a_cohort_that_two_attempts_share_is_caught_by_itself(tmp_path, monkeypatch, kept):
    cohorts = Cohorts(PLAN.sampling, Entropy.replay(b"cohorts"))
    assert PLAN.sampling.method is Sampling.FIXED
    record = recorded(
        tmp_path, monkeypatch, drawn=lambda number, attempt, _block: cohorts.draw(*kept(number, attempt), 0)
    )
    assert broken(record) == {cohorts_are_fresh}


def test_every_purpose_has_its_own_keys(sound):
    """A key that serves two purposes shows as one value under two names."""
    purposes = [name for name in sound.keys if name not in ("client", "clients", "cohorts")]
    owners = Counter(key for name in purposes for key in set(sound.keys[name]))
    assert max(owners.values()) == 1
