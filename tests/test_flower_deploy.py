"""docs/deploy.md as it is written, on an app that knew nothing of d2pfed: ten clients, and a simulation."""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import end, free_port

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = ROOT / "tests" / "flower_foreign"
CLIENTS = 10
PORT = re.compile(r"\b80[01]0\b")
BLOCK = re.compile(r"```sh\n# (.*?)\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs" / "deploy.md").read_text())

CLIENT_CHANGE = [
    ("app = ClientApp()", "from d2pfed.flower.client import private\n\napp = ClientApp(mods=[private])")
]
SERVER_CHANGE = [
    ("from flwr.serverapp.strategy import FedAvg", "from d2pfed.flower.server import PrivateFedAvg"),
    (
        "    strategy = FedAvg(fraction_evaluate=fraction_evaluate)",
        '    strategy = PrivateFedAvg.for_target({"epsilon": 30.0, "population": 10}, global_model, context)',
    ),
]


def make_private(app: Path) -> dict[str, int]:
    """Make the foreign app private as the guide says; return how many lines of each file have changed."""
    shutil.copytree(FOREIGN, app, ignore=shutil.ignore_patterns("__pycache__"))
    changed = {}
    for name, changes in (("client_app.py", CLIENT_CHANGE), ("server_app.py", SERVER_CHANGE)):
        file = app / "foreign" / name
        before = after = file.read_text()
        for old, new in changes:
            assert after.count(old) == 1
            after = after.replace(old, new)
        file.write_text(after)
        lines = difflib.ndiff(before.splitlines(), after.splitlines())
        changed[name] = sum(line[0] in "+-" and bool(line[2:].strip()) for line in lines)
    settings = app / "pyproject.toml"
    settings.write_text(settings.read_text() + 'd2pfed-directory = ""\n')
    return changed


def test_a_foreign_app_becomes_private_in_a_few_lines(tmp_path):
    assert make_private(tmp_path / "app") == {"client_app.py": 3, "server_app.py": 4}


def test_the_guide_says_where_each_command_is_run():
    assert [place for place, _ in BLOCKS] == [
        "on all machines",
        "on the server",
        "at the authority",
        "on each client",
        "on the server",
        "at the authority",
        "on the server",
        "on the server, and leave it running",
        "on the server",
        "on each client, and leave it running",
        "on the server",
        "in a first terminal",
        "in a second terminal",
    ]


class Machines:
    """Directories that stand for machines, each with a home of its own, and the commands that are run on them."""

    def __init__(self, directory: Path, port: int, ended: ExitStack) -> None:
        self._directory = directory
        self._port = port
        self._ended = ended
        programs = directory / "bin"
        programs.mkdir()
        for name, module in (("d2pfed", "d2pfed.cli"), ("d2pfed-node", "d2pfed.flower.node")):
            code = f"import {module}; {module}.main()"
            (programs / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
            (programs / name).chmod(0o755)

    def home(self, name: str) -> Path:
        home = self._directory / name
        home.mkdir(exist_ok=True)
        return home

    def _settings(self, name: str, **variables: str) -> dict[str, object]:
        path = [self._directory / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        here = {
            "HOME": str(self.home(name)),
            "PATH": os.pathsep.join(str(part) for part in path),
            "PYTHONPATH": str(ROOT / "src"),
            "SERVER": "localhost",
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        return {"cwd": self.home(name), "env": os.environ | here | variables}

    def run(self, name: str, commands: str, **variables: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", PORT.sub(str(self._port), commands)],
            **self._settings(name, **variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, name: str, commands: str, **variables: str) -> Path:
        log = self.home(name) / "log"
        process = subprocess.Popen(
            [
                "bash",
                "-euc",
                "exec "
                + PORT.sub(str(self._port), commands).replace("D2PFED_SIMULATION", "env D2PFED_SIMULATION"),
            ],
            **self._settings(name, **variables),
            stdout=self._ended.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ended.callback(end, process)
        return log


@contextmanager
def machines(directory: Path, port: int) -> Iterator[Machines]:
    with ExitStack() as ended:
        yield Machines(directory, port, ended)


def wait_for(log: Path, text: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
        time.sleep(0.5)


@pytest.mark.slow
def test_the_guides_commands_run_as_they_are_written(tmp_path):
    pytest.importorskip("torch", reason="the app trains with torch (extra `train`)")
    commands, begun = [block for _, block in BLOCKS], time.monotonic()
    with machines(tmp_path, free_port()) as here:
        server, authority = here.home("server"), here.home("authority")
        here.run("server", commands[1])
        here.run("authority", commands[2])
        public = (authority / "authority").read_text().strip()
        for client in range(CLIENTS):
            home = here.home(f"client-{client}")
            here.run(f"client-{client}", commands[3], CLIENT=str(client), AUTHORITY=public)
            shutil.copy(server / "superlink.pem", home)
            (server / "node-keys").mkdir(exist_ok=True)
            shutil.copy(home / "node-key.pub", server / "node-keys" / f"{client}.pub")
            with (authority / "enrolments").open("a") as file:
                file.write((home / "enrolment").read_text())
            make_private(home / "app")
        here.run("server", commands[4])
        shutil.copy(server / "commitment", authority)
        here.run("authority", commands[5])
        for name in ("roster", "authority"):
            shutil.copy(authority / name, server)
        here.run("server", commands[6])
        make_private(server / "app")
        wait_for(here.start("server", commands[7]), "Uvicorn running", 60)
        here.run("server", commands[8])
        for client in range(CLIENTS):
            here.start(f"client-{client}", commands[9], CLIENT=str(client))
        said = here.run("server", commands[10])
        print(f"two private rounds of {CLIENTS} clients after {(time.monotonic() - begun) / 60:.1f} minutes")
        here.run("server", commands[10])  # the same command again: a new run, on the same accounts
        status = here.run("client-3", "d2pfed client status ~/d2pfed-client")
    assert "10 of 10 clients are here" in said
    assert "round 2 of 2: 10 of 10 survivors, epsilon" in said
    rounds = (server / "d2pfed" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["survivors"] for line in rounds] == [10, 10]
    again = (server / "d2pfed" / "run-2" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["survivors"] for line in again] == [10, 10]
    assert re.search(r"^vectors +4$", status, re.MULTILINE)
    assert re.search(r"^last run +run-2-", status, re.MULTILINE)


@pytest.mark.slow
def test_the_guides_simulation_runs_as_it_is_written(tmp_path):
    pytest.importorskip("torch", reason="the app trains with torch (extra `train`)")
    pytest.importorskip("ray", reason="Flower's simulation needs Ray")
    commands = [block for _, block in BLOCKS]
    with machines(tmp_path, free_port()) as here:
        make_private(here.home("laptop") / "app")
        wait_for(here.start("laptop", commands[11]), "Uvicorn running", 60)
        said = here.run("laptop", commands[12])
    assert "round 2 of 2: 10 of 10 survivors, epsilon" in said
