import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from d2pfed.accounting import SERVER, Scheme
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.ledger import read_rows
from d2pfed.plan import Target
from d2pfed.run import Job, RunDirectory, Settings
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerStep


@pytest.fixture(scope="module")
def parts():
    task = load_task("digits", population=40)
    return task, build_model("logistic", task, seed=0)


def settings(model, **changes) -> Settings:
    wish = Target(dimension=model.dimension, population=40, cohort=20, rounds=4, epsilon=30.0, delta=1e-3)
    base = Settings(
        task="digits",
        data="digits",
        model="logistic",
        target=wish,
        local=LocalTraining(rate=0.5, epochs=1, batch_size=10),
        step=ServerStep(rate=1.0, momentum=0.5, averaging=0.5),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=7,
    )
    return replace(base, **changes)


def job(parts, **changes) -> Job:
    return Job.of(settings(parts[1], **changes), *parts)


def forever(_progress) -> bool:
    return True


def after(rounds: int):
    return lambda progress: progress.round < rounds


def state_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "checkpoint.safetensors")


def test_a_run_leaves_plan_ledger_metrics_model_and_summary(parts, tmp_path):
    summary = job(parts).execute(tmp_path / "run", tmp_path / "run" / "ledger.sqlite", forever)
    assert summary.rounds == 4
    assert summary.stopped == ""
    assert 0.1 < summary.test_accuracy <= 1
    assert [str(item.observer) for item in summary.spent] == ["released", "server", "client", "alone"]
    assert summary.spent[0].epsilon <= 30
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    for name in ("plan.json", "settings.json", "summary.json", "model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_an_interrupted_run_resumes_to_the_same_model(parts, tmp_path):
    one, two = tmp_path / "a" / "run", tmp_path / "b" / "run"
    whole = job(parts).execute(one, one / "ledger.sqlite", forever)
    part = job(parts).execute(two, two / "ledger.sqlite", after(2))
    assert (part.rounds, part.stopped, part.test_accuracy) == (2, "interrupted", None)
    rest = job(parts).execute(two, two / "ledger.sqlite", forever)
    assert rest.rounds == 4
    for name, array in state_of(one).items():
        np.testing.assert_array_equal(array, state_of(two)[name])
    assert [item.epsilon for item in rest.spent] == [item.epsilon for item in whole.spent]


def test_a_finished_run_says_again_what_it_came_to(parts, tmp_path):
    first = job(parts).execute(tmp_path / "run", tmp_path / "run" / "ledger.sqlite", forever)
    again = job(parts).execute(tmp_path / "run", tmp_path / "run" / "ledger.sqlite", forever)
    assert again.test_accuracy == first.test_accuracy
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_other_settings_are_refused_and_named(parts, tmp_path):
    job(parts).execute(tmp_path / "run", tmp_path / "run" / "ledger.sqlite", after(1))
    with pytest.raises(ConfigError, match="begun with other settings: seed was 7, now 8"):
        job(parts, seed=8).execute(tmp_path / "run", tmp_path / "run" / "ledger.sqlite", forever)


def test_a_second_process_on_a_run_is_refused(tmp_path):
    with RunDirectory.open(tmp_path / "run", "{}"), pytest.raises(ConfigError, match="another process is working"):
        RunDirectory.open(tmp_path / "run", "{}")
    RunDirectory.open(tmp_path / "run", "{}").close()


def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the run directory"):
        RunDirectory.open(tmp_path / "file" / "run", "{}")


def test_a_damaged_checkpoint_is_refused(parts, tmp_path):
    path = tmp_path / "run"
    job(parts).execute(path, path / "ledger.sqlite", after(2))
    file = path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        job(parts).execute(path, path / "ledger.sqlite", forever)


def test_a_checkpoint_beside_an_older_ledger_is_refused(parts, tmp_path):
    path, ledger = tmp_path / "run", tmp_path / "ledger.sqlite"
    job(parts).execute(path, ledger, after(1))
    old = ledger.read_bytes()
    job(parts).execute(path, ledger, after(2))
    ledger.write_bytes(old)
    with pytest.raises(LedgerError, match="older copy"):
        job(parts).execute(path, ledger, forever)


def test_runs_over_the_same_clients_share_one_budget(parts, tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    first = job(parts).execute(tmp_path / "first", ledger, forever)
    assert first.rounds == 4
    second = job(parts, seed=8).execute(tmp_path / "second", ledger, forever)
    assert second.rounds == 0
    assert "the budget is spent" in second.stopped


def test_a_ledger_with_another_budget_is_refused(parts, tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    job(parts).execute(tmp_path / "first", ledger, after(1))
    wish = replace(settings(parts[1]).target, delta=1e-4)
    with pytest.raises(ConfigError, match="budget"):
        job(parts, target=wish).execute(tmp_path / "second", ledger, forever)


def test_the_metrics_of_a_round_that_was_not_kept_are_forgotten(tmp_path):
    with RunDirectory.open(tmp_path / "run", "{}") as directory:
        for number in (1, 2, 3):
            directory.append({"round": number})
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"round": 4, "accu')
        directory.keep_metrics(2)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"round": 1}\n{"round": 2}\n'


def test_what_replace_writes_is_whole_or_absent(tmp_path):
    with RunDirectory.open(tmp_path / "run", "{}") as directory:
        directory.replace("file", b"old")
        with pytest.raises(TypeError):
            directory.replace("file", "not bytes")
        assert (tmp_path / "run" / "file").read_bytes() == b"old"


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_run
task = test_run.load_task("digits", population=40)
parts = task, test_run.build_model("logistic", task, seed=0)
path = Path({path!r})
print("ready", flush=True)
test_run.job(parts).execute(path, path / "ledger.sqlite", test_run.forever)
print("done", flush=True)
"""


def test_kills_at_random_moments_lose_no_release_and_no_round(parts, tmp_path):
    """The process dies three times at moments spread over a run; then it is left to finish."""
    path = tmp_path / "run"
    script = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for delay in (0.05, 0.2, 0.5):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    summary = job(parts).execute(path, path / "ledger.sqlite", forever)
    rows = read_rows(path / "ledger.sqlite")
    committed = {row.key.round for row in rows if row.kind == "commit"}
    assert committed >= set(range(summary.rounds))
    assert summary.rounds == 4 or "budget" in summary.stopped
    assert summary.spent[0].epsilon <= 30
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, summary.rounds + 1))


def test_a_resumed_partition_draws_no_client_twice(parts, tmp_path):
    """Without a seed: the secret that draws cohorts is the run's, not the process's."""
    wish = replace(settings(parts[1]).target, scheme=Scheme.ONCE, cohort=10, against=SERVER)
    path = tmp_path / "run"
    for rounds in (1, 2, 3, 4):
        job(parts, target=wish, seed=None).execute(path, path / "ledger.sqlite", after(rounds))
    committed = [row.release.participants for row in read_rows(path / "ledger.sqlite") if row.kind == "commit"]
    assert sorted(client for cohort in committed for client in cohort) == list(range(40))
    assert (path / "identity").stat().st_mode & 0o077 == 0
