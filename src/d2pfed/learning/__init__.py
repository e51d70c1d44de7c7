"""Models, data sets, partitions, local training of a whole cohort at once: torch, and nothing of privacy."""

from d2pfed.learning.architectures import MODELS, build_model, fitting
from d2pfed.learning.fingerprint import fingerprint
from d2pfed.learning.local_settings import LocalTraining, MakeOptimizer, Optimizer, Precision, Rate, Schedule
from d2pfed.learning.local_training import SequentialTrainer
from d2pfed.learning.losses import Losses, default_metrics
from d2pfed.learning.model import (
    Forward,
    Metric,
    Model,
    Module,
    Step,
    Weigh,
    evaluate,
    example_losses,
    fixed_content,
    measure,
    user_model,
)
from d2pfed.learning.personal import PersonalTrainer, without_personal
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
from d2pfed.learning.torch_records import TorchRecords
from d2pfed.learning.trainer import LocalTrainer, one_thread, packed, trainer_for, unpacked, use_one_thread
from d2pfed.learning.user_clients import Collate, UserClients, batches_of, held_by
