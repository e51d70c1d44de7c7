"""The example of three hospitals: what a patient adds to the model, and the app between real processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
torch = pytest.importorskip("torch", reason="the example trains with torch (extra `train`)")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "hospitals"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.parametrize("data", ["table", "images"])
def test_hospitals_share_no_patient_and_none_with_the_test(data):
    from hospitals.task import RECORDS, load_patients  # noqa: PLC0415

    parts = [load_patients(data, hospital) for hospital in (0, 1, 2, None)]
    assert sum(len(labels) for _, labels in parts[:3]) == RECORDS[data]
    rows = torch.cat([inputs for inputs, _ in parts])
    assert len(np.unique(rows.numpy(), axis=0)) == len(rows)


@pytest.mark.parametrize("data", ["table", "images"])
def test_a_patient_adds_minus_its_own_gradient(data):
    from hospitals.task import Patients, load_patients, make_net  # noqa: PLC0415

    net, (inputs, labels) = make_net(data), load_patients(data, 1)
    found = np.concatenate(list(Patients(net, inputs, labels).gradients(np.array([3, 0]))))
    for row, place in zip(found, (3, 0), strict=True):
        loss = torch.nn.functional.cross_entropy(net(inputs[[place]]), labels[[place]])
        expected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(net.parameters()))])
        assert row == pytest.approx(-expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(("data", "least"), [("table", 0.8), ("images", 0.3)])
def test_three_hospitals_train_between_processes(data, least):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    options = f"--app {EXAMPLE} --clients 3 --rounds 20 --epsilon 8 --warm --seconds 400 --config data={data}"
    done = subprocess.run(
        [sys.executable, "run", *options.split()],
        cwd=ROOT / "examples" / "flower",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = [line for line in done.stdout.splitlines() if line.startswith("round 20: 3 survivors, accuracy ")]
    assert len(last) == 1, done.stdout
    assert float(last[0].split()[-1]) > least
