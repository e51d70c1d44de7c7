"""Training many clients at once is the same as training each alone."""

import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning import (
    Examples,
    LocalTrainer,
    LocalTraining,
    Model,
    Optimizer,
    SequentialTrainer,
    StoredClients,
)
from d2pfed.learning.model import evaluate, example_losses, measure
from d2pfed.learning.record_program import recorded
from d2pfed.learning.trainer import TrainingMethod

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits

LOCALS = [
    LocalTraining(lr=0.2, epochs=2, batch_size=4),
    LocalTraining(lr=0.1, momentum=0.5, epochs=2, batch_size=4),
    LocalTraining(optimizer=Optimizer.ADAM, lr=0.01, epochs=3, batch_size=5),
    LocalTraining(optimizer=Optimizer.RMSPROP, lr=0.01, batch_size=3),
]


def clients_of(sizes: list[int], *, shape: tuple[int, ...] = (2, 4, 4), seed: int = 0) -> StoredClients:
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    table = Examples(
        torch.randn(total, *shape, generator=generator), torch.randint(3, (total,), generator=generator)
    )
    return StoredClients(table, tuple(np.split(np.arange(total), np.cumsum(sizes)[:-1])))


def dense(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, 3))


def convolution(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Tanh(), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3))


def plain_convolution(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))


class Scaled(nn.Module):
    """One number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * inputs


def normalised(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    middle = nn.LayerNorm(7), nn.Tanh(), Scaled()
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 7), *middle, nn.Linear(7, 3, bias=False))


def torch_update(model: Model, examples: Examples, local: LocalTraining, lines: np.ndarray) -> np.ndarray:
    """The literal twin: torch's own optimizers on the module itself."""
    module = model.load(model.initial()).train()
    kinds = {Optimizer.ADAM: torch.optim.Adam, Optimizer.RMSPROP: torch.optim.RMSprop}
    if local.optimizer is Optimizer.SGD:
        optimizer = torch.optim.SGD(module.parameters(), local.lr, local.momentum)
    else:
        optimizer = kinds[local.optimizer](module.parameters(), local.lr)
    for line in lines:
        batch = examples.take(line[line >= 0])
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(batch.inputs), batch.labels).backward()
        optimizer.step()
    return torch.cat([value.detach().flatten() for value in module.parameters()]).numpy() - model.initial()


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: f"{local.optimizer}-{local.momentum}")
@pytest.mark.parametrize("build", [dense, normalised, convolution, plain_convolution])
def test_both_trainers_do_what_torch_optimizers_do(build, local):
    model, clients = Model(build()), clients_of([9, 4, 1])
    wanted = [
        torch_update(model, clients.examples(k), local, local.schedule(n, np.random.default_rng([5, k])))
        for k, n in enumerate([9, 4, 1])
    ]
    for trainer in (LocalTrainer(model, clients, local), SequentialTrainer(model, clients, local)):
        np.testing.assert_allclose(list(trainer(model.initial(), [0, 1, 2], 5)), wanted, atol=1e-5)


@pytest.mark.parametrize("trained", [("4.*",), ("2.*", "4.bias"), ("0.bias",)])
def test_untrained_front_layers_run_once_with_the_same_result(trained):
    model, clients = Model(convolution(), trained), clients_of([9, 0, 4])
    seen, forward = [], model.scoring[0].forward
    model.scoring[0].forward = lambda inputs: (seen.append(len(inputs)), forward(inputs))[1]
    for local in LOCALS:
        trainer = LocalTrainer(model, clients, local).choose(model.initial(), [0])
        seen.clear()
        updates = list(trainer(model.initial(), [0, 1, 2], 5))
        assert seen == ([] if trained == ("0.bias",) else [9, 0, 4])
        wanted = list(SequentialTrainer(model, clients, local)(model.initial(), [0, 1, 2], 5))
        np.testing.assert_allclose(updates, wanted, atol=1e-5)


def test_a_front_that_acts_by_chance_stays_behind():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 3))
    assert Model(module).behind_front() is None
    assert Model(dense()).behind_front() is None


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 13), min_size=1, max_size=6),
    chunk=st.integers(1, 7),
    local=st.sampled_from(LOCALS),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_an_update_depends_neither_on_the_cohort_nor_on_the_chunks(sizes, chunk, local, seed, data):
    model, clients = Model(dense()), clients_of(sizes)
    cohort = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=6, unique=True))
    with mock.patch("d2pfed.learning.trainer._CHUNK_BYTES", chunk * 4 * model.dimension):
        together = list(LocalTrainer(model, clients, local)(model.initial(), cohort, seed))
    alone = [next(SequentialTrainer(model, clients, local)(model.initial(), [client], seed)) for client in cohort]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_client_with_no_examples_has_a_zero_update():
    model, clients = Model(dense()), clients_of([0, 3])
    updates = list(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0, 1], 1))
    assert not updates[0].any()
    assert updates[1].any()


def test_the_order_of_examples_follows_the_round_seed():
    model, clients = Model(dense()), clients_of([9])
    first, again, other = (
        next(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0], seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(7, track_running_stats=False)], ids=["dropout", "batch statistics"]
)
def test_what_cannot_be_trained_at_once_goes_one_by_one(layer):
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 7), layer, nn.Linear(7, 3))
    model, clients = Model(module), clients_of([8, 8, 8])
    local = LocalTraining(lr=0.1, batch_size=4)
    loop = list(SequentialTrainer(model, clients, local)(model.initial(), [0, 1, 2], 3))
    np.testing.assert_array_equal(list(LocalTrainer(model, clients, local)(model.initial(), [0, 1, 2], 3)), loop)
    np.testing.assert_array_equal(next(LocalTrainer(model, clients, local)(model.initial(), [2], 3)), loop[2])


class Steered(nn.Module):
    """What vmap refuses: random numbers of a function, a branch on a value, a count kept in a buffer."""

    def __init__(self, refused: str) -> None:
        super().__init__()
        self.refused = refused
        self.linear = nn.Linear(32, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs.flatten(1))
        if self.refused == "random":
            return nn.functional.dropout(outputs, 0.5, self.training)
        if self.refused == "branch":
            return outputs if outputs.sum() > 0 else -outputs
        self.largest.copy_(torch.maximum(self.largest, outputs.detach().max()))
        return outputs / (1 + self.largest)


@pytest.mark.parametrize("refused", ["random", "branch", "buffer"])
def test_what_vmap_refuses_goes_one_by_one(refused):
    model, clients = Model(Steered(refused)), clients_of([8, 5, 8])
    local = LocalTraining(lr=0.1, batch_size=4)
    loop = list(SequentialTrainer(model, clients, local)(model.initial(), [0, 1, 2], 3))
    np.testing.assert_array_equal(list(LocalTrainer(model, clients, local)(model.initial(), [0, 1, 2], 3)), loop)


class Mistaken(nn.Module):
    """A module with a mistake, of a class that torch raises too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        raise RuntimeError("the user's own mistake")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(15, 3)), "shape"),
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 7), nn.Tanh(), nn.Linear(6, 3)), "shape"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), "channels"),
        (Mistaken(), "the user's own mistake"),
    ],
    ids=["dense", "vmap", "convolution", "own"],
)
def test_a_mistake_in_a_module_is_raised_as_itself(module, message):
    model, clients = Model(module), clients_of([8, 8])
    with pytest.raises(RuntimeError, match=message):
        list(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0, 1], 3))


def test_a_mistake_after_the_trial_is_not_taken_for_what_vmap_cannot_do(monkeypatch):
    model, clients = Model(normalised()), clients_of([8, 8])
    trainer = LocalTrainer(model, clients, LOCALS[0], method=TrainingMethod.VMAP)
    list(trainer(model.initial(), [0, 1], 3))

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("d2pfed.learning.local_training.BatchedTrainer.__call__", fail)
    with pytest.raises(RuntimeError, match="broken"):
        list(trainer(model.initial(), [0, 1], 3))


@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("build", [dense, plain_convolution], ids=["dense", "convolution"])
def test_a_label_that_is_no_class_is_an_error_of_torch_and_no_wild_write(build, label):
    model = Model(build())
    table = Examples(torch.zeros(4, 2, 4, 4), torch.tensor([0, 1, 2, label]))
    clients = StoredClients(table, (np.arange(4),))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        list(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0], 3))


@pytest.mark.parametrize(
    ("build", "local", "method"),
    [
        (dense, LOCALS[0], TrainingMethod.COMPILED),
        (dense, LOCALS[1], TrainingMethod.VMAP),
        (dense, LOCALS[2], TrainingMethod.COMPILED),
        (dense, LOCALS[3], TrainingMethod.VMAP),
        (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(32, 3)), LOCALS[0], TrainingMethod.LOOP),
        (lambda: Steered("random"), LOCALS[0], TrainingMethod.LOOP),
        (lambda: Steered("branch"), LOCALS[0], TrainingMethod.LOOP),
        (lambda: Steered("buffer"), LOCALS[0], TrainingMethod.LOOP),
    ],
)
def test_the_method_follows_from_the_model(build, local, method):
    model = Model(build())
    chosen = LocalTrainer(model, clients_of([0, 8]), local).choose(model.initial(), [0, 1])
    assert chosen.method is method


def test_a_module_of_no_known_kind_is_tried_once_and_both_methods_agree(monkeypatch):
    model, clients = Model(normalised()), clients_of([0, 9, 4])
    trials = []
    monkeypatch.setattr(
        LocalTrainer,
        "_faster",
        lambda *_: trials.append(1) or ([TrainingMethod.VMAP, TrainingMethod.LOOP][len(trials) % 2], ""),
    )
    trainer = LocalTrainer(model, clients, LOCALS[0])
    assert not next(trainer(model.initial(), [0], 3)).any()  # nothing to try with yet
    first = list(trainer(model.initial(), [0, 1, 2], 3))
    again = list(trainer(model.initial(), [0, 1, 2], 3))
    assert trials == [1]
    np.testing.assert_array_equal(first, again)
    for method in (TrainingMethod.VMAP, TrainingMethod.LOOP):
        fixed = LocalTrainer(model, clients, LOCALS[0], method=method)
        np.testing.assert_allclose(list(fixed(model.initial(), [0, 1, 2], 3)), first, atol=1e-5)


def test_a_trial_measures_both_methods():
    model = Model(normalised())
    chosen = LocalTrainer(model, clients_of([9]), LOCALS[0]).choose(model.initial(), [0])
    assert chosen.method in {TrainingMethod.VMAP, TrainingMethod.LOOP}


class Mixing(nn.Module):
    """What vmap does without complaint and not as the loop does: a state in Python decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 3), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(inputs.flatten(1)) * self.calls


def test_a_module_for_which_vmap_finds_other_gradients_goes_one_by_one():
    model = Model(Mixing())
    assert (
        LocalTrainer(model, clients_of([8]), LOCALS[0]).choose(model.initial(), [0]).method is TrainingMethod.LOOP
    )


def test_the_layers_before_the_first_trained_one_are_cut_off_once(monkeypatch):
    model, clients = Model(convolution(), ("4.*",)), clients_of([9, 4])
    cuts, cut = [], Model.behind_front
    monkeypatch.setattr(Model, "behind_front", lambda model: (cuts.append(model), cut(model))[1])
    trainer = LocalTrainer(model, clients, LOCALS[0])
    for seed in range(3):
        list(trainer(model.initial(), [0, 1], seed))
    assert sum(one is model for one in cuts) == 1


@pytest.mark.parametrize("build", [dense, plain_convolution, normalised, convolution])
def test_a_pickled_trainer_holds_no_caches_and_gives_the_same_updates(build):
    model, clients = Model(build()), clients_of([9, 4])
    trainer = LocalTrainer(model, clients, LOCALS[0]).choose(model.initial(), [0])
    before = len(pickle.dumps(trainer))
    wanted = list(trainer(model.initial(), [0, 1], 3))
    content = pickle.dumps(trainer)
    assert len(content) == before
    np.testing.assert_array_equal(list(pickle.loads(content)(model.initial(), [0, 1], 3)), wanted)


def test_training_leaves_the_global_generator_alone():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 3))
    model, clients = Model(module), clients_of([8])
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    list(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0], 3))
    torch.testing.assert_close(torch.rand(3), wanted)


def test_a_module_that_trains_its_head_alone_gives_updates_of_the_head():
    model, clients = Model(dense(), ("3.*",)), clients_of([8, 5])
    loop = list(SequentialTrainer(model, clients, LOCALS[0])(model.initial(), [0, 1], 3))
    np.testing.assert_allclose(
        list(LocalTrainer(model, clients, LOCALS[0])(model.initial(), [0, 1], 3)), loop, atol=1e-6
    )
    assert loop[0].shape == (7 * 3 + 3,)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(32, 3), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs.flatten(1))


def test_a_parameter_that_is_never_used_stays_as_it_is():
    model, clients = Model(Idle()), clients_of([8])
    for trainer in (LocalTrainer(model, clients, LOCALS[0]), SequentialTrainer(model, clients, LOCALS[0])):
        update = next(trainer(model.initial(), [0], 3))
        assert update[:99].any()
        assert not update[99:].any()


def test_params_may_be_read_only_and_are_left_alone():
    model, clients = Model(dense()), clients_of([8])
    params = model.initial()
    before = params.copy()
    params.setflags(write=False)
    for trainer in (LocalTrainer(model, clients, LOCALS[0]), SequentialTrainer(model, clients, LOCALS[0])):
        assert next(trainer(params, [0], 3)).any()
    np.testing.assert_array_equal(params, before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"optimizer": Optimizer.ADAM, "momentum": 0.5},
        {"epochs": 0},
        {"batch_size": 0},
    ],
)
def test_impossible_local_training_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong)) if len(wrong) == 1 else "momentum"):
        LocalTraining(**wrong)


# Devices: no test machine has one, so `meta` stands in. Its tensors have no values, and mix with no others.

META = torch.device("meta")


class MetaClients:
    population = 3

    def examples(self, client):
        rows = clients_of([9, 4, 1]).examples(client)
        return rows.each(lambda leaf: leaf.to(META))


def test_clients_are_trained_at_once_on_a_device_and_copied_once(monkeypatch):
    model, copies = Model(normalised(), device=META), []

    def copied(tensor):
        copies.append(tuple(tensor.shape))
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    for by_row in (True, False):
        trainer = LocalTrainer(model, MetaClients(), LOCALS[2], TrainingMethod.VMAP, by_row)
        assert len(list(trainer(np.ones(model.dimension, np.float32), [0, 1, 2], 5))) == 3
    assert copies == [(3, model.dimension)] * 2


def test_the_loop_stays_on_its_device():
    model = Model(normalised(), device=META)
    with pytest.raises(NotImplementedError, match="copy out of meta"):  # of what was trained, at the end
        next(SequentialTrainer(model, MetaClients(), LOCALS[0])(np.ones(model.dimension, np.float32), [0], 5))


def test_perceptrons_are_not_trained_by_compiled_code_on_a_device(monkeypatch):
    monkeypatch.setattr(LocalTrainer, "_faster", lambda *_: (TrainingMethod.VMAP, ""))
    model = Model(dense(), device=META)
    chosen = LocalTrainer(model, MetaClients(), LOCALS[0]).choose(np.ones(model.dimension, np.float32), [0])
    assert chosen.method is TrainingMethod.VMAP


def test_the_program_of_records_stays_on_its_device():
    model, rows = Model(convolution(), device=META), MetaClients().examples(0)
    values, fixed = model.unflatten(np.ones(model.dimension, np.float32)), model.fixed()
    found = recorded(model, values, fixed, rows)(values, fixed, rows)
    assert {each.device for each in found} == {META}
    assert [len(each) for each in found] == [9] * len(model.names)


def test_losses_are_summed_in_double_precision_on_the_cpu_alone(monkeypatch):
    """MPS has no doubles."""
    seen, double = [], torch.Tensor.double
    monkeypatch.setattr(torch.Tensor, "double", lambda own: (seen.append(own.device), double(own))[1])
    model, rows = Model(dense(), device=META), clients_of([9]).examples(0)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda own: torch.zeros(own.shape))
    params = np.ones(model.dimension, np.float32)
    assert evaluate(model, params, rows)["loss"] == 0
    assert measure(model, params, [rows], {}) == {"loss": 0.0}
    assert not example_losses(model, params, rows).any()
    assert set(seen) == {torch.device("cpu")}
