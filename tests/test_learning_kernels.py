"""Compiled training and features equal their plain twins."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d2pfed.learning import (
    Examples,
    LocalTrainer,
    LocalTraining,
    Model,
    Optimizer,
    SequentialTrainer,
    StoredClients,
)
from d2pfed.learning.architectures import OrientedEdges, image_gradients
from d2pfed.learning.dense import Moments, train_dense, widths_of
from d2pfed.learning.trainer import TrainingMethod

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits


def perceptron(widths: list[int]) -> nn.Module:
    layers = [nn.Flatten()]
    for entering, leaving in pairwise(widths):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def plain_dense(params, widths, inputs, labels, schedule, lr, *, mask=True):
    """The twin of the compiled loop in numpy, float64."""
    layers, at = [], 0
    for entering, leaving in pairwise(widths):
        weight = params[at : at + entering * leaving].reshape(leaving, entering).astype(np.float64)
        at += entering * leaving
        layers.append((weight, params[at : at + leaving].astype(np.float64)))
        at += leaving
    for line in schedule:
        rows = line[line >= 0]
        values = [inputs[rows].astype(np.float64)]
        for weight, bias in layers[:-1]:
            values.append(np.maximum(values[-1] @ weight.T + bias, 0))
        logits = values[-1] @ layers[-1][0].T + layers[-1][1]
        slope = np.exp(logits - logits.max(axis=1, keepdims=True))
        slope = (slope / slope.sum(axis=1, keepdims=True) - np.eye(widths[-1])[labels[rows]]) / len(rows)
        for (weight, bias), entering in zip(reversed(layers), reversed(values), strict=True):
            before = (slope @ weight) * ((entering > 0) | (not mask))
            np.subtract(weight, lr * slope.T @ entering, out=weight)
            np.subtract(bias, lr * slope.sum(axis=0), out=bias)
            slope = before
    return np.concatenate([part.ravel() for layer in layers for part in layer]) - params


def dense_case(widths, count, local, seed):
    torch.manual_seed(seed)
    model = Model(perceptron(widths))
    examples = Examples(torch.rand(count, widths[0]), torch.randint(widths[-1], (count,)))
    schedule = local.schedule(count, np.random.default_rng(seed))
    return model, examples, schedule


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    count=st.integers(0, 23),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_compiled_sgd_is_its_numpy_twin(widths, count, batch_size, seed):
    local = LocalTraining(lr=0.2, epochs=2, batch_size=batch_size)
    model, examples, schedule = dense_case([*widths, 5], count, local, seed)
    update = train_dense(model.initial(), widths_of(model), examples, schedule, local.lr)
    arrays = examples.inputs.numpy(), examples.labels.numpy()
    np.testing.assert_allclose(
        update, plain_dense(model.initial(), [*widths, 5], *arrays, schedule, local.lr), atol=1e-6
    )


def test_the_twin_notices_a_relu_without_its_slope():
    local = LocalTraining(lr=0.2, epochs=2, batch_size=10)
    widths = [30, 20, 5]
    model, examples, schedule = dense_case(widths, 20, local, 1)
    update = train_dense(model.initial(), widths_of(model), examples, schedule, local.lr)
    arrays = examples.inputs.numpy(), examples.labels.numpy()
    wrong = plain_dense(model.initial(), widths, *arrays, schedule, local.lr, mask=False)
    assert np.abs(update - wrong).max() > 1e-3


@pytest.mark.parametrize("widths", [[392, 48, 10], [784, 60, 60, 10], [700, 900, 10]])
def test_compiled_sgd_is_the_loop_at_full_size(widths):
    local = LocalTraining(lr=0.2, epochs=3, batch_size=10)
    model, examples, _ = dense_case(widths, 80, local, 1)
    schedule = local.schedule(80, np.random.default_rng([3, 0]))
    update = train_dense(model.initial(), widths_of(model), examples, schedule, local.lr)
    loop = SequentialTrainer(model, StoredClients(examples, (np.arange(80),)), local)
    np.testing.assert_allclose(update, next(loop(model.initial(), [0], 3)), atol=1e-6)


@pytest.mark.parametrize("widths", [[3, 5], [392, 48, 10], [784, 60, 60, 10]])
def test_compiled_adam_is_the_loop(widths):
    local = LocalTraining(optimizer=Optimizer.ADAM, lr=1e-3, epochs=3, batch_size=10)
    model, examples, _ = dense_case(widths, 37, local, 1)
    schedule = local.schedule(37, np.random.default_rng([3, 0]))
    fresh = Moments(*np.zeros((2, model.dimension), np.float32))
    update = train_dense(model.initial(), widths_of(model), examples, schedule, local.lr, fresh)
    loop = SequentialTrainer(model, StoredClients(examples, (np.arange(37),)), local)
    wanted = next(loop(model.initial(), [0], 3))
    np.testing.assert_allclose(update, wanted, atol=1e-5)
    again = train_dense(model.initial(), widths_of(model), examples, schedule, local.lr, fresh)
    assert np.abs(again - wanted).max() > 1e-4  # moments that are carried change the next update


def test_wide_layers_in_large_batches_are_left_to_torch():
    model, examples, _ = dense_case([784, 60, 10], 3, LocalTraining(), 1)
    clients = StoredClients(examples, (np.arange(3),))
    for size, method in ((10, TrainingMethod.COMPILED), (1000, TrainingMethod.VMAP)):
        trainer = LocalTrainer(model, clients, LocalTraining(batch_size=size))
        assert trainer.choose(model.initial(), [0]).method is method


@pytest.mark.parametrize("side", [3, 8, 12, 28, 33, 64])
def test_compiled_edge_features_are_those_of_torch(side):
    images = torch.rand(9, 1, side, side, generator=torch.Generator().manual_seed(side))
    images[0] = 0
    edges = OrientedEdges(side).eval()
    wanted = edges(images).detach()  # with gradients, so by torch
    with torch.no_grad():
        found = edges(images)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert not found[0].any()
    assert (found.roll(1, dims=1)[1:] - wanted[1:]).abs().max() > 0.01  # the check notices a wrong direction


def test_edge_features_are_differentiable_under_vmap_and_in_float64():
    images = torch.rand(4, 1, 8, 8, requires_grad=True)
    edges = OrientedEdges(8).eval()
    edges(images).square().sum().backward()
    assert images.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(edges)(images[None])[0], edges(images))
        torch.testing.assert_close(edges.double()(images.double()).float(), OrientedEdges(8)(images))


def test_pixels_that_are_no_numbers_give_features_that_are_none():
    images = torch.full((1, 1, 8, 8), float("nan"))
    with torch.no_grad():
        assert OrientedEdges(8).eval()(images).isnan().all()


def test_gradients_of_images_are_weighted_differences():
    smooth, slope = np.float32([0.5, 0.25, 0, 0, 0]), np.float32([0, 0.5, 0, 0, 0])
    image = np.random.default_rng(1).random((1, 6, 6)).astype(np.float32)
    wide = np.pad(image[0], 1)
    turned = (wide[:, 2:] - wide[:, :-2]) / 2
    across = turned[1:-1] / 2 + (turned[:-2] + turned[2:]) / 4
    found = image_gradients(image, smooth, slope)[0]
    np.testing.assert_allclose(found[0], across, atol=1e-6)
    turned_image = np.ascontiguousarray(image.transpose(0, 2, 1))
    np.testing.assert_allclose(found[1], image_gradients(turned_image, smooth, slope)[0, 0].T, atol=1e-6)
