import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from d2pfed.errors import ConfigError
from d2pfed.learning import Examples, StoredClients, Task
from d2pfed.ledger import RowKind, read_rows
from reproduction.honest import COLUMNS, DELTA, EPSILON, SCALES, Scale, show
from reproduction.leaves import dead_leaves
from reproduction.result import Context, Size, write

SIDE = 24  # the paper's network has its size at this side alone
SCALE = Scale(population=60, filters=2, rounds=3, network_rounds=1)


def striped(count: int, seed: int) -> Examples:
    """Images of ten classes: made-up ones, under stripes whose direction tells the class."""
    images = dead_leaves(count, SIDE, seed)
    labels = torch.arange(count) % 10
    places = torch.arange(SIDE, dtype=torch.float32)
    angle = labels[:, None, None] * (math.pi / 10)
    waves = torch.sin(2 * (places * angle.cos() + places[:, None] * angle.sin()))
    return Examples(images + 0.5 * waves[:, None], labels)


def task(opened: list[str]) -> Task:
    table = striped(240, 1)
    held = striped(100, 2)

    def test() -> Examples:
        opened.append("test")
        return striped(100, 3)

    return Task(
        name="stripes",
        clients=StoredClients(table, tuple(np.array_split(np.arange(240), 60))),
        validation=held,
        test=test,
        classes=10,
        input_shape=(3, SIDE, SIDE),
        description="Stripes.",
    )


def context(folder: Path, heard: list[tuple[str, float]]) -> Context:
    return Context(
        folder=folder, data=None, size=Size.QUICK, report=lambda what, share: heard.append((what, share))
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    opened: list[str] = []
    heard: list[tuple[str, float]] = []
    return show(context(folder, heard), SCALE, lambda: task(opened)), folder, opened, heard


def rows(result) -> list[dict[str, object]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in result.table.rows]


def test_every_setting_keeps_the_promise_to_who_reads_the_model(shown):
    for row in rows(shown[0]):
        assert 0.95 * EPSILON < row["epsilon, released"] <= EPSILON


def test_where_everyone_takes_part_the_server_is_promised_the_same(shown):
    small, *whole = rows(shown[0])
    for row in whole:
        assert row["epsilon, server"] == row["epsilon, released"]
    assert small["epsilon, server"] > 2 * small["epsilon, released"]


def test_noise_is_as_long_as_its_formula_says(shown):
    for row in rows(shown[0]):
        formula = math.sqrt(row["parameters"]) * row["sigma / clip"] / row["clients a round"]
        assert row["noise / clip"] == pytest.approx(formula, rel=0.01)
        forgotten = row["sigma / clip"] / row["clients a round"]  # that it grows with the dimension
        assert row["noise / clip"] != pytest.approx(forgotten, rel=0.01)


def test_where_everyone_takes_part_noise_is_that_of_a_gaussian_mechanism(shown):
    def delta(epsilon: float, mu: float) -> float:
        below, above = (0.5 * math.erfc((epsilon / mu + side * mu / 2) / math.sqrt(2)) for side in (-1, 1))
        return below - math.exp(epsilon) * above

    for row in rows(shown[0])[1:]:
        mu = 2 * math.sqrt(row["rounds"]) / row["sigma / clip"]
        assert 0.9 * DELTA < delta(EPSILON, mu) <= 1.001 * DELTA  # sigma is rounded in the table
        assert delta(EPSILON, 2 * mu) > 10 * DELTA  # the noise for a sensitivity of one clip would be too little


def test_each_setting_on_the_way_is_less_noisy_than_the_one_before(shown):
    noise = [row["noise / clip"] for row in rows(shown[0])]
    assert noise == sorted(noise, reverse=True)


def test_only_our_last_model_meets_the_test_data_and_only_once(shown):
    result, _, opened, _ = shown
    assert opened == ["test"]
    accuracies = [row["test accuracy"] for row in rows(result)]
    assert accuracies[:-1] == [None, None, None]
    assert 0 <= accuracies[-1] <= 1


def test_runs_are_charged_to_a_ledger_as_often_as_the_table_says(shown):
    result, folder, _, _ = shown
    for name, record in result.ran.items():
        row = next(row for row in rows(result) if row["setting"] == name)
        ledger = read_rows(folder / "runs" / record["run"] / "ledger.sqlite")
        assert sum(line.kind is RowKind.COMMIT for line in ledger) == row["rounds run"]


def test_what_was_run_is_read_again_and_not_repeated(shown):
    result, folder, opened, _ = shown

    def fail() -> Task:
        raise AssertionError("the data is not needed")

    again = show(context(folder, []), SCALE, fail)
    assert again.table == result.table
    assert again.words == result.words
    assert opened == ["test"]


def test_progress_only_grows_and_comes_to_its_end(shown):
    shares = [share for _, share in shown[3]]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_the_result_is_written_with_its_drawing_and_its_runs(shown, tmp_path):
    result = replace(shown[0], reduced="smaller in every way")
    written = write(result, tmp_path, "command", "date")
    assert sorted(path.suffix for path in written) == [".csv", ".json", ".png", ".svg"]
    assert set(json.loads((tmp_path / "cifar10-honest.json").read_text())["ran"]) == set(result.ran)
    assert "times as long as any update may be" in result.words[0]


def test_a_quick_result_says_what_was_reduced():
    assert SCALES[Size.QUICK].reduced
    assert not SCALES[Size.FULL].reduced


def test_fewer_clients_than_the_papers_cohort_are_refused():
    with pytest.raises(ConfigError, match=r"population must be at least .* 10, got 9"):
        replace(SCALE, population=9)
