"""Audits by two worlds: what is reached of what is claimed, and nothing where nothing differs.

`mechanism` is of whole rounds of a simulation, `deployed` of enrolled client agents with directories of their own.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from d2pfed.accounting import SERVER, Sampling, account
from d2pfed.api.audit import Worlds, audit_mechanism, audited_plan
from d2pfed.api.audit.bounds import gaussian_epsilon
from d2pfed.deploy.client import TrainArrays
from d2pfed.deploy.layout import NamedArrays
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.round import rotation_seed
from d2pfed.simulation import Fidelity
from support.enrolled_clients import DIMENSION, directory_of, enrol
from support.malicious_server import MaliciousServer
from support.small_committees import CLIENTS, keep_keys_in, shrink

LEAST = 0.7  # of the claimed epsilon that the audit must reach where the claim is tight
TIGHT = ("centered", "shared")  # of the others, rounding and composition are charged for more than a test can see


def mechanism(trials: int, seed: str) -> dict[str, object]:
    """Audit each mechanism by whole rounds of the protocol, then the first one with nothing to find."""
    root, rows, failed = Entropy.replay(seed.encode()), [], 0
    target = PrivacyTarget(cohort_size=4, epsilon=4.0, delta=1e-5, against=SERVER)
    for name in ("centered", "shared", "ddgauss", "skellam"):
        plan = audited_plan(replace(target, mechanism=name))
        found = audit_mechanism(plan, trials, entropy=root.child(name), fidelity=Fidelity.PROTOCOL)
        failed += found.is_refuted or (name in TIGHT and found.gaussian < LEAST * found.claimed)
        rows.append(f"{name} {found.gaussian:.2f} of {found.claimed:.2f}")
        sys.stderr.write(f"{rows[-1]}\n")
    null = audit_mechanism(audited_plan(target), trials, entropy=root.child("null"), worlds=Worlds.SAME)
    failed += max(null.counted, null.gaussian) > 0
    return {
        "campaign": "audit of the mechanisms",
        "command": f"scripts/campaign audit-mechanism {trials} --seed {seed}",
        "result": f"{trials:,} trials per world, confidence 0.99, lower bound on epsilon of what is claimed against "
        f"the server: {', '.join(rows)}; with equal worlds {max(null.counted, null.gaussian):g}",
        "failed": int(failed),
    }


def sends(length: float) -> Callable[[int], TrainArrays]:
    """The training of clients of which the first moves its first parameter by this much, and the others nothing."""

    def of(client: int) -> TrainArrays:
        def train(arrays: NamedArrays, _settings: Mapping[str, object]) -> NamedArrays:
            own = np.float32(length if client == 0 else 0.0) * np.eye(1, DIMENSION, dtype=np.float32)[0]
            return {name: array + own for name, array in arrays.items()}

        return train

    return of


def seen_of(
    directory: Path, enrolled: Path, plan: Plan, make: Callable[[Path], MaliciousServer], length: float
) -> float:
    """Run one round with client agents in fresh directories; what the server sees where the first client differs."""
    shutil.copytree(enrolled, directory)
    for client in range(plan.cohort_size):
        file = directory_of(directory, client) / "client.toml"
        file.write_text(file.read_text().replace(str(enrolled), str(directory)))
    keep_keys_in(directory, plan.cohort_size)
    server = make(directory)
    server.train = sends(length)
    server.announce()
    opened = server.attempt(without=tuple(range(plan.quorum, plan.cohort_size)))
    seed = rotation_seed(server.session())
    shutil.rmtree(directory)
    return float(plan.codec.decode(plan.ring.center(opened.vector), seed, 1)[0])


def deployed(trials: int, directory: Path) -> dict[str, object]:
    """Audit one round of deployed clients, over pair masks and over the lattice, against the server.

    The smallest set that may be opened answers, and all but one client send zero.
    """
    rows, failed = [], 0
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for protocol, clients in (("pairwise", 5), ("lattice", CLIENTS)):
            enrolled = directory / protocol
            enrolled.mkdir()
            roster = enrol(enrolled, clients)
            plan = calibrate(
                PrivacyTarget(
                    dimension=DIMENSION, population=clients, cohort_size=clients, rounds=1, sampling=Sampling.NONE,
                    against=SERVER, epsilon=12.0, delta=1e-5, dropouts=0.2 if clients == 5 else 0.1, colluders=0.0,
                    spare=0, compression="off", consistency="signed", protocol=protocol,
                )
            )  # fmt: skip
            far = 4 * plan.codec.clip
            worlds = [
                [
                    seen_of(directory / f"{protocol} {world} {trial}", enrolled, plan, make, world)
                    for trial in range(trials)
                ]
                for make in [lambda place, plan=plan, roster=roster: MaliciousServer(place, plan, roster)]
                for world in (-far, far)
            ]
            errors = sum(seen > 0 for seen in worlds[0]), sum(seen <= 0 for seen in worlds[1])
            release = plan.release("", 0, 0, (), plan.quorum)
            claimed = account([release], SERVER, delta=plan.delta, max_participations=1).epsilon
            found = gaussian_epsilon(errors, trials, plan.delta, 0.01)
            failed += not LEAST * claimed <= found <= claimed
            rows.append(f"{protocol} {found:.2f} of {claimed:.2f} ({100 * found / claimed:.0f} %)")
            sys.stderr.write(f"{rows[-1]}, errors {errors}\n")
    return {
        "campaign": "audit of deployed clients",
        "command": f"scripts/campaign audit-deployed {trials}",
        "result": f"{trials:,} rounds per world over enrolled client agents, confidence 0.99, lower bound on epsilon "
        f"of what is claimed against the server: {', '.join(rows)}",
        "failed": int(failed),
    }


def main(name: str, size: int, directory: Path, seed: str) -> int:
    """Run a campaign by its name and print what was found."""
    found = deployed(size, directory) if name == "deployed" else mechanism(size, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
