import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from d2pfed.accounting import SERVER, Sampling
from d2pfed.api import Job
from d2pfed.errors import ConfigError, D2PFedError, DamagedFile, LedgerError
from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.ledger import Ledger, read_rows, verify
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Outcome, Participant, run_plan
from d2pfed.runs import ArrayShape, Checkpoint, End, RoundRecord, RunDirectory, RunSettings, RunSummary, open_run
from d2pfed.runs.json_files import from_json, to_json
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, execute, task_job
from support.reports import Page


@pytest.fixture(scope="module")
def parts():
    task = load_task("digits", population=40)
    return task, build_model("logistic", task, seed=0)


def settings(model, **changes) -> Settings:
    target = PrivacyTarget(
        dimension=model.dimension, population=40, cohort_size=20, rounds=4, epsilon=30.0, delta=1e-3
    )
    base = Settings(
        task="digits",
        data="digits",
        model="logistic",
        target=target,
        local=LocalTraining(lr=0.5, epochs=1, batch_size=10),
        server=ServerOptimizer(lr=1.0, momentum=0.5, averaging=0.5),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=7,
    )
    return replace(base, **changes)


def job(parts, **changes) -> Job:
    wanted = settings(parts[1], **changes)
    return task_job(wanted, *parts, calibrate(wanted.target))


def spared(model, spare: int) -> PrivacyTarget:
    return replace(settings(model).target, spare=spare, attempts_per_round=spare + 3)


def forever(_progress) -> bool:
    return True


def after(rounds: int):
    return lambda progress: progress.round < rounds


def state_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "checkpoint.safetensors")


def test_a_run_leaves_plan_ledger_metrics_model_and_summary(parts, tmp_path):
    summary = execute(job(parts), tmp_path / "run", None, forever)
    assert summary.rounds == 4
    assert summary.stopped == ""
    assert 0.1 < summary.test_metrics["accuracy"] <= 1
    assert [str(item.observer) for item in summary.guarantees] == ["released", "server", "client", "alone"]
    assert summary.guarantees[0].epsilon <= 30
    assert (summary.charged, summary.max_attempts, summary.end) == (4, 5, End.COMPLETE)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    for name in ("plan.json", "settings.json", "summary.json", "model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_an_interrupted_run_resumes_to_the_same_model(parts, tmp_path):
    one, two = tmp_path / "a" / "run", tmp_path / "b" / "run"
    whole = execute(job(parts), one, None, forever)
    part = execute(job(parts), two, None, after(2))
    assert (part.rounds, part.end, part.test_metrics) == (2, End.INTERRUPTED, None)
    rest = execute(job(parts), two, None, forever)
    assert rest.rounds == 4
    for name, array in state_of(one).items():
        np.testing.assert_array_equal(array, state_of(two)[name])
    assert rest.guarantees == whole.guarantees == part.guarantees
    assert rest.charged == whole.charged


def test_a_finished_run_says_again_what_it_came_to(parts, tmp_path):
    first = execute(job(parts), tmp_path / "run", None, forever)
    again = execute(job(parts), tmp_path / "run", None, forever)
    assert again.test_metrics == first.test_metrics
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_other_settings_are_refused_and_named(parts, tmp_path):
    execute(job(parts), tmp_path / "run", None, after(1))
    with pytest.raises(ConfigError, match="begun with other settings: seed was 7, now 8"):
        execute(job(parts, seed=8), tmp_path / "run", None, forever)


def test_a_second_process_on_a_run_is_refused(tmp_path):
    with RunDirectory.open(tmp_path / "run", "{}"), pytest.raises(ConfigError, match="another process is working"):
        RunDirectory.open(tmp_path / "run", "{}")
    RunDirectory.open(tmp_path / "run", "{}").close()


def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the run directory"):
        RunDirectory.open(tmp_path / "file" / "run", "{}")


def test_no_file_of_a_run_is_written_through_a_link(tmp_path, monkeypatch):
    def attacked(path: Path) -> list[str]:
        """Open a run whose files lead elsewhere and add a line; return what was changed elsewhere."""
        path.mkdir()
        elsewhere = {name: path.with_name(f"{path.name}-{name}") for name in ("lock", "metrics.jsonl", "seen")}
        for name, file in elsewhere.items():
            file.write_text("kept")
            (path / name).symlink_to(file)
        for _ in range(2):  # once more without the first link, at which it stops
            with suppress(ConfigError), RunDirectory.open(path, "{}") as run:
                run.replace("seen", b"replaced")
                run.append("{}")
            (path / "lock").unlink()
        return [name for name, file in elsewhere.items() if file.read_text() != "kept"]

    assert attacked(tmp_path / "checked") == []
    monkeypatch.setattr("d2pfed.runs.directory.opened_for_lines", lambda file: file.open("w"))
    assert attacked(tmp_path / "unchecked") == ["lock", "metrics.jsonl"]


def test_a_damaged_checkpoint_is_refused(parts, tmp_path):
    path = tmp_path / "run"
    execute(job(parts), path, None, after(2))
    file = path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DamagedFile, match="is not a checkpoint"):
        execute(job(parts), path, None, forever)


@pytest.mark.parametrize("place", range(0, 9000, 450))
def test_a_checkpoint_with_any_byte_changed_is_one_clear_error(tmp_path, finished, place):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    file = path / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1
    file.write_bytes(content)
    with RunDirectory.open(path, (path / "settings.json").read_text()) as directory, pytest.raises(D2PFedError):
        directory.load()


@pytest.fixture(scope="module")
def finished(parts, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    execute(job(parts), path, None, forever)
    return path


def test_a_checkpoint_without_a_checksum_is_caught(parts, tmp_path, finished, monkeypatch):
    """The planted bug: a flipped bit of a parameter would train on."""
    monkeypatch.setattr("d2pfed.runs.directory._checksum", lambda _checkpoint: "")
    with RunDirectory.open(tmp_path / "other", "{}") as directory:
        directory.save(Checkpoint(ServerOptimizer().start(np.zeros(3, np.float32)), ""))
        file = directory.path / "checkpoint.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert directory.load() is not None


# A run belongs to its ledger


def shared_ledger(tmp_path, plan, times=1.0, declared=()):
    path = tmp_path / "ledger.sqlite"
    budget = replace(run_plan(plan).budget, epsilon=times * plan.epsilon, declared=declared)
    Ledger.create(path, budget).close()
    return path


def test_a_ledger_that_is_not_there_is_an_error_and_none_is_made(parts, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no ledger at .*misspelt: `d2pfed ledger create` makes one"):
        execute(job(parts), tmp_path / "run", tmp_path / "misspelt", forever)
    assert not (tmp_path / "misspelt").exists()


def test_a_checkpoint_beside_an_older_ledger_is_refused(parts, tmp_path):
    path = tmp_path / "run"
    ledger = shared_ledger(tmp_path, job(parts).plan)
    execute(job(parts), path, ledger, after(1))
    old = ledger.read_bytes()
    execute(job(parts), path, ledger, after(2))
    ledger.write_bytes(old)
    with pytest.raises(LedgerError, match="older copy"):
        execute(job(parts), path, ledger, forever)


def test_an_older_ledger_without_its_checkpoint_is_refused(parts, tmp_path):
    path = tmp_path / "run"
    ledger = shared_ledger(tmp_path, job(parts).plan)
    old = ledger.read_bytes()
    execute(job(parts), path, ledger, after(2))
    (path / "checkpoint.safetensors").unlink()
    ledger.write_bytes(old)
    with pytest.raises(LedgerError, match="older copy"):
        execute(job(parts), path, ledger, forever)


def test_a_run_whose_checkpoint_is_gone_does_not_begin_again(parts, tmp_path):
    path = tmp_path / "run"
    execute(job(parts), path, None, after(2))
    (path / "checkpoint.safetensors").unlink()
    with pytest.raises(LedgerError, match="its directory does not know"):
        execute(job(parts), path, None, forever)


def test_a_run_whose_ledger_is_gone_does_not_get_a_new_one(parts, tmp_path):
    path = tmp_path / "run"
    execute(job(parts), path, None, after(1))
    for file in path.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerError, match="is gone, and what was spent with it"):
        execute(job(parts), path, None, forever)


def test_a_copied_directory_does_not_spend_again(parts, tmp_path):
    path = tmp_path / "run"
    execute(job(parts, seed=None), path, None, after(1))
    shutil.copytree(path, tmp_path / "copies" / "run")
    with pytest.raises(ConfigError, match="is a copy of a run's directory"):
        execute(job(parts, seed=None), tmp_path / "copies" / "run", None, forever)
    path.rename(tmp_path / "copies" / "moved")
    with pytest.raises(LedgerError, match="run moved: its directory has begun run run here"):
        execute(job(parts, seed=None), tmp_path / "copies" / "moved", None, forever)


def test_of_a_run_and_its_copy_one_goes_on(parts, tmp_path):
    """A copy that was put back in its place, as from a backup, knows nothing of what was written since."""
    path, backup = tmp_path / "run", tmp_path / "backup"
    ledger = shared_ledger(tmp_path, job(parts).plan)
    execute(job(parts), path, ledger, after(1))
    shutil.copytree(path, backup)
    execute(job(parts), path, ledger, after(2))
    path.rename(tmp_path / "aside")
    shutil.copytree(backup, path)
    with pytest.raises(LedgerError, match="its directory does not know"):
        execute(job(parts), path, ledger, forever)
    shutil.rmtree(path)
    (tmp_path / "aside").rename(path)
    assert execute(job(parts), path, ledger, forever).rounds == 4


def test_a_second_run_of_the_same_name_is_refused(parts, tmp_path):
    ledger = shared_ledger(tmp_path, job(parts).plan, times=5)
    execute(job(parts), tmp_path / "a" / "run", ledger, after(1))
    with pytest.raises(LedgerError, match="run run was begun by another directory"):
        execute(job(parts), tmp_path / "b" / "run", ledger, forever)


def test_runs_over_the_same_clients_share_one_budget(parts, tmp_path):
    ledger = shared_ledger(tmp_path, job(parts).plan)
    first = execute(job(parts), tmp_path / "first", ledger, forever)
    assert first.rounds == 4
    second = execute(job(parts, seed=8), tmp_path / "second", ledger, forever)
    assert (second.rounds, second.end, second.test_metrics, second.charged) == (0, End.EXHAUSTED, None, 0)
    assert "run second: " in second.stopped


def test_a_run_keeps_its_own_guarantee_in_a_richer_ledger(parts, tmp_path):
    """The plan was stretched by hand: by itself it spends more than it guarantees, and the ledger would allow it."""
    planned = job(parts)
    stretched = replace(planned, plan=replace(planned.plan, rounds=40, max_attempts=40))
    ledger = shared_ledger(tmp_path, stretched.plan, times=100)
    summary = execute(stretched, tmp_path / "run", ledger, forever)
    assert (summary.rounds, summary.end, summary.test_metrics) == (0, End.EXHAUSTED, None)
    assert "and it guarantees 30" in summary.stopped


def test_a_run_takes_no_more_attempts_than_it_was_charged_for(parts, tmp_path):
    ledger = shared_ledger(tmp_path, job(parts).plan, times=100)
    losses = Dropouts(unmask=Fraction(1))  # every attempt fails after it was committed
    stubborn = replace(settings(parts[1]).target, attempts_per_round=20)
    summary = execute(job(parts, dropouts=losses, target=stubborn), tmp_path / "run", ledger, forever)
    assert (summary.end, summary.charged, summary.test_metrics) == (End.EXHAUSTED, summary.max_attempts, None)
    assert verify(ledger).charged == {"run": summary.max_attempts}


def test_a_ledger_with_another_budget_is_refused(parts, tmp_path):
    ledger = shared_ledger(tmp_path, job(parts).plan)
    target = replace(settings(parts[1]).target, delta=1e-4)
    with pytest.raises(
        ConfigError, match=r"the ledger has the budget at delta 0\.001 .*, this plan needs at delta"
    ):
        execute(job(parts, target=target), tmp_path / "second", ledger, forever)


# What is printed


def test_spending_so_far_is_shown_only_for_a_blind_stop(parts, tmp_path):
    sighted = execute(job(parts), tmp_path / "sighted", None, after(2))
    blind = execute(job(parts, stop_is_blind=True), tmp_path / "blind", None, after(2))
    assert sighted.so_far == ()
    assert sighted.guarantees == blind.guarantees
    for part, whole in zip(blind.so_far, blind.guarantees, strict=True):
        assert part.epsilon < whole.epsilon
    for name in ("sighted", "blind"):
        page = (tmp_path / name / "report.html").read_text()
        assert ("if nobody stopped it" in page) == (name == "blind")


def test_who_took_part_stands_beside_no_amplified_number(parts, tmp_path):
    execute(job(parts, stop_is_blind=True), tmp_path / "run", None, after(2))
    for file in ("summary.json", "metrics.jsonl", "report.html"):
        text = (tmp_path / "run" / file).read_text()
        assert "realised" not in text
        assert "participants" not in text


# Crashes


@pytest.mark.parametrize("damage", ["lost", "torn", "twice", "rubbish", "not text"])
def test_a_damaged_line_of_metrics_does_not_end_a_run(parts, tmp_path, damage):
    path = tmp_path / "run"
    execute(job(parts), path, None, after(2))
    file = path / "metrics.jsonl"
    one, two = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        {
            "lost": two,
            "torn": one[:20] + two,
            "twice": one + two + two,
            "rubbish": b"[1]\n{}\n" + one + b'{"round": "2"}\n' + two,
            "not text": b"\xff\xfe\n" + one + two,
        }[damage]
    )
    summary = execute(job(parts), path, None, forever)
    assert (summary.rounds, summary.end) == (4, End.COMPLETE)
    found = [json.loads(line)["round"] for line in file.read_text().splitlines()]
    assert found == {"lost": [2, 3, 4], "torn": [3, 4]}.get(damage, [1, 2, 3, 4])
    assert (path / "report.html").exists()


@pytest.mark.parametrize("name", ["settings.json", "identity", "seen", "checkpoint.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"[" * 5000, b"{}"])
def test_a_damaged_file_is_one_clear_error(parts, tmp_path, finished, name, content):
    path = tmp_path / "run"
    finished_copy = shutil.copytree(finished, path)
    (finished_copy / name).write_bytes(content)
    with pytest.raises(D2PFedError) as caught:
        execute(job(parts), path, None, forever)
    assert "\n" not in str(caught.value)


def test_a_run_whose_settings_are_gone_is_refused(parts, tmp_path, finished):
    (shutil.copytree(finished, tmp_path / "run") / "settings.json").unlink()
    with pytest.raises(DamagedFile, match=r"settings\.json is missing"):
        execute(job(parts), tmp_path / "run", None, forever)


@pytest.mark.parametrize("name", ["settings.json", "identity", "seen", "checkpoint.safetensors", "metrics.jsonl"])
def test_a_directory_in_place_of_a_file_is_one_clear_error(parts, tmp_path, finished, name):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises((D2PFedError, OSError)) as caught:
        execute(job(parts), path, None, forever)
    assert "\n" not in str(caught.value)


def test_the_metrics_of_a_round_that_was_not_kept_are_forgotten(tmp_path):
    with RunDirectory.open(tmp_path / "run", "{}") as directory:
        for number in (1, 2, 3):
            directory.append(json.dumps({"round": number}))
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
execute(test_run.job(parts, target=test_run.spared(parts[1], 4)), path, None, test_run.forever)
print("done", flush=True)
"""


def test_kills_at_random_moments_lose_no_release_and_no_round(parts, tmp_path):
    """The process dies twice at different moments of a run; then it is left to finish."""
    path = tmp_path / "run"
    script = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for delay in (0.1, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    summary = execute(job(parts, target=spared(parts[1], 4)), path, None, forever)
    rows = read_rows(path / "ledger.sqlite")
    committed = {row.key.round for row in rows if row.kind == "commit"}
    assert committed == set(range(summary.rounds)) == set(range(4))
    assert summary.charged <= summary.max_attempts == 8
    assert summary.guarantees[0].epsilon <= 30
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, summary.rounds + 1))


def the_cap_is_counted(parts, path, monkeypatch):
    """Each contribution knows how often its client took part before, in attempts that failed too."""
    seen: Counter[int] = Counter()
    encode = Participant.encode

    def noted(self, session, update, group, clip=None):
        assert self.participations == seen[self.client]
        seen[self.client] += 1
        return encode(self, session, update, group, clip)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "encode", noted)
        target = replace(spared(parts[1], 6), max_participations=2, against=SERVER, epsilon=60.0)
        for rounds in (2, 4):
            execute(job(parts, target=target, dropouts=Dropouts(unmask=Fraction(2, 5))), path, None, after(rounds))
    assert max(seen.values()) > 2  # some were at their cap


def test_the_cap_is_counted_in_training_over_attempts_and_resumptions(parts, tmp_path, monkeypatch):
    the_cap_is_counted(parts, tmp_path / "run", monkeypatch)


def test_a_cap_that_is_not_counted_in_training_is_caught(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "participations", lambda _self, _run, clients: dict.fromkeys(clients, 0))
    with pytest.raises(AssertionError):
        the_cap_is_counted(parts, tmp_path / "run", monkeypatch)


def test_a_resumed_partition_draws_no_client_twice(parts, tmp_path):
    """Without a seed: the secret that draws cohorts is the run's, not the process's."""
    target = replace(settings(parts[1]).target, sampling=Sampling.ONCE, cohort_size=10, against=SERVER)
    path = tmp_path / "run"
    for rounds in (1, 2, 3, 4):
        execute(job(parts, target=target, seed=None), path, None, after(rounds))
    committed = [row.release.participants for row in read_rows(path / "ledger.sqlite") if row.kind == "commit"]
    assert sorted(client for cohort in committed for client in cohort) == list(range(40))
    assert (path / "identity").stat().st_mode & 0o077 == 0


# In the clear, and what every run leaves


ARRAYS = (ArrayShape("weight", (2, 3)), ArrayShape("bias", (2,)), ArrayShape("scale", ()))


@dataclass(frozen=True)
class Means:
    """The mean of a round, by a formula of the round and the model; it stops working after some rounds."""

    last: int = 99

    def mean(self, number, model):
        if number >= self.last:
            raise KeyboardInterrupt
        mean = (np.cos(np.arange(len(model)) + number) - model / 4).astype(np.float32)
        return Outcome(mean, attempt=0, survivors=3)


@dataclass(frozen=True)
class Length:
    """A metric that a test can compute again."""

    def validate(self, _rounds, params):
        return {"length": float(np.linalg.norm(params))}

    def test(self, params):
        return {"length": float(np.linalg.norm(params))}


def clear_settings(**changes) -> RunSettings:
    base = RunSettings(
        title="means",
        data="none",
        target=None,
        rounds=4,
        optimizer=ServerOptimizer(lr=0.5, momentum=0.5, averaging=0.5),
        arrays=ARRAYS,
    )
    return replace(base, **changes)


def train_in_the_clear(path: Path, means=Means(), listen=forever) -> RunSummary:  # noqa: B008 - it is frozen
    with open_run(path, clear_settings(), None, np.ones(9, np.float32)) as run:
        return run.train(means, Length(), listen)


def test_a_clear_run_leaves_all_files_but_plan_and_ledger(tmp_path, finished):
    summary = train_in_the_clear(tmp_path / "run")
    assert (summary.rounds, summary.end, summary.guarantees, summary.bits) == (4, End.COMPLETE, (), None)
    assert (summary.charged, summary.upload_bytes) == (4, 36)
    private, clear = ({file.name for file in path.iterdir()} for path in (finished, tmp_path / "run"))
    assert {name for name in private - clear if "ledger" not in name} == {"plan.json", "identity", "seen"}
    assert clear <= private
    page = Page.read((tmp_path / "run" / "report.html").read_text())
    assert "it protects nobody" in page.text
    assert "Epsilon none trained in the clear" in page.text
    assert "protects nobody" not in Page.read((finished / "report.html").read_text()).text.replace(
        "This run repeats from its seed: anyone who knows the seed can remove the noise", ""
    )


def test_an_interrupted_run_in_the_clear_resumes_to_the_same_model(tmp_path):
    whole = train_in_the_clear(tmp_path / "whole")
    part = train_in_the_clear(tmp_path / "parts", listen=after(2))
    assert (part.rounds, part.end, part.test_metrics) == (2, End.INTERRUPTED, None)
    assert "Stopped after round 2 of 4" in (tmp_path / "parts" / "report.html").read_text()
    with pytest.raises(KeyboardInterrupt):
        train_in_the_clear(tmp_path / "parts", Means(last=3))
    rest = train_in_the_clear(tmp_path / "parts")
    assert rest.test_metrics == whole.test_metrics
    for name, array in state_of(tmp_path / "whole").items():
        np.testing.assert_array_equal(array, state_of(tmp_path / "parts")[name])
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


def test_a_private_run_does_not_go_on_in_the_clear_nor_the_other_way_round(parts, tmp_path):
    train_in_the_clear(tmp_path / "clear", listen=after(1))
    initial = np.ones(9, np.float32)
    with (
        pytest.raises(LedgerError, match="is gone"),
        open_run(tmp_path / "clear", clear_settings(), job(parts).plan, initial),
    ):
        pass
    private = open_run(tmp_path / "private", clear_settings(), job(parts).plan, initial)
    with private as run, pytest.raises(ValueError, match="not trained in the clear"):
        run.train(Means(), Length(), forever)
    with (
        pytest.raises(ConfigError, match="begun with a plan"),
        open_run(tmp_path / "private", clear_settings(), None, initial),
    ):
        pass


def test_the_model_is_saved_as_named_arrays_with_their_shapes(parts, tmp_path, finished):
    train_in_the_clear(tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {name: array.shape for name, array in saved.items()} == {"weight": (2, 3), "bias": (2,), "scale": ()}
    flat = np.concatenate([saved[array.name].ravel() for array in ARRAYS])
    np.testing.assert_array_equal(flat, state_of(tmp_path / "run")["average"])
    module = dict(parts[1].module.named_parameters())
    saved = load_file(finished / "model.safetensors")
    assert {name: array.shape for name, array in saved.items()} == {
        name: tuple(module[name].shape) for name in parts[1].names
    }


def test_private_and_clear_runs_leave_records_of_one_type(tmp_path, finished):
    train_in_the_clear(tmp_path / "run")
    for path in (tmp_path / "run", finished):
        lines = (path / "metrics.jsonl").read_text().splitlines()
        records = [from_json(RoundRecord, line, "metrics.jsonl") for line in lines]
        assert [record.round for record in records] == [1, 2, 3, 4]
        assert [to_json(record) for record in records] == lines
        assert all(record.exchanges == () for record in records)
    with pytest.raises(DamagedFile, match="it has no `metrics`"):
        from_json(RoundRecord, lines[0].replace('"metrics"', '"metric"'), "metrics.jsonl")
