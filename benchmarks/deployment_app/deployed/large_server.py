"""Private averaging of a large model."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from d2pfed.flower.server import KeyUse, PrivateFedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    model = {"params": np.zeros(int(config["parameters"]), np.float32)}
    target = {"epsilon": 1000.0, "compression": config["compression"]}
    strategy = PrivateFedAvg.for_target(target, model, context, keys=KeyUse(str(config["keys"])))
    strategy.start(grid, ArrayRecord({"params": Array(model["params"])}))
