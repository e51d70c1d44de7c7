"""Models, data sets, partitions, local training of a whole cohort at once: torch, and nothing of privacy."""

from d2pfed.learning.architectures import MODELS, build_model, fitting
from d2pfed.learning.evaluation import Metrics, evaluate
from d2pfed.learning.local import LocalTraining, Optimizer
from d2pfed.learning.model import Model, Params
from d2pfed.learning.partition import ByOwner, Dirichlet, Iid, Partition, Shards, parse_partition
from d2pfed.learning.sequential import SequentialTrainer
from d2pfed.learning.sources import cache_directory, fetch, where
from d2pfed.learning.task import Clients, Examples, ReloadedClients, StoredClients, Task
from d2pfed.learning.tasks import load_clients, load_task
from d2pfed.learning.trainer import LocalTrainer, Method, use_one_thread

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
    "Method",
    "SequentialTrainer",
    "Metrics",
    "evaluate",
    "use_one_thread",
]
