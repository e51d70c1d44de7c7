"""LSTM layers of many clients at once against torch's own, one client after the other."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from d2pfed.learning import recurrent
from d2pfed.learning.recurrent import OneProductLstm

KINDS = list(product((1, 2), (False, True), (False, True), (False, True)))


def gradients(net, values, inputs):
    """Return the gradients of a loss that every output is in."""

    def loss(own, inputs):
        outputs, (hidden, cells) = torch.func.functional_call(net, own, (inputs,))
        return outputs.sin().sum() + (1.3 * hidden).cos().sum() + cells.square().sum()

    return torch.func.grad(loss, argnums=(0, 1))(values, inputs)


@pytest.mark.parametrize(("layers", "both_ways", "bias", "batch_first"), KINDS)
def test_gradients_of_clients_together_are_those_of_each_alone(layers, both_ways, bias, batch_first):
    torch.manual_seed(0)
    net = nn.LSTM(5, 7, layers, bias=bias, batch_first=batch_first, bidirectional=both_ways)
    inputs = torch.randn(3, 4, 6, 5)
    values = {
        name: torch.stack([each.detach() * size for size in (1.0, 0.9, 1.5)])
        for name, each in net.named_parameters()
    }
    with OneProductLstm():
        found = torch.func.vmap(lambda own, rows: gradients(net, own, rows))(values, inputs)
    for client in range(3):
        own = {name: value[client] for name, value in values.items()}
        wanted = gradients(net, own, inputs[client])
        for name in own:
            torch.testing.assert_close(found[0][name][client], wanted[0][name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1][client], wanted[1], rtol=1e-4, atol=1e-4)


def test_a_frozen_layer_lets_gradients_through():
    torch.manual_seed(0)
    net, inputs = nn.LSTM(5, 7), torch.randn(3, 4, 6, 5)
    values = {name: each.detach() for name, each in net.named_parameters()}
    with OneProductLstm():
        found = torch.func.vmap(lambda rows: gradients(net, values, rows)[1])(inputs)
    for client in range(3):
        torch.testing.assert_close(found[client], gradients(net, values, inputs[client])[1], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_is_not_written_by_hand_is_torchs_own(monkeypatch):
    monkeypatch.setattr(recurrent, "lstm", None)  # to call it would fail
    rows = torch.randn(4, 6, 5)
    with OneProductLstm():
        nn.LSTM(5, 7, proj_size=3)(rows)
        nn.LSTM(5, 7, 2, dropout=0.5)(rows)
        nn.LSTM(5, 7)(pack_sequence(list(rows)))
        nn.GRU(5, 7)(rows)
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(5, 7)(rows)


def test_a_second_derivative_is_refused():
    net, inputs = nn.LSTM(5, 7), torch.randn(3, 4, 6, 5)
    values = {name: each.detach() for name, each in net.named_parameters()}

    def bent(rows):
        return torch.func.grad(lambda rows: gradients(net, values, rows)[1].square().sum())(rows)

    with OneProductLstm(), pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.vmap(bent)(inputs)
