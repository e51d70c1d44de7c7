"""The app of the federation test, unchanged, in Flower's own simulation."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
pytest.importorskip("ray", reason="Flower's simulation needs Ray (extra `ray`)")

from loopback import Federation

from d2pfed.ledger import RowKind, read_rows
from d2pfed.secagg.trust import Consistency
from support.enrolled_clients import DIMENSION, make_plan, noise_bound
from test_flower_federation import wait_for

ROOT = Path(__file__).resolve().parent.parent


def test_the_same_app_runs_in_flowers_own_simulation(tmp_path):
    (tmp_path / "planted").write_text("planted")
    environment = {"PYTHONPATH": str(ROOT / "src")}
    with Federation(tmp_path / "federation", 5, environment=environment) as federation:
        federation.start_simulation()
        config = {"directory": str(tmp_path / "run"), "signals": str(tmp_path), "rounds": 2}
        seconds = {"training-seconds": 200.0, "keys-seconds": 200.0, "joining-seconds": 200.0}
        federation.run(ROOT / "tests" / "flower_light", config | seconds)
        wait_for(tmp_path / "run" / "models.json", federation, 300)
    rows = read_rows(tmp_path / "run" / "ledger.sqlite")
    everyone = (0, 1, 2, 3, 4)
    assert [row.release.participants for row in rows if row.kind is RowKind.COMMIT] == [everyone] * 2
    models = json.loads((tmp_path / "run" / "models.json").read_text())
    exact = np.where(np.arange(DIMENSION) < 5, 2 / 5, 0)
    assert np.abs(np.array(models["2"]) - exact).max() < 2 * noise_bound(
        make_plan(dropouts=0.2, colluders=0.1, spare=6, consistency=Consistency.ASSUMED), 5
    )
