"""Several seeds, the authors' loop, and the benchmarks that others use, all in small."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from d2pfed.errors import ConfigError
from d2pfed.learning import build_model, load_task
from d2pfed.numerics.randomness import Entropy
from reproduction.as_coded import CodeNoise, CodeRun, Pixels, SharedAdam, mean_update, scaled
from reproduction.at_server import at_server
from reproduction.comparisons import Benchmark, compare
from reproduction.explicit import PAPER_LOCAL, local_training, server_optimizer
from reproduction.history import Repeat, RunHistory
from reproduction.page import benchmarks
from reproduction.presentation import compared, epsilon_cell, guessing, seeds_of, spoken, spoken_number
from reproduction.published import INFIMNIST
from reproduction.result import Context, Size, write
from reproduction.runs import run_systems
from reproduction.systems import as_coded, fedavg
from reproduction.workload import Workload

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def workload() -> Workload:
    task = load_task("digits", population=600)
    initial = partial(build_model, "logistic", task)
    small = replace(
        INFIMNIST, task="digits", model="logistic", dimension=650, population=600, cohort_size=12, rounds=2
    )
    return Workload(small, task, initial(0), "iid", replace(PAPER_LOCAL, epochs=1), initial)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    folder = tmp_path_factory.mktemp("repeats")
    return Context(folder=folder, data=None, size=Size.QUICK, report=lambda _what, _fraction: None)


def test_several_seeds_give_a_mean_and_a_band(workload, context):
    (once,) = run_systems([fedavg(workload)], context)
    (twice,) = run_systems([fedavg(workload)], replace(context, repeats=2))
    assert [each.seed for each in twice.repeats] == [1, 2]
    assert twice.repeats[0] == once.repeats[0]
    assert twice.repeats[0].validation != twice.repeats[1].validation
    assert twice.test == pytest.approx(sum(twice.tests) / 2)
    assert all(low <= mean <= high for mean, (low, high) in zip(twice.validation, twice.band, strict=True))
    assert len(list(context.folder.glob("runs/infimnist-fedavg-*"))) == 2


def history(*tests: float) -> RunHistory:
    repeats = tuple(
        Repeat(seed=seed, validation=(test,), test=test, charged=(), server=None, seconds=0.0)
        for seed, test in enumerate(tests, 1)
    )
    return RunHistory(system=None, repeats=repeats, released=())  # type: ignore[arg-type]


def test_words_claim_only_what_the_bands_allow():
    assert compared(history(90, 91, 92), history(80, 81, 89), "cpSGD") == "above cpSGD in every run"
    assert compared(history(80, 81), history(90, 91), "cpSGD") == "below cpSGD in every run"
    assert compared(history(80, 91), history(90, 95), "X") == "not told apart from X: their runs overlap"
    assert compared(history(10, 10, 10), history(10, 10, 10), "X") == "not told apart from X: their runs overlap"
    assert compared(history(99), history(1), "X") == "not ranked against X, for want of seeds"
    assert spoken(history(90, 92)) == "91.0 % (90.0 to 92.0)"
    assert spoken(history(94.79, 94.8, 94.82)) == "94.8 % from every seed"
    assert spoken(history(90)) == "90.0 %"


@pytest.mark.parametrize(("tests", "said"), [((9, 10, 13), " (guessing gives 10 %)"), ((11, 14), "")])
def test_accuracies_that_guessing_reaches_are_named(tests, said):
    ten_classes = SimpleNamespace(workload=SimpleNamespace(task=SimpleNamespace(classes=10)))
    assert guessing(replace(history(*tests), system=ten_classes)) == said


def test_words_say_how_many_seeds_their_numbers_are_of():
    assert seeds_of([history(1), history(2)]).startswith("One seed each")
    assert seeds_of([history(1, 2, 3)]) == "Means of 3 seeds; in brackets the lowest and the highest."
    assert seeds_of([history(1, 2, 3)], ranges=False) == "Means of 3 seeds."
    assert seeds_of([history(1, 2), history(1)], ranges=False) == "Means of 1 to 2 seeds."


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((0.05129, "0.0513"), (2.950479, "2.95"), (138.7, "139"), (999.4, "999"), (999.6, "1,000")),
        *((25373.9, "25,400"), (848805.3, "849,000"), (math.inf, "infinite")),
    ],
)
def test_numbers_in_sentences_have_three_digits_and_no_exponent(value, said):
    assert spoken_number(value) == said


def test_an_infinite_epsilon_is_a_word_in_tables_since_json_has_none():
    assert epsilon_cell(math.inf) == "infinite"
    assert epsilon_cell(25373.8859) == 25373.9


@pytest.mark.parametrize("repeats", [0, 101])
def test_an_impossible_number_of_repeats_is_refused(context, repeats):
    with pytest.raises(ConfigError, match="repeats must be in"):
        replace(context, repeats=repeats)


# The authors' loop


def test_long_updates_are_scaled_to_norm_one_as_the_authors_do():
    short, long = np.full(4, 0.1, np.float32), np.full(4, 0.2, np.float32)
    assert np.array_equal(scaled(short, 0.25), short)
    assert np.linalg.norm(scaled(long, 0.25)) == pytest.approx(1)  # a sound clip would give 0.25


def test_the_last_update_of_a_client_drawn_twice_counts_twice(workload):
    quiet = CodeRun(noise=CodeNoise.NONE, deviation=0.0, clip=1e6, levels=1 << 40, pixels=Pixels.BARE)
    examples = workload.task.clients.examples(3)
    params = workload.model.initial()
    adam = SharedAdam(workload.model, PAPER_LOCAL)
    mean = mean_update(quiet, adam, params, [(3, examples), (3, examples)], Entropy.replay(b"twice"))
    assert adam.moments.taken == 2 * len(PAPER_LOCAL.schedule(len(examples), np.random.default_rng(0)))  # noqa: TID251
    alone = SharedAdam(workload.model, PAPER_LOCAL)
    mean_update(quiet, alone, params, [(3, examples)], Entropy.replay(b"twice"))
    seed = int(Entropy.replay(b"twice").child("order").stream().words(1)[0] >> np.uint64(2))
    second = alone.train(params, examples, seed, 3)
    np.testing.assert_allclose(mean, second, atol=1e-4)


@pytest.mark.parametrize("noise", list(CodeNoise))
def test_the_loop_runs_once_and_is_read_again(workload, context, noise):
    (first,) = run_systems([as_coded(workload, noise)], context)
    (again,) = run_systems([as_coded(workload, noise)], context)
    assert first.repeats == again.repeats
    assert len(first.validation) == 2
    assert (first.released, first.server) == ((), None)


# At the server, and the benchmarks


@pytest.mark.slow
def test_mechanisms_at_equal_epsilon_against_the_server(workload, context):
    result = at_server(workload, context, [1.0])
    assert len(result.table.rows) == 6 + 1
    assert result.reduced == "no epsilon 0.5, 2, 4, 8"
    write(result, context.folder, "scripts/reproduce at-server", "2020-06-01")
    assert (context.folder / "at-server.png").stat().st_size > 10_000


def test_a_benchmark_has_rows_for_every_observer_and_in_the_clear(context, tmp_path):
    small = Benchmark(
        name="small",
        title="8 x 8 digits",
        load=lambda _: load_task("digits", population=60),
        model=lambda task, seed: build_model("logistic", task, seed),
        model_name="logistic",
        epsilon=8.0,
        cohort_size=None,
        rounds=2,
        local=local_training(lr=0.5, batch_size=10),
        step=server_optimizer(),
        client_rates=(1e-6, 0.5),
        server_rates=(1.0,),
    )
    result = compare(small, context)
    assert {run["local"]["lr"] for run in result.ran.values()} == {0.5}  # each system's best of the grid
    row = dict(zip(result.table.columns, result.table.rows[0], strict=True))
    assert row["epsilon, released"] == row["epsilon, server"] <= 8 < row["epsilon, alone"]
    assert row["cohort"] == row["clients"] == 60
    write(result, tmp_path, "scripts/reproduce small", "2020-06-01")
    text = benchmarks(tmp_path)
    assert text is not None
    assert "| `small` | 60 | 60 | 2 | 2 |" in text


def test_the_committed_benchmarks_are_what_their_records_give():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == benchmarks(ROOT / "reproduction" / "results")
