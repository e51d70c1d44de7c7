"""Training as people do it: optimizers, schedules, clipping, FedProx, bf16, weights of examples, personal layers."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import d2pfed
from d2pfed.api.settings import settings_of
from d2pfed.errors import ConfigError
from d2pfed.learning import (
    Examples,
    LocalTrainer,
    LocalTraining,
    Model,
    PersonalTrainer,
    RecordTrainer,
    SequentialTrainer,
    StoredClients,
    UserClients,
    default_metrics,
    trainer_for,
    user_model,
    without_personal,
)
from d2pfed.learning.losses import Accuracy, CrossEntropy, logits_of
from d2pfed.learning.model import measure
from d2pfed.learning.trainer import TrainingMethod
from d2pfed.training import ServerOptimizer, round_of, shuffle_seed

CPU = torch.device("cpu")
SEED = shuffle_seed("run", 3)


def network(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4), nn.ReLU()] * (layers - 1), nn.Linear(4, 3))


def stored(sizes=(12, 7)) -> StoredClients:
    generator = torch.Generator().manual_seed(1)
    count = sum(sizes)
    table = Examples(torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))
    return StoredClients(table, tuple(np.split(np.arange(count), np.cumsum(sizes)[:-1])))


def by_torch(model, clients, local, make, *, clip=None, mu=0.0, factor=lambda _done: 1.0, client=0):
    """Return the update of one client by torch's own optimizer, the plain loop that people write."""
    net = model.load(model.initial()).train()
    start = [value.detach().clone() for value in net.parameters()]
    optimizer = make(net.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    rows, generator = clients.examples(client), np.random.default_rng([SEED, client])
    schedule = local.schedule(len(rows), generator)
    for done, line in enumerate(schedule):
        batch = rows.take(line[line >= 0])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch.inputs), batch.labels)
        pairs = zip(net.parameters(), start, strict=True)
        loss = loss + mu / 2 * sum(((value - begun) ** 2).sum() for value, begun in pairs)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(done / len(schedule))
        optimizer.step()
    return model.flatten({name: value.detach() for name, value in net.named_parameters()}) - model.initial()


def sgd(params, lr=0.2, **more):
    return torch.optim.SGD(params, lr=lr, **more)


CASES = {
    "adamw": ({"optimizer": "adamw"}, partial(torch.optim.AdamW, lr=0.2), {}),
    "decay": ({"weight_decay": 0.3}, partial(sgd, weight_decay=0.3), {}),
    "adam with decay": (
        {"optimizer": "adam", "weight_decay": 0.3},
        partial(torch.optim.Adam, lr=0.2, weight_decay=0.3),
        {},
    ),
    "clip": ({"max_grad_norm": 0.1}, sgd, {"clip": 0.1}),
    "proximal": ({"proximal": 2.0}, sgd, {"mu": 2.0}),
    "both": (
        {"proximal": 2.0, "max_grad_norm": 0.2, "momentum": 0.5},
        partial(sgd, momentum=0.5),
        {"mu": 2.0, "clip": 0.2},
    ),
    "steps": ({"step_schedule": "linear"}, sgd, {"factor": lambda done: 1 - done}),
    "rounds": ({"lr_schedule": "linear", "rounds": 4}, sgd, {"factor": lambda _done: 0.25}),
    "own rounds": ({"lr_schedule": lambda done: done**2, "rounds": 4}, sgd, {"factor": lambda _done: 0.5625}),
    "own": ({"optimizer": torch.optim.NAdam}, partial(torch.optim.NAdam, lr=0.2), {}),
    "own rate": ({"optimizer": partial(torch.optim.Adagrad, lr=0.5)}, partial(torch.optim.Adagrad, lr=0.5), {}),
    "own function": (
        {"optimizer": lambda params: sgd(params, 0.3, nesterov=True, momentum=0.9), "step_schedule": "linear"},
        partial(sgd, lr=0.3, nesterov=True, momentum=0.9),
        {"factor": lambda done: 1 - done},
    ),
}


@pytest.mark.parametrize(("settings", "make", "more"), CASES.values(), ids=CASES.keys())
def test_each_setting_does_what_the_usual_loop_does(settings, make, more):
    local = LocalTraining(lr=0.2, epochs=2, batch_size=5, **settings)
    model, clients = Model(network()), stored()
    wanted = [by_torch(model, clients, local, make, client=each, **more) for each in (0, 1)]
    plain = [by_torch(model, clients, local, sgd, client=each) for each in (0, 1)]
    trainers = [SequentialTrainer(model, clients, local), LocalTrainer(model, clients, local)]
    if not local.needs_loop:
        trainers.append(LocalTrainer(model, clients, local, TrainingMethod.VMAP))
    for trainer in trainers:
        found = list(trainer(model.initial(), [0, 1], SEED))
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
        assert np.abs(np.array(found) - plain).max() > 1e-3


def test_a_round_s_seed_has_the_round_s_number():
    assert [round_of(shuffle_seed("run", number)) for number in (0, 1, 1000)] == [0, 1, 1000]
    assert len({shuffle_seed(run, number) & 0xFFFFFFFF for run in "ab" for number in range(3)}) == 6


def test_bf16_computes_in_bf16_and_adds_up_in_float32():
    seen = []

    class Watched(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append(outputs.dtype)
            return outputs

    torch.manual_seed(0)
    model, clients = Model(Watched(4, 3)), stored()
    exact, half = (
        np.array(
            list(SequentialTrainer(model, clients, LocalTraining(precision=each))(model.initial(), [0, 1], 1))
        )
        for each in (None, "bf16")
    )
    assert set(seen) == {torch.float32, torch.bfloat16}
    assert half.dtype == np.float32
    assert 0 < np.abs(half - exact).max() < 0.02 * np.abs(exact).max()


def test_a_known_network_is_not_trained_by_hand_in_bf16():
    model = Model(network())
    chosen = LocalTrainer(model, stored(), LocalTraining(precision="bf16")).choose(model.initial(), [0])
    assert chosen.method in (TrainingMethod.VMAP, TrainingMethod.LOOP)


def test_a_module_of_bf16_parameters_trains():
    model, clients = Model(nn.Linear(4, 3).to(torch.bfloat16)), stored()
    rows = clients.examples(0)
    own = UserClients.of([(rows.inputs.to(torch.bfloat16), rows.labels)], None, CPU)
    (update,) = trainer_for(model, own, LocalTraining())(model.initial(), [0], 1)
    assert update.dtype == np.float32
    assert np.abs(update).max() > 0


@pytest.mark.parametrize("kind", ["loop", "many at once"])
def test_an_example_s_weight_is_a_factor_of_its_loss(kind):
    rows = stored().examples(0)
    weigh = lambda _inputs, labels: (labels == 1).float() * 3  # noqa: E731
    model = user_model(network(), weigh=weigh)
    assert not model.is_plain
    trainer = (
        SequentialTrainer(model, stored(), LocalTraining(batch_size=12))
        if kind == "loop"
        else LocalTrainer(model, stored(), LocalTraining(batch_size=12), TrainingMethod.VMAP)
    )
    (found,) = trainer(model.initial(), [0], 1)
    net = model.load(model.initial())
    losses = nn.functional.cross_entropy(net(rows.inputs), rows.labels, reduction="none")
    (3 * losses[rows.labels == 1].sum() / 12).backward()
    slopes = model.flatten({name: value.grad for name, value in net.named_parameters()})
    np.testing.assert_allclose(found, -0.1 * slopes, rtol=1e-3, atol=1e-6)


def test_weights_of_examples_need_a_loss_of_each():
    rows = stored().examples(0)
    loss = lambda outputs, labels: nn.functional.cross_entropy(outputs, labels) * 1.0  # noqa: E731
    model = user_model(network(), loss=loss, weigh=lambda _inputs, labels: labels.float())
    own = UserClients.of([(rows.inputs, rows.labels)], None, CPU)
    with pytest.raises(ConfigError, match="example_weights must be one for each loss"):
        trainer_for(model, own, LocalTraining())


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"weight_decay": -1.0}, "weight_decay must be positive"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"proximal": float("nan")}, "proximal must be positive"),
        ({"lr_schedule": "cosinus"}, "lr_schedule must be one of linear, cosine"),
        ({"optimizer": "own"}, "optimizer must be a function"),
        ({"optimizer": lambda params: params}, r"must return a torch\.optim\.Optimizer, got list"),
        ({"optimizer": torch.optim.NAdam, "weight_decay": 0.1}, "weight_decay is of a named optimizer"),
        ({"step_schedule": lambda _done: -1.0}, "must return a factor that is finite and at least 0"),
        ({"precision": "half"}, "precision must be one of float32, bf16"),
        ({"collate": 3}, "collate must be a function"),
        ({"example_weights": 3}, "example_weights must be a function"),
        ({"personal": "tail.*"}, "personal must name trained parameters"),
        ({"personal": "*"}, "some trained parameters must be shared"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_a_run(wrong, rule, tmp_path):
    rows = stored().examples(0)
    with pytest.raises(ConfigError, match=rule):
        d2pfed.fit(
            network(),
            [(rows.inputs, rows.labels)] * 4,
            privacy=None,
            rounds=1,
            cohort_size=2,
            training=wrong,
            directory=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_optimizer_has_a_name():
    assert settings_of(ServerOptimizer, "avgm", "server") == ServerOptimizer(momentum=0.9)
    adam, yogi = (settings_of(ServerOptimizer, name, "server") for name in ("adam", "yogi"))
    assert adam.second_moment == yogi.second_moment == 0.99
    assert (adam.second_rule, yogi.second_rule) == ("adam", "yogi")
    rows = stored().examples(0)
    with pytest.raises(ConfigError, match="server must be one of avgm, adam, yogi"):
        d2pfed.fit(network(), [(rows.inputs, rows.labels)] * 4, privacy=None, server="adamax")


# Text


class Tagger(nn.Module):
    """Scores each word of a sentence, as pretrained models do: an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 5)

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.words(input_ids)})()


def sentences(lengths):
    return [torch.arange(length) % 5 for length in lengths]


def padded(some):
    pad = partial(nn.utils.rnn.pad_sequence, some, batch_first=True)
    return {"input_ids": pad(), "labels": pad(padding_value=-100)}


def test_sentences_of_unequal_length_train_as_torch_s_mean_over_tokens():
    model = user_model(Tagger())
    clients = UserClients.of([sentences([2, 5, 3])], None, CPU, padded)
    assert len(clients.held(0)) == 3
    with pytest.raises(ConfigError, match="a collate function may pad one by others"):
        RecordTrainer(model, clients).count(0)
    (found,) = trainer_for(model, clients, LocalTraining(batch_size=3))(model.initial(), [0], 1)
    net, batch = model.load(model.initial()), padded(sentences([2, 5, 3]))
    nn.functional.cross_entropy(net(batch["input_ids"]).logits.movedim(-1, 1), batch["labels"]).backward()
    np.testing.assert_allclose(found, -0.1 * net.words.weight.grad.numpy().ravel(), rtol=1e-4, atol=1e-7)


def test_a_loader_with_a_collate_function_keeps_its_batches():
    sizes = []

    def watched(some):
        sizes.append(len(some))
        return padded(some)

    data = sentences([2, 5, 3, 4, 2])
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=watched, shuffle=True)
    clients = UserClients.of([loader], None, CPU)
    rows = clients.held(0)
    assert (len(rows), sizes) == (5, [2, 2, 1])
    again = clients.held(0)
    assert all(
        torch.equal(a.inputs["labels"], b.inputs["labels"]) for a, b in zip(rows.items, again.items, strict=True)
    )
    steps = []
    model = user_model(Tagger(), forward=lambda module, x: steps.append(len(x["input_ids"])) or module(**x))
    list(trainer_for(model, clients, LocalTraining(batch_size=100, epochs=2))(model.initial(), [0], 1))
    assert sorted(steps) == [1, 1, 2, 2, 2, 2]


def test_examples_of_unequal_length_without_a_collate_function_are_refused():
    with pytest.raises(ConfigError, match="client 0 must hold examples of one shape, or training a collate"):
        UserClients.of([sentences([2, 5, 3])], None, CPU).examples(0)


def test_targets_that_are_ignored_count_nowhere():
    outputs, labels = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
    labels[0], labels[2] = outputs[0].argmax(), (outputs[2].argmax() + 1) % 3
    assert Accuracy()(outputs, labels) == 0.5
    losses = CrossEntropy()(outputs, labels)
    assert losses[[1, 3]].tolist() == [0, 0]
    net = nn.Linear(4, 3)
    rows = Examples(torch.randn(4, 4), labels)
    for method in (TrainingMethod.LOOP, TrainingMethod.VMAP):
        whole = Model(nn.Sequential(net))
        known = Examples(rows.inputs[[0, 2]], rows.labels[[0, 2]])
        one = LocalTraining(batch_size=4, momentum=0.5)
        ignoring, without = (
            list(
                LocalTrainer(whole, StoredClients(each, (np.arange(len(each)),)), one, method)(
                    whole.initial(), [0], 1
                )
            )
            for each in (rows, known)
        )
        np.testing.assert_allclose(ignoring, without, rtol=1e-4, atol=1e-6)


def test_an_ignore_index_of_the_user_s_own_is_that_of_the_metric_too():
    model = user_model(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(ignore_index=1))
    rows = stored().examples(0)
    with torch.no_grad():
        outputs = model.scoring(rows.inputs)
    kept = rows.labels != 1
    wanted = float(nn.functional.cross_entropy(outputs[kept], rows.labels[kept]))
    metrics = default_metrics(model.losses)
    found = measure(model, model.initial(), [rows], metrics)
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((outputs[kept].argmax(1) == rows.labels[kept]).float().mean()))


def test_outputs_of_unequal_length_are_measured_together():
    model = user_model(Tagger())
    batches = [Examples(padded(sentences(lengths))) for lengths in ([2, 4], [7])]
    found = measure(model, model.initial(), batches, {"accuracy": Accuracy()})
    with torch.no_grad():
        guesses = model.scoring(torch.arange(9)).logits.argmax(-1)
    words = torch.cat(sentences([2, 4, 7]))
    assert found["accuracy"] == pytest.approx(float((guesses[words] == words).float().mean()))


def test_classes_on_the_last_axis_are_those_of_logits_alone():
    labels = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="return a dictionary with the key logits"):
        CrossEntropy()(torch.zeros(2, 4, 5), labels)
    outputs = torch.randn(2, 4, 4)  # as many words as classes
    assert torch.equal(logits_of({"logits": outputs}), outputs.movedim(-1, 1))
    assert torch.equal(logits_of(outputs), outputs)


def test_a_forward_function_and_logits_keep_the_default_metric(tmp_path):
    words = torch.arange(4).repeat(8, 4, 1)
    result = d2pfed.fit(
        Tagger(),
        [(each, each) for each in words],
        privacy=None,
        rounds=1,
        cohort_size=2,
        validation=(words[0], words[0]),
        training={"forward": lambda module, words: {"logits": module(words).logits, "more": None}},
        directory=tmp_path / "run",
    )
    assert set(result.metrics) == {"loss", "accuracy"}


# Personal layers


def personal_run(path, **more):
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(4, 20, 4, generator=generator)
    data = [
        (x, ((x[:, 0] > 0) ^ bool(client % 2)).long()) for client, x in enumerate(inputs)
    ]  # half say the contrary
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = {"privacy": None, "rounds": 4, "cohort_size": 4, "lr": 0.5, "epochs": 4, "seed": 1} | more
    return net, data, d2pfed.fit(net, data, training={"personal": "2.*"}, directory=path, **settings)


def test_personal_layers_stay_with_their_clients(tmp_path):
    net, data, result = personal_run(tmp_path / "run")
    assert result.summary.dimension == 40
    assert torch.equal(result.module[2].weight, net[2].weight)
    right = [
        float((result.personal(client)(x).argmax(1) == y).float().mean()) for client, (x, y) in enumerate(data)
    ]
    assert min(right) > 0.85
    heads = [result.personal(client)[2].weight for client in (0, 1)]
    assert (heads[0] - heads[1]).abs().max() > 0.1
    assert torch.equal(result.personal(0)[0].weight, result.module[0].weight)


def test_personal_layers_are_refused_behind_drawn_cohorts(tmp_path):
    target = d2pfed.PrivacyTarget(epsilon=50.0, delta=1e-2, against="released", sampling="fixed")
    with pytest.raises(ConfigError, match="would tell in which rounds a client was"):
        personal_run(tmp_path / "run", privacy=target, cohort_size=3, seed=None)


def test_a_round_that_is_tried_again_starts_from_the_layers_before_it(tmp_path):
    whole = Model(network())
    model = without_personal(whole, ["2.bias"])
    trainer = PersonalTrainer(whole, model, stored(), LocalTraining(), tmp_path)
    params = model.initial()
    assert len(params) == whole.dimension - 3
    first = list(trainer(params, [0], SEED))
    again = list(trainer(params, [0], SEED))
    later = list(trainer(params, [0], SEED + 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.array(later) - first).max() > 0
    list(trainer(params, [1], 0))
    assert not (tmp_path / "1.npz").exists()  # a trial leaves nothing
