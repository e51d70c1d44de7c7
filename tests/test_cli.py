import contextlib
import importlib
import json
import signal
import subprocess
import sys

import pytest

from d2pfed.api.progress import Watcher
from support.commands import run_command


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command line in an empty directory and return its exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(line: str) -> tuple[int, str, str]:
        return run_command(line.split(), monkeypatch, capsys)

    return call


CIFAR = "--accountant binomial --trials 7285851 --levels 401 --dimension 996298 --population 2000 --rounds 300"
FOR_RELEASED = "--against released --sampling fixed --dropouts 0 --colluders 0"
PAPER = f"plan --delta 1e-5 --cohort-size 100 --rounds 100 --dimension 51370 {FOR_RELEASED} --json"
TINY = (
    "train --task digits --model logistic --population 40 --cohort-size 20 --rounds 2 --epsilon 30 --name tiny"
    " --against released --sampling fixed --dropouts 0 --colluders 0 --backend in-process"
)


@pytest.mark.parametrize(
    ("changes", "bits", "coordinates"),
    [
        ("", 8, 4_096),
        ("--longest-mean 1", 9, 4_096),
        ("--compression off", 8, 51_450),
        ("--compression off --rotation hadamard", 8, 65_536),
    ],
)
def test_the_plan_of_the_papers_setting_costs_what_it_should(run, changes, bits, coordinates):
    status, out, _ = run(f"{PAPER} {changes}")
    plan = json.loads(out)
    assert status == 0
    assert 1.152 <= plan["sigma"] <= 1.152 * 1.01
    size = coordinates * bits // 8
    assert (plan["bits"], plan["modulus"], plan["vector_bytes"]) == (bits, 2**bits, size)
    assert size < plan["upload_bytes"] < size + 12_500  # keys and shares of a hundred clients on top
    assert min(plan["wrap_probability"], plan["wrap_energy"]) <= 1e-2
    assert 1 <= plan["relative_error"] < 1.01
    assert plan["noise_multiplier"] == pytest.approx(plan["sigma"] / 2, rel=1e-3)
    assert 0.99 < plan["epsilon"]["released"] <= 1 < plan["epsilon"]["server"] < plan["epsilon"]["alone"]
    assert plan["options"]["population"] == 100_000


def test_a_plan_is_a_table_with_reasons_and_warnings(run):
    status, out, _ = run(f"plan --population 2000 --cohort-size 10 --dimension 996298 --rounds 300 {FOR_RELEASED}")
    assert status == 0
    for text in (
        "noise on the sum",
        "released",
        "server",
        "alone",
        "To keep epsilon 1",
        "bits hold it",
        "Warning:",
    ):
        assert text in out


def test_standing_keys_have_no_shares_that_open_a_secret(run):
    silos = "plan --population 4 --cohort-size 4 --dimension 8 --rounds 2 --delta 1e-3 --sampling none"
    _, standing, _ = run(f"{silos} --consistency signed --protocol standing")
    _, pairwise, _ = run(f"{silos} --protocol pairwise")
    assert "shares that open a secret" not in standing
    assert "shares that open a secret" in pairwise


@pytest.mark.parametrize(
    ("line", "epsilon"),
    [
        ("--noise-multiplier 0.6 --accountant wbk-mironov", 2.950479),
        ("--noise-multiplier 0.8 --accountant wbk-mironov", 1.513062),
        ("--noise-multiplier 1.0 --accountant wbk-mironov", 0.942049),
        ("--noise-multiplier 0.6 --accountant pld", 0.7827),
        ("--accountant binomial --trials 3642525 --levels 601", 19.612962160),
        (f"{CIFAR} --cohort-size 10", 54.2037717),
    ],
)
def test_the_accountants_give_the_known_numbers(run, line, epsilon):
    status, out, _ = run(f"account {line} --json")
    result = json.loads(out)
    assert status == 0
    assert result["epsilon"] == pytest.approx(epsilon, abs=6e-5 if "pld" in line else 1e-6)
    assert {"delta", "accountant", "adjacency"} <= set(result)
    assert "epsilon" in run(f"account {line}")[1]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("plan --epsilon -1", "epsilon must be positive and finite, got -1"),
        ("account --noise-multiplier 1 --adjacency add-remove --sampling fixed", "add-remove is of records"),
        ("plan --epsilon nan", "epsilon must be positive and finite, got nan"),
        ("plan --epsilon x", "'--epsilon'"),
        ("plan --cohort-size 200 --population 100", "cohort_size must be at most the population 100, got 200"),
        ("plan --bits 4", "bits must be at least 10"),
        ("plan --dropouts 0.9", "what would do: at most"),
        ("plan --mechanism shared --colluders 0.1", "colluders must be 0 with the mechanism shared"),
        ("plan --against nobody", "against must be released, server"),
        ("plan --nope", "No such option"),
        ("nope", "No such command 'nope'. See `d2pfed --help`."),
        ("trian", "No such command 'trian'. Did you mean 'train'? See `d2pfed --help`."),
        ("account --noise 1", "'--noise'. Did you mean '--noise-multiplier'? See `d2pfed account --help`."),
        ("report", "Missing argument 'RUN'. See `d2pfed report --help`."),
        ("train --config nowhere.toml", "nowhere.toml: No such file or directory"),
        ("plan --unit record", "a plan needs records: state what is missing (--records on the command line)"),
        ("account", "needs --noise-multiplier"),
        ("account --accountant binomial", "needs --trials and --levels"),
        ("account --noise-multiplier 0", "noise_multiplier must be in [0.001, 1e+06], got 0"),
        ("train --task nope", "task must be one of"),
        ("train --optimizer nope", "optimizer must be one of sgd, adam, adamw, rmsprop or a function, got 'nope'"),
        ("train --task digits --model nope", "nope"),
        ("train --task digits --lost 2", "lost must be in [0, 1], got 2"),
        ("train --task digits --lost 0.1,0.2", "lost must be one fraction or 4, got 2"),
        ("train --task digits --lost x", "lost must be a fraction"),
        ("ledger show nowhere", "there is no ledger at nowhere"),
        ("ledger verify nowhere", "there is no ledger at nowhere"),
        ("report nowhere", "nowhere"),
    ],
)
def test_bad_input_is_one_line_that_says_rule_and_value(run, line, rule):
    status, out, err = run(line)
    assert status == 2
    assert out == ""
    assert rule in err
    assert err.startswith("d2pfed: ")
    assert err.count("\n") == 1


def test_a_run_from_training_to_its_ledger_and_report(run, tmp_path):
    status, out, err = run(TINY)
    assert status == 0
    assert "Test accuracy" in out
    assert "released" in out
    assert "round" in err
    status, out, _ = run("ledger show runs/tiny --plot epsilon.png --json")
    rows = json.loads(out)["rows"]
    assert [row["kind"] for row in rows] == ["create", "open", "begin", *["reserve", "commit"] * 2]
    assert (tmp_path / "epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert "commit" in run("ledger show runs/tiny")[1]
    assert json.loads(run("ledger verify runs/tiny --json")[1])["committed"] == 2
    assert "is consistent: 2 releases" in run("ledger verify runs/tiny")[1]
    assert run("report runs/tiny")[0] == 0
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_a_finished_run_answers_in_json(run):
    status, out, _ = run(f"{TINY} --json --seed 3")
    summary = json.loads(out)
    assert status == 0
    assert summary["repeatable"] is True
    assert summary["guarantees"][0]["observer"] == "released"
    assert (summary["charged"], summary["max_attempts"], summary["so_far"]) == (2, 3, [])
    assert "other settings" in run(f"{TINY} --seed 4")[2]


def test_a_ledger_of_a_population_is_made_once(run):
    line = "ledger create clients.sqlite --epsilon 4 --delta 1e-3 --max-participations 2"
    assert run(line)[0] == 0
    assert run(line)[0] == 2
    assert "The budget of epsilon 4 at delta 0.001" in " ".join(run("ledger verify clients.sqlite")[1].split())
    status, _, err = run("ledger show clients.sqlite --plot nothing.png")
    assert (status, err.count("\n")) == (2, 1)
    status, out, err = run(f"{TINY} --delta 1e-3 --max-participations 2 --ledger clients.sqlite")
    assert status == 3, err  # its own guarantee is not within the ledger's budget
    assert "cannot go on" in out
    assert "Test accuracy" not in out


def test_a_ledger_that_is_not_there_is_one_line_and_no_ledger_is_made(run, tmp_path):
    status, _, err = run(f"{TINY} --ledger misspelt.sqlite")
    assert (status, err.count("d2pfed: there is no ledger at misspelt.sqlite")) == (2, 1)
    assert not (tmp_path / "misspelt.sqlite").exists()


def test_declared_runs_must_fit_the_budget_together(run, tmp_path):
    assert run(f"{TINY} --delta 1e-3 --max-participations 2")[0] == 0
    line = "ledger create {} --epsilon {} --delta 1e-3 --max-participations 2 --declare runs/tiny/plan.json"
    assert run(line.format("rich.sqlite", 31))[0] == 0
    status, _, err = run(line.format("poor.sqlite", 20))
    assert status == 2
    assert "the declared runs" in err
    assert not (tmp_path / "poor.sqlite").exists()
    other = TINY.replace("--name tiny", "--name other")
    assert run(f"{other} --delta 1e-3 --max-participations 2 --ledger rich.sqlite")[0] == 0
    assert "Run other: 2 of 3 attempts charged" in run("ledger verify rich.sqlite")[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_after_its_round_and_is_its_exit_status(run, monkeypatch, number, code):
    show = Watcher.show

    def signalled(self, completed, text):
        signal.raise_signal(number)
        show(self, completed, text)

    with monkeypatch.context() as patched:
        patched.setattr(Watcher, "show", signalled)
        status, out, _ = run(TINY)
    assert status == code
    assert "Stopped after round 1; the same command resumes." in out
    status, out, _ = run(TINY)
    assert status == 0
    assert "after 2 rounds" in out
    assert signal.getsignal(number) is not None


def test_a_run_out_of_attempts_has_its_own_exit_status(run, tmp_path):
    status, out, _ = run(f"{TINY} --lost 0,0,0,1 --json")
    summary = json.loads(out)
    assert status == 3
    assert (summary["end"], summary["test_metrics"]) == ("exhausted", None)
    assert summary["charged"] == summary["max_attempts"] == 3


def test_data_says_what_was_found_where(run, tmp_path):
    found = json.loads(run(f"data where infimnist --data {tmp_path} --json")[1])
    assert found
    assert set(found.values()) == {None}
    assert "not found" in run(f"data where infimnist --data {tmp_path}")[1]


def test_without_arguments_the_first_steps_are_printed(run):
    status, out, _ = run("")
    assert status == 0
    assert "To begin:" in out
    assert "d2pfed train --task digits" in out
    assert run("--version")[1].startswith("d2pfed ")


OWN = """
import torch
from d2pfed.learning import Examples, Model, StoredClients, Task
import numpy as np


def signs():
    inputs = torch.linspace(-1, 1, 400)[:, None]
    table = Examples(inputs, (inputs[:, 0] > 0).long())
    return Task(
        name="signs",
        clients=StoredClients(table, tuple(np.arange(400).reshape(40, 10))),
        validation=table,
        test=lambda: table,
        classes=2,
        input_shape=(1,),
        description="Made up.",
    )


def linear():
    return Model(torch.nn.Linear(1, 2))


def number():
    return 7
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_a_test.py").write_text(OWN)
    yield
    sys.modules.pop("mine_for_a_test", None)


OWN_RUN = TINY.replace("--task digits --model logistic --population 40", "--task mine_for_a_test:signs")


def test_a_task_and_a_model_of_ones_own_are_trained(run, own_module):
    status, out, err = run(f"{OWN_RUN} --model mine_for_a_test:linear")
    assert status == 0, err
    assert "Test accuracy" in out


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ("--task mine_for_a_test:number", "must return a Task of d2pfed.learning, got a int"),
        ("--task mine_for_a_test:nothing", "must be MODULE:FUNCTION"),
        ("--task no_such_module:nothing", "No module named"),
        ("--task :", "must be MODULE:FUNCTION"),
    ],
)
def test_a_function_that_makes_no_task_is_one_line(run, own_module, names, rule):
    status, _, err = run(f"train {names}")
    assert status == 2
    assert rule in err
    assert err.count("\n") == 1


def test_a_plan_of_records_asks_every_silo(run):
    silos = "--unit record --population 20 --records 5000 --dimension 100 --rounds 30 --against server"
    status, out, err = run(f"plan {silos}")
    assert status == 0, err
    assert "every silo draws each record" in out


def test_a_plan_that_clients_refuse_by_default_is_told_so(run):
    told = "A client with the default policy refuses this plan: "
    assert told in " ".join(run(PAPER.removesuffix("--json"))[1].split())
    assert told not in " ".join(run("plan")[1].split())


def test_plan_and_train_have_one_set_of_defaults(run):
    options = json.loads(run("plan --json")[1])["options"]
    assert [options[name] for name in ("sampling", "dropouts", "colluders")] == ["once", 0.1, 0.1]
    helps = [" ".join(run(f"{command} --help")[1].split()) for command in ("plan", "train")]
    for text in (
        "or colluding(c). Default: server.",
        "every silo is asked: none. Default: once.",
        "missing from the sum. Default: 0.1.",
        "all it knows. Default: 0.1.",
    ):
        assert all(text in shown for shown in helps)


def test_a_run_from_a_seed_is_refused_on_a_shared_ledger(run):
    status, out, err = run(f"{TINY} --seed 1 --ledger clients.sqlite")
    assert (status, out) == (2, "")
    assert "shared ledger takes its noise from the system, got seed 1" in err


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("ledger verify x.sqlite", "d2pfed.cli.ledger.verify"),
        ("certify verify x.sqlite", "d2pfed.certificate_verifier.verify"),
        ("audit mechanism", "d2pfed.cli.audit.PrivacyTarget"),
        (TINY, "d2pfed.cli.train.fit"),
    ],
)
def test_ctrl_c_is_never_success(run, monkeypatch, tmp_path, line, place):
    def interrupted(*_args, **_settings):
        raise KeyboardInterrupt

    (tmp_path / "x.sqlite").touch()
    importlib.import_module(place.rpartition(".")[0])
    monkeypatch.setattr(place, interrupted)
    assert run(line)[0] == 130


@pytest.mark.parametrize("made", [None, ImportError("initialization failed")])
def test_ctrl_c_that_a_library_loses_is_no_success_either(run, monkeypatch, made):
    def load(*_given, **_named):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if made is not None:
            raise made

    monkeypatch.setattr("d2pfed.cli.audit.PrivacyTarget", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    status, _, err = run("audit mechanism")
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert (status, "Traceback" in err) == (130, False)


def test_the_same_command_goes_on_and_says_so(run):
    assert "is resumed" not in run(TINY)[2]
    status, _, err = run(TINY)
    assert status == 0
    assert "The run in runs/tiny finished on 20" in err.replace("\n", " ")
    assert "nothing was trained." in err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["train", "--task", "os:system"], "os:system must be MODULE:FUNCTION without arguments: system"),
        (["train", "--task", "os:nothing"], "os:nothing must be MODULE:FUNCTION without arguments: module 'os'"),
        (["roster", "draws", ""], "a file must have a name, got '.'"),
    ],
)
def test_what_once_ended_in_a_traceback_is_one_line(monkeypatch, capsys, words, rule):
    if words[0] == "roster":
        pytest.importorskip("flwr")
    status, out, err = run_command(words, monkeypatch, capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert rule in err


def test_the_name_of_a_file_may_be_no_text(run):
    assert run("ledger create \udc80 --epsilon 1 --delta 1e-5")[0] == 0
    status, out, _ = run("ledger verify \udc80")
    assert status == 0
    assert out.startswith("\\udc80 is consistent")


@pytest.mark.parametrize(
    "line",
    [
        "train --config /dev/full",
        "ledger create made --epsilon 1 --delta 1e-5 --declare /dev/full",
        f"roster show /dev/full {'00' * 32}",
    ],
)
def test_a_device_that_never_ends_is_not_read(run, line):
    if line.startswith("roster"):
        pytest.importorskip("flwr")
    assert run(line) == (2, "", "d2pfed: /dev/full must be a file, got a device\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes."),
    ],
)
def test_too_little_memory_is_one_line(run, monkeypatch, error):
    def exhausted(*_args):
        raise error

    monkeypatch.setattr("d2pfed.cli.plan.calibrate", exhausted)
    assert run("plan") == (2, "", "d2pfed: there is too little memory for this command (see `ulimit -v`)\n")


@pytest.mark.parametrize(
    "mebibytes", [120, 300]
)  # with 300 OpenBLAS may wait forever for memory that it cannot have
def test_a_real_limit_of_memory_is_one_line(tmp_path, mebibytes):
    limits = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20,) * 2)"
    program = f"{limits}; sys.argv = ['d2pfed', 'plan']; from d2pfed.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == "d2pfed: there is too little memory for this command (see `ulimit -v`)\n"
