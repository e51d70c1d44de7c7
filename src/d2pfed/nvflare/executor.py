"""The client's half in an NVFlare job: executors that answer requests with a training script, or with its records."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
from nvflare.apis.dxo import DXO
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.app_common.logging.job_log_streamer import is_log_streaming_allowed
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from d2pfed.deploy.client import PrivateClient, Purpose, TrainArrays, discreet, log_error
from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.questions import EXAMPLES, RecordAnswers, question_of
from d2pfed.errors import ConfigError, PeerError
from d2pfed.nvflare.sites import APP, app_digest, client_config, node_of, simulation
from d2pfed.nvflare.tasks import make_refusal, make_result, read_task
from d2pfed.round import Units
from d2pfed.statistics.questions import STATISTIC, MetricMeans, is_evaluation


def answer_task(shareable: Shareable, fl_ctx: FLContext, train: Callable[[Purpose], TrainArrays]) -> Shareable:
    """Answer a request by the client of this site; what a refusal says names a rule and no data."""
    reply = make_reply(ReturnCode.OK)
    try:
        with discreet():
            kind, data, purpose = read_task(shareable)
            require_own_logs(fl_ctx)
            site, workspace = fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
            try:
                config = client_config(Path(workspace.get_site_config_dir()), site)
            except Exception:  # noqa: BLE001 - what is wrong with its files is for the client's own log
                log_error("this client's config cannot be used")
                raise ConfigError("this client is not set up; its own log says why") from None
            app = Path(workspace.get_app_dir(fl_ctx.get_job_id()))
            client = PrivateClient(
                config.serving(""), node_of(site), {APP: app_digest(app)}, train(purpose), purpose
            )
            reply.update(make_result(kind, client.answer(kind, data)))
    except (PeerError, ConfigError) as refusal:
        reply.update(make_refusal(refusal))
    return reply


def require_own_logs(fl_ctx: FLContext) -> None:
    """Refuse to work where NVFlare streams the site's log, which has the text of what training raises, to the server.

    Checked: test_nvflare_components.py::test_a_site_that_streams_its_logs_is_refused.
    """
    if simulation() is None and is_log_streaming_allowed(fl_ctx):
        raise ConfigError(
            "this site lets its logs go to the server: set allow_log_streaming to false in its local/resources.json"
        )


class PrivateExecutor(ClientAPIExecutor):
    """Answers requests with a script of NVFlare's Client API, which receives and sends models as ever.

    Guarantee: of what the script sends, only the trained arrays are used, and they leave clipped, noised and masked; of
    an evaluation only what is asked for, in the same way. Its metrics and what it logs to NVFlare's trackers stay here.
    Checked: test_nvflare_components.py::test_nothing_of_the_script_leaves_in_clear.
    """

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer a request."""

        def run(purpose: Purpose) -> TrainArrays:
            is_training = purpose is Purpose.TRAINING
            task = AppConstants.TASK_TRAIN if is_training else AppConstants.TASK_VALIDATION

            def call(arrays: NamedArrays, settings: Mapping[str, object]) -> NamedArrays:
                sent = {name: array for name, array in arrays.items() if is_training or name != STATISTIC}
                asked = FLModelUtils.to_shareable(to_model(sent, settings))
                result = super(PrivateExecutor, self).execute(task, asked, fl_ctx, abort_signal)
                if result.get_return_code() != ReturnCode.OK:
                    raise ConfigError(f"the script must send a model, got {result.get_return_code()}")
                made = FLModelUtils.from_shareable(result)
                return trained_arrays(made, sent) if is_training else sent | evaluated(made, settings)

            return call

        return answer_task(shareable, fl_ctx, run)

    def fire_log_analytics(self, fl_ctx: FLContext, dxo: DXO) -> None:
        """Keep what the script logs at this site: a loss in the clear would tell of its data."""


class RecordsExecutor(Executor):
    """Answers requests with a module's `units`, so that each single record is protected.

    `units(arrays, settings, site)` returns what this site holds under a model: `d2pfed.round.Units`, and for private
    evaluations also `deploy.questions.EvaluatedRecords`. `d2pfed.learning.TorchRecords` is such a function.

    Args:
        script: The module's file, relative to the job's code.
    """

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script
        self._module: ModuleType | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Load the module when the job begins."""
        if event_type == EventType.START_RUN:
            custom = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_app_custom_dir(fl_ctx.get_job_id())
            self._module = load_module(Path(custom) / self.script)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer a request."""
        site = fl_ctx.get_identity_name()

        def call(arrays: NamedArrays, settings: Mapping[str, object]) -> Units:
            is_asked = is_evaluation(settings)
            model = {name: array for name, array in arrays.items() if not is_asked or name != STATISTIC}
            held = self._module.units(model, settings, site)  # type: ignore[union-attr]
            return RecordAnswers(question_of(settings), held) if is_asked else held

        return answer_task(shareable, fl_ctx, lambda _purpose: call)


def load_module(file: Path) -> ModuleType:
    """Return the module in a file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the script must be a module of Python, got {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_model(arrays: NamedArrays, settings: Mapping[str, object]) -> FLModel:
    """Return the model that a script receives: the round counts from 0 as in NVFlare, the settings are its `meta`."""
    number, total = settings.get("server-round"), settings.get("total-rounds", 1)
    return FLModel(
        params_type=ParamsType.FULL,
        params=dict(arrays),
        current_round=int(str(number)) - 1,
        total_rounds=int(str(total)),
        meta=dict(settings),
    )


def trained_arrays(made: FLModel, sent: NamedArrays) -> NamedArrays:
    """Return the arrays that a script has trained, whether it sends them whole or as differences."""
    found = {name: np.asarray(made.params[name]) for name in sent if name in (made.params or {})}
    if made.params_type == ParamsType.DIFF:
        return {name: (sent[name] + array).astype(sent[name].dtype) for name, array in found.items()}
    return {name: array.astype(sent[name].dtype, copy=False) for name, array in found.items()}


def evaluated(made: FLModel, settings: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Return the vector that answers an evaluation: a script counts its examples as `num-examples`, or as one."""
    question = question_of(settings)
    if isinstance(question, MetricMeans):
        numbers = (int, float, np.number)
        metrics = {
            name: float(value) for name, value in (made.metrics or {}).items() if isinstance(value, numbers)
        }
        vector = question.encode(metrics, metrics.get(EXAMPLES, 1.0))
    elif {"scores", "labels"} <= set(made.params or {}):
        scores, labels = (np.asarray(made.params[name], np.float64) for name in ("scores", "labels"))
        vector = question.encode(scores, labels)
    else:
        raise ConfigError("an evaluation of scores must send the arrays scores and labels")
    return {STATISTIC: vector.astype(np.float32)}


def statistic_reply(asked: FLModel, vector: np.ndarray) -> FLModel:
    """Return the model with which a script answers a request for a statistic, which `asked.meta` names."""
    if STATISTIC not in (asked.params or {}):
        raise ConfigError(f"a request for a statistic has an array named {STATISTIC}")
    return FLModel(params_type=ParamsType.FULL, params={**asked.params, STATISTIC: vector.astype(np.float32)})
