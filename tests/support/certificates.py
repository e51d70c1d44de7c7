"""Small runs of each kind, and certificates that are signed anew after a forger has changed them."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import d2pfed
from d2pfed.accounting import RELEASED, SERVER, Sampling
from d2pfed.api import Job
from d2pfed.api.certify import certify
from d2pfed.certificate_verifier import canonical
from d2pfed.learning import LocalTraining, Optimizer, build_model, load_task
from d2pfed.ledger import Ledger
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Attempt, local_sum, run_plan
from d2pfed.secagg.crypto import sign, signing_public
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, execute, task_job

SECRET, OTHER = b"s" * 32, b"o" * 32
PUBLIC = signing_public(SECRET).hex()


KINDS = {
    "once": {"sampling": "once", "against": SERVER, "dropouts": 0.1, "colluders": 0.05},
    "fixed": {"sampling": "fixed", "against": RELEASED},
    "adaptive": {"sampling": "once", "against": SERVER, "clip": "auto"},
}


SILO_KINDS = {
    "record": {},
    "record replaced": {"adjacency": "replace-one"},
    "person in two silos": {"max_silos": 2},
    "person replaced in two silos": {"max_silos": 2, "adjacency": "replace-one"},
}


def key_in(root: Path) -> Path:
    """Return the file of the signing key."""
    file = root / "signing.key"
    if not file.exists():
        file.write_bytes(SECRET)
        file.chmod(0o600)
    return file


@cache
def certified(root: Path, kind: str) -> Path:
    """Return a certified run of a kind, made once in a process: do not change it, change a copy."""
    make = train_silos if kind in SILO_KINDS else train
    path = make(root / "certified" / kind, **(KINDS | SILO_KINDS)[kind])
    certify(path, key=key_in(root))
    return path


def job(seed: int | None = None, **changes: object) -> Job:
    """Return a run of two rounds over tiny digits."""
    task = load_task("digits", population=400, partition=None, data_dir=None)
    model = build_model("logistic", task, seed=0)
    target = {"population": 400, "cohort_size": 40, "rounds": 2, "epsilon": 8.0} | changes
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=PrivacyTarget(dimension=model.dimension, **target),
        local=LocalTraining(optimizer=Optimizer.SGD, lr=0.2, epochs=1, batch_size=10),
        server=ServerOptimizer(),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=seed,
    )
    return task_job(settings, task, model, calibrate(settings.target))


def train_silos(path: Path, **changes: object) -> Path:
    """Return the directory of a run over five silos at its end."""
    inputs = torch.from_numpy(np.sin(np.arange(5 * 20 * 3.0)).reshape(5, 20, 3).astype(np.float32))
    silos = [(part, (part[:, 0] > 0).long()) for part in inputs]
    target = {"unit": "record", "epsilon": 8.0, "delta": 1e-3, "records": 100, "batch_rate": 0.3, "colluders": 0.2}
    with patch("d2pfed.runs.report.write_report"):
        d2pfed.fit(torch.nn.Linear(3, 2), silos, privacy=target | changes, rounds=2, directory=path)
    return path


def train(path: Path, ledger: Path | None = None, **changes: object) -> Path:
    """Return the directory of such a run at its end."""
    with patch("d2pfed.runs.report.write_report"):  # plots take most of the time
        execute(job(**changes), path, ledger, lambda _: True)
    return path


def statistics(path: Path, count: int) -> Path:
    """Return a ledger on which so many histograms were charged and released."""
    plan = calibrate(
        PrivacyTarget(
            dimension=4,
            population=20,
            cohort_size=20,
            rounds=1,
            epsilon=2.0,
            delta=1e-5,
            against=SERVER,
            sampling=Sampling.NONE,
            max_participations=1,
        )
    )
    vectors = {client: np.eye(4, dtype=np.float32)[client % 4] for client in range(20)}
    charge = run_plan(plan)
    with Ledger.create(path, replace(charge.budget, epsilon=20.0)) as book:
        for number in range(count):
            book.begin(f"histogram {number}", f"owner {number}", charge)
            local_sum(plan, Attempt(f"histogram {number}", 0, 0), vectors, book, Entropy.system())
    return path


def signed(statement: dict, secret: bytes = SECRET) -> bytes:
    """Return the certificate of a statement, signed with this key."""
    signature = sign(secret, canonical(statement)).hex()
    return canonical({"statement": statement, "public_key": signing_public(secret).hex(), "signature": signature})


def forged(certificate: Path, change: Callable[[dict], object], secret: bytes = SECRET) -> Path:
    """Return a certificate whose statement was changed and signed anew."""
    statement = json.loads(certificate.read_text())["statement"]
    change(statement)
    file = certificate.with_name("forged.json")
    file.write_bytes(signed(statement, secret))
    return file
