"""A SuperLink and five SuperNodes as processes of their own, three rounds with standing keys, one exchange each."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import Federation

from d2pfed.deploy.config import read_client_config
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.keystore import is_in_memory
from support.enrolled_clients import DIMENSION, make_plan, noise_bound
from test_flower_federation import PLAN, ROOT, seconds_to_start, wait_for

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: the nightly script runs them

SHARED = Path("/dev/shm")
ROUNDS = 3


@pytest.fixture(scope="module")
def memory():
    """A directory in memory, where silos keep their keys."""
    if not is_in_memory(SHARED):
        pytest.skip("this machine has no file system in memory")
    place = Path(tempfile.mkdtemp(dir=SHARED))
    yield place
    shutil.rmtree(place)


def test_three_rounds_are_three_exchanges_after_the_set_up(tmp_path, memory):
    deadline = max(30.0, 8 * seconds_to_start())
    signals = tmp_path / "signals"
    signals.mkdir()
    (signals / "planted").write_text("planted")
    place = tmp_path / "federation"
    environment = {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": str(memory)}
    with Federation(place, 5, environment=environment, database=str(place / "superlink.db")) as federation:
        federation.start_superlink()
        for client in range(5):
            federation.register(client)
            federation.start_supernode(client)
        federation.run(
            ROOT / "tests" / "flower_light",
            {
                "directory": str(tmp_path / "run"),
                "roster": str(federation.roster),
                "authority": federation.authority,
                "draws": str(federation.draws),
                "signals": str(signals),
                "keys": "standing",
                "rounds": ROUNDS,
                "training-seconds": deadline,
                "keys-seconds": deadline,
                "joining-seconds": 10 * deadline,
            },
        )
        wait_for(tmp_path / "run" / "models.json", federation, 40 * deadline)
        logs = [read_client_config(federation.client_directory(client)).log.read() for client in range(5)]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    exchanges = [[each["name"] for each in line["exchanges"]] for line in metrics]
    assert (
        exchanges == [["STANDING_INVITATION", "STANDING_ADVERTS", "STANDING_REQUEST"]] + [["STANDING_REQUEST"]] * 2
    )
    kinds = [row.kind for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None]
    assert kinds == [RowKind.RESERVE, RowKind.COMMIT] * ROUNDS
    assert [len(log.bodies(Entry.CHARGE)) for log in logs] == [ROUNDS] * 5
    models = json.loads((tmp_path / "run" / "models.json").read_text())
    exact = np.zeros(DIMENSION)
    exact[:5] = ROUNDS / 5
    plan = make_plan(rounds=ROUNDS, **PLAN | {"spare": 3 * ROUNDS})
    assert np.abs(np.array(models[str(ROUNDS)]) - exact).max() < ROUNDS * noise_bound(plan, 5)
    assert list(memory.rglob("*/lock"))  # the keys were there, and nowhere in a client's directory
    print(
        json.dumps([[(each["name"], round(each["seconds"], 1)) for each in line["exchanges"]] for line in metrics])
    )
