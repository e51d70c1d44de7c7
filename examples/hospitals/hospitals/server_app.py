"""A server that sees the sum of a round over all hospitals, with noise, and nothing else."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from d2pfed.flower.server import PrivateFedAvg
from d2pfed.flower.statistics import private_metrics
from d2pfed.training import ServerOptimizer
from hospitals.task import CLASSES, RECORDS, load_patients, make_net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and test on the server's own patients after each round."""
    config = context.run_config
    data = str(config["data"])
    target = {
        "unit": "record",
        "epsilon": config["epsilon"],
        "records": RECORDS[data],
        "batch_rate": config["batch-rate"],
        "colluders": 0.33,  # one hospital of three may tell the server all that it knows
        "dropouts": 0.0,
    }
    strategy = PrivateFedAvg.for_target(
        target, make_net(data), context, optimizer=ServerOptimizer(lr=config["lr"])
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return the accuracy on patients that no hospital trains on."""
        net = make_net(data)
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy = test(net, *load_patients(data, None))
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_net(data).state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    found = private_metrics(strategy, grid, result.arrays, ["accuracy"], epsilon=1.0, classes=CLASSES[data])
    share, error = float(found.value["accuracy"]), float(found.standard_error["accuracy"])
    print(f"accuracy on the hospitals' own patients: {share:.3f}, standard error {error:.3f}", flush=True)
