"""FedAvg with evaluation on the clients."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from deployed.common import make_net, tick, timed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    clients = int(config["clients"])
    strategy = FedAvg(min_available_nodes=clients, min_train_nodes=clients, min_evaluate_nodes=clients)
    strategy.start(
        timed(grid, str(config["times"])),
        ArrayRecord(make_net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=lambda *_: tick(str(config["times"])),
    )
