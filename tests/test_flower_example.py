import difflib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from d2pfed.deploy.account import ClientAccount
from d2pfed.deploy.config import init_client, read_client_config
from d2pfed.deploy.rosters import SignedRoster
from d2pfed.errors import ConfigError
from d2pfed.plan import Enrolled, calibrate

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs/deploy.md").read_text()


def lines(name: str) -> list[str]:
    return (ROOT / "examples/flower" / name).read_text().splitlines()


def test_an_existing_client_becomes_private_by_three_lines_for_one():
    changes = list(difflib.ndiff(lines("before/client_app.py"), lines("digits/client_app.py")))
    assert [line[0] for line in changes if line[0] in "+-" and line[2:].strip()].count("+") <= 3
    assert sum(line.startswith("-") for line in changes) == 1


def test_an_existing_server_becomes_private_in_at_most_five_lines():
    changes = list(difflib.ndiff(lines("before/server_app.py"), lines("digits/server_app.py")))
    changed = [line for line in changes if line[0] in "+-" and line[2:].strip()]
    assert 1 <= len(changed) <= 5


@pytest.mark.parametrize("name", ["client_app.py", "server_app.py"])
def test_the_guide_shows_the_change_as_it_is(name):
    diff = difflib.unified_diff(
        lines(f"before/{name}"), lines(f"digits/{name}"), f"before/{name}", f"digits/{name}", lineterm=""
    )
    assert "\n".join(diff) in GUIDE


def test_a_client_enrolled_by_the_guide_accepts_the_examples_epsilon(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
    pytest.importorskip("torch", reason="the example trains with torch (extra `train`)")
    from d2pfed.deploy.targets import complete_target, trained_sizes  # noqa: PLC0415
    from digits.task import Net  # noqa: PLC0415 - loads torch

    config = tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    signed = SignedRoster(SimpleNamespace(clients=range(config["population"]), depth=12), b"")
    asked = {"epsilon": config["epsilon"], "population": config["population"]}
    plan = calibrate(complete_target(asked, trained_sizes(Net()), signed, config))
    enrolled = Enrolled(config["population"], 4 << 12)
    enrols = re.search(r"d2pfed client init .* --epsilon (\d+)", GUIDE)
    init_client(tmp_path / "client", 0, bytes(range(32)), tmp_path / "anchor", float(enrols[1]))
    config = read_client_config(tmp_path / "client")
    config.policy.check(plan, enrolled)
    ClientAccount(config.log, config.budget).require_room(plan, "a run", config.log.read())
    init_client(tmp_path / "cautious", 1, bytes(range(32)), tmp_path / "another")
    with pytest.raises(ConfigError, match="epsilon against server must be at most 10"):
        read_client_config(tmp_path / "cautious").policy.check(plan, enrolled)


ROLES = ("authority", "server", "client")


def composed(role: str) -> dict[str, dict]:
    yaml = pytest.importorskip("yaml", reason="it comes with Flower (extra `flower`)")
    return yaml.safe_load((ROOT / f"examples/flower/compose.{role}.yaml").read_text())


SERVICES = {(role, name): service for role in ROLES for name, service in composed(role)["services"].items()}


@pytest.mark.parametrize("key", SERVICES)
def test_a_service_has_no_more_rights_than_its_role_needs(key):
    service, (role, _) = SERVICES[key], key
    assert service["user"] == "10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges"]
    assert {"mem_limit", "pids_limit"} <= set(service)
    assert service["volumes"][0] == "${STATE}:/state"  # of this role alone
    assert all("ANCHOR" in volume for volume in service["volumes"][1:])
    assert set(service.get("secrets", ())) <= set(composed(role)["secrets"])
    assert (service.get("network_mode") == "none") == (role == "authority")


@pytest.mark.parametrize("key", [key for key in SERVICES if "command" in SERVICES[key]])
def test_a_service_names_what_it_is_given_and_waits_for_what_there_is(key):
    service, (role, _) = SERVICES[key], key
    command = " ".join(service["command"])
    assert set(re.findall(r"\$\$(?!key)([A-Z]\w*)", command)) <= set(service["environment"])
    assert not re.search(r"(?<!\$)\$(?!\$)", command)  # Docker would fill it in itself, with nothing
    assert set(service.get("depends_on", ())) <= set(composed(role)["services"])
    if "flower-superlink" in command or "d2pfed-node" in command:
        assert service["restart"] == "always"
        assert "healthcheck" in service
        assert "$$STATE/superlink.pem" in command


def test_the_image_is_not_root_and_takes_packages_by_hash():
    text = (ROOT / "examples/flower/Dockerfile").read_text()
    assert "\nUSER 10001\n" in text
    installs = re.findall(r"pip install [^\n]*", text)
    assert len(installs) == 3
    assert all("--require-hashes" in line or line.endswith("--no-build-isolation .") for line in installs)
    pinned = re.search(r"torch==\S+ --hash=sha256:[0-9a-f]{64}", text)[0]
    assert pinned in (ROOT / "scripts/setup").read_text()


@pytest.mark.slow
def test_the_services_run_as_processes_where_there_is_no_docker(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
    pytest.importorskip("torch", reason="the example trains with torch (extra `train`)")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "d2pfed-node").write_text(f'#!/bin/sh\nexec {sys.executable} -m d2pfed.flower.node "$@"\n')
    (programs / "d2pfed-node").chmod(0o755)
    here = {
        "STATE": str(tmp_path / "state"),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'examples/flower'}",
    }
    installed = Path(sys.executable).parent  # also where this environment is not activated
    here |= {"PATH": f"{programs}{os.pathsep}{installed}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(ROOT / "examples/flower/containers")]
    done = subprocess.run(
        command, env=os.environ | here, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    server = tmp_path / "state" / "server" / "d2pfed"
    assert len((server / "run" / "metrics.jsonl").read_text().splitlines()) == 10
    check = SERVICES["server", "server"]["healthcheck"]["test"][1:-1]
    assert subprocess.run([*check, server], env=os.environ | here, check=False).returncode == 0
