"""The bytes of a model: exact, the same everywhere, and refused where no finite model has them."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.model_bytes import decode_model, encode_model, model_size
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, calibrate, describe
from d2pfed.round import Attempt, Outcome, session_of
from d2pfed.simulation import Fidelity, SimulatedFederation
from d2pfed.training import ServerOptimizer, train
from support.simulations import Given


def _params(count: int) -> np.ndarray:
    return np.sin(np.arange(1, count + 1) ** 1.5).astype(np.float32)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 19_354])
def test_eight_bits_err_by_at_most_half_a_step(count: int) -> None:
    params = _params(count)
    data = encode_model(params, 8)
    assert len(data) == model_size(count, 8) == count + 4 * -(-count // 256)
    for start in range(0, count, 256):
        block = slice(start, start + 256)
        step = np.abs(params[block]).max() / 127
        assert np.abs(decode_model(data, count, 8)[block] - params[block]).max() <= step / 2 * (1 + 1e-5)


def test_the_bytes_are_those_of_the_protocol() -> None:
    # Scale 1 / 64, exact; 0.5 / (1 / 64) = 32; a half goes to the even number.
    params = np.array([127 / 64, -127 / 64, 0.5, 1.5 / 64, 2.5 / 64, -0.5 / 64], np.float32)
    assert encode_model(params, 8) == np.float32(1 / 64).tobytes() + bytes([127, 129, 32, 2, 2, 0])


def test_thirty_two_bits_are_the_floats() -> None:
    params = _params(300)
    assert encode_model(params, 32) == params.astype("<f4").tobytes()
    assert np.array_equal(decode_model(encode_model(params), 300), params)


@pytest.mark.parametrize("params", [np.zeros(5, np.float32), np.full(5, 1e-45, np.float32)])
def test_what_has_no_scale_is_zero(params: np.ndarray) -> None:
    assert not decode_model(encode_model(params, 8), 5, 8).any()


def test_the_greatest_floats_survive() -> None:
    most = np.finfo(np.float32).max * np.float32(0.999)
    found = decode_model(encode_model(np.array([most, -most, 0], np.float32), 8), 3, 8)
    assert np.allclose(found, [most, -most, 0], rtol=1e-6)


def test_a_hostile_model_is_refused() -> None:
    good = encode_model(np.array([1.0, -0.5], np.float32), 8)
    assert decode_model(good, 2, 8)[0] == np.float32(127) * np.float32(1 / 127)
    for scale in (np.nan, np.inf, -np.inf, -1.0, -0.0, 3e38):
        with pytest.raises(PeerError):
            decode_model(np.float32(scale).tobytes() + good[4:], 2, 8)
    for data in (good[:-1], good + b"\0", b"", good[:4] + b"\x80\0", encode_model(np.zeros(2, np.float32))):
        with pytest.raises(PeerError):
            decode_model(data, 2, 8)


def test_a_model_that_is_not_finite_is_not_sent() -> None:
    for wrong in (np.nan, np.inf):
        with pytest.raises(ConfigError, match="finite"):
            encode_model(np.array([wrong, 1], np.float32), 8)


@pytest.mark.parametrize("bits", [0, 7, 16, 64])
def test_other_formats_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="download_bits must be 8 or 32"):
        model_size(4, bits)


TARGET = PrivacyTarget(dimension=30, population=100, cohort_size=12, rounds=2, epsilon=20.0, delta=1e-3)


class Seen(Given):
    """A backend that says which models it was given."""

    models: list = []  # noqa: RUF012 - of one test at a time

    def train(self, params, clients, seed):
        self.models.append(params)
        return super().train(params, clients, seed)

    def encode(self, encoder, params, clients, seed):
        self.models.append(params)
        return super().encode(encoder, params, clients, seed)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("fidelity", [Fidelity.SUM, Fidelity.PROTOCOL])
def test_simulated_clients_train_from_the_model_that_would_be_sent(bits, fidelity) -> None:
    plan, model = calibrate(replace(TARGET, download_bits=bits)), _params(30)
    backend = Seen(lambda clients: (np.zeros(30, np.float32) for _ in clients))
    backend.models.clear()
    federation = SimulatedFederation(
        plan=plan, backend=backend, entropy=Entropy.replay(b"download"), fidelity=fidelity
    )
    federation.collect(session_of(plan, Attempt("run", 0, 0), tuple(range(12))), model, {})
    (seen,) = backend.models
    assert np.array_equal(seen, decode_model(encode_model(model, bits), 30, bits))
    assert np.array_equal(seen, model) == (bits == 32)


def test_the_server_steps_from_its_own_floats_so_small_steps_add_up() -> None:
    start, mean = np.full(4, 0.5, np.float32), np.full(4, 1e-4, np.float32)
    start[0], mean[0] = 1, 0
    shown = []

    def aggregate(state):
        shown.append(decode_model(encode_model(state.params, 8), 4, 8))
        return Outcome(mean, 0, 1)

    optimizer = ServerOptimizer()
    *_, last = train(optimizer.start(start), optimizer, 200, aggregate)
    assert np.allclose(last.state.params, start + 200 * mean, atol=1e-5)
    assert np.abs(shown[-1] - last.state.params).max() <= 0.5 / 127 + 3e-4
    # The wrong twin steps from what was sent: each step is below half of a code's, and rounding takes it back.
    twin = start
    for _ in range(200):
        twin = decode_model(encode_model(twin, 8), 4, 8) + mean
    assert np.abs(twin - start).max() < 0.01


def test_a_plan_counts_the_model_as_it_is_sent() -> None:
    received = {}
    for bits in (8, 32):
        target = replace(TARGET, dimension=1000, download_bits=bits)
        received[bits] = describe(target, calibrate(target)).traffic.client.received
    assert received[32] - received[8] == 4000 - (1000 + 4 * 4)
