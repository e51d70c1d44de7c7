"""A report is read back from a run's directory, or one line says which file is missing or damaged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2pfed.accounting import Sampling
from d2pfed.api import Job
from d2pfed.cli import main
from d2pfed.errors import D2PFedError
from d2pfed.learning import LocalTraining, Optimizer, build_model, load_task
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate
from d2pfed.runs import RoundRecord, RunSummary
from d2pfed.runs.json_files import from_json, to_json
from d2pfed.runs.report import read_report, write_report
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, execute, task_job
from support.reports import Page, outside

FILES = ("plan.json", "settings.json", "metrics.jsonl", "summary.json")


def job(kind: MechanismName, scheme: Sampling, rounds: int, cohort: int = 10) -> Job:
    task = load_task("digits", population=4 * cohort, partition=None, data_dir=None)
    model = build_model("logistic", task, seed=0)
    target = PrivacyTarget(
        dimension=model.dimension,
        population=4 * cohort,
        cohort_size=cohort,
        rounds=rounds,
        epsilon=8.0,
        mechanism=kind,
        sampling=scheme,
    )
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=target,
        local=LocalTraining(optimizer=Optimizer.SGD, lr=0.2, epochs=1, batch_size=10),
        server=ServerOptimizer(),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=5,
    )
    return task_job(settings, task, model, calibrate(settings.target))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, bytes]:
    """Return a real run of two rounds, and the report that it left when it was interrupted after one."""
    path = tmp_path_factory.mktemp("runs") / "real"
    work = job(MechanismName.CENTERED, Sampling.FIXED, 2)
    execute(work, path, None, lambda _: False)
    first = (path / "report.html").read_bytes()
    execute(work, path, None, lambda _: True)
    return path, first


@pytest.fixture(scope="module")
def reported(finished, tmp_path_factory) -> Path:
    """Return a copy of it, whose summary also has what was spent so far."""
    path = shutil.copytree(finished[0], tmp_path_factory.mktemp("reported") / "real")
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"so_far": summary["guarantees"]}))
    write_report(read_report(path), path)
    return path


@pytest.fixture
def run(reported, tmp_path) -> Path:
    """Return a copy that a test may damage."""
    return shutil.copytree(reported, tmp_path / "real")


def test_a_run_leaves_a_report_when_interrupted_and_again_at_its_end(finished):
    path, first = finished
    interrupted, ended = (Page.read(html.decode()) for html in (first, (path / "report.html").read_bytes()))
    assert "Stopped after round 1 of 2: interrupted." in interrupted.text
    assert "Finished after 2 rounds." in ended.text
    assert outside(first.decode()) == []


def test_the_report_has_the_numbers_that_the_run_wrote(run):
    report = read_report(run)
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert report.summary.test_metrics == summary["test_metrics"]
    assert [item.epsilon for item in report.summary.guarantees] == [
        item["epsilon"] for item in summary["guarantees"]
    ]
    assert [record.metrics for record in report.rounds] == [line["metrics"] for line in lines]
    assert [record.survivors for record in report.rounds] == [10, 10]
    assert report.summary.repeatable
    assert report.ledger == "ledger.sqlite"
    settings = dict(report.settings)
    assert (settings["details.local.lr"], settings["target.cohort_size"], settings["details.dropouts.masked"]) == (
        "0.2",
        "10",
        "0",
    )
    assert (settings["target.bits"], settings["target.mechanism"]) == ("none", "centered")


def test_a_ledger_elsewhere_is_not_named(run):
    (run / "ledger.sqlite").unlink()
    assert read_report(run).ledger is None


def test_an_infinite_epsilon_is_read_back(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["so_far"][0] |= {"epsilon": float("inf"), "reason": "no noise"}
    (run / "summary.json").write_text(json.dumps(summary))
    assert read_report(run).summary.so_far[0].epsilon == float("inf")


def test_the_command_writes_the_same_bytes_in_another_process(run):
    page, plots = run / "report.html", sorted((run / "plots").iterdir())
    before = [path.read_bytes() for path in (page, *plots)]
    for path in (page, *plots):
        path.unlink()
    code = (
        "import sys; from d2pfed.cli import main; main()\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    (run.parent / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 20\n")
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run)],
        capture_output=True,
        text=True,
        check=False,
        cwd=run.parent,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The report is in {page}.\n"
    assert [path.read_bytes() for path in (page, *plots)] == before


def complain(arguments: list[str], monkeypatch, capsys) -> str:
    """Return the one line with which a command refuses."""
    monkeypatch.setattr(sys, "argv", ["d2pfed", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_is_all_that_is_printed(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["d2pfed", "report", str(run), "--json"])
    main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(run / "report.html")
    assert len(printed["plots"]) == 12


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(run, monkeypatch, capsys, name):
    (run / name).unlink()
    assert f"{name} is missing" in complain([str(run)], monkeypatch, capsys)


def test_what_is_no_directory_is_refused(run, monkeypatch, capsys):
    assert "there is no run directory" in complain([str(run / "nowhere")], monkeypatch, capsys)


def test_a_file_that_cannot_be_read_is_named(run):
    (run / "plan.json").unlink()
    (run / "plan.json").mkdir()
    with pytest.raises(D2PFedError, match=r"cannot read .*plan\.json"):
        read_report(run)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"{}", b'"text"', b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_something_else_is_refused_by_name(run, name, content):
    if (name, content) == ("metrics.jsonl", b""):
        return  # a crash may take metrics, and the report goes on without
    (run / name).write_bytes(content)
    with pytest.raises(D2PFedError, match=name):
        read_report(run)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plan.json", '"quorum":10', '"quorum":11'),
        ("plan.json", '"quorum":10', '"quorum": 10'),
        ("plan.json", '"":"Ring"', '"":"Ding"'),
        ("settings.json", '"cohort_size":10', '"cohort_size":0'),
        ("settings.json", '"title":"digits, logistic"', '"title":7'),
        ("settings.json", '"data":"', '"dada":"'),
        ("settings.json", '"rounds":2,"seed"', '"rounds":2.5,"seed"'),
        ("settings.json", '"lr":{"":"float","is":"0x', '"lr":{"":"float","is":"?x'),
        ("metrics.jsonl", '"accuracy": 0', '"accuracy": 7'),
        ("metrics.jsonl", '"metrics"', '"metric"'),
        ("metrics.jsonl", '"loss": ', '"loss": "x", "more": '),
        ("metrics.jsonl", '"exchanges": []', '"exchanges": [1]'),
        ("metrics.jsonl", '"survivors": 10', '"survivors": 1e1'),
        ("metrics.jsonl", '"survivors": 10', f'"survivors": {10**400}'),
        ("metrics.jsonl", '"update_norm": ', '"update_norm": "'),
        ("metrics.jsonl", '"round": 2', '"round": 3'),
        ("summary.json", '"view": "server"', '"view": "nobody"'),
        ("summary.json", '"unit": "client"', '"unit": "cat"'),
        ("summary.json", '"colluders": 0', '"colluders": true'),
        ("summary.json", '"so_far": [', '"so_far": 5, "other": ['),
        ("summary.json", '"reason": ""', '"reason": null'),
        ("summary.json", '"delta": 0', '"delta": "small", "x": 0'),
    ],
)
def test_a_damaged_value_is_refused(run, name, old, new):
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))
    with pytest.raises(D2PFedError) as refused:
        read_report(run)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_run_that_went_on_since_its_summary_must_be_resumed_first(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + metrics.read_text().splitlines()[1].replace('"round": 2', '"round": 3')
    )
    with pytest.raises(D2PFedError, match=r"summary\.json has 2 rounds and metrics\.jsonl 3: .*resume it"):
        read_report(run)


def test_records_and_summary_come_back_by_the_type_that_wrote_them(run):
    records = (run / "metrics.jsonl").read_text().splitlines()
    assert [to_json(from_json(RoundRecord, line, "here")) for line in records] == records
    summary = (run / "summary.json").read_text()
    assert to_json(from_json(RunSummary, summary, "here")) == summary


def test_a_private_run_without_its_plan_is_not_shown_as_one_in_the_clear(run):
    """The summary knows its width: the planted twin says that nothing was encoded, and has no plan to show."""
    (run / "plan.json").unlink()
    with pytest.raises(D2PFedError, match=r"plan\.json is missing"):
        read_report(run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"bits": None}))
    assert read_report(run).plan is None


def test_a_run_in_the_clear_with_a_plan_beside_it_is_refused(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"bits": None}))
    with pytest.raises(D2PFedError, match=r"plan\.json is there, and by summary\.json .* in the clear"):
        read_report(run)
