"""Local training of any rows: what a user's data become, and which trainer takes them."""

import numpy as np
import pytest
import torch
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning import (
    Examples,
    LocalTrainer,
    LocalTraining,
    SequentialTrainer,
    UserClients,
    fixed_content,
    trainer_for,
    user_model,
)
from d2pfed.learning.trainer import TrainingMethod

CPU = torch.device("cpu")


def held(count: int = 6) -> list:
    inputs = torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(1))
    return [(each, (each[:, 0] > 0).long()) for each in inputs]


def rows_of(data):
    return UserClients.of([data], None, CPU).examples(0)


def trainer(module, data, **hooks):
    return trainer_for(user_model(module, **hooks), UserClients.of(data, None, CPU), LocalTraining())


def test_a_known_network_is_trained_by_the_compiled_loop():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert trainer(net, held()).method is TrainingMethod.COMPILED


def test_a_hook_keeps_a_known_network_from_the_compiled_loop():
    """The loop by hand would not call the hook."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    hooked = trainer(net, held(), forward=lambda module, x: module(-x))
    assert hooked.method in (TrainingMethod.VMAP, TrainingMethod.LOOP)
    params = hooked.model.initial()
    (plain,) = trainer(net, held())(params, [0], 0)
    (found,) = hooked(params, [0], 0)
    assert np.abs(found - plain).max() > 1e-3


def test_a_hook_sees_the_layers_that_are_not_trained_too():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    seen = []

    def forward(module, x):
        seen.append(len(module))
        return module(x)

    list(
        trainer(net, held(), forward=forward, trainable="2.*")(user_model(net, trainable="2.*").initial(), [0], 0)
    )
    assert set(seen) == {3}


def test_rows_that_a_mean_loss_mixes_are_trained_client_after_client():
    loss = lambda outputs, labels: nn.functional.cross_entropy(outputs, labels) * 1.0  # noqa: E731
    assert isinstance(trainer(nn.Linear(4, 2), held(), loss=loss), SequentialTrainer)
    by_row = lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="none")  # noqa: E731
    assert isinstance(trainer(nn.Linear(4, 2), held(), loss=by_row), LocalTrainer)


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 4), torch.zeros(2)),
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_client_whose_rows_are_unlike_the_others_is_named(other):
    with pytest.raises(ConfigError, match="client 1 must hold inputs of shape"):
        list(trainer(nn.Linear(4, 2), [held()[0], other])(user_model(nn.Linear(4, 2)).initial(), [0, 1], 0))


def test_arrays_become_what_torch_s_modules_take():
    rows = rows_of((np.zeros((3, 2)), np.zeros(3, np.int8)))
    assert rows.inputs.dtype == torch.float32
    assert rows.labels.dtype == torch.int64
    kept = rows_of((torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3)))
    assert kept.inputs.dtype == torch.float64
    assert kept.labels.dtype == torch.float32


@pytest.mark.parametrize("empty", [None, [], (), ([], []), (torch.zeros(0, 4), torch.zeros(0)), Examples(None)])
def test_no_data_have_no_rows(empty):
    assert len(rows_of(empty)) == 0


def test_large_data_are_measured_in_batches_and_joined_as_they_were():
    inputs = torch.arange(5000.0).reshape(2500, 2)
    rows = rows_of(({"a": inputs, "b": (inputs, inputs)}, inputs[:, 0]))
    assert len(rows) == 2500
    assert (rows.inputs["b"][1] == inputs).all()


def test_the_digest_of_what_is_not_trained_covers_buffers_and_all_types():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    net.register_buffer("scale", torch.tensor(3))
    content = dict(fixed_content(user_model(net, trainable="0.*")))
    assert set(content) == {"1.weight", "1.bias", "scale"}
    net.scale.fill_(4)
    assert dict(fixed_content(user_model(net, trainable="0.*"))) != content


def test_a_model_on_a_device_gives_its_vector_back_on_the_cpu():
    model = user_model(nn.Linear(2, 2), device="cpu")
    assert model.device == CPU
    assert isinstance(model.initial(), np.ndarray)
    with pytest.raises(ConfigError, match="device must be one of cpu, cuda, mps, got 'cpu:x'"):
        user_model(nn.Linear(2, 2), device="cpu:x")
