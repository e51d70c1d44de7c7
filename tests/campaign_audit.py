"""Audits of every mechanism by two worlds: what is reached of what is claimed, and nothing where nothing differs."""

import json
import sys
from dataclasses import replace

from d2pfed.accounting import SERVER
from d2pfed.api.audit import Worlds, audit_mechanism, audited_plan
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget
from d2pfed.simulation import Fidelity

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


def main(name: str, size: int, seed: str) -> int:
    """Run a campaign by its name and print what was found."""
    found = {"mechanism": mechanism}[name](size, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[4]))
