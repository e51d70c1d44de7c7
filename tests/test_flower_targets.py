"""What a strategy derives from a model, a roster and a target."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Context, RecordDict

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.targets import complete_target, trained_sizes
from d2pfed.errors import ConfigError
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.plan import PrivacyTarget
from d2pfed.secagg.trust import Consistency
from support.enrolled_clients import enrol

ARRAYS = {"weight": np.zeros((4, 3), np.float32), "bias": np.zeros(4, np.float32)}
LOOSE = {"epsilon": 1000.0}


def context(**config: object) -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)


def test_a_strategy_follows_from_roster_model_and_configuration(tmp_path):
    signed = enrol(tmp_path, 5)
    (tmp_path / "roster").write_bytes(signed.data)
    (tmp_path / "authority").write_text(signed.roster.authority.hex() + "\n")
    asked = context(**{"d2pfed-directory": str(tmp_path), "num-server-rounds": 3, "lr": 0.1})
    strategy = PrivateFedAvg.for_target(LOOSE, ARRAYS, asked)
    plan = strategy.plan
    assert (plan.dimension, plan.rounds, plan.cohort_size) == (16, 3, 5)
    assert (plan.sampling.method, plan.sampling.population) == (Sampling.NONE, 5)
    assert (plan.consistency, plan.max_participations) == (Consistency.SIGNED, plan.max_attempts)
    assert plan.quorum == 4
    assert strategy.directory == tmp_path / "run"
    assert strategy.draws == tmp_path / "draws"
    assert strategy.target.against == SERVER
    assert strategy.run_config == asked.run_config
    assert strategy.trained == ("weight", "bias")


def test_without_a_roster_it_is_a_simulation(tmp_path):
    asked = context(**{"d2pfed-directory": str(tmp_path), "num-server-rounds": 2})
    strategy = PrivateFedAvg.for_target(LOOSE | {"population": 6, "cohort_size": 5}, ARRAYS, asked)
    assert (strategy.roster, strategy.draws) == (None, None)
    assert strategy.plan.consistency is Consistency.ASSUMED
    assert strategy.plan.sampling.method is Sampling.FIXED


@pytest.mark.parametrize("depth", [None, 5])
def test_a_roster_without_draws_has_none_to_count_on(tmp_path, depth):
    asked = LOOSE | {"cohort_size": 3, "rounds": 1}
    found = complete_target(asked, {"a": 7}, enrol(tmp_path, 5, depth), {})
    assert (found.draws == 0) is (depth is None)


def test_a_whole_target_is_kept():
    target = PrivacyTarget(epsilon=1000.0, population=5, cohort_size=5, rounds=2, dropouts=0.4)
    found = complete_target(target, {"a": 7}, None, {})
    assert (found.dimension, found.dropouts, found.colluders, found.rounds) == (7, 0.4, 0.0, 2)


@pytest.mark.parametrize(
    ("privacy", "config", "rule"),
    [
        ({"epsilon": 1.0}, {"num-server-rounds": 1}, "must state its population"),
        ({"epsilon": 1.0, "population": 5}, {}, "must state its rounds"),
        ({"epsilon": 1.0, "population": 5, "dimension": 9}, {}, "has dimension 9, and the app has 7"),
        ({"epsilom": 1.0}, {}, "privacy has no field 'epsilom' .did you mean epsilon"),
    ],
)
def test_what_cannot_be_derived_is_said(privacy, config, rule):
    with pytest.raises(ConfigError, match=rule):
        complete_target(privacy, {"a": 7}, None, config)


def test_the_server_needs_a_directory_and_its_authority(tmp_path):
    with pytest.raises(ConfigError, match="must name the server's directory: d2pfed-directory"):
        PrivateFedAvg.for_target(LOOSE, ARRAYS, context())
    (tmp_path / "roster").write_bytes(b"")
    with pytest.raises(ConfigError, match="authority must hold the public key"):
        PrivateFedAvg.for_target(LOOSE, ARRAYS, context(**{"d2pfed-directory": str(tmp_path)}))


def test_a_modules_buffers_and_frozen_parameters_are_not_trained():
    torch = pytest.importorskip("torch", reason="the model is torch's (extra `train`)")
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[0].bias.requires_grad = False
    assert trained_sizes(module) == {"0.weight": 6, "1.weight": 3, "1.bias": 3}
    assert set(module.state_dict()) - set(trained_sizes(module)) == {
        "0.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    with pytest.raises(ConfigError, match="no parameter requires a gradient"):
        trained_sizes(torch.nn.BatchNorm1d(3, affine=False))
    with pytest.raises(ConfigError, match="a torch module or arrays by name, got int"):
        trained_sizes(3)


def test_what_is_personal_is_not_in_the_sum():
    arrays = {"body.weight": np.zeros((2, 3)), "head.weight": np.zeros(4)}
    assert trained_sizes(arrays, ["head.*"]) == {"body.weight": 6}
    with pytest.raises(ConfigError, match="personal must name trained parameters"):
        trained_sizes(arrays, ["tail.*"])
