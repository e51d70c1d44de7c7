"""Private averaging of the same model."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from d2pfed.flower.server import KeyUse, PrivateFedAvg
from deployed.common import make_net, tick

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config, net = context.run_config, make_net()
    strategy = PrivateFedAvg.for_target({"epsilon": 1000.0}, net, context, keys=KeyUse(str(config["keys"])))
    strategy.start(
        grid,
        ArrayRecord(net.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=lambda *_: tick(str(config["times"])),
    )
