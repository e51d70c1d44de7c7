"""A server that averages what its clients have learned."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from d2pfed.flower.server import PrivateFedAvg
from digits.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and test on the server after each round."""
    config = context.run_config
    target = {"epsilon": config["epsilon"], "population": config["population"]}
    strategy = PrivateFedAvg.for_target(target, Net(), context)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": config["lr"]}),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy on the server's own test digits."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    accuracy = test(model, load_test_data())
    print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
    return MetricRecord({"accuracy": accuracy})
