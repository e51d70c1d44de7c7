"""A server that sums what light clients know."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.rosters import read_roster
from d2pfed.deploy.transport import Deadlines
from d2pfed.flower.server import KeyUse, PrivateFedAvg
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.secagg.trust import Consistency

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the planned rounds, and leave the model after each beside the run."""
    config = context.run_config
    directory = Path(str(config["directory"]))
    cohort, rounds, dimension = int(config["cohort"]), int(config["rounds"]), int(config["dimension"])
    plan = calibrate(
        PrivacyTarget(
            dimension=dimension,
            population=cohort,
            cohort_size=cohort,
            rounds=rounds,
            sampling=Sampling.NONE,
            against=SERVER,
            epsilon=20000.0,
            delta=1e-5,
            dropouts=float(config["dropouts"]),
            colluders=float(config["colluders"]),
            spare=3 * rounds,  # a client counts each vector that it sends, also in attempts that fail
            consistency=Consistency.SIGNED if config["roster"] else Consistency.ASSUMED,
        )
    )
    roster = str(config["roster"])
    strategy = PrivateFedAvg(
        plan=plan,
        directory=directory,
        roster=read_roster(Path(roster), str(config["authority"])) if roster else None,
        draws=Path(str(config["draws"])) if roster else None,
        keys=KeyUse(str(config["keys"])),
        deadlines=Deadlines(joining=float(config["joining-seconds"]), keys=float(config["keys-seconds"])),
    )
    models = {}

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        models[number] = arrays["params"].numpy().tolist()
        return MetricRecord({"norm": float(np.linalg.norm(models[number]))})

    initial = ArrayRecord({"params": Array(np.zeros(dimension, np.float32))})
    seconds = float(config["training-seconds"])
    strategy.start(grid, initial, rounds, seconds, run_config=config, evaluate_fn=evaluate)
    (directory / "models.json").write_text(json.dumps(models))
