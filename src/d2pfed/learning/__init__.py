"""Models, data sets, partitions, local training of a whole cohort at once: torch, and nothing of privacy."""

from d2pfed.learning.architectures import MODELS, build_model, fitting
from d2pfed.learning.evaluation import Metric, Metrics, accuracy, evaluate, example_losses, measure
from d2pfed.learning.local_training import LocalTraining, Optimizer
from d2pfed.learning.model import Forward, Losses, Model, Params, Step, cross_entropy
from d2pfed.learning.packing import packed, unpacked
from d2pfed.learning.partition import ByOwner, Dirichlet, Iid, Partition, Shards, parse_partition
from d2pfed.learning.record_gradients import Groups, RecordTrainer
from d2pfed.learning.rows import Rows, batches_of, rows_of
from d2pfed.learning.sequential import SequentialTrainer
from d2pfed.learning.sources import cache_directory, fetch, where
from d2pfed.learning.task import Clients, Examples, ReloadedClients, StoredClients, Task
from d2pfed.learning.tasks import load_clients, load_task
from d2pfed.learning.trainer import LocalTrainer, TrainingMethod, use_one_thread
from d2pfed.learning.user_clients import LabelledClients, UserClients
from d2pfed.learning.user_model import Module, fixed_content, one_thread, trainer_for, user_model

__all__ = [
    "Examples",
    "Clients",
    "StoredClients",
    "ReloadedClients",
    "Task",
    "load_task",
    "load_clients",
    "fetch",
    "where",
    "cache_directory",
    "Partition",
    "Iid",
    "Shards",
    "Dirichlet",
    "ByOwner",
    "parse_partition",
    "Model",
    "Params",
    "MODELS",
    "build_model",
    "fitting",
    "Optimizer",
    "LocalTraining",
    "LocalTrainer",
    "TrainingMethod",
    "SequentialTrainer",
    "Metrics",
    "Metric",
    "evaluate",
    "example_losses",
    "measure",
    "accuracy",
    "RecordTrainer",
    "Groups",
    "Rows",
    "rows_of",
    "batches_of",
    "UserClients",
    "Module",
    "user_model",
    "trainer_for",
    "one_thread",
    "fixed_content",
    "LabelledClients",
    "Forward",
    "Step",
    "Losses",
    "cross_entropy",
    "use_one_thread",
    "packed",
    "unpacked",
]
