"""A module is a flat vector of what is trained, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning import (
    MODELS,
    Examples,
    LocalTraining,
    Model,
    SequentialTrainer,
    StoredClients,
    Task,
    build_model,
    evaluate,
    fitting,
)
from d2pfed.learning.architectures import OrientedEdges
from d2pfed.learning.dense import widths_of

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits


def block() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def task(shape: tuple[int, ...], classes: int = 10) -> Task:
    inputs = torch.zeros(3, *shape) if len(shape) > 1 else torch.zeros(3, *shape, dtype=torch.int32)
    examples = Examples(inputs, torch.arange(3) % classes)
    clients = StoredClients(examples, (np.arange(3),))
    return Task(
        name="t",
        clients=clients,
        validation=examples,
        test=lambda: examples,
        classes=classes,
        input_shape=shape,
        description="Zeros.",
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_flatten_undoes_unflatten(seed):
    model = Model(block())
    params = np.random.default_rng(seed).standard_normal(model.dimension, np.float32)
    np.testing.assert_array_equal(model.flatten(model.unflatten(params)), params)


def test_loading_gives_a_module_and_leaves_the_model_alone():
    model = Model(block())
    before = model.initial()
    loaded = model.load(before + 1)
    values = torch.cat([value.detach().flatten() for value in loaded.parameters()]).numpy()
    np.testing.assert_array_equal(values, before + 1)
    np.testing.assert_array_equal(model.initial(), before)
    assert not loaded.training


def test_a_model_does_not_follow_later_changes_of_the_module():
    module = block()
    model = Model(module)
    before = model.initial()
    with torch.no_grad():
        module[1].weight.add_(1)
    np.testing.assert_array_equal(model.initial(), before)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("*",), ("1.weight", "1.bias", "3.weight", "3.bias")),
        (("3.*",), ("3.weight", "3.bias")),
        (("*.bias",), ("1.bias", "3.bias")),
        (("3.bias", "1.weight"), ("1.weight", "3.bias")),
    ],
)
def test_parameters_are_chosen_by_name(patterns, names):
    assert Model(block(), patterns).names == names


def test_parameters_without_gradients_are_never_trained():
    module = block()
    module[1].requires_grad_(requires_grad=False)
    assert Model(module).names == ("3.weight", "3.bias")
    with pytest.raises(ConfigError, match=r"'1\.\*' names none"):
        Model(module, ("1.*",))


@pytest.mark.parametrize("patterns", [("head.*",), ("*", "nothing"), ()])
def test_patterns_that_choose_nothing_are_refused(patterns):
    with pytest.raises(ConfigError):
        Model(block(), patterns)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4, bias=False)
        self.leave = nn.Linear(4, 4, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(inputs).relu())


@pytest.mark.parametrize("patterns", [("*",), ("leave.*",)])
def test_shared_parameters_count_once_and_stay_shared(patterns):
    model = Model(Tied(), patterns)
    assert model.dimension == 16
    params = np.arange(16, dtype=np.float32) / 16
    loaded = model.load(params)
    assert loaded.leave.weight is loaded.enter.weight
    inputs = torch.randn(5, 4)
    through = model.outputs_of(model.scoring, model.unflatten(params) | model.fixed(), inputs)
    torch.testing.assert_close(through, loaded(inputs))


def test_mixed_dtypes_are_kept():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[1].to(torch.float64)
    model = Model(module)
    kinds = [value.dtype for value in model.unflatten(model.initial()).values()]
    assert kinds == [torch.float32, torch.float32, torch.float64, torch.float64]
    assert model.initial().dtype == np.float32


def test_complex_parameters_are_refused():
    with pytest.raises(ConfigError, match="real floats"):
        Model(nn.Linear(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_statistics_that_would_be_learnt_outside_the_sum_are_refused(layer):
    with pytest.raises(ConfigError, match="running statistics"):
        Model(nn.Sequential(nn.Linear(4, 3), layer))
    if isinstance(layer, nn.BatchNorm1d) and layer.affine:
        with pytest.raises(ConfigError, match="the module would learn"):
            Model(layer)


def trained_normalisation() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    for _ in range(5):
        module(torch.randn(20, 4) + 3)
    return module


def test_a_trained_normalisation_is_used_as_it_is():
    module = trained_normalisation()
    model = Model(module, ("3.*",))
    inputs, labels = torch.randn(6, 4), torch.arange(6) % 2
    values = model.unflatten(model.initial()) | model.fixed()
    module.eval()
    wanted = nn.functional.cross_entropy(module(inputs), labels, reduction="none")
    torch.testing.assert_close(model.losses_of(model.training, values, inputs, labels), wanted)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.linear(inputs) + self.seen * torch.tensor([0.0, 1.0])


def test_buffers_start_afresh_for_every_client():
    model = Model(Counter())
    examples = Examples(torch.ones(6, 4), torch.tensor([0, 1, 1, 0, 1, 1]))
    clients = StoredClients(examples, (np.arange(3), np.arange(3, 6)))
    trainer = SequentialTrainer(model, clients, LocalTraining(batch_size=3))
    first, second = trainer(model.initial(), [0, 1], 0)
    np.testing.assert_array_equal(first, second)
    assert not model.fixed()["seen"].any()


@pytest.mark.parametrize("params", [np.zeros(3, np.float32), np.zeros(23, np.float64)])
def test_vectors_of_another_shape_or_type_are_refused(params):
    model = Model(block())
    assert model.dimension == 23
    with pytest.raises(ConfigError, match="float32 of shape"):
        model.unflatten(params)


@pytest.mark.parametrize(
    ("name", "shape", "dimension"),
    [
        ("logistic", (1, 8, 8), 650),
        ("edges", (1, 28, 28), 19_354),
        ("mlp", (1, 28, 28), 51_370),
        ("cnn", (3, 24, 24), 996_298),
        ("small-cnn", (1, 28, 28), 20_490),
        ("char", (32,), 16 * 10 + (16 * 32 + 1) * 256 + 257 * 10),
    ],
)
def test_models_have_the_sizes_of_their_descriptions(name, shape, dimension):
    model = build_model(name, task(shape), seed=1)
    assert model.dimension == dimension
    assert 0 <= evaluate(model, model.initial(), task(shape).validation)["accuracy"] <= 1
    np.testing.assert_array_equal(build_model(name, task(shape), seed=1).initial(), model.initial())
    assert (build_model(name, task(shape), seed=2).initial() != model.initial()).any()


def test_every_name_of_a_model_is_tested():
    assert set(MODELS) == {"logistic", "edges", "mlp", "cnn", "small-cnn", "char"}


@pytest.mark.parametrize(
    ("shape", "name"),
    [((1, 8, 8), "logistic"), ((1, 28, 28), "edges"), ((3, 24, 24), "small-cnn"), ((32,), "char")],
)
def test_each_kind_of_task_has_a_model_that_fits(shape, name):
    assert fitting(task(shape)) == name


def test_edges_are_of_one_length_and_blind_to_brightness_and_see_a_turn():
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images[3] = 0.5
    front = OrientedEdges(28)
    features = front(images)
    np.testing.assert_allclose(features[:3].flatten(1).norm(dim=1), 3.0, rtol=1e-5)
    np.testing.assert_allclose(front(images[:3] / 2), features[:3], atol=1e-4)
    turned = front(images[:3].rot90(1, (2, 3)))
    np.testing.assert_allclose(turned.rot90(-1, (2, 3)).roll(2, 1), features[:3], atol=1e-4)
    assert (turned - features[:3]).abs().max() > 0.1
    assert front(torch.zeros(1, 1, 28, 28)).abs().max() == 0
    assert front(images[:0]).shape == (0, 8, 7, 7)


def test_unknown_models_and_wrong_shapes_are_refused():
    with pytest.raises(ConfigError, match="edges needs square grey images"):
        build_model("edges", task((3, 8, 8)), seed=1)
    with pytest.raises(ConfigError, match="model must be one of logistic"):
        build_model("transformer", task((1, 8, 8)), seed=1)
    with pytest.raises(ConfigError, match="char needs inputs with 1 axes"):
        build_model("char", task((1, 8, 8)), seed=1)


def half(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none") / 2


class Odd(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -super().forward(inputs)


def hooked() -> nn.Module:
    module = block()
    module[1].register_forward_hook(lambda _module, _inputs, output: -output)
    return module


def test_training_by_hand_is_for_plain_perceptrons_alone():
    assert widths_of(Model(block())).tolist() == [4, 3, 2]
    assert widths_of(Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))).tolist() == [4, 2]
    others = [
        Model(block(), ("3.*",)),
        Model(block(), losses=half),
        Model(nn.Sequential(*block()[1:])),
        Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))),
        Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))),
        Model(nn.Sequential(nn.Flatten(2), nn.Linear(4, 2))),
        Model(block().double()),
        Model(Odd(*block())),
        Model(hooked()),
        Model(Tied()),
    ]
    assert [widths_of(model) for model in others] == [None] * len(others)


def test_metrics_are_those_of_the_whole_set():
    generator = torch.Generator().manual_seed(1)
    examples = Examples(torch.randn(2500, 4, generator=generator), torch.randint(2, (2500,), generator=generator))
    model = Model(block())
    found = evaluate(model, model.initial(), examples)
    outputs = model.load(model.initial())(examples.inputs).detach()
    assert found["accuracy"] == pytest.approx(float((outputs.argmax(1) == examples.labels).float().mean()))
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, examples.labels)), rel=1e-5)


def test_nothing_can_be_measured_on_nothing():
    model = Model(block())
    with pytest.raises(ConfigError, match="at least one example"):
        evaluate(model, model.initial(), Examples(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)))
