"""The reproduction: published accountants, systems through the one loop, results, page and command."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from d2pfed.accounting import ContinuousGaussian
from d2pfed.cli import run
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.learning import build_model, load_task
from d2pfed.noise.mechanisms import BinomialNoise, Shared
from d2pfed.plan import MechanismName, Plan
from reproduction.__main__ import app
from reproduction.catalogue import CATALOGUE, select
from reproduction.explicit import PAPER_LOCAL
from reproduction.frontier import _QUICK_KINDS, frontier
from reproduction.headline import fig1a, fig1b
from reproduction.page import page
from reproduction.published import CIFAR10, INFIMNIST, binomial_epsilon, d2pfed_epsilon
from reproduction.result import Context, Result, Size, write
from reproduction.runs import run_systems
from reproduction.sweeps import fig3, fig4, fig5
from reproduction.systems import central, cpsgd, d2pfed, fedavg, planned, relative_error, with_smaller_lr
from reproduction.workload import Workload, reductions

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def workload() -> Workload:
    """The paper's experiment in small: 8 x 8 digits, a linear model, two rounds."""
    task = load_task("digits", population=600)
    model = build_model("logistic", task, seed=0)
    small = replace(
        INFIMNIST, task="digits", model="logistic", dimension=650, population=600, cohort_size=6, rounds=2
    )
    initial = partial(build_model, "logistic", task)
    return Workload(small, task, model, "iid", replace(PAPER_LOCAL, epochs=1), initial)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture(scope="module")
def context(folder) -> Context:
    """Where runs are kept for all tests, since many share them."""
    return Context(folder=folder, data=None, size=Size.QUICK, report=lambda _what, _fraction: None)


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (d2pfed_epsilon(INFIMNIST, 0.6, 100), 2.950479),
        (d2pfed_epsilon(INFIMNIST, 0.8, 100), 1.513062),
        (d2pfed_epsilon(INFIMNIST, 1.0, 100), 0.942049),
        (d2pfed_epsilon(INFIMNIST, 0.5, 1), 3.855468),
        (d2pfed_epsilon(INFIMNIST, 0.5, 100), 5.620295),
        (d2pfed_epsilon(CIFAR10, 0.03, 1), 2.134870),
        (d2pfed_epsilon(CIFAR10, 0.03, 300), 3.183079),
        (binomial_epsilon(INFIMNIST, 1), 1.295422059),
        (binomial_epsilon(INFIMNIST, 100), 19.612962160),
        (binomial_epsilon(CIFAR10, 1), 1.4930907),
        (binomial_epsilon(CIFAR10, 300), 54.2037717),
    ],
)
def test_the_published_accountants_give_the_published_numbers(found, known):
    assert found == pytest.approx(known, abs=1e-6)


def test_d2pfed_is_the_papers_algorithm_with_its_parameters(workload):
    plan = d2pfed(workload).work
    assert isinstance(plan, Plan)
    assert isinstance(plan.mechanism, Shared)
    assert plan.codec.clip == 0.25
    assert plan.codec.box == pytest.approx(10 * plan.codec.granularity)  # 21 levels from -g_max to g_max
    assert plan.sigma == pytest.approx(0.6, rel=1e-4)


def test_where_the_levels_are_fine_no_coordinate_is_bounded(workload):
    fine = replace(workload, experiment=replace(workload.experiment, levels=2001))
    plan = d2pfed(fine).work
    assert isinstance(plan, Plan)
    assert plan.codec.box is None
    assert plan.codec.granularity == pytest.approx(2 * 0.25 / 2000)


def test_cpsgd_has_the_papers_levels_and_coins(workload):
    plan = cpsgd(workload).work
    assert isinstance(plan, Plan)
    assert isinstance(plan.mechanism, BinomialNoise)
    assert 0 <= plan.mechanism.trials * plan.cohort_size - 3_642_525 < 2 * plan.cohort_size
    assert float(plan.codec.radius) == pytest.approx(300, abs=0.01)
    assert plan.ring.bits == 24


def test_a_plan_by_hand_promises_what_it_costs_and_longer_updates_cost_more(workload):
    main, loud = d2pfed(workload), d2pfed(workload, clip=1.0)
    assert loud.epsilon > 10 * main.epsilon
    assert loud.published is not None
    assert main.published is not None
    assert loud.published(2) == main.published(2)


def test_a_calmed_system_moves_less_the_more_noise_it_has(workload):
    noisy, quiet = planned(workload, MechanismName.BINOMIAL, 1.0), planned(workload, MechanismName.CENTERED, 1.0)
    rates = [with_smaller_lr(system, relative_error(system)).step.lr for system in (noisy, quiet)]
    assert rates[0] < rates[1] <= quiet.step.lr
    assert with_smaller_lr(fedavg(workload), 0.5) == fedavg(workload)


def test_a_mechanism_of_no_figure_goes_through_the_loop_too(workload, context):
    (curve,) = run_systems([planned(workload, MechanismName.DDGAUSS, 5.0)], context)
    assert len(curve.validation) == 2
    assert curve.released[-1] <= 5


def test_reference_systems_go_through_the_loop(workload, context):
    heard = []
    told = replace(context, report=lambda what, fraction: heard.append((what, fraction)))
    plain, gauss = run_systems([fedavg(workload), central(workload, 1.0)], told)
    assert (plain.released, plain.server, plain.system.bits) == ((), None, 32)
    assert isinstance(gauss.system.work, ContinuousGaussian)
    assert 0.9 < gauss.released[-1] <= 1.001  # on the coarse grid
    assert plain.test > gauss.test
    assert [fraction for _, fraction in heard] == sorted(fraction for _, fraction in heard)
    assert heard[-1][1] == 1


@pytest.mark.parametrize("make", [fedavg, d2pfed], ids=["trusted", "private"])
def test_a_stopped_run_carries_on_to_the_same_curve(workload, context, tmp_path, make):
    def stop(_what: str, _fraction: float) -> None:
        raise KeyboardInterrupt

    (whole,) = run_systems([make(workload)], context)
    stopped = replace(context, folder=tmp_path, report=stop)
    with pytest.raises(KeyboardInterrupt):
        run_systems([make(workload)], stopped)
    assert not list(tmp_path.glob("runs/*/summary.json"))
    (rest,) = run_systems([make(workload)], replace(context, folder=tmp_path))
    assert rest.validation == whole.validation
    assert rest.test == whole.test


def test_a_finished_run_is_read_from_its_record_and_not_repeated(workload, context, tmp_path):
    there = replace(context, folder=tmp_path)
    (first,) = run_systems([fedavg(workload)], there)
    shutil.rmtree(tmp_path / "runs")
    (again,) = run_systems([fedavg(workload)], there)
    assert again == first
    assert not (tmp_path / "runs").exists()


def test_from_records_alone_a_system_has_the_seeds_that_were_kept(workload, context, tmp_path):
    there = replace(context, folder=tmp_path)
    with pytest.raises(ConfigError, match="must hold a run of every system, got none of not private"):
        run_systems([fedavg(workload)], replace(there, kept=True))
    run_systems([fedavg(workload)], there)
    (found,) = run_systems([fedavg(workload)], replace(there, repeats=3, kept=True))
    assert [each.seed for each in found.repeats] == [1]


def test_a_damaged_record_is_refused_by_name(workload, context, tmp_path):
    there = replace(context, folder=tmp_path)
    run_systems([fedavg(workload)], there)
    (record,) = tmp_path.glob("records/*.json")
    record.write_text(record.read_text()[:-20])
    with pytest.raises(D2PFedError, match=record.name):
        run_systems([fedavg(workload)], there)


def test_another_setting_is_another_run(workload, context, tmp_path):
    there = replace(context, folder=tmp_path)
    run_systems([fedavg(workload), fedavg(replace(workload, local=PAPER_LOCAL))], there)
    assert len(list(tmp_path.glob("runs/*"))) == 2


def test_clients_whose_training_diverges_send_zero(workload, context, tmp_path):
    wild = replace(fedavg(workload), local=replace(PAPER_LOCAL, lr=1e6, epochs=2))
    (curve,) = run_systems([wild], replace(context, folder=tmp_path))
    assert np.isfinite(curve.validation).all()


@pytest.fixture(scope="module")
def results(workload, context) -> dict[str, Result]:
    """All figures in small, written to the context."""
    with patch("d2pfed.runs.report.write_report"):  # each run's own plots take half of the time
        made = {
            "fig1a": fig1a([workload], context),
            "fig1b": fig1b([workload], context),
            "fig3": fig3(workload, context),
            "fig4": fig4(workload, context),
            "fig5": fig5(workload, context),
            "frontier": frontier(workload, context, [*_QUICK_KINDS], [1.0]),
        }
    for name, result in made.items():
        write(result, context.folder, f"scripts/reproduce {name} --quick", "2020-06-01")
    return made


@pytest.mark.parametrize("name", ["fig1a", "fig1b", "fig3", "fig4", "fig5", "frontier"])
def test_a_result_is_a_picture_a_table_words_and_a_record(results, context, name):
    result = results[name]
    assert (context.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (context.folder / f"{name}.svg").read_text().startswith("<?xml")
    lines = (context.folder / f"{name}.csv").read_text().splitlines()
    assert len(lines) == 1 + len(result.table.rows)
    record = json.loads((context.folder / f"{name}.json").read_text())
    assert record["command"] == f"scripts/reproduce {name} --quick"
    assert "rounds" in record["reduced"]
    assert len(record["words"]) >= (1 if name == "fig1b" else 2)
    for made in record["ran"].values():
        assert made["seeds"] == [1]
        assert [len(course) for course in made["validation_accuracy"]] == [made["rounds"]] == [2]


def test_figures_share_their_runs(results, context):
    names = [path.name.rsplit("-", 1)[0] for path in context.folder.glob("runs/*")]
    assert names.count("infimnist-d2pfed-0.6") == 6  # five group sizes, and updates of norm 1


def test_the_page_has_every_result_in_the_catalogues_order(results, context):
    text = page(context.folder, "there")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.split(":")[0] for title in titles[:5]] == [
        *("## Figure 1a", "## Figure 1b", "## Figure 3", "## Figure 4", "## Figure 5")
    ]
    assert "![Figure 3: D2P-Fed under different sigma](there/fig3.png)" in text
    assert "Made by `scripts/reproduce fig3 --quick` on 2020-06-01. Reduced: 20 rounds for 100" in text
    assert "| 90.7 |" in text


def test_the_committed_page_is_what_its_records_give():
    folder = ROOT / "reproduction" / "results"
    assert (ROOT / "reproduction" / "README.md").read_text() == page(folder, "results")


def test_a_page_of_nothing_or_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no result was found"):
        page(tmp_path, "x")
    (tmp_path / "a.json").write_text('{"name": "a"}')
    with pytest.raises(ConfigError, match="lacks columns, command, date"):
        page(tmp_path, "x")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="not the record of a result"):
        page(tmp_path, "x")


def test_a_full_result_reduces_nothing(context):
    assert reductions(replace(context, size=Size.FULL), INFIMNIST, CIFAR10) == ""


def test_every_name_of_the_catalogue_leads_to_a_function():
    for entry in CATALOGUE.values():
        assert callable(getattr(import_module(f"reproduction.{entry.module}"), entry.function))
    assert select("all") == CATALOGUE


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["reproduce", *words])
    try:
        run(app, "reproduce")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


def test_an_unknown_result_is_one_line(monkeypatch, capsys):
    status, _, text = command(monkeypatch, capsys, "fig9")
    assert status == 2
    assert text.startswith("reproduce: name must be all, page or one of errata, fig1a, ")
    assert text.count("\n") == 1


def test_missing_data_is_one_line(monkeypatch, capsys, tmp_path):
    status, _, text = command(
        monkeypatch, capsys, "fig3", "--quick", "--data", str(tmp_path), "--out", str(tmp_path)
    )
    assert status == 2
    assert "reproduce: " in text
    assert "Traceback" not in text


def test_a_folder_that_is_a_file_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "participations").touch()
    status, _, text = command(monkeypatch, capsys, "fig2", "--quick", "--out", str(tmp_path / "participations"))
    assert status == 2
    assert text.endswith("participations: File exists\n")
    assert "Traceback" not in text


def test_the_command_writes_the_page_beside_its_folder(monkeypatch, capsys, results, context, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(context.folder, folder, ignore=shutil.ignore_patterns("runs", "records"))
    status, out, _ = command(monkeypatch, capsys, "page", "--out", str(folder))
    assert status == 0
    assert "README.md" in out.replace("\n", "")
    assert (tmp_path / "README.md").read_text() == page(folder, "results")
