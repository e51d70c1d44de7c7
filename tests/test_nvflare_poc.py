"""A provisioned network of NVFlare on one machine, over TLS: five sites, and each process killed in a round."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare.apis", reason="NVFlare is not installed (extra `nvflare`)")

from d2pfed.api.certify import certify
from d2pfed.deploy.config import read_client_config
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from support.nvflare_network import Network

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: scripts/nvflare runs them

LIGHT = Path(__file__).resolve().parent / "nvflare_light"
SITES = 5
ROUNDS = 40
RECORDS = {
    "unit": "record", "epsilon": 5000.0, "clip": 1.0, "dropouts": 0.2, "colluders": 0.0, "records": 500,
    "batch_rate": 0.5,
}  # fmt: skip
PAIRS = {"epsilon": 5000.0, "clip": 4.0, "dropouts": 0.2, "colluders": 0.0}
WAITS = {"poll": 0.1, "keys": 90.0, "joining": 120.0, "grace": 5.0}
PAUSE = Path("/tmp/d2pfed-nvflare-pause")
ENDED = ("FINISHED", "FAILED")


def job(place, monkeypatch, **settings):
    """Export a job as a user would."""
    monkeypatch.syspath_prepend(LIGHT)
    from net import Net  # noqa: PLC0415

    from d2pfed.nvflare.recipe import PrivateFedAvgRecipe  # noqa: PLC0415

    monkeypatch.chdir(LIGHT)
    recipe = PrivateFedAvgRecipe(model=Net(), min_clients=SITES - 1, deadlines=WAITS, **settings)
    recipe.export(str(place))
    return str(place / settings["name"])


def finish(network, number, seconds=400.0):
    until = time.monotonic() + seconds
    while not (status := network.admin("status", number)).startswith(ENDED):
        assert time.monotonic() < until, status
        time.sleep(3)
    return status


def rounds(run):
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def charges(network, site):
    return len(read_client_config(network.own(site)).log.read().bodies(Entry.CHARGE))


def kinds(run):
    return [row.kind for row in read_rows(run / "ledger.sqlite") if row.key is not None]


def pause_in_a_round(run, network):
    """Have the sites pause in training, and wait until no round ends: one is charged, and its vectors are missing."""
    PAUSE.touch()
    seen = [-1]

    def is_still():
        time.sleep(5)
        seen.append(len(rounds(run)))
        return seen[-1] == seen[-2]

    network.wait_until(is_still)


@pytest.fixture
def network(tmp_path):
    PAUSE.unlink(missing_ok=True)
    with Network(tmp_path / "network", SITES) as network:
        network.bring_up(*network.names)
        yield network
    PAUSE.unlink(missing_ok=True)


def test_a_run_survives_kills_of_a_site_and_of_the_server_in_a_round(network, tmp_path, monkeypatch):
    # A script of the Client API in pairs.
    script = job(tmp_path, monkeypatch, name="pairs", num_rounds=2, train_script="script.py", privacy=PAIRS)
    assert finish(network, network.admin("submit", script)).startswith("FINISHED:COMPLETED")
    pairs = network.own("server") / "pairs"
    assert [each["survivors"] for each in rounds(pairs)] == [SITES, SITES]
    assert [charges(network, site) for site in network.names] == [2] * SITES
    # Records under standing keys; a site is killed while it trains, and comes back for the next round.
    silo = job(tmp_path, monkeypatch, name="silos", num_rounds=ROUNDS, train_script="silo.py", privacy=RECORDS)
    run = network.own("server") / "silos"
    network.admin("submit", silo)
    network.wait_until(lambda: len(rounds(run)) >= 1)
    pause_in_a_round(run, network)
    network.kill("site-5")
    PAUSE.unlink()
    network.wait_until(lambda: any(each["survivors"] == SITES - 1 for each in rounds(run)))
    network.start("site-5")
    # The server is killed in a round: the job is submitted again, and goes on with its run.
    pause_in_a_round(run, network)
    network.kill("server")
    PAUSE.unlink(missing_ok=True)
    before = len(rounds(run))
    network.bring_up()
    assert finish(network, network.admin("submit", silo)).startswith("FINISHED:COMPLETED")
    assert 2 <= before < len(rounds(run)) == ROUNDS
    assert [each["round"] for each in rounds(run)] == list(range(1, ROUNDS + 1))
    assert kinds(run).count(RowKind.COMMIT) == ROUNDS
    assert kinds(run).count(RowKind.RESERVE) > ROUNDS  # attempts that were lost stay charged
    assert certify(run, key=tmp_path / "key").certificate.exists()
    subprocess.run([sys.executable, "-c", "from d2pfed.cli import main; main()", "report", str(run)], check=True)
    assert "Federation over NVFlare, 5 clients" in (run / "report.html").read_text()
