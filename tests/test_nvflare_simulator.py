"""Jobs in NVFlare's simulator: scripts as they are, records, evaluations, statistics, runs that go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="NVFlare is not installed (extra `nvflare`)")

from d2pfed.ledger import RowKind, read_rows

pytestmark = pytest.mark.slow
LIGHT = Path(__file__).parent / "nvflare_light"

TRAIN = """
from net import Net
from d2pfed.nvflare.recipe import PrivateFedAvgRecipe
from nvflare.recipe import SimEnv

recipe = PrivateFedAvgRecipe(
    name="light", model=Net(), min_clients={sites}, num_rounds={rounds}, train_script="{script}",
    privacy={privacy}, evaluations={evaluations}, deadlines={{"poll": 0.1}},
)
recipe.execute(SimEnv(num_clients={sites}, workspace_root="{place}"))
"""
ASK = """
from d2pfed.nvflare.recipe import PrivateStatisticRecipe
from nvflare.recipe import SimEnv

recipe = PrivateStatisticRecipe(
    name="sums", statistic="{statistic}", size=4, min_clients={sites}, train_script="sevens.py", privacy={privacy},
)
recipe.execute(SimEnv(num_clients={sites}, num_threads={threads}, workspace_root="{place}"))
"""
PRIVACY = {"epsilon": 5000.0, "clip": 4.0, "dropouts": 0.0, "colluders": 0.0}
RECORDS = {
    "unit": "record", "epsilon": 5000.0, "clip": 1.0, "dropouts": 0.0, "colluders": 0.0, "records": 300,
    "batch_rate": 0.5,
}  # fmt: skip
ACCURACY = {"final": {"metrics": {"accuracy": [0.0, 1.0]}, "epsilon": 500.0, "max_examples": 4.0}}


def run(job, place, statistic="sevens", **settings):
    """Run a job as a user would, and return what it prints."""
    text = job.format(place=place, statistic=statistic, **settings)
    environment = {name: value for name, value in os.environ.items() if name != "D2PFED_SIMULATION"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=LIGHT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def kinds(place):
    return [row.kind for row in read_rows(place / "ledger.sqlite") if row.key is not None]


def test_a_script_trains_is_evaluated_and_goes_on(tmp_path):
    settings = {"sites": 3, "rounds": 3, "script": "script.py", "privacy": PRIVACY}
    said = run(TRAIN, tmp_path, evaluations=ACCURACY, **settings)
    place = tmp_path / "light-d2pfed" / "server" / "light"
    assert kinds(place) == [RowKind.RESERVE, RowKind.COMMIT] * 3
    answer = json.loads((place / "answer-final.json").read_text())
    assert abs(answer["value"]["accuracy"] - 0.25) < 6 * answer["standard_error"]["accuracy"]
    assert answer["clients"] == 3
    assert "31337" not in (tmp_path / "light" / "server" / "log.txt").read_text() + said
    # The same job again is finished; the evaluation is not charged twice.
    run(TRAIN, tmp_path, evaluations=ACCURACY, **settings)
    assert kinds(place) == [RowKind.RESERVE, RowKind.COMMIT] * 3
    assert json.loads((place / "answer-final.json").read_text()) == answer


def test_records_of_sites_are_protected_and_evaluated(tmp_path):
    question = {"final": {"metrics": {"accuracy": [0.0, 1.0]}, "epsilon": 500.0}}
    settings = {"sites": 3, "rounds": 2, "script": "silo.py", "privacy": RECORDS}
    run(TRAIN, tmp_path, evaluations=question, **settings)
    place = tmp_path / "light-d2pfed" / "server" / "light"
    answer = json.loads((place / "answer-final.json").read_text())
    assert abs(answer["value"]["accuracy"] - 0.75) < 6 * answer["standard_error"]["accuracy"]
    assert kinds(place) == [RowKind.RESERVE, RowKind.COMMIT] * 2


def test_a_statistic_is_the_private_sum(tmp_path):
    privacy = PRIVACY | {"clip": 14.0}
    run(ASK, tmp_path, sites=3, threads=3, privacy=privacy)
    place = tmp_path / "sums-d2pfed" / "server" / "sums"
    answer = json.loads((place / "answer-sevens.json").read_text())
    assert np.abs(np.array(answer["value"]) - 21).max() < 6 * answer["standard_error"]
    # Asked again it costs nothing; another statistic needs another name.
    run(ASK, tmp_path, sites=3, threads=3, privacy=privacy)
    assert json.loads((place / "answer-sevens.json").read_text()) == answer
    with pytest.raises(AssertionError, match="choose another name"):
        run(ASK, tmp_path, "eights", sites=3, threads=3, privacy=privacy)
    assert kinds(place) == [RowKind.RESERVE, RowKind.COMMIT]


def test_seventy_sites_sum_in_the_lattice_protocol(tmp_path):
    # NVFlare gives each site's process ten seconds to connect: on a busy machine some of seventy may come too late.
    privacy = PRIVACY | {"clip": 14.0, "protocol": "lattice", "dropouts": 0.3}
    run(ASK, tmp_path, sites=70, threads=70, privacy=privacy)
    place = tmp_path / "sums-d2pfed" / "server" / "sums"
    answer = json.loads((place / "answer-sevens.json").read_text())
    assert answer["clients"] >= 47
    assert np.abs(np.array(answer["value"]) - 7 * answer["clients"]).max() < 6 * answer["standard_error"]
    (done,) = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert "LATTICE_REQUEST" in {each["name"] for each in done["exchanges"]}
    assert kinds(place) == [RowKind.RESERVE, RowKind.COMMIT]
