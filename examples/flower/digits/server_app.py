"""A server that learns what its clients have learned together, and nothing about one of them."""

from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, UserConfig
from flwr.serverapp import Grid, ServerApp

from d2pfed.accounting import SERVER, Sampling
from d2pfed.flower.grid import Deadlines
from d2pfed.flower.rosters import read_roster
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.secagg.graph import Consistency
from digits.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and test on the server after each round."""
    config = context.run_config
    roster = str(config["roster"])
    strategy = PrivateFedAvg(
        plan=make_plan(config),
        directory=Path(str(config["run-directory"])),
        roster=read_roster(Path(roster), str(config["authority"])) if roster else None,
        draws=Path(str(config["draws"])) if roster else None,
        deadlines=Deadlines(joining=float(config["joining-seconds"]), keys=float(config["keys-seconds"])),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["training-seconds"]),
        train_config=ConfigRecord({"lr": config["lr"]}),
        run_config=config,
        evaluate_fn=evaluate,
    )


def make_plan(config: UserConfig) -> Plan:
    """Return the least noise that meets the target; every client checks the plan against its own policy."""
    population, cohort = int(config["population"]), int(config["cohort"])
    rounds = int(config["num-server-rounds"])
    return calibrate(
        PrivacyTarget(
            dimension=sum(parameter.numel() for parameter in Net().parameters()),
            population=population,
            cohort_size=cohort,
            rounds=rounds,
            epsilon=float(config["epsilon"]),
            delta=float(config["delta"]),
            against=SERVER,
            sampling=Sampling.NONE if cohort == population else Sampling.FIXED,
            dropouts=float(config["dropouts"]),
            colluders=float(config["colluders"]),
            spare=rounds,  # a client counts each vector that it sends, also in attempts that fail
            consistency=Consistency.SIGNED if config["roster"] else Consistency.ASSUMED,
        )
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy on the server's own test digits."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    accuracy = test(model, load_test_data())
    print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
    return MetricRecord({"accuracy": accuracy})
