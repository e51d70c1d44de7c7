"""What campaigns do at length, in small: targets are what they say, and each campaign finds a planted mistake."""

from unittest.mock import patch

import numpy as np
import pytest

import campaign_storage
import campaign_targets
import campaign_timing
from d2pfed.accounting import DiscreteGaussianSum
from d2pfed.errors import PeerError
from d2pfed.ledger import Ledger
from d2pfed.ledger.client_log import ClientLog
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.plan import calibrate
from support import storage
from support.fuzzing import GROUPS, HEADER_BYTES, Target, is_framed, reframed
from support.sessions import run_standing


@pytest.fixture(scope="module")
def targets() -> dict[str, list[Target]]:
    return {name: list(group()) for name, group in GROUPS.items() if name != "certificates"}


def test_every_reader_and_machine_accepts_its_samples(targets):
    refused = [each.name for group in targets.values() for each in group if any(map(each.refuses, each.samples))]
    assert refused == []
    assert {name: len(group) for name, group in targets.items()} == {"texts": 15, "wires": 101, "machines": 60}


def changed(data: bytes, stream: Stream) -> bytes:
    """A sample with a few bytes changed, and the right checksum where it has one."""
    body = bytearray(data[HEADER_BYTES:] if is_framed(data) else data)
    for _ in range(1 + stream.below(3)):
        if body:
            body[stream.below(len(body))] = stream.below(256)
    return reframed(data, bytes(body)) if is_framed(data) else bytes(body)


def findings(targets: list[Target], count: int) -> list[str]:
    stream, found = Stream(digest("fuzz in small")), []
    for number in range(count):
        target = targets[number % len(targets)]
        try:
            target.refuses(changed(target.samples[0], stream))
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            found.append(f"{target.name}: {error!r}")
    return found


@pytest.mark.parametrize(("group", "count"), [("texts", 3000), ("wires", 6000), ("machines", 700)])
def test_a_changed_message_is_refused_or_accepted_and_nothing_else(targets, group, count):
    assert findings(targets[group], count) == []


def test_an_error_that_is_not_ours_is_found():
    def reader(data: bytes) -> int:
        if len(data) < 2:
            raise PeerError("too short")
        return data[0] // (data[1] - 7)

    assert findings([Target("a reader", reader, (bytes([1, 8]),))], 3000)


def test_random_epochs_of_standing_keys_give_exact_sums():
    outcomes = [outcome for seed in range(30) for outcome in run_standing(seed)]
    assert outcomes.count("sum") > 40
    assert "void" in outcomes


@pytest.mark.parametrize("name", storage.SCENARIOS)
def test_a_life_that_is_not_disturbed_leaves_nothing_wrong(name, tmp_path):
    scenario = storage.SCENARIOS[name]
    scenario.prepare(tmp_path)
    scenario.live(tmp_path, None)
    assert scenario.wrong(tmp_path) == 0
    scenario.live(tmp_path, None)
    assert scenario.wrong(tmp_path) == 0


def test_a_release_that_is_not_in_the_ledger_is_counted(tmp_path):
    with patch.object(Ledger, "commit", lambda _ledger, _release: None):
        storage.serve(tmp_path)
    assert storage.wrong_server(tmp_path) >= storage.ROUNDS


def test_a_vector_without_its_charge_is_counted(tmp_path):
    storage.enrolled(tmp_path)
    kept = ClientLog.append

    def forget_charges(log, history, entry, body):
        return history if entry.value == "charge" else kept(log, history, entry, body)

    with patch.object(ClientLog, "append", forget_charges):
        storage.participate(tmp_path)
    assert storage.wrong_client(tmp_path) > 0


def test_kills_come_at_the_wanted_number(tmp_path):
    found = campaign_storage.kills(10, tmp_path, "ci")
    assert found["failed"] == 0
    assert str(found["result"]).startswith("10 kills (5 of a server, 3 of resumed runs, 2 of clients)")


def test_random_targets_hold_against_the_oracles():
    assert campaign_targets.targets(6, "ci")["failed"] == 0


def test_a_plan_with_half_of_its_noise_is_found():
    """The planted twin: claims stay as they are, and the noise that the oracles see is halved."""
    target = campaign_targets.PrivacyTarget(
        dimension=10,
        population=50,
        cohort_size=50,
        rounds=2,
        epsilon=2.0,
        delta=1e-5,
        against="server",
        sampling="none",
    )
    plan = calibrate(target)
    assert campaign_targets.faults_of(plan, target) == []
    with patch.object(DiscreteGaussianSum, "sum_variance", 1.0):
        assert any("dp-accounting" in fault for fault in campaign_targets.faults_of(plan, target))


def test_a_time_that_follows_the_noise_is_seen():
    """By a clock that counts the noise itself, so that no machine's speed decides."""
    clock = iter(np.cumsum(np.arange(10**6)))

    def slow(stream: Stream) -> np.ndarray:
        drawn = stream.below(1000)
        for _ in range(drawn):
            next(clock)
        return np.array([drawn])

    with patch.object(campaign_timing.time, "perf_counter_ns", lambda: next(clock)):
        assert campaign_timing.correlation(slow, 300, Entropy.replay(b"clock")) > 0.5


def test_the_control_draws_one_number_by_rejection():
    stream = Entropy.replay(b"control").stream()
    draws = [int(campaign_timing.rejection(stream)[0]) for _ in range(200)]
    assert 10 < np.std(draws) < 40
