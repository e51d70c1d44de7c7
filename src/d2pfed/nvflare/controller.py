"""The server's half in an NVFlare job: a controller that trains privately, and asks private questions."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable

from d2pfed.deploy.client import Purpose
from d2pfed.deploy.evaluation import Asked, PrivateAnswer, means_of, metrics_of, total_of
from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.strategy import KeyUse, Strategy
from d2pfed.deploy.targets import DIRECTORY_SETTING, ROUNDS_SETTING, RUN_SETTING
from d2pfed.deploy.transport import Deadlines
from d2pfed.nvflare.sites import APP, app_digest, server_directory
from d2pfed.nvflare.tasks import TASK, Fields, TaskEngine
from d2pfed.plan.bounds import check_name
from d2pfed.statistics.questions import STATISTIC
from d2pfed.training import ServerOptimizer

_NAME = "NVFlare"


class JobAborted(Exception):  # noqa: N818 - the name of the event, not of a defect
    """The job was aborted: the run goes on when a job with its name is submitted again."""


@dataclass(frozen=True, slots=True)
class TaskSender:
    """Sends tasks through a controller (`nvflare.tasks.Sender`)."""

    controller: Controller
    context: FLContext
    aborted: Signal

    def require_running(self) -> None:
        """Raise once the job is aborted: nothing waits for its deadline then."""
        if self.aborted.triggered:
            raise JobAborted("the job was aborted; submit it again to go on")

    def sites(self) -> Iterator[str]:
        """Return the sites of the job that are connected now."""
        for client in self.context.get_engine().get_clients():
            if self.controller.get_client_disconnect_time(client.name) is None:
                yield client.name

    def send(self, site: str, fields: Fields, seconds: int, answered: Callable[[Fields | None], None]) -> None:
        """Send a task to a site; call `answered` with the result's fields, or None if the task ends without one."""
        is_answered = False

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 - NVFlare's names
            nonlocal is_answered
            is_answered = True
            answered(dict(client_task.result))
            client_task.result = None

        def done(task: Task, fl_ctx: FLContext) -> None:  # noqa: ARG001 - NVFlare's names
            if not is_answered:
                answered(None)

        task = Task(TASK, Shareable(dict(fields)), timeout=seconds, result_received_cb=received, task_done_cb=done)
        self.controller.send(task, self.context, targets=[site])


class PrivateController(Controller):
    """Trains a model as a plan allows, then asks what was asked for; or asks for one statistic, without a model.

    The server's directory is `local/d2pfed` of its startup kit: the signed `roster`, the public key of its `authority`
    and the server's `draws`, and a directory for each run by its name. A job with the name of a run that is not
    finished goes on with it.

    Args:
        run: The run's name.
        privacy: Fields of `PrivacyTarget`; dimension and population are filled in.
        sites: The population where nobody is enrolled.
        rounds: How many rounds are planned.
        trained: Names of the arrays that are trained, while the others stay with the clients; None: all.
        persistor_id: The component that loads the initial model and keeps the trained one.
        optimizer: Fields of `ServerOptimizer`.
        deadlines: Fields of `Deadlines`.
        timeout: For how many seconds the server waits for the vectors of a round.
        keys: `standing` or `attempt`; None: as the plan says.
        evaluations: Asked after training, by name: fields of `means_of` (`metrics` with their bounds) or `metrics_of`.
        statistic: Name and size of the statistic that is asked for in place of training.
    """

    def __init__(
        self,
        *,
        run: str,
        privacy: Mapping[str, object],
        sites: int,
        rounds: int = 1,
        trained: Sequence[str] | None = None,
        persistor_id: str = "",
        optimizer: Mapping[str, object] | None = None,
        deadlines: Mapping[str, float] | None = None,
        timeout: float = 3600.0,
        keys: str | None = None,
        evaluations: Mapping[str, Mapping[str, object]] | None = None,
        statistic: Sequence[object] | None = None,
    ) -> None:
        super().__init__()
        check_name("a run's", run)
        self.run = run
        self.privacy = privacy
        self.sites = sites
        self.rounds = rounds
        self.trained = trained
        self.persistor_id = persistor_id
        self.optimizer = optimizer
        self.deadlines = deadlines
        self.timeout = timeout
        self.keys = keys
        self.evaluations = evaluations
        self.statistic = statistic

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: a run begins in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: a run's directory is always complete."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the job; NVFlare reports an exception as the job's failure."""
        workspace, job = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT), fl_ctx.get_job_id()
        local, app = Path(workspace.get_site_config_dir()), Path(workspace.get_app_dir(job))
        engine = TaskEngine(TaskSender(self, fl_ctx, abort_signal))
        if self.statistic is not None:
            name, size = str(self.statistic[0]), int(str(self.statistic[1]))
            strategy = self._strategy(local, app, {STATISTIC: np.zeros(size, np.float32)})
            answers = {name: _readable(total_of(Asked(strategy, engine, _NAME, self.timeout), name, size, {}))}
        else:
            persistor = fl_ctx.get_engine().get_component(self.persistor_id)
            arrays = persistor.load(fl_ctx)[ModelLearnableKey.WEIGHTS]
            strategy = self._strategy(local, app, arrays)
            config = {"total-rounds": self.rounds}
            trained = strategy.train(engine, arrays, over=_NAME, timeout=self.timeout, config=config)
            persistor.save(make_model_learnable(dict(trained), {}), fl_ctx)
            asking = Asked(strategy, replace(engine, purpose=Purpose.EVALUATION), _NAME, self.timeout)
            questions = (self.evaluations or {}).items()
            answers = {name: _readable(_ask(asking, trained, name, question)) for name, question in questions}
        for name, answer in answers.items():
            text = json.dumps(answer, indent=1)
            self.log_info(fl_ctx, f"{name}: {text}")
            for place in (strategy.directory, Path(workspace.get_result_root(job))):
                place.mkdir(parents=True, exist_ok=True)
                (place / f"answer-{name}.json").write_text(text)

    def _strategy(self, local: Path, app: Path, arrays: NamedArrays) -> Strategy:
        """Return the strategy of this job's run, in the server's own directory."""
        directory = server_directory(local)
        names = arrays if self.trained is None else self.trained
        settings = {DIRECTORY_SETTING: str(directory), RUN_SETTING: self.run, ROUNDS_SETTING: self.rounds}
        known: dict[str, object] = {} if (directory / "roster").exists() else {"population": self.sites}
        if self.statistic is not None:
            known["longest_mean"] = 1.0  # all sites may answer the same
        planned = Strategy.planned(
            {**known, **self.privacy},
            {name: arrays[name] for name in names},
            settings,
            optimizer=ServerOptimizer(**(self.optimizer or {})),  # type: ignore[arg-type]  # checked at construction
            deadlines=Deadlines(**(self.deadlines or {})),
            keys=None if self.keys is None else KeyUse(self.keys),
        )
        directory.mkdir(parents=True, exist_ok=True)
        return replace(planned, run_config={APP: app_digest(app)})

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Log a result that comes after its task's time."""
        self.log_warning(fl_ctx, f"{client.name} has answered task {task_name} {client_task_id} too late")


def _ask(asked: Asked, arrays: NamedArrays, name: str, question: Mapping[str, object]) -> PrivateAnswer[Any, Any]:
    """Ask for the means of the clients' own metrics, where their bounds are given, or for metrics of scores."""
    if isinstance(question.get("metrics"), Mapping):
        return means_of(asked, arrays, name=name, **{"max_examples": 1.0, **question})  # type: ignore[arg-type]
    usual = {"metrics": ["accuracy", "loss"], "bins": 20, "max_loss": 5.0, "max_values": None}
    return metrics_of(asked, arrays, name=name, **{**usual, **question})  # type: ignore[arg-type]


def _readable(answer: PrivateAnswer[Any, Any]) -> dict[str, object]:
    """Return an answer as JSON has it."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return {str(name): plain(each) for name, each in value.items()}
        return np.asarray(value).tolist()

    epsilons = {str(each.observer): each.epsilon for each in answer.guarantees}
    numbers = {"value": plain(answer.value), "standard_error": plain(answer.standard_error)}
    return {**numbers, "clients": answer.clients, "epsilon": epsilons}
