"""Private statistics: what they say, what their noise is, and what they refuse."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

import d2pfed
from d2pfed import Adjacency, BudgetExceeded, ConfigError, Ledger, PrivacyTarget, calibrate
from d2pfed.ledger import Budget
from d2pfed.plan import DEFAULT_TARGET, ideal_multiplier
from d2pfed.plan.calibrate import _Draft
from d2pfed.round import run_plan
from d2pfed.statistics import metrics, release
from d2pfed.statistics.metrics import MetricName, MetricScheme
from d2pfed.statistics.queries import cumulative_root
from d2pfed.statistics.questions import Bounds, MetricMeans, ScoreMetrics
from d2pfed.statistics.records import Ball, CodedRecords

CALM = {"epsilon": 1e3, "delta": 1e-6, "seed": 1, "fidelity": "sum"}  # hardly any noise


def near(result, truth, times=6):
    return bool((np.abs(result.value - truth) <= times * result.standard_error).all())


# What they say


def test_a_sum_is_of_clipped_vectors():
    vectors = [np.array([3.0, 4.0]), np.array([0.3, 0.4]), np.array([0.0, -1.0])] * 4
    result = d2pfed.private_sum(vectors, clip=1.0, **CALM)
    assert near(result, 4 * np.array([0.9, 0.2])), result
    assert result.standard_error.max() < 0.2


def test_numbers_give_a_number():
    result = d2pfed.private_sum(range(10), clip=20.0, **CALM)
    assert np.ndim(result.value) == 0
    assert near(result, 45)


def test_mappings_arrays_and_tensors_are_the_same_clients():
    import torch  # noqa: PLC0415

    vectors = np.eye(4)
    given = (vectors, list(vectors), dict(enumerate(vectors)), torch.eye(4))
    values = [d2pfed.private_sum(each, **CALM).value for each in given]
    assert all(np.abs(value - 1).max() < 0.2 for value in values)


def test_a_mean_within_bounds_counts_what_is_beyond_as_the_bound():
    result = d2pfed.private_mean([10.0, 20.0, 30.0, 1000.0], bounds=(0, 40), **CALM)
    assert near(result, 25)
    assert result.bound == 20


def test_a_weighted_mean_caps_the_weights():
    values, weights = np.array([1.0, 0.0, -1.0, 0.5] * 5), np.array([1.0, 2.0, 3.0, 1000.0] * 5)
    result = d2pfed.private_mean(values, clip=1.0, weights=weights, max_weight=10, **CALM)
    capped = np.minimum(weights, 10)
    assert near(result, (capped @ values) / capped.sum())
    assert result.standard_error < 0.05


def test_weights_are_never_in_clear(monkeypatch):
    seen = []
    local_sum = release.local_sum
    monkeypatch.setattr(release, "local_sum", lambda *args, **kw: (seen.append(args), local_sum(*args, **kw))[1])
    d2pfed.private_mean(np.ones(6), clip=1.0, weights=[7.0] * 6, max_weight=14, **CALM)
    (_plan, _attempt, vectors, _ledger, _entropy) = seen[0]
    assert all(np.linalg.norm(each) <= 1 and len(each) == 2 for each in vectors.values())


def test_a_weight_that_drowns_is_said():
    result = d2pfed.private_mean(
        np.ones(10), clip=1.0, weights=np.full(10, 1e-9), max_weight=1, delta=1e-3, seed=3
    )
    assert any("total weight" in warning for warning in result.warnings)
    assert np.isfinite(result.value)


def test_a_histogram_counts_clients_or_values():
    values = [[1, 1, 1, 5], [5], [], [9, 20]] * 3
    clients = d2pfed.private_histogram(values, [0, 4, 8, 10], **CALM)
    assert near(clients, 3 * np.array([0.75, 1.25, 0.5]))
    counted = d2pfed.private_histogram(values, [0, 4, 8, 10], max_values=4, **CALM)
    assert near(counted, 3 * np.array([3, 2, 1]))
    capped = d2pfed.private_histogram(values, [0, 4, 8, 10], max_values=2, **CALM)
    assert near(capped, 3 * np.array([1.5, 1.5, 1]))
    assert (clients.bound, counted.bound, capped.bound) == (1, 4, 2)


def test_bins_are_closed_on_the_left_and_the_last_on_both_sides():
    result = d2pfed.private_histogram([0.0, 1.0, 2.0, -0.1, 2.1], [0, 1, 2], **CALM)
    assert near(result, [1, 2])


def test_a_table_has_a_cell_per_combination():
    rows = [[("a", 1)], [("a", 2)], [("b", 2)], [("b", 2), ("?", 1)]]
    result = d2pfed.private_table(rows, {"letter": ["a", "b"], "number": [1, 2]}, **CALM)
    assert near(result, np.array([[1, 1], [0, 1.5]]))
    single = d2pfed.private_table([["x"], ["y"], ["x"]], [["x", "y"]], **CALM)
    assert near(single, [2, 1])


def test_quantiles_are_those_of_the_values():
    generator = np.linspace(0, 1, 400)
    values = [100 * generator[at::40] ** 2 for at in range(40)]
    result = d2pfed.private_quantile(values, [0.1, 0.5, 0.9], bounds=(0, 100), **CALM)
    truth = np.quantile(np.concatenate(values), [0.1, 0.5, 0.9])
    assert np.abs(result.value - truth).max() < 100 / 64 + 6 * result.standard_error.max()
    one = d2pfed.private_quantile(values, 0.5, bounds=(0, 100), **CALM)
    assert np.ndim(one.value) == 0


def test_the_square_of_the_root_adds_up():
    root = cumulative_root(50)
    assert np.allclose(root @ root, np.tri(50))
    assert np.linalg.norm(root[:, 0]) == pytest.approx(np.linalg.norm(root, axis=0).max())
    assert np.linalg.norm(root[:, 0]) ** 2 < 1 + math.log(50) / math.pi + 0.1


def scored():
    """Return 30 clients with scores of two classes that are right more often than not."""
    generator = np.linspace(0.01, 0.99, 600).reshape(30, 20)
    labels = [(each > 0.5).astype(int) ^ (np.arange(20) % 7 == 0) for each in generator]
    return list(zip(generator, labels, strict=True))


def test_metrics_are_those_of_the_pooled_records():
    from sklearn.metrics import confusion_matrix, log_loss, roc_auc_score  # noqa: PLC0415

    clients = scored()
    scores, labels = (np.concatenate(each) for each in zip(*clients, strict=True))
    names = ["accuracy", "loss", "confusion", "calibration", "auroc"]
    for most in (None, 20):
        result = d2pfed.private_metrics(clients, names, max_values=most, bins=100, **CALM)
        truth = {
            "accuracy": np.mean((scores > 0.5) == labels),
            "loss": log_loss(labels, scores),
            "confusion": confusion_matrix(labels, scores > 0.5) / len(labels),
            "auroc": roc_auc_score(labels, scores),
        }
        for name, right in truth.items():
            spread = 6 * result.standard_error[name].max() + 0.01
            assert np.abs(result.value[name] - right).max() < spread, name
        assert result.standard_error["accuracy"] < 0.02


def test_metrics_by_a_prediction_and_for_several_classes():
    inputs = np.eye(3)[[0, 1, 2, 2]]
    clients = [(inputs, np.array([0, 1, 2, 1]))] * 10
    for unit in ({}, {"privacy": RECORDS}):
        result = d2pfed.private_metrics(
            clients, ["accuracy", "calibration"], predict=lambda x: 0.7 * x + 0.1, classes=3, **unit, **CALM
        )
        assert abs(result.value["accuracy"] - 0.75) < 0.05
        assert abs(result.value["calibration"] - 0.05) < 0.1


# How large the noise is


def honest_error(clients, dimension, epsilon):
    """Return what the error may be: a trusted server's Gaussian, for as many honest clients as are planned for."""
    target = PrivacyTarget(
        dimension=dimension,
        population=clients,
        cohort_size=clients,
        rounds=1,
        spare=0,
        epsilon=epsilon,
        sampling="none",
    )
    quorum, colluders = clients - math.floor(clients / 10), math.ceil(clients / 10)
    return ideal_multiplier(target) * 2 * math.sqrt(clients / (quorum - colluders))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("clients", "dimension"), [(10, 1), (10, 300), (100, 20), (1000, 5), (10_000, 1000)])
def test_the_stated_error_is_within_five_per_cent_of_a_trusted_server(clients, dimension, epsilon):
    terms = release.Terms(epsilon=epsilon, delta=None, privacy=None, ledger=None, fidelity="sum", seed=1)
    plan = calibrate(terms.target(dimension, clients, 1.0, None))
    stated = math.sqrt(clients) * float(plan.mechanism.sigma) * plan.codec.granularity
    assert 1 <= stated / honest_error(clients, dimension, epsilon) + 1e-3 <= 1.05


def the_error_is_that_of_a_trusted_server(clients, repeats=3, dimension=1000):
    """Check the root mean square error, and that there is no bias where all clients are at the clip."""
    vector, errors = np.eye(dimension)[0], []
    for _ in range(repeats):
        result = d2pfed.private_sum([vector] * clients, fidelity="sum")
        errors.append(result.value - clients * vector)
        assert abs(errors[-1][0]) < 5.5 * result.standard_error[0]
    ratio = np.sqrt(np.mean(np.square(errors))) / honest_error(clients, dimension, 1.0)
    count = repeats * dimension
    low, high = np.sqrt(chi2.ppf([1e-6, 1 - 1e-6], count) / count)
    assert low < ratio < 1.01 * high, ratio


@pytest.mark.parametrize("clients", [10, 100])
def test_the_error_is_that_of_a_trusted_server(clients):
    the_error_is_that_of_a_trusted_server(clients)


def test_noise_counted_for_all_instead_of_the_honest_is_caught(monkeypatch):
    """Caught by the size of the noise, by the guarantee against colluders, and by the ledger."""
    with monkeypatch.context() as planted:
        planted.setattr(_Draft, "contributors", property(lambda self: self.target.cohort_size))
        with pytest.raises(BudgetExceeded):
            d2pfed.private_sum(np.eye(40), seed=1)
        planted.setattr(release, "run_plan", lambda plan: replace(run_plan(plan), epsilon=2.0))
        with pytest.raises(AssertionError):
            the_error_is_that_of_a_trusted_server(100)
    assert_kept(d2pfed.private_sum(np.eye(40), seed=1))
    monkeypatch.setattr(_Draft, "contributors", property(lambda self: self.target.quorum))
    with pytest.raises(AssertionError):
        assert_kept(d2pfed.private_sum(np.eye(40), seed=1))


def assert_kept(result):
    worst = max(each.epsilon for each in result.guarantees if each.observer != d2pfed.ALONE)
    assert worst <= result.epsilon


def test_both_fidelities_give_the_same_bits():
    vectors = np.eye(12)
    by_protocol, by_sum = (d2pfed.private_sum(vectors, fidelity=each, seed=5) for each in ("protocol", "sum"))
    assert (by_protocol.value == by_sum.value).all()
    assert (by_protocol.fidelity, by_sum.fidelity) == ("protocol", "sum")
    other = d2pfed.private_sum(vectors, fidelity="sum", seed=6)
    assert (by_sum.value != other.value).any()


def test_few_clients_run_the_protocol_and_many_its_sum():
    assert d2pfed.private_sum(np.eye(10), delta=1e-3).fidelity == "protocol"
    assert d2pfed.private_sum(np.eye(101)[:, :3], delta=1e-3).fidelity == "sum"


# What it costs


def budget(epsilon=3.0, clients=30):
    return Budget(epsilon, clients**-1.1, d2pfed.SERVER, 1)


def test_statistics_share_a_ledger(tmp_path):
    with Ledger.create(tmp_path / "ledger.sqlite", budget()) as ledger:
        first = d2pfed.private_sum(np.eye(30), epsilon=1.0, ledger=ledger)
        second = d2pfed.private_histogram(range(30), [0, 10, 30], epsilon=1.0, ledger=ledger)
        assert 0.9 < first.spent < 1.0 < second.spent < 2 * first.spent
        assert first.delta == second.delta == ledger.budget.delta
        assert len(ledger.releases()) == 2
    by_path = d2pfed.private_sum(np.eye(30), epsilon=0.5, ledger=tmp_path / "ledger.sqlite")
    by_run = d2pfed.private_sum(np.eye(30), epsilon=0.1, ledger=tmp_path)
    assert second.spent < by_path.spent < by_run.spent
    assert d2pfed.verify(tmp_path / "ledger.sqlite").spent == pytest.approx(by_run.spent)


def test_a_budget_that_does_not_allow_it_releases_nothing(tmp_path):
    with Ledger.create(tmp_path / "ledger.sqlite", budget(1.0)) as ledger:
        d2pfed.private_sum(np.eye(30), epsilon=0.8, ledger=ledger)
        with pytest.raises(BudgetExceeded):
            d2pfed.private_sum(np.eye(30), epsilon=0.8, ledger=ledger)
        assert len(ledger.releases()) == 1


def test_a_ledger_of_training_says_delta_observer_and_adjacency(tmp_path):
    """Training asks each client up to three times, by replace-one; the statistic goes by what the ledger has."""
    training = calibrate(
        PrivacyTarget(
            dimension=50,
            population=30,
            cohort_size=30,
            rounds=3,
            spare=0,
            epsilon=1.0,
            delta=1e-4,
            against="server",
        )
    )
    charge = run_plan(training)
    with Ledger.create(tmp_path / "ledger.sqlite", replace(charge.budget, epsilon=4.0)) as ledger:
        ledger.begin("training", "here", charge)
        result = d2pfed.private_sum(np.eye(30), epsilon=1.0, ledger=ledger)
        assert result.plan.adjacency is Adjacency.REPLACE_ONE
        assert (result.delta, result.plan.against, result.plan.max_participations) == (1e-4, d2pfed.SERVER, 1)
        assert result.spent > 1.2
        with pytest.raises(ConfigError, match="adjacency is replace-one in all"):
            d2pfed.private_sum(np.eye(30), ledger=ledger, privacy={"adjacency": "zero-out"})
        with pytest.raises(ConfigError, match=r"delta is the ledger's 0\.0001, got 0\.01"):
            d2pfed.private_sum(np.eye(30), ledger=ledger, delta=0.01)
        with pytest.raises(ConfigError, match="against is the ledger's server, got released"):
            d2pfed.private_sum(np.eye(30), ledger=ledger, privacy={"against": "released"})


def test_a_result_names_unit_adjacency_observers_and_warns_of_few_clients():
    result = d2pfed.private_sum(np.eye(10), seed=1)
    text = repr(result)
    for part in (
        "private sum over 10 clients",
        "against server and up to 1 colluding",
        "for one client of norm at most 1, replace-one",
        "alone",
    ):
        assert part in text, text
    assert "large as clients are few" in text
    assert "can remove it" in text
    assert not d2pfed.private_sum(np.eye(10), delta=1e-4).warnings
    assert not d2pfed.private_sum(np.eye(10), delta=0.0999).warnings
    assert "is not below 1 / clients = 0.1: publishing" in repr(d2pfed.private_sum(np.eye(10), delta=0.1))
    assert result.guarantees[0].delta == pytest.approx(10**-1.1)


def test_replace_one_is_the_default_as_in_training_and_has_twice_the_noise():
    wide = d2pfed.private_sum(np.eye(20), privacy={"dropouts": 0.0}, delta=1e-3)
    assert wide.plan.adjacency is DEFAULT_TARGET.adjacency is Adjacency.REPLACE_ONE
    narrow = d2pfed.private_sum(np.eye(20), privacy={"adjacency": "zero-out", "dropouts": 0.0}, delta=1e-3)
    assert wide.standard_error[0] / narrow.standard_error[0] == pytest.approx(2, rel=0.02)


# What they refuse


RECORDS = {"unit": "record", "records": 400}
BAD = [
    (lambda: d2pfed.private_sum([]), "at least 2 clients, got 0"),
    (lambda: d2pfed.private_sum([1.0]), "at least 2 clients, got 1"),
    (lambda: d2pfed.private_sum(3.0), "vectors must be a sequence or mapping with an entry per client, got float"),
    (lambda: d2pfed.private_sum([[1.0], [1.0, 2.0]]), r"client 0 has \(1,\), client 1 has \(2,\)"),
    (lambda: d2pfed.private_sum(np.zeros((3, 2, 2))), r"one number or one vector per client, got the shape \(2, 2\)"),
    (lambda: d2pfed.private_sum(["a", "b"]), "vectors of client 0 must be numbers"),
    (lambda: d2pfed.private_sum([[], []]), "one number or one vector per client"),
    (lambda: d2pfed.private_sum([1, 2], epsilon=0.0), "epsilon must be positive and finite, got 0"),
    (lambda: d2pfed.private_sum([1, 2], clip=0.0), "clip must be positive and finite, got 0"),
    (lambda: d2pfed.private_sum([1, 2], clip="auto"), "clip must be a number, got 'auto'"),
    (lambda: d2pfed.private_sum([1, 2], delta=2.0), "delta must be in"),
    (lambda: d2pfed.private_sum([1, 2], fidelity="exact"), "fidelity must be auto, sum, protocol, got 'exact'"),
    (lambda: d2pfed.private_sum([1, 2], seed="x"), "seed must be a whole number or None, got 'x'"),
    (lambda: d2pfed.private_sum([1, 2], privacy={"clip": 3}), "privacy may change against, .*, got 'clip'"),
    (lambda: d2pfed.private_sum([1, 2], privacy={"dropouts": 2.0}), r"dropouts must be in \[0, 1\)"),
    (lambda: d2pfed.private_sum([1, 2], ledger=3), "ledger must be a Ledger or the path"),
    (lambda: d2pfed.private_mean([1, 2], bounds=(3, 1)), "bounds must be two numbers, the lower one first"),
    (lambda: d2pfed.private_mean([1, 2], bounds=(0, 1), clip=1.0), "a mean has a clip or bounds"),
    (lambda: d2pfed.private_mean([1, 2], clip=1, weights=[1, 2]), "weights need max_weight"),
    (lambda: d2pfed.private_mean([1, 2], clip=1, weights=[1, 2, 3], max_weight=3), "one number for each of 2 clients"),
    (lambda: d2pfed.private_histogram([1, 2], [0, 2, 1]), "bins must rise strictly, got 2 before 1"),
    (lambda: d2pfed.private_histogram([1, 2], [0]), "bins must be at least two edges"),
    (lambda: d2pfed.private_histogram([1, 2], [0, math.nan]), "bins must be finite"),
    (lambda: d2pfed.private_histogram([1, 2], [0, 1], max_values=0), "max_values must be positive"),
    (lambda: d2pfed.private_histogram([[[1]], 2], [0, 1]), "values of client 0 must be a list of numbers"),
    (lambda: d2pfed.private_quantile([1, 2], 1.5, bounds=(0, 1)), r"levels must be numbers in \[0, 1\], got 1.5"),
    (lambda: d2pfed.private_quantile([1, 2], 0.5, bounds=(0, 1), bins=1), r"bins must be a whole number in \[2"),
    (lambda: d2pfed.private_table([[1], [2]], []), "categories must be a list for each variable"),
    (lambda: d2pfed.private_table([[1], [2]], [[1, 1]]), "categories of a variable must differ"),
    (lambda: d2pfed.private_table([[1], [2]], ["ab"]), "categories of a variable must be a list, got 'ab'"),
    (lambda: d2pfed.private_table([1, 2], [[1], [2]]), "rows of client 0 must be a list, got int"),
    (lambda: d2pfed.private_table([[], []], [range(2000), range(2000)]), "a table must have at most 1048576 cells"),
    (lambda: d2pfed.private_metrics([1, 2]), "client 0 must have a pair of scores and labels, got int"),
    (lambda: d2pfed.private_metrics([([0.5], [0, 1]), ([0.5], [0])]), "as many labels as rows of scores"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, ["f1"]), "metrics must be out of accuracy, .*, got 'f1'"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, []), "metrics must be different names"),
    (lambda: d2pfed.private_metrics([(np.eye(3), range(3))] * 2, ["auroc"]), "auroc is of two classes, got 3"),
    (lambda: d2pfed.private_metrics([(np.eye(3), range(3)), ([0.5], [0])]), "one number of classes, got 2, 3"),
    (lambda: d2pfed.private_sum([[1], [2]], privacy={"unit": "record"}), "the unit record needs records, a public"),
    (lambda: d2pfed.private_sum([1, 2], privacy={"unit": "record", "records": 9}), "a record per row, all alike"),
    (lambda: d2pfed.private_sum([1, 2], privacy={"unit": "patient"}), "unit must be"),
    (lambda: d2pfed.private_mean([[1], [2]], clip=1, weights=[1, 1], privacy=RECORDS), "weights are for the unit"),
    (lambda: d2pfed.private_histogram([1, 2], [0, 9], max_values=3, privacy=RECORDS), "max_values is for the unit"),
    (lambda: d2pfed.private_sum([1, 2], privacy=["against"]), "privacy must be a dictionary of changes .*, got list"),
    (lambda: d2pfed.private_sum([1, 2], privacy=d2pfed.PrivacyTarget()), "a dictionary of .*, got PrivacyTarget"),
    (lambda: d2pfed.private_mean([1, 2], epsilom=1.0), r"statistic has no field 'epsilom' \(did you mean epsilon\?\)"),
    (lambda: d2pfed.private_sum([1, 2], clip=1e300), r"bound on a vector must be in \[1e-30, 1e\+30\], got 1e\+300"),
    (lambda: d2pfed.private_sum([1, 2], clip=1e-300), r"bound on a vector must be in \[1e-30, 1e\+30\], got 1e-300"),
    (lambda: d2pfed.private_mean([1, 2], max_weight=3), "max_weight goes with weights"),
    (lambda: d2pfed.private_mean([1, 2]), r"a mean needs bounds=\(lowest, highest\) on each number, or clip="),
    (lambda: d2pfed.private_quantile([1, 2], 0.5, bounds=(-1e308, 1e308)), "bounds must be a finite distance apart"),
    (lambda: d2pfed.private_histogram([1, 2], np.arange(2e6)), "must have at most 1048576 bins, got 1999999"),
    (lambda: d2pfed.private_table([[1], [2]], [[[], 2]]), "categories of a variable must be plain values"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, [[]]), r"metrics must be out of accuracy, .*, got \[\]"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, predict=3), "predict must be a function, got int"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, predict=abs), "predict needs classes, their number"),
    (lambda: d2pfed.private_metrics([([0.5], [0])] * 2, classes=3), "scores of client 0 must have 3 classes, got 2"),
    (lambda: d2pfed.private_metrics([(0, [0])] * 2, predict=abs, classes=2, privacy=RECORDS), "a row of inputs"),
    (
        lambda: d2pfed.private_metrics([([0.5], [0, 1])] * 2, predict=abs, classes=2, privacy=RECORDS),
        "client 0 must have a row of inputs for each label",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "rule"), BAD, ids=[rule[:40] for _, rule in BAD])
def test_bad_input_is_refused_in_one_line(call, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_seed_repeats_the_noise_but_on_no_shared_ledger(tmp_path):
    """There it would be charged, and certified, as if it protected anybody."""
    options = {"fidelity": "sum", "delta": 1e-3}
    first, again, other = (d2pfed.private_sum(np.eye(12), **options, seed=seed) for seed in (4, 4, 5))
    assert (first.value == again.value).all()
    assert (first.value != other.value).any()
    with d2pfed.Ledger.create(tmp_path / "ledger", d2pfed.Budget(9.0, 1e-3, d2pfed.SERVER)) as ledger:
        with pytest.raises(ConfigError, match="takes its noise from the system, got seed 4"):
            d2pfed.private_sum(np.eye(12), **options, seed=4, ledger=ledger)
        assert not ledger.runs()


def test_what_a_ledger_has_spent_is_printed_with_its_condition(tmp_path):
    with d2pfed.Ledger.create(tmp_path / "ledger", d2pfed.Budget(3.0, 1e-3, d2pfed.SERVER)) as ledger:
        text = repr(d2pfed.private_sum(np.eye(12), ledger=ledger))
    assert "if none was begun or stopped for what another had shown" in text


def test_a_client_without_records_fits_any_number_of_classes():
    scored = [(np.eye(3), range(3))] * 11
    found = d2pfed.private_metrics([([], []), *scored], "accuracy", **CALM)
    assert abs(found.value["accuracy"] - 11 / 12) < 0.05
    assert d2pfed.private_metrics([([], [])] * 12, "accuracy", **CALM).value["accuracy"] < 0.05


# Where the unit is a record


def test_runs_for_persons_in_one_and_in_two_silos_share_no_ledger(tmp_path):
    """The total of a ledger holds for one kind of person: priced as one silo's, a run says nothing about two."""
    budget, given = d2pfed.Budget(9.0, 1e-3, d2pfed.SERVER), [[1.0]] * 10
    with d2pfed.Ledger.create(tmp_path / "ledger", budget) as ledger:
        two = d2pfed.private_sum(given, privacy={**RECORDS, "max_silos": 2}, ledger=ledger)
        usual = d2pfed.private_sum(given, privacy=RECORDS, ledger=ledger)  # takes what the ledger has
        assert usual.plan.batches == two.plan.batches
        with pytest.raises(ConfigError, match="max_silos is 2 in all of the ledger's runs, got 1"):
            d2pfed.private_sum(given, privacy={**RECORDS, "max_silos": 1}, ledger=ledger)


def test_records_are_counted_one_by_one():
    values = [np.linspace(0, 10, 40 + at) for at in range(6)]
    pooled, edges = np.concatenate(values), [0, 2.5, 5, 10]
    options = {**CALM, "privacy": RECORDS}
    assert near(d2pfed.private_sum(values, clip=10.0, **options), pooled.sum())
    assert near(d2pfed.private_mean(values, bounds=(0, 10), **options), pooled.mean())
    assert near(d2pfed.private_histogram(values, edges, **options), np.histogram(pooled, edges)[0])
    rows = [np.column_stack([each, 10 - each]) for each in values]
    assert near(d2pfed.private_sum(rows, clip=20.0, **options), [pooled.sum(), (10 - pooled).sum()])
    median = d2pfed.private_quantile(values, 0.5, bounds=(0, 10), **options)
    assert abs(median.value - np.median(pooled)) < 0.2
    scores = [(each / 10, each > 4) for each in values]
    accuracy = d2pfed.private_metrics(scores, "accuracy", **options).value["accuracy"]
    assert abs(accuracy - np.mean((pooled > 5) == (pooled > 4))) < 0.02
    assert near(d2pfed.private_table([["a"] * 5, ["b"], []], [["a", "b"]], **options), [5, 1])


def test_a_record_is_protected_by_the_noise_of_all_honest_clients():
    result = d2pfed.private_histogram([[1.0]] * 12, [0, 2], epsilon=1.0, privacy={**RECORDS, "colluders": 0.3})
    assert (result.plan.unit, result.plan.adjacency) == ("record", "add-remove")
    assert result.delta == pytest.approx(400**-1.1)
    assert_kept(result)
    target = replace(
        release.Terms(epsilon=1.0, delta=None, privacy=RECORDS, ledger=None, fidelity="sum", seed=None).target(
            1, 12, 1.0, None
        ),
        colluders=0.3,
    )
    honest = 12 - 1 - 4
    trusted = 2 * ideal_multiplier(target) * math.sqrt(12 / honest)
    assert 1 <= result.standard_error[0] / trusted + 1e-3 <= 1.05


def test_a_record_that_leaves_changes_nothing_that_is_public():
    """The plan, the divisor and the noise are the same for any number of records."""
    many, one = (d2pfed.private_sum([[0.1] * count, [0.2], []], privacy=RECORDS) for count in (50, 1))
    assert many.plan == one.plan
    assert many.standard_error == one.standard_error


def test_a_ledger_has_one_unit(tmp_path):
    with Ledger.create(tmp_path / "ledger.sqlite", replace(budget(), delta=1e-4)) as ledger:
        d2pfed.private_sum(np.ones((5, 3)), epsilon=1.0, ledger=ledger, privacy=RECORDS)
        d2pfed.private_sum(np.ones((5, 3)), epsilon=1.0, ledger=ledger, privacy=RECORDS)
        with pytest.raises(ConfigError, match="the ledger's runs protect a record, and this statistic a client"):
            d2pfed.private_sum(np.ones((5, 3)), epsilon=1.0, ledger=ledger)


# What cannot be counted counts as zero, and shows nowhere


@pytest.fixture
def contributions(monkeypatch):
    """What each client gave to the sum of the last release: its vector, or the vectors of its records as rows."""
    last, local_sum = [], release.local_sum

    def rows(given):
        if isinstance(given, CodedRecords):
            return np.concatenate([np.empty((0, given.code.dimension)), *given.gradients(np.arange(given.count))])
        return given[None, :]

    def seen(plan, attempt, vectors, *rest, **options):
        last[:] = map(rows, vectors.values())
        return local_sum(plan, attempt, vectors, *rest, **options)

    monkeypatch.setattr(release, "local_sum", seen)
    return last


ODD = [math.nan, math.inf, -math.inf, None, 10**400, type("NAType", (), {})()]  # the last is pandas' NA, by name
OF_VALUES = {
    "sum": lambda values, **more: d2pfed.private_sum(values, clip=5.0, **more),
    "mean": lambda values, **more: d2pfed.private_mean(values, clip=5.0, **more),
    "bounded mean": lambda values, **more: d2pfed.private_mean(values, bounds=(2, 9), **more),
    "histogram": lambda values, **more: d2pfed.private_histogram(values, [0, 2, 5, 10], **more),
    "quantile": lambda values, **more: d2pfed.private_quantile(values, 0.5, bounds=(0, 10), **more),
    "table": lambda values, **more: d2pfed.private_table(values, [[1, 3, 4]], **more),
}


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:8])
@pytest.mark.parametrize("statistic", OF_VALUES.values(), ids=OF_VALUES.keys())
def test_a_record_that_is_not_finite_adds_nothing_and_is_no_error(contributions, statistic, odd):
    statistic([[1, 3, odd, 4], [4], [3]], privacy=RECORDS, **CALM)
    whole = contributions[0]
    statistic([[1, 3, 4], [4], [3]], privacy=RECORDS, **CALM)
    assert not whole[2].any()
    assert whole[[0, 1, 3]].any()
    assert np.array_equal(np.delete(whole, 2, axis=0), contributions[0])  # to the bit


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:8])
@pytest.mark.parametrize("statistic", list(OF_VALUES.values())[:-1], ids=list(OF_VALUES)[:-1])
def test_a_client_whose_value_is_not_finite_adds_nothing_and_is_no_error(contributions, statistic, odd):
    result = statistic([4.0, odd, 3.0], **CALM)
    assert np.isfinite(result.value).all()
    assert not contributions[1].any()
    assert contributions[0].any()


def test_a_client_that_has_none_in_place_of_its_vector_adds_nothing(contributions):
    result = d2pfed.private_mean([None, [1.0, 2.0], [3.0, 4.0]], bounds=(0, 10), **CALM)
    assert result.value.shape == (2,)
    assert [each.any() for each in contributions] == [False, True, True]


def test_a_histogram_says_what_it_counts():
    values = [[1.0, 1.0, 1.0, 3.0], [3.0], []]
    shares = d2pfed.private_histogram(values, [0, 2, 4], **CALM)
    counts = d2pfed.private_histogram(values, [0, 2, 4], max_values=4, **CALM)
    assert shares.name == "private histogram (counting clients, by shares of their values)"
    assert counts.name == "private histogram (counting values, up to 4 a client)"
    assert near(shares, [0.75, 1.25])
    assert near(counts, [3, 2])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:8])
def test_a_vector_or_weight_that_is_not_finite_has_no_weight(contributions, odd):
    given = {"bounds": (0, 10), "max_weight": 4, **CALM}
    d2pfed.private_mean([[1.0, 2.0], [3.0, odd], [5.0, 6.0]], weights=[1, 2, 3], **given)
    assert [each.any() for each in contributions] == [True, False, True]
    d2pfed.private_mean([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], weights=[1, odd, -3], **given)
    assert [each.any() for each in contributions] == [True, False, False]


def test_a_row_without_one_entry_per_variable_is_counted_nowhere(contributions):
    rows = [[("a", 1), ("a",), ("a", 1, 1), ({}, 1), (None, 1), 7], [("a", 1)], []]
    d2pfed.private_table(rows, [["a"], [1, 2]], privacy=RECORDS, **CALM)
    assert contributions[0].tolist() == [[1, 0]] + [[0, 0]] * 5


UNUSABLE = [([math.nan, 0.5, 0.5], 0), ([0.2, 0.2, 1.5], 0), ([-0.1, 0.5, 0.5], 0)]
UNUSABLE += [([0.5, 0.3, 0.2], label) for label in (3, -1, 0.5, math.nan, math.inf)]


@pytest.mark.parametrize(("scores", "label"), UNUSABLE)
def test_a_scored_record_that_cannot_be_used_adds_nothing(contributions, scores, label):
    names, good = ["accuracy", "loss", "confusion", "calibration"], np.eye(3)[[0, 1, 2]]
    others = [(good, [0, 1, 2])] * 2
    clients = [(np.vstack([good, scores]), [0, 1, 1, label]), *others]
    d2pfed.private_metrics(clients, names, privacy=RECORDS, **CALM)
    whole = contributions[0]
    assert not whole[3].any()
    d2pfed.private_metrics([(good, [0, 1, 1]), *others], names, privacy=RECORDS, **CALM)
    assert np.array_equal(whole[:3], contributions[0])
    one = d2pfed.private_metrics(clients, names, max_values=4, **CALM)
    assert np.isfinite(one.value["loss"])


def test_who_holds_the_records_is_told_and_the_result_is_not(caplog):
    with caplog.at_level("WARNING", "d2pfed.statistics"):
        odd = d2pfed.private_sum([[1.0, math.nan], [1.0], []], privacy=RECORDS, **CALM)
    assert ["count as zero" in each.getMessage() for each in caplog.records] == [True]
    assert odd.warnings == d2pfed.private_sum([[1.0], [1.0], []], privacy=RECORDS, **CALM).warnings


# A user's own function, and the records that it sees


def normalised_by_batch(inputs):
    """Scores as of a network with batch norm in training mode: all depend on each."""
    return 1 / (1 + np.exp(-9 * (inputs - inputs.mean()) / (inputs.std() + 1e-9)))


def moved_by_one_record(contributions, predict):
    """Return by how many bounds on a record the sum moves if one record is added, and by how many the record itself."""
    inputs, totals = np.linspace(-1, 1, 200), []
    for own in (inputs, np.append(inputs, 1e6)):
        clients = [(each, (each > 0).astype(int)) for each in (own, inputs, inputs)]
        result = d2pfed.private_metrics(clients, "accuracy", predict=predict, classes=2, privacy=RECORDS, **CALM)
        totals.append(contributions[0].sum(0))
    return np.linalg.norm(totals[1] - totals[0]) / result.bound


def test_a_record_is_scored_by_itself_alone(contributions, monkeypatch):
    """One record with a large value would move the scores of all others: more than forty bounds, printed as one."""
    assert moved_by_one_record(contributions, normalised_by_batch) <= 1
    scoring = metrics._Scoring
    monkeypatch.setattr(metrics, "_Scoring", lambda *given: scoring(*given[:2], of_records=False))  # the twin
    assert moved_by_one_record(contributions, normalised_by_batch) > 40


def test_a_network_in_training_mode_moves_the_sum_by_one_record(contributions):
    import torch  # noqa: PLC0415

    net = torch.nn.Sequential(torch.nn.BatchNorm1d(1, affine=False), torch.nn.Linear(1, 2), torch.nn.Softmax(1))

    def predict(inputs):
        return net(torch.tensor(inputs, dtype=torch.float32)[:, None]).detach().numpy()

    assert moved_by_one_record(contributions, predict) <= 1


def fails_for_large(inputs):
    if (np.abs(inputs) > 10).any():
        raise RuntimeError("a value of the data")
    return 1 / (1 + np.exp(-inputs))


def test_a_record_that_predict_fails_for_counts_as_zero_alone(contributions):
    assert moved_by_one_record(contributions, fails_for_large) == 0
    clients = [(np.array([1.0, -1.0, 1e9]), [1, 0, 1]), (np.array([1e9]), [0]), (np.ones(1), [1])]
    result = d2pfed.private_metrics(clients, "accuracy", predict=fails_for_large, classes=2, **CALM)  # of clients
    assert [each.any() for each in contributions] == [False, False, True]
    assert abs(result.value["accuracy"] - 1 / 3) < 0.1


@pytest.mark.parametrize(
    "wrong", [lambda x: 0.5, lambda x: "a", lambda x: np.full((1, 3), 0.3), lambda x: [0.5, 0.5]]
)
def test_what_is_no_score_of_a_record_counts_as_zero(contributions, wrong):
    def predict(inputs):
        return wrong(inputs) if inputs[0] == 7 else [0.9]

    clients = [(np.array([1.0, 7.0]), [1, 1]), (np.array([]), []), (np.ones(1), [1])]
    d2pfed.private_metrics(clients, "accuracy", predict=predict, classes=2, privacy=RECORDS, **CALM)
    assert contributions[0].tolist() == [[1, 1], [0, 0]]


def test_scores_that_depend_on_what_was_scored_before_are_refused():
    """Dropout, say: a record that is left out would give all later ones other scores."""
    calls = []

    def predict(inputs):
        calls.append(1)
        return np.full(len(inputs), 1 / len(calls))

    with pytest.raises(ConfigError, match="the same scores every time"):
        d2pfed.private_metrics([(np.ones(3), np.ones(3))] * 2, predict=predict, classes=2, privacy=RECORDS)


# Bounds, weights and their errors


def test_each_number_is_brought_within_its_bounds():
    """Not only the whole vector within its radius, where a large number would go beyond and others shrink."""
    result = d2pfed.private_mean([[50.0, 0.75, 0.25]] * 12, bounds=(0, 1), **CALM)
    assert near(result, [1, 0.75, 0.25])
    metrics_of = MetricMeans({"accuracy": Bounds(0.0, 1.0), "loss": Bounds(0.0, 10.0)}, 5)
    beyond = metrics_of.encode({"accuracy": 3.0, "loss": 4.0}, 5)
    assert np.array_equal(beyond, metrics_of.encode({"accuracy": 1.0, "loss": 4.0}, 5))
    assert not np.array_equal(beyond, metrics_of.encode({"accuracy": 1.0, "loss": 10.0}, 5))


def test_a_weight_is_capped_in_an_evaluation():
    means = MetricMeans({"accuracy": Bounds(0.0, 1.0)}, 30)
    for accuracy in (0.0, 0.5, 1.0):
        most = means.encode({"accuracy": accuracy}, 30)
        assert np.array_equal(means.encode({"accuracy": accuracy}, 3000), most)
        assert np.linalg.norm(most) <= 1 + 1e-12
        assert np.allclose(means.encode({"accuracy": accuracy}, 15), most / 2)
    names = MetricScheme(names=(MetricName.ACCURACY,), classes=2, bins=2, max_loss=5.0, has_count=True)
    of_scores = ScoreMetrics(names, 4)
    assert np.linalg.norm(of_scores.encode([0.9] * 400, [1] * 400)) <= 1 + 1e-12


def require_error(decoded, noisy):
    """The stated standard error is the spread of what noisy sums are decoded to."""
    value, stated = decoded
    spread = np.std([decode for decode, _ in noisy], axis=0)
    assert np.abs(spread / stated - 1).max() < 0.06, (spread, stated)
    assert value.shape == stated.shape


def test_the_error_of_a_mean_has_the_noise_of_its_weight():
    """Far from the middle the weight's noise is a large part of it."""
    import torch  # noqa: PLC0415

    noise = torch.randn(4000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy()
    ball = Ball(2, math.sqrt(2), (-1.0, 1.0))
    total = 100 * ball.joint(np.array([[0.95, -0.9]]))[0]
    require_error(ball.mean(total, 1.0), [ball.mean(total + each, 1.0) for each in noise])
    scheme = MetricScheme(names=(MetricName.ACCURACY,), classes=2, bins=2, max_loss=5.0, has_count=True)

    def accuracy(sums):
        value, error = scheme.decode(sums, 1.0, 1)
        return value["accuracy"], error["accuracy"]

    sums = np.array([95.0, 100.0])
    require_error(accuracy(sums), [accuracy(sums + each[:2]) for each in noise])


def test_the_example_prints_its_statistics(capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "survey.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("over 2,000 clients") == 4
    assert shown.count("(for one record of norm") == 2
