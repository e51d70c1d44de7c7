"""Committees as small as a test can run: 24 of a cohort of 28, in real directories."""

from dataclasses import replace
from pathlib import Path

from d2pfed.accounting import Sampling
from d2pfed.plan import PROFILES, Plan, Protocol, calibrate
from d2pfed.plan.bounds import MOST_SIGNED
from d2pfed.plan.target import PrivacyTarget
from d2pfed.secagg.lattice import parameters
from support.enrolled_clients import DIMENSION, directory_of
from support.lattice import quick

CLIENTS, MEMBERS = 28, 24


def shrink(monkeypatch) -> None:
    """Let the rule choose committees of 24, and deployments take cohorts of 28."""
    quick(monkeypatch)
    monkeypatch.setattr(parameters, "_COMMITTEES", (MEMBERS,))
    monkeypatch.setattr(parameters, "_LEAST_PACKED", 16)
    monkeypatch.setitem(PROFILES, Protocol.LATTICE, replace(PROFILES[Protocol.LATTICE], cohorts=(2, MOST_SIGNED)))
    parameters.choose_committee.cache_clear()


def make_lattice_plan(rounds: int = 2, **changes) -> Plan:
    """A plan with so little noise that a sum shows who is in it; two clients may be missing."""
    target = {
        "dimension": DIMENSION,
        "population": CLIENTS,
        "cohort_size": CLIENTS,
        "rounds": rounds,
        "sampling": Sampling.NONE,
        "against": "server",
        "epsilon": 5000.0,
        "delta": 1e-5,
        "dropouts": 0.1,
        "colluders": 0.0,
        "spare": 4,
        "consistency": "signed",
        "protocol": "lattice",
    }
    return calibrate(PrivacyTarget(**(target | changes)))


def keep_keys_in(directory: Path, clients: int = CLIENTS) -> None:
    """Let clients keep members' keys below a test's own directory, which may be on a disk."""
    for client in range(clients):
        file = directory_of(directory, client) / "client.toml"
        file.write_text(f'state = "{directory}/keys"\nkeys_on_disk = true\n{file.read_text()}')
