"""Gradients of single records: those of autograd, the same in any place, and refused where records mix."""

import logging

import numpy as np
import pytest
import torch

import d2pfed
from d2pfed.errors import ConfigError
from d2pfed.learning import RecordTrainer, UserClients, record_program, user_model
from d2pfed.simulation import Silos


def network(*layers, **options):
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(layers or (torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))))
    return user_model(module, **options)


def data(rows=23, columns=6, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def trainer(model=None, silos=None, groups=None, chunk=8):
    model = model or network()
    return RecordTrainer(model, UserClients.of(silos or [data()], None, model.device), groups, chunk)


def every(own, params):
    wanted = [(client, np.arange(own.count(client))) for client in range(own.silos.population)]
    found = [(clients, rows.copy()) for clients, rows in own.chunks(params, wanted)]
    clients, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {client: rows[clients == client] for client in np.unique(clients).tolist()}


def by_autograd(model, inputs, label):
    module = model.load(model.initial())
    torch.nn.functional.cross_entropy(module(inputs[None]), label[None]).backward()
    return -np.concatenate([value.grad.reshape(-1).numpy() for value in module.parameters()])


def test_a_records_vector_is_its_gradient_downhill():
    own = trainer()
    inputs, labels = data()
    found = every(own, own.model.initial())[0]
    for row in range(len(labels)):
        assert np.allclose(found[row], by_autograd(own.model, inputs[row], labels[row]), atol=1e-6)


def require_place_blind(gradients, own, params):
    """A record's vector is the same, to the bit, alone, in any batch, order and place."""
    whole = gradients(own, params, np.arange(23))
    assert np.array_equal(gradients(own, params, np.arange(23)[::-1])[::-1], whole)
    for chosen in ([4], [4, 5], [22, 4, 0], list(range(3, 20))):
        assert np.array_equal(gradients(own, params, np.array(chosen)), whole[chosen])


def fixed_chunks(own, params, chosen):
    return np.concatenate([rows.copy() for _, rows in own.chunks(params, [(0, chosen)])])


def mean_removed(own, params, chosen):
    """A twin: something of the batch is in every record."""
    found = fixed_chunks(own, params, chosen)
    return found - np.float32(1e-7) * found.mean(0)


def test_a_records_vector_does_not_depend_on_the_others_to_the_bit():
    own = trainer().tried(network().initial(), 20)
    assert own.chunk == 8
    require_place_blind(fixed_chunks, own, own.model.initial())
    with pytest.raises(AssertionError):
        require_place_blind(mean_removed, own, own.model.initial())


@pytest.mark.parametrize("width", [1, 40, 48, 49, 50, 51, 61, 65, 127, 130])
def test_records_of_every_width_are_processed_many_at_once(width):
    """Where a row began decided the order of a sum, from 49 columns on: chunks had one record, and took 40 times."""
    own = trainer(network(torch.nn.Linear(width, 10)), [data(23, width)], chunk=32)
    own = own.tried(own.model.initial(), 20)
    assert own.chunk == 32
    require_place_blind(fixed_chunks, own, own.model.initial())


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.LSTM(5, 7, batch_first=True), torch.nn.Linear(7, 3)

    def forward(self, inputs):
        return self.head(self.inner(inputs.unflatten(1, (6, 5)))[0][:, -1])


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.TransformerEncoderLayer(10, 2, 12, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(10, 3)

    def forward(self, inputs):
        return self.head(self.block(inputs.unflatten(1, (3, 10))).mean(1))


def convolutions():
    first = torch.nn.Unflatten(1, (2, 3, 5)), torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.GroupNorm(2, 4)
    return *first, torch.nn.Sigmoid(), torch.nn.Flatten(), torch.nn.Linear(60, 3)


@pytest.mark.parametrize(
    "layers", [convolutions(), [Recurrent()], [Attending()]], ids=["cnn", "lstm", "transformer"]
)
def test_usual_networks_are_processed_many_at_once_by_their_gradients(layers):
    own = trainer(network(*layers), [data(23, 30)], chunk=32)
    own = own.tried(own.model.initial(), 20)
    assert own.chunk == 32
    require_place_blind(fixed_chunks, own, own.model.initial())
    inputs, labels = data(23, 30)
    found = fixed_chunks(own, own.model.initial(), np.arange(3))
    for row in range(3):
        assert np.allclose(found[row], by_autograd(own.model, inputs[row], labels[row]), atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "writes"), [([torch.nn.Linear(30, 3)], False), ([Attending()], False), (convolutions(), True)]
)
def test_a_shortened_program_gives_the_same_bits(layers, writes, monkeypatch):
    model, found, lengths, shorten = network(*layers), [], [], record_program._shorten
    for change in (shorten, lambda _: None):
        steps = lambda graph: (change(graph), lengths.append(len(graph.nodes)))  # noqa: B023, E731 - at once
        monkeypatch.setattr(record_program, "_shorten", steps)
        found.append(every(trainer(model, [data(23, 30)]), model.initial())[0])
    assert np.array_equal(*found)
    assert (lengths[0] == lengths[1]) is writes  # group norm writes in place: then nothing is taken out


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
        {"padding": "same", "dilation": 3},
        {"padding": "valid", "groups": 2, "bias": False},
    ],
)
def test_convolutions_of_patches_are_torchs(options):
    options = {"bias": True} | options
    line = {name: value[-1] if isinstance(value, tuple) else value for name, value in options.items()}
    for layer, shape in (
        (torch.nn.Conv2d(4, 6, (2, 3), **options), (3, 4, 9, 11)),
        (torch.nn.Conv1d(4, 6, 4, **line), (3, 4, 17)),
    ):
        inputs = torch.randn(shape)
        wanted = layer(inputs)
        with record_program._Unfolded():
            assert torch.allclose(layer(inputs), wanted, atol=1e-5)
            assert torch.allclose(layer(inputs[0]), wanted[0], atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 49, 10), (7, 1, 9), (3, 2, 5), (13, 65, 11), (16, 33, 8)]
)
def test_a_product_is_the_same_at_every_place(rows, inner, columns):
    first, second = torch.randn(40, rows, inner), torch.randn(40, inner, columns)
    for one, two in ((first, second), (first.mT.contiguous().mT, second), (first, second[:1].expand(40, -1, -1))):
        found = record_program.product(one, two)
        assert torch.allclose(found, torch.bmm(one, two), atol=1e-4)
        moved = record_program.product(one.roll(7, 0), two if two.stride(0) == 0 else two.roll(7, 0))
        assert torch.equal(moved, found.roll(7, 0))


def test_what_the_program_multiplies_begins_at_whole_registers(monkeypatch):
    """By construction, whatever library multiplies: all places of a batch look alike to it."""
    seen, plain = [], torch.bmm

    def looked_at(one, two):
        found = plain(one, two)
        seen.extend(
            each.data_ptr() % 64 == 0 == each.stride(0) % 16 for each in (one, two, found) if each.stride(0)
        )
        return found

    monkeypatch.setattr(torch, "bmm", looked_at)
    record_program.product(torch.randn(9, 13, 65), torch.randn(9, 65, 11))
    assert seen == [True] * 3


def test_silos_share_chunks_and_have_the_vectors_that_they_have_alone():
    silos = [data(5, seed=3), data(0), data(9, seed=4), data(1, seed=5)]
    own = trainer(silos=silos)
    found = every(own, own.model.initial())
    assert sorted(found) == [0, 2, 3]
    for client, rows in found.items():
        units = next(Silos(own).train(own.model.initial(), (client,), 0))
        assert units.count == len(rows)
        assert np.array_equal(
            np.concatenate([each.copy() for each in units.gradients(np.arange(len(rows)))]), rows
        )


def test_where_bits_depend_on_the_place_chunks_have_one_record(monkeypatch):
    own = trainer()
    plain = RecordTrainer._at

    def shaky(self, params):
        gradients = plain(self, params)

        def placed(rows):
            found = gradients(rows)
            return found + np.float32(1e-7) * np.arange(len(found), dtype=np.float32)[:, None]

        return placed

    monkeypatch.setattr(RecordTrainer, "_at", shaky)
    assert own.tried(own.model.initial(), 20).chunk == 1


def test_chunks_suit_the_expected_batch():
    own = trainer(chunk=0)
    assert own.tried(own.model.initial(), 3).chunk == 32
    assert own.tried(own.model.initial(), 256).chunk == 320
    assert own.tried(own.model.initial(), 2000).chunk <= 512


def test_batch_norm_is_refused_with_a_remedy_and_group_norm_is_not():
    layers = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4, track_running_stats=False), torch.nn.Linear(4, 3)
    with pytest.raises(ConfigError, match="use GroupNorm"):
        trainer(network(*layers))
    good = network(torch.nn.Linear(6, 4), torch.nn.GroupNorm(2, 4), torch.nn.Linear(4, 3))
    assert trainer(good).tried(good.initial(), 10).chunk == 8


def test_random_layers_are_refused():
    own = trainer(network(torch.nn.Linear(6, 4), torch.nn.Dropout(), torch.nn.Linear(4, 3)))
    with pytest.raises(ConfigError, match="record by record"):
        own.tried(own.model.initial(), 10)


# One record that raises.


def with_a_bad_label(rows=23, bad=7):
    inputs, labels = data(rows)
    labels[bad] = 9  # of three classes: torch raises for its whole chunk
    return inputs, labels


def test_a_record_that_raises_counts_as_zero_and_moves_no_other():
    own, params = trainer(silos=[with_a_bad_label()]), network().initial()
    whole = fixed_chunks(trainer(), params, np.arange(23))
    for chosen in (np.arange(23), np.array([7]), np.array([6, 7, 8]), np.arange(23)[::-1], np.arange(4, 17)):
        found = fixed_chunks(own, params, chosen)
        others = chosen != 7
        assert np.isnan(found[~others]).all()  # which a batch counts as zero
        assert np.array_equal(found[others], whole[chosen[others]])


def test_a_record_that_raises_changes_none_of_other_silos_in_its_chunk():
    silos = [data(5, seed=3), with_a_bad_label(4, bad=2), data(3, seed=4)]
    params = network().initial()
    found = every(trainer(silos=silos), params)
    assert list(np.isnan(found[1]).all(axis=1)) == [False, False, True, False]
    for silo in (0, 2):
        assert np.array_equal(found[silo], every(trainer(silos=[silos[silo]]), params)[0])


def cholesky_loss(outputs, labels):
    """Raises for a record whose outputs are not positive."""
    return torch.linalg.cholesky(torch.diag_embed(outputs)).sum((-1, -2))


def test_a_model_under_which_zeros_raise_does_not_tell_how_many_were_drawn():
    """The server picks a model without a bias: a chunk filled up with zeros would raise, and a full one would not."""
    model = network(torch.nn.Linear(6, 3), loss=cholesky_loss)
    own = trainer(model, [(torch.ones(16, 6), torch.zeros(16, dtype=torch.long))])
    chosen_by_the_server = np.concatenate([np.full(18, 0.1), np.zeros(3)]).astype(np.float32)
    full = fixed_chunks(own, chosen_by_the_server, np.arange(16))
    assert np.isfinite(full).all()
    for count in (1, 7, 9, 15):
        assert np.array_equal(fixed_chunks(own, chosen_by_the_server, np.arange(count)), full[:count])


def test_a_patient_with_a_row_that_raises_counts_as_zero_and_no_other():
    groups = [np.arange(23) // 3]
    own, params = trainer(silos=[with_a_bad_label()], groups=groups), network().initial()
    found, whole = every(own, params)[0], every(trainer(groups=groups), params)[0]
    assert np.isnan(found[2]).all()
    assert np.array_equal(np.delete(found, 2, axis=0), np.delete(whole, 2, axis=0))


def test_a_patient_with_rows_of_both_infinities_is_no_warning():
    inputs = torch.tensor([[1e30], [1e30], [1.0]])
    model = user_model(torch.nn.Linear(1, 1), loss=lambda outputs, wanted: (outputs * wanted).squeeze(-1))
    silos = [(inputs, torch.tensor([[1e30], [-1e30], [1.0]]))]
    found = every(trainer(model, silos, groups=[[0, 0, 1]]), model.initial())[0]
    assert np.isnan(found[0]).any()
    assert np.array_equal(found[1], [-1, -1])


def test_the_trial_is_not_refused_for_one_record_and_its_holder_is_told(caplog):
    own = trainer(silos=[with_a_bad_label()])
    with caplog.at_level(logging.WARNING, "d2pfed.learning"):
        assert own.tried(own.model.initial(), 20).chunk == 8
        fixed_chunks(own, own.model.initial(), np.arange(23))
    assert [each.getMessage() for each in caplog.records] == [
        "the gradient of a record cannot be computed: it counts as zero"
    ]


def test_a_loss_that_remembers_what_came_before_is_refused():
    calls = []

    def loss(outputs, labels):
        calls.append(1)
        return torch.nn.functional.cross_entropy(outputs, labels, reduction="none") * len(calls)

    own = trainer(network(loss=loss))
    with pytest.raises(ConfigError, match="must be the same every time"):
        own.tried(own.model.initial(), 10)


def test_fit_goes_on_where_the_gradient_of_a_record_raises(tmp_path):
    own = silos()
    own[2][1][11] = 5
    found = d2pfed.fit(
        torch.nn.Linear(6, 2),
        lambda silo: own[silo],  # not tried before the charge, as silos in a list are
        population=len(own),
        privacy=privacy(),
        rounds=2,
        directory=tmp_path / "run",
        run={"progress": False},
    )
    assert found.summary.rounds == 2
    # Times would tell how large a batch was.
    assert all(record.seconds is None and not record.exchanges for record in found.history)


def test_a_patients_gradients_add_up_to_one_unit():
    owners = ["b", "a", "b", "c", "a", "b"]
    own = trainer(silos=[data(6)], groups=[owners], chunk=4)
    single = every(trainer(silos=[data(6)], chunk=4), own.model.initial())[0].astype(np.float64)
    found = every(own, own.model.initial())[0]
    assert own.count(0) == 3
    for unit, name in enumerate("abc"):
        rows = [row for row, owner in enumerate(owners) if owner == name]
        assert np.array_equal(found[unit], sum(single[row] for row in rows).astype(np.float32))
    assert np.array_equal(fixed_chunks(own, own.model.initial(), np.array([1])), found[[1]])


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="owners of silo"):
        trainer(silos=[data(6)], groups=[["a"] * 5]).count(0)
    with pytest.raises(ConfigError, match="for 1 silos"):
        trainer(silos=[data(6)], groups=[["a"] * 6] * 2).count(0)
    by_name = trainer(silos={"hospital": data(6)}, groups={"hospital": ["a"] * 6})
    by_number = trainer(silos=[data(6)], groups=lambda _silo: np.arange(6) // 2)
    assert (by_name.count(0), by_number.count(0)) == (1, 3)
    assert trainer(silos=[data(6)], groups=np.zeros((1, 6), int)).count(0) == 1
    with pytest.raises(ConfigError, match="must be a sequence, a mapping or a function, got int"):
        trainer(silos=[data(6)], groups=3).count(0)
    with pytest.raises(ConfigError, match="owners by numbers or texts"):
        trainer(silos=[data(6)], groups=[[None] * 6]).count(0)


def test_groups_by_name_are_those_of_the_silo_of_that_name():
    """In another order the owners of one hospital would be given to the rows of another."""
    held = {"a": data(6), "b": data(6)}
    own = trainer(silos=held, groups={"b": ["x"] * 6, "a": np.arange(6)})
    assert (own.count(0), own.count(1)) == (6, 1)
    with pytest.raises(ConfigError, match="'a' is not among them"):
        trainer(silos=held, groups={"b": ["x"] * 6, "c": ["x"] * 6}).count(0)
    with pytest.raises(ConfigError, match="0 is not among them"):
        trainer(silos=list(held.values()), groups={"b": ["x"] * 6, "a": ["x"] * 6}).count(0)


def test_silos_of_another_form_are_found_before_anything_is_charged():
    own = trainer(silos=[data(6), (torch.zeros(6, 5), torch.zeros(6, dtype=torch.long))])
    with pytest.raises(ConfigError, match="all silos must hold rows of one form"):
        own.tried(own.model.initial(), 10)


def test_a_run_over_rows_does_not_go_on_over_owners(tmp_path):
    """Its epsilon is that of a row: returned to a call with groups, it would be taken for a patient's."""
    given = {"privacy": privacy(), "rounds": 1, "directory": tmp_path / "run"}
    d2pfed.fit(torch.nn.Linear(6, 2), silos(), **given)
    groups = [np.arange(60) // 2] * 5
    with pytest.raises(ConfigError, match="begun with other settings"):
        d2pfed.fit(torch.nn.Linear(6, 2), silos(), training={"groups": groups}, resume=True, **given)


def test_other_inputs_losses_and_steps_are_trained_by_record():
    module = torch.nn.Linear(6, 1)
    regression = user_model(module, loss=torch.nn.MSELoss())
    rows = [(torch.randn(9, 6), torch.randn(9, 1))]
    assert every(trainer(regression, rows), regression.initial())[0].shape == (9, 7)
    stepped = user_model(module, step=lambda net, batch: (net(batch[0]) - batch[1]).abs().mean())
    assert every(trainer(stepped, rows), stepped.initial())[0].shape == (9, 7)
    named = user_model(module, forward=lambda net, given: net(given["x"]), loss=torch.nn.MSELoss())
    told = [({"x": torch.randn(9, 6)}, torch.randn(9, 1))]
    assert every(trainer(named, told), named.initial())[0].shape == (9, 7)


# The whole way, from `fit`.


def silos(count=5, rows=60):
    inputs = torch.randn(count, rows, 6, generator=torch.Generator().manual_seed(7))
    return [(part, (part.sum(1) > 0).long()) for part in inputs]


def privacy(**changes):
    values = {
        "unit": "record",
        "epsilon": 20.0,
        "delta": 1e-3,
        "batch_rate": 0.5,
        "records": 300,
        "against": "server",
    }
    return values | changes


def test_fit_learns_from_records_and_prints_the_unit(tmp_path):
    own = silos()
    found = d2pfed.fit(
        torch.nn.Linear(6, 2), own, privacy=privacy(), rounds=15, lr=5.0, validation=own[0],
        run={"evaluate_every": 15, "progress": False}, directory=tmp_path / "run", )  # fmt: skip
    assert found.metrics["accuracy"] > 0.85
    assert {str(each.unit) for each in found.guarantees} == {"record"}
    assert all(record.seconds is None for record in found.history)  # time would tell how large a batch was
    page = (tmp_path / "run" / "report.html").read_text()
    for words in ("about one record", "add-remove", "set max_silos and groups", "honest silos", "Another silo"):
        assert words in page
    again = d2pfed.fit(
        torch.nn.Linear(6, 2), own, privacy=privacy(), rounds=15, lr=5.0, validation=own[0],
        run={"evaluate_every": 15, "progress": False}, directory=tmp_path / "other",
        training={"groups": [np.arange(60) // 2] * 5},
    )  # fmt: skip
    assert again.summary.rounds == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": privacy(records=None)}, "records must be given under add-remove"),
        ({"rounds": None}, "rounds must be given"),
        ({"epochs": 2}, "one step over a secret batch"),
        ({"training": {"momentum": 0.5}}, "one step over a secret batch"),
        ({"run": {"backend": "processes"}}, "worker processes"),
        (
            {
                "privacy": {"epsilon": 1.0},
                "training": {"groups": [np.arange(60)] * 5},
                "rounds": 1,
                "cohort_size": 5,
            },
            "groups are for",
        ),
    ],
)
def test_fit_refuses_what_does_not_go_with_records(tmp_path, options, message):
    given = {"privacy": privacy(), "rounds": 2, "directory": tmp_path / "run"}
    with pytest.raises(ConfigError, match=message):
        d2pfed.fit(torch.nn.Linear(6, 2), silos(), **(given | options))


def test_records_are_counted_where_their_number_may_be_known(tmp_path):
    found = d2pfed.fit(
        torch.nn.Linear(6, 2), silos(rows=20), privacy=privacy(records=None, adjacency="zero-out"), rounds=1,
        directory=tmp_path / "run", run={"progress": False},
    )  # fmt: skip
    assert found.summary.rounds == 1
    assert '"records":100' in (tmp_path / "run" / "plan.json").read_text()
