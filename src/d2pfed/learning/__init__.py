"""Models, data sets, partitions, local training of a whole cohort at once: torch, and nothing of privacy."""

from d2pfed.learning.architectures import MODELS, build_model, fitting
from d2pfed.learning.fingerprint import fingerprint
from d2pfed.learning.local_training import LocalTraining, Optimizer, SequentialTrainer
from d2pfed.learning.model import (
    Forward,
    Losses,
    Metric,
    Model,
    Module,
    Step,
    accuracy,
    evaluate,
    example_losses,
    fixed_content,
    measure,
    user_model,
)
from d2pfed.learning.record_gradients import Groups, RecordTrainer
from d2pfed.learning.sources import cache_directory, fetch, where
from d2pfed.learning.task import (
    Clients,
    Examples,
    Partition,
    PartitionKind,
    StoredClients,
    Task,
    parse_partition,
)
from d2pfed.learning.tasks import load_task
from d2pfed.learning.trainer import LocalTrainer, one_thread, packed, trainer_for, unpacked, use_one_thread
from d2pfed.learning.user_clients import UserClients, batches_of

__all__ = [
    "Clients",
    "Examples",
    "StoredClients",
    "Task",
    "cache_directory",
    "fetch",
    "load_task",
    "where",
    "Partition",
    "PartitionKind",
    "parse_partition",
    "MODELS",
    "Model",
    "Module",
    "build_model",
    "fitting",
    "fingerprint",
    "fixed_content",
    "user_model",
    "Forward",
    "Losses",
    "Metric",
    "Step",
    "accuracy",
    "evaluate",
    "example_losses",
    "measure",
    "LocalTrainer",
    "LocalTraining",
    "Optimizer",
    "SequentialTrainer",
    "trainer_for",
    "Groups",
    "RecordTrainer",
    "UserClients",
    "batches_of",
    "one_thread",
    "packed",
    "unpacked",
    "use_one_thread",
]
