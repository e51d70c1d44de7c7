"""Records under a torch module for engines: gradients and scores of one record at a time."""

import numpy as np
import pytest
import torch

from d2pfed.deploy.questions import EvaluatedRecords
from d2pfed.errors import ConfigError
from d2pfed.learning import TorchRecords
from d2pfed.round import Units


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(6, 3)
    )


def silo(_name):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, 4, generator=generator)
    return [(each, torch.tensor(place % 3)) for place, each in enumerate(inputs)]


def arrays_of(module):
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def rows(units, chosen):
    return np.concatenate(list(units.gradients(np.array(chosen))))


def test_a_records_row_is_its_gradient_downhill_in_the_arrays_order():
    module = network()
    arrays = dict(reversed(arrays_of(module).items()))
    units = TorchRecords(module, silo)(arrays, {}, "site-1")
    inputs, label = silo("")[4]
    module.eval()
    torch.nn.functional.cross_entropy(module(inputs[None]), label[None]).backward()
    named = dict(module.named_parameters())
    exact = -np.concatenate([named[name].grad.numpy().ravel() for name in arrays if name in named])
    assert np.allclose(rows(units, [4])[0], exact, atol=1e-7)


def test_a_records_row_depends_on_that_record_and_the_model_alone():
    records, module = TorchRecords(network(), silo), network()
    before = records(arrays_of(module), {}, "site-1")
    whole = rows(before, range(9))
    assert np.array_equal(rows(before, [7, 2, 7]), whole[[7, 2, 7]])
    records({name: array * 2 for name, array in arrays_of(module).items()}, {}, "site-1")
    assert np.array_equal(rows(records(arrays_of(module), {}, "site-1"), range(9)), whole)


def test_what_is_not_trained_has_no_place_in_a_row():
    module = network()
    module[0].requires_grad_(requires_grad=False)
    units = TorchRecords(module, silo)(arrays_of(module), {}, "site-1")
    assert rows(units, [0]).shape == (1, 6 + 6 + 6 * 3 + 3)
    with pytest.raises(ConfigError, match="must be parameters of the module, got other"):
        TorchRecords(module, silo)({"other": np.zeros(2)}, {}, "site-1")


def test_records_are_what_training_and_evaluation_ask_for():
    module = network()
    units = TorchRecords(module, silo)(arrays_of(module), {}, "site-1")
    assert isinstance(units, Units)
    asked: EvaluatedRecords = units
    scores, label = asked.evaluate(5)
    assert (units.count, label, scores.shape) == (9, 2, (3,))
    assert scores.sum() == pytest.approx(1.0)
