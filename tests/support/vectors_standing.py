"""Test vectors of standing keys: what `tests/vectors/v2/standing.json` holds, and how they are made."""

import json
import sys

from d2pfed.numerics.randomness import Entropy
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.standing import Silos, make_epoch, update_of
from support.vectors_secagg import FOLDER

COHORT = (7, 10, 13, 2**64 - 1)
FILE = FOLDER / "standing.json"
STEPS = [(0, 0, COHORT), (0, 1, COHORT[:3]), (1, 1, COHORT), (2, 3, COHORT[1:])]  # steps 0, 1, 5 and 11


def make() -> dict:
    """A set-up of four, and steps that skip others, with three sets of members."""
    epoch = make_epoch(COHORT, bits=13, colluders=1)
    silos = Silos(epoch)
    silos.set_up()
    roots = {client: Entropy.replay(b"silo").child(client, 2).key for client in COHORT}
    steps = []
    for number, attempt, members in STEPS:
        before = len(silos.log)
        total = silos.step(number, attempt, members)
        step = silos.current.step(number, attempt, members)
        steps.append(
            {
                "round": number,
                "attempt": attempt,
                "members": list(members),
                "vectors": {str(client): update_of(epoch, client, step).tolist() for client in members},
                "exchange": [_hex(entry) for entry in silos.log[before:]],
                "sum": total.tolist(),
            }
        )
    names = ("run", "epoch", "first", "dimension", "bits", "quorum", "colluders", "rounds", "attempts")
    return {
        "epoch": {name: getattr(epoch, name) for name in names}
        | {
            "plan_digest": epoch.plan_digest.hex(),
            "roster_digest": epoch.roster_digest.hex(),
            "serial": silos.roster.serial,
            "silos": list(COHORT),
        },
        "digest": epoch.digest.hex(),
        "keys_digest": silos.current.keys.digest.hex(),
        "entropy": {str(client): key.hex() for client, key in roots.items()},
        "signing": {str(client): enrolment_secret(client).hex() for client in COHORT},
        "positions": {str(client): position_of(client, 2, silos.roster).pack().hex() for client in COHORT},
        "set_up": [_hex(entry) for entry in silos.log[: 2 * len(COHORT)]],
        "task": TASK.hex(),
        "model": MODEL.hex(),
        "steps": steps,
    }


def _hex(entry):
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in entry.items()}


def main():
    FILE.write_text(json.dumps(make(), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
