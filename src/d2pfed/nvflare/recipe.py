"""Jobs of NVFlare that train or ask privately, as recipes for its simulator, its POC mode and a provisioned network."""

import os
from collections.abc import Mapping
from pathlib import Path

from nvflare.app_common.executors.client_api_executor import ExecutionMode
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from d2pfed.accounting import Unit
from d2pfed.deploy.config import SIMULATION_VARIABLE
from d2pfed.deploy.targets import trained_sizes
from d2pfed.errors import ConfigError
from d2pfed.nvflare.controller import PrivateController
from d2pfed.nvflare.executor import PrivateExecutor, RecordsExecutor
from d2pfed.nvflare.sites import enrol_simulated
from d2pfed.nvflare.tasks import TASK

# Between two questions of a site for its next task: NVFlare's own 2 seconds would be most of a round.
_POLL_SECONDS = 0.1


class PrivateJob(FedJob):
    """A job of d2pfed's components, which every site has installed: a job brings the training script alone.

    In NVFlare's simulator its clients are simulated in `WORKSPACE-d2pfed`, and protect nobody; those that hold records
    are enrolled there.
    """

    def __init__(
        self, name: str, min_clients: int, script: str, executor: PrivateExecutor | RecordsExecutor
    ) -> None:
        super().__init__(name=name, min_clients=min_clients)
        self.set_app_packages(["d2pfed"])
        self._has_records = isinstance(executor, RecordsExecutor)
        self.to_server({"server": {"task_request_interval": _POLL_SECONDS}})
        self.to_clients(executor, tasks=[TASK])
        self.to_clients({"default_task_fetch_interval": _POLL_SECONDS})
        self.to_clients(script)

    def simulator_run(
        self, workspace: str, n_clients: int | None = None, clients: list[str] | None = None, **options: object
    ) -> int | None:
        """Run the job in NVFlare's simulator."""
        is_named = SIMULATION_VARIABLE in os.environ
        place = Path(os.environ.setdefault(SIMULATION_VARIABLE, str(Path(f"{workspace}-d2pfed").absolute())))
        place.mkdir(parents=True, exist_ok=True)
        if self._has_records:
            enrol_simulated(place, clients or [f"site-{number}" for number in range(1, (n_clients or 0) + 1)])
        try:
            code: int | None = super().simulator_run(workspace, n_clients=n_clients, clients=clients, **options)
        finally:
            if not is_named:  # the next job of this process has a directory of its own
                del os.environ[SIMULATION_VARIABLE]
        return code


class PrivateFedAvgRecipe(Recipe):
    """Federated averaging in which no one sees a client's update, within a privacy target.

    In place of NVFlare's `FedAvgRecipe`; the training script stays as it is. With the unit record the script is a
    module with `units` (`executor.RecordsExecutor`) in place of a loop.

    Args:
        name: Of the job and its run: the next job with this name goes on with the run.
        model: A torch module; its buffers stay with the clients.
        min_clients: With how many sites the job may start.
        num_rounds: How many rounds are planned.
        train_script: As in NVFlare's own recipes.
        train_args: The script's arguments.
        privacy: Fields of `d2pfed.PrivacyTarget`, at least epsilon and clip.
        optimizer: Fields of `ServerOptimizer`.
        deadlines: Fields of `Deadlines`.
        timeout: For how many seconds the server waits for the vectors of a round.
        keys: `standing` or `attempt`; None: as the plan says.
        evaluations: Private evaluations after training, by name; each states its epsilon, and `metrics` with their
            bounds, or `classes`.
        launch_external_process: Whether the script runs in a process of its own.
        command: What starts that process.
        client_memory_gc_rounds: As in NVFlare's own recipes.
    """

    def __init__(
        self,
        *,
        name: str,
        model: object,
        min_clients: int,
        num_rounds: int,
        train_script: str,
        privacy: Mapping[str, object],
        train_args: str = "",
        optimizer: Mapping[str, object] | None = None,
        deadlines: Mapping[str, float] | None = None,
        timeout: float = 3600.0,
        keys: str | None = None,
        evaluations: Mapping[str, Mapping[str, object]] | None = None,
        launch_external_process: bool = False,
        command: str = "python3 -u",
        client_memory_gc_rounds: int = 0,
    ) -> None:
        executor = _executor(
            privacy,
            train_script,
            train_args,
            ExchangeFormat.PYTORCH,
            command=command if launch_external_process else None,
            gc_rounds=client_memory_gc_rounds,
        )
        job = PrivateJob(name, min_clients, train_script, executor)
        persistor = job.to_server(PTModel(model))["persistor_id"]
        controller = PrivateController(
            run=name,
            privacy=dict(privacy),
            sites=min_clients,
            rounds=num_rounds,
            trained=list(trained_sizes(model)),
            persistor_id=persistor,
            optimizer=optimizer,
            deadlines=deadlines,
            timeout=timeout,
            keys=keys,
            evaluations=evaluations,
        )
        job.to_server(controller)
        super().__init__(job)

    def enable_log_streaming(self, *_arguments: object, **_options: object) -> None:
        """Refuse: what a client's script prints would reach the server in the clear."""
        raise ConfigError("a private job does not stream its clients' logs to the server")


class PrivateStatisticRecipe(Recipe):
    """One private sum of vectors that the sites' script computes: counts, histograms, means.

    The script receives a model with the array `d2pfed.statistic` and answers by `executor.statistic_reply`; with the
    unit record, `units` returns one vector for each record.

    Args:
        name: Of the job and its run.
        statistic: Tells the script which statistic is meant.
        size: How many numbers a client answers with.
        min_clients: With how many sites the job may start.
        train_script: As in NVFlare's own recipes.
        privacy: Fields of `d2pfed.PrivacyTarget`: `clip` bounds a client's vector.
        train_args: The script's arguments.
        deadlines: Fields of `Deadlines`.
        keys: `standing` or `attempt`; None: as the plan says.
    """

    def __init__(
        self,
        *,
        name: str,
        statistic: str,
        size: int,
        min_clients: int,
        train_script: str,
        privacy: Mapping[str, object],
        train_args: str = "",
        deadlines: Mapping[str, float] | None = None,
        keys: str | None = None,
    ) -> None:
        executor = _executor(privacy, train_script, train_args, ExchangeFormat.NUMPY)
        job = PrivateJob(name, min_clients, train_script, executor)
        controller = PrivateController(
            run=name,
            privacy=dict(privacy),
            sites=min_clients,
            statistic=[statistic, size],
            deadlines=deadlines,
            keys=keys,
        )
        job.to_server(controller)
        super().__init__(job)


def _executor(
    privacy: Mapping[str, object],
    script: str,
    arguments: str,
    arrays: ExchangeFormat,
    *,
    command: str | None = None,
    gc_rounds: int = 0,
) -> PrivateExecutor | RecordsExecutor:
    """Return the executor of a module of records, or of a script: in a process of its own where it has a command."""
    if privacy.get("unit") == Unit.RECORD:
        if command is not None or arguments:
            raise ConfigError("a module of records is called in the job's own process and takes no arguments")
        return RecordsExecutor(script)
    expected = ExchangeFormat.NUMPY
    options = {"params_exchange_format": arrays, "server_expected_format": expected, "memory_gc_rounds": gc_rounds}
    if command is None:
        return PrivateExecutor(
            ExecutionMode.IN_PROCESS, task_script_path=script, task_script_args=arguments, **options
        )
    whole = f"{command} custom/{Path(script).name} {arguments}"
    return PrivateExecutor(ExecutionMode.EXTERNAL_PROCESS, command=whole, **options)
