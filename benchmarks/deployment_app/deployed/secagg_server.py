"""Flower's SecAgg+ over the same model, by its own workflow; it has no evaluation on the clients here."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from deployed.common import make_net, tick, timed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    clients = int(config["clients"])
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([value.numpy() for value in make_net().state_dict().values()]),
        evaluate_fn=lambda *_: tick(str(config["times"])),
    )
    rounds = ServerConfig(num_rounds=int(config["num-server-rounds"]))
    workflow = SecAggPlusWorkflow(num_shares=clients, reconstruction_threshold=2 * clients // 3 + 1)
    legacy = LegacyContext(context=context, config=rounds, strategy=strategy)
    DefaultWorkflow(fit_workflow=workflow)(timed(grid, str(config["times"])), legacy)
