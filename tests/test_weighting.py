"""Weights that nobody learns: in a client's vector, in a plan, and in training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import d2pfed
from d2pfed import ConfigError, Entropy, Participant, PrivacyTarget, calibrate
from d2pfed.ledger import Ledger
from d2pfed.noise.clipping import Weighting
from d2pfed.numerics import canonical
from d2pfed.plan import decode_plan
from d2pfed.plan.describe import describe_plan
from d2pfed.round import Attempt, local_sum, run_plan, session_of

D, CLIENTS = 6, 40


def target(**changes):
    default = {
        "dimension": D,
        "population": CLIENTS,
        "cohort_size": CLIENTS,
        "rounds": 1,
        "spare": 0,
        "epsilon": 1e3,
        "delta": 1e-5,
        "against": "server",
        "sampling": "none",
        "clip": 2.0,
    }
    return PrivacyTarget(**(default | changes))


@given(
    st.lists(st.floats(-1e20, 1e20), min_size=1, max_size=5),
    st.floats(0, 1e30),
    st.floats(0.001, 1e6),
    st.floats(0.001, 1e6),
)
@example([0.0, 0.0], 3.0, 1.0, 2.0)
def test_no_vector_exceeds_the_radius(update, weight, cap, clip):
    weighting = Weighting.balanced(cap, clip, len(update))
    sent = weighting.vector(np.array([*update, weight], np.float64)).astype(np.float64)
    assert np.linalg.norm(sent) <= 1 + 1e-6
    if not any(update):
        assert not sent.any()  # a silent client has no weight


def test_the_mean_is_that_of_the_clipped_updates_by_capped_weights():
    generator = np.linspace(-1, 1, CLIENTS * D).reshape(CLIENTS, D) * 3
    weights = np.arange(CLIENTS) + 1.0
    weighting = Weighting.balanced(10.0, 2.0, D)
    sent = [weighting.vector(np.append(x, w)) for x, w in zip(generator, weights, strict=True)]
    norms = np.linalg.norm(generator, axis=1, keepdims=True)
    clipped, capped = generator * np.minimum(1, 2 / norms), np.minimum(weights, 10)
    assert np.allclose(weighting.mean(np.mean(sent, axis=0), 0.0), capped @ clipped / capped.sum(), atol=1e-5)


def test_a_total_weight_that_drowns_moves_nothing_far():
    weighting = Weighting.balanced(10.0, 2.0, D)
    found = weighting.mean(np.append(np.full(D, 0.1), -0.05).astype(np.float32), 0.1)
    assert np.abs(found).max() < 2.0


def weighted_round(tmp_path, plan, updates):
    charge = run_plan(plan)
    with Ledger.create(tmp_path / "ledger", charge.budget) as ledger:
        ledger.begin("run", "run", charge)
        total = local_sum(plan, Attempt("run", 0, 0), updates, ledger, Entropy.replay(b"weights"))
    return total / plan.cohort_size


def test_a_weighted_round_gives_the_weighted_mean(tmp_path):
    plan = calibrate(target(), max_weight=100.0)
    weights = np.where(np.arange(CLIENTS) % 2, 100.0, 20.0)
    updates = {
        client: np.append(np.full(D, 0.5 if client % 2 else -0.5), weights[client]).astype(np.float32)
        for client in range(CLIENTS)
    }
    mean = weighted_round(tmp_path, plan, updates)
    assert mean.shape == (D,)
    assert np.abs(mean - (0.5 * 100 - 0.5 * 20) / 120).max() < 0.05


def test_a_plan_with_weights_says_its_dimension_and_clip():
    plan = calibrate(target(), max_weight=100.0)
    assert (plan.dimension, plan.codec.rotation.dimension, plan.update_clip) == (D, D + 1, 2.0)
    assert decode_plan(canonical.encode(plan)) == plan
    assert len({each.digest for each in (plan, calibrate(target(), max_weight=99.0), calibrate(target()))}) == 3
    assert describe_plan(plan).guarantees
    with pytest.raises(ConfigError, match="codec's clip of 1"):
        replace(plan, codec=replace(plan.codec, clip=2.0))
    with pytest.raises(ConfigError, match="weights take a fixed clip"):
        calibrate(target(clip="auto"), max_weight=1.0)
    with pytest.raises(ConfigError, match="cap must be positive"):
        calibrate(target(), max_weight=0.0)


def test_an_update_without_its_weight_is_refused():
    plan = calibrate(target(), max_weight=100.0)
    own = Participant(plan=plan, client=0, entropy=Entropy.replay(b"x"), participations=0)
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(CLIENTS)))
    with pytest.raises(ConfigError, match=r"must have shape \(7,\), got \(6,\)"):
        own.encode(session, np.zeros(D, np.float32), None)
    with pytest.raises(ConfigError, match="a weight must be at least 0"):
        own.encode(session, np.append(np.ones(D), -1.0).astype(np.float32), None)


# Training


def silos():
    """Return 60 clients of one of two lines; those of the second are few, and have most of the data."""
    clients, sizes = [], []
    for client in range(60):
        size = 80 if client % 6 == 0 else 4
        inputs = torch.linspace(-1, 1, size).reshape(-1, 1)
        clients.append((inputs, (3 if size == 80 else -1) * inputs))
        sizes.append(size)
    return clients, sizes


def slope(tmp_path, name, **training):
    clients, _ = silos()
    torch.manual_seed(1)
    result = d2pfed.fit(
        torch.nn.Linear(1, 1, bias=False),
        clients,
        privacy={
            "epsilon": 500.0,
            "sampling": "none",
            "clip": 1.0,
            "delta": 1e-3,
            "dropouts": 0.0,
            "colluders": 0.0,
        },
        rounds=10,
        cohort_size=60,
        loss=torch.nn.functional.mse_loss,
        lr=0.1,
        epochs=2,
        directory=tmp_path / name,
        seed=1,
        training=training,
    )
    return result, next(result.module.parameters()).item()


def test_weights_decide_whom_a_model_serves(tmp_path):
    _, sizes = silos()
    result, weighted = slope(tmp_path, "weighted", weights=sizes, max_weight=80)
    assert weighted > 1.5  # most clients have -1, most data 3
    assert result.history[0].clip == 1.0
    with pytest.raises(ConfigError, match="holds a run"):
        slope(tmp_path, "weighted", weights=sizes, max_weight=40)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"weights": [1.0] * 60}, "weights and max_weight go together"),
        ({"max_weight": 3.0}, "weights and max_weight go together"),
        ({"weights": [1.0] * 59, "max_weight": 3.0}, "one number for each of 60 clients"),
        ({"weights": [-1.0] * 60, "max_weight": 3.0}, "weights must be finite and at least 0"),
        ({"weights": [float("nan")] * 60, "max_weight": 3.0}, "weights must be finite"),
        ({"weights": [1.0] * 60, "max_weight": 0}, "max_weight must be positive"),
    ],
)
def test_bad_weights_are_refused(tmp_path, options, rule):
    with pytest.raises(ConfigError, match=rule):
        slope(tmp_path, "bad", **options)
