"""Random privacy targets: each is refused with an error of ours, or its epsilons hold against two oracles.

The oracles are the certificates' verifier, which shares no line with the accountants, and dp-accounting's privacy loss
distribution of the Gaussian that has the noise of the fewest honest contributors, in every release that one client may
be in: a lower bound on what is to be claimed against the server.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable

from dp_accounting.pld import privacy_loss_distribution as pld

from d2pfed import certificate_verifier as verifier
from d2pfed.accounting import SERVER, Adjacency, Sampling, Unit
from d2pfed.api.certificate_content import event
from d2pfed.errors import D2PFedError
from d2pfed.ledger import Head
from d2pfed.ledger.budget import ChargedRun
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.plan import Plan, PrivacyTarget, calibrate, guarantees
from d2pfed.plan.target import RotationName
from d2pfed.round import run_plan

MOST = 500.0  # an epsilon above this guarantees nothing, and is compared with nobody's
SLACK = 1e-3  # by which a claim may be below an oracle: their own rounding


def draw_target(stream: Stream) -> dict[str, object]:
    """Settings of any kind: most of them make sense by themselves, and extreme ones are among them."""

    def among(*values: object, odd: tuple[object, ...] = ()) -> object:
        chosen = odd if odd and stream.below(25) == 0 else values
        return chosen[stream.below(len(chosen))]

    population = int(str(among(10, 50, 100, 1000, 10_000, odd=(2, 3, 10**6))))
    cohort = max(1, int(population * (1, 0.5, 0.1)[stream.below(3)]) - stream.below(2))
    settings: dict[str, object] = {
        "dimension": among(1, 2, 10, 100, 1000),
        "population": population,
        "cohort_size": cohort,
        "rounds": among(1, 2, 5, 10, odd=(300,)),
        "epsilon": among(0.5, 1.0, 4.0, 8.0, 20.0, odd=(0.01, 100.0, 1e6, 1e-300, 0.0, math.nan, -1.0)),
        "delta": among(None, 1e-3, 1e-5, 1e-9, odd=(1e-30, 0.5, 0.0, 1.0)),
        "against": among("released", "server", "server", "client", odd=("alone", "colluding(1)", "colluding(3)")),
        "mechanism": among("centered", "centered", "shared", "ddgauss", "skellam", odd=tuple(MechanismName)),
        "sampling": among("fixed", "none", odd=tuple(Sampling)),
        "adjacency": among(Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT),
        "dropouts": among(0.0, 0.1, 0.3, odd=(0.5, 0.99)),
        "colluders": among(0.0, 0.0, 0.05, odd=(0.5, 0.99)),
        "spare": among(None, 0, 3),
        "clip": among(1.0, 0.01, 30.0, odd=(1e6, 1e-300, "auto", "auto(2)", math.inf)),
        "bits": among(None, odd=(1, 8, 16, 32)),
        "rotation": among(RotationName.HADAMARD, odd=tuple(RotationName)),
    }
    if settings["sampling"] == "none":
        settings["cohort_size"] = population
    if stream.below(4) == 0:
        records = {"unit": Unit.RECORD, "mechanism": MechanismName.CENTERED, "sampling": Sampling.NONE}
        sizes = {
            "records": among(10, 1000, 10**6),
            "batch_rate": among(None, 0.01, 0.3, 1.0),
            "max_silos": among(1, 2),
        }
        settings |= records | sizes | {"cohort_size": population, "adjacency": among(*Adjacency)}
    return settings


def lower_bound(plan: Plan) -> float:
    """A lower bound on epsilon against the server, where no client is hidden: the Gaussian of the same variance."""
    noise = plan.release("", 0, 0, (), plan.quorum).noise
    apart = 1 if plan.adjacency is Adjacency.ZERO_OUT else 2
    releases = min(plan.max_participations, plan.max_attempts)
    shift = apart * float(noise.radius) * math.sqrt(releases)
    ratio = math.sqrt(noise.sum_variance) / shift
    if not 0.02 < ratio < 1e3:
        return 0.0  # no use to anyone, and out of the reach of a grid
    loss = pld.from_gaussian_mechanism(
        ratio, value_discretization_interval=1e-3, pessimistic_estimate=False, use_connect_dots=False
    )
    return float(loss.get_epsilon_for_delta(plan.delta))


def faults_of(plan: Plan, target: PrivacyTarget) -> list[str]:
    """What is wrong with a plan."""
    charged = ChargedRun("run", "owner", run_plan(plan))
    stated, found = event(Head(1, bytes(32)), charged), []
    for item in guarantees(plan):
        if item.observer == target.against and item.epsilon > target.epsilon * (1 + SLACK):
            found.append(f"epsilon {item.epsilon} was planned where {target.epsilon} was asked for")
        if item.epsilon > MOST:
            continue
        try:
            own = verifier.own_bound([verifier.event_of(stated)], str(item.observer), item.delta, item.epsilon)
        except verifier.Unchecked:
            own = 0.0
        if item.epsilon < own * (1 - SLACK):
            found.append(f"{item.observer}: {item.epsilon} is claimed, the verifier has {own}")
        if (
            item.observer == SERVER
            and plan.batches is None
            and item.epsilon < (least := lower_bound(plan)) * (1 - SLACK)
        ):
            found.append(f"server: {item.epsilon} is claimed, dp-accounting has at least {least}")
    return found


def targets(count: int, seed: str, plan_of: Callable[[PrivacyTarget], Plan] = calibrate) -> dict[str, object]:
    """Try so many targets."""
    fates, wrong = Counter[str](), 0
    for number in range(count):
        settings = draw_target(Stream(digest("target", seed, number)))
        try:
            target = PrivacyTarget(**settings)
            plan = plan_of(target)
        except D2PFedError as error:
            fates["refused"] += 1
            if "\n" in str(error):
                wrong += 1
            continue
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            wrong += 1
            sys.stderr.write(f"{settings}: {error!r}\n")
            continue
        fates["planned"] += 1
        for fault in faults_of(plan, target):
            wrong += 1
            sys.stderr.write(f"{settings}: {fault}\n")
    return {
        "campaign": "random privacy targets",
        "command": f"scripts/campaign targets-random {count} --seed {seed}",
        "result": f"{count:,} targets: {fates['refused']:,} refused, {fates['planned']:,} planned and compared with "
        f"the verifier and with dp-accounting: {wrong} below an oracle or uncaught",
        "failed": wrong,
    }


def main(name: str, size: int, seed: str) -> int:
    """Run the campaign and print what was found."""
    found = {"random": targets}[name](size, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[4]))
