import difflib
import re
import tomllib
from pathlib import Path

import pytest

from d2pfed.errors import ConfigError
from d2pfed.flower.client_account import ClientAccount
from d2pfed.flower.client_config import init_client, read_client_config
from d2pfed.plan import Enrolled

ROOT = Path(__file__).resolve().parent.parent
BEFORE = (ROOT / "examples/flower/before/client_app.py").read_text().splitlines()
PRIVATE = (ROOT / "examples/flower/digits/client_app.py").read_text().splitlines()


def test_an_existing_client_becomes_private_in_at_most_five_changed_lines():
    changes = [line for line in difflib.ndiff(BEFORE, PRIVATE) if line[0] in "+-" and line[2:].strip()]
    assert 1 <= len(changes) <= 5


def test_the_guide_shows_the_change_as_it_is():
    diff = difflib.unified_diff(BEFORE, PRIVATE, "before/client_app.py", "digits/client_app.py", lineterm="")
    assert "\n".join(diff) in (ROOT / "docs/deploy.md").read_text()


def test_the_examples_epsilon_is_accepted_by_the_client_that_the_guide_enrols(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
    pytest.importorskip("torch", reason="the example trains with torch (extra `train`)")
    from digits.server_app import make_plan  # noqa: PLC0415 - loads torch

    config = tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    plan = make_plan(config | {"roster": "a roster"})
    enrolled = Enrolled(config["population"], 4 << 12)
    enrols = re.search(r"d2pfed client init .* --epsilon (\d+)", (ROOT / "docs/deploy.md").read_text())
    init_client(tmp_path / "client", 0, bytes(range(32)), tmp_path / "anchor", float(enrols[1]))
    config = read_client_config(tmp_path / "client")
    config.policy.check(plan, enrolled)
    ClientAccount(config.log, config.budget).require_room(plan, "a run", config.log.read())
    init_client(tmp_path / "cautious", 1, bytes(range(32)), tmp_path / "another")
    with pytest.raises(ConfigError, match="epsilon against server must be at most 10"):
        read_client_config(tmp_path / "cautious").policy.check(plan, enrolled)
