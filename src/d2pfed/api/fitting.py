"""`fit`: a user's own module, trained over a user's own clients, private against the server by default."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from d2pfed.accounting import Unit
from d2pfed.api.arguments import (
    check_local,
    checked_callbacks,
    checked_metrics,
    checked_seed,
    checked_stop,
    checked_weights,
    fixed_digest,
    function_name,
    keep_baseline,
    ledger_path,
    run_directory,
    whole_number,
)
from d2pfed.api.backends import backend_named
from d2pfed.api.complete_target import scope_of
from d2pfed.api.user_run import Details, OwnEvaluator, OwnRun
from d2pfed.api.result import FitResult
from d2pfed.api.simulated import array_shapes
from d2pfed.api.early_stop import EarlyStop
from d2pfed.api.progress import Callback, watching
from d2pfed.learning import (
    Forward,
    Groups,
    LocalTraining,
    Losses,
    Metric,
    Module,
    OwnClients,
    RecordTrainer,
    Step,
    one_thread,
    own_model,
)
from d2pfed.plan import DEFAULT_TARGET, PrivacyTarget
from d2pfed.runs import RunSettings
from d2pfed.training import ServerOptimizer


def fit(
    module: Module,
    clients: Sequence[object] | Mapping[object, object] | Callable[[int], object],
    *,
    privacy: PrivacyTarget | Mapping[str, object] | None = DEFAULT_TARGET,
    rounds: int | None = None,
    cohort_size: int | None = None,
    population: int | None = None,
    groups: Groups | None = None,
    weights: Sequence[float] | None = None,
    max_weight: float | None = None,
    validation: object = None,
    test: object = None,
    loss: Losses | None = None,
    metrics: Mapping[str, Metric] | None = None,
    forward: Forward | None = None,
    step: Step | None = None,
    trainable: str | Sequence[str] = "*",
    optimizer: str = "sgd",
    lr: float = 0.1,
    momentum: float = 0.0,
    epochs: int = 1,
    batch_size: int = 10,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    server_second_moment: float = 0.0,
    server_lr_decay: float = 1.0,
    server_averaging: float = 0.0,
    device: str = "cpu",
    evaluate_every: int = 1,
    early_stop: EarlyStop | None = None,
    callbacks: Sequence[Callback] = (),
    directory: str | Path | None = None,
    ledger: str | Path | None = None,
    baseline: FitResult | str | Path | None = None,
    backend: str = "auto",
    workers: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> FitResult:
    """Train a module over clients by federated averaging, with secure aggregation and differential privacy.

    The clients are simulated on this machine; each round's sum is made by their own encoders. A call with the same
    directory and settings goes on where the run is, or returns what it came to.

    Args:
        module: Any module whose rows of a batch do not mix; it is copied, not changed.
        clients: The data set of each client: a sequence, a mapping, or a function of a client's number (then give
            `population`). A data set is a pair of tensors or arrays, a torch Dataset or a DataLoader, of any size,
            and is loaded when its client is asked.
        privacy: The target; fields that only `fit` knows may be left out. A dictionary changes the default target:
            epsilon 1 against the server, each client in one round, 10 % dropouts and 10 % colluders. None trains in
            the clear.
        rounds: How many rounds; None chooses, where each client is in one round.
        cohort_size: How many clients are asked in a round; None chooses, as above.
        population: How many clients there are, where `clients` is a function.
        groups: Where the unit of privacy is a record: for each silo the owner of each row, such as a patient. All rows
            of one owner in a silo are then one unit. None: each row is one.
        weights: A weight from 0 on for each client, such as how many examples it has: the mean update is weighted by
            them, each capped at `max_weight`. They are private: their sum is released beside the updates' in one
            vector. None weighs all clients alike.
        max_weight: The cap on a weight: public, chosen without looking at the weights.
        validation: A data set to choose by, measured after rounds.
        test: A data set to report on, opened once at the end.
        loss: From outputs and targets to the loss of each example or their mean; None is the cross entropy.
        metrics: Functions of all outputs and all targets, by name; None is the accuracy where loss is None.
        forward: From the module and inputs to outputs, where the module is not called with the inputs.
        step: From the module and a batch to its loss, in place of forward and loss.
        trainable: A pattern or patterns of parameter names, such as `head.*`; the others keep their values.
        optimizer: The clients' optimizer: sgd, adam or rmsprop.
        lr: The clients' learning rate; where the unit is a record, a factor of the server's.
        momentum: The clients' momentum, for sgd.
        epochs: The clients' passes over their data in a round.
        batch_size: The clients' batch size.
        server_lr: The server's learning rate.
        server_momentum: The server's momentum.
        server_second_moment: Decay of Adam's second moment at the server; 0: no Adam.
        server_lr_decay: Factor by which the server's learning rate shrinks in each round.
        server_averaging: Decay of the running average of models; 0: the last model counts.
        device: cpu, cuda or mps; data and module are moved there.
        evaluate_every: After how many rounds the validation data are measured; after the last one always.
        early_stop: A rule that ends the run, declared here so that its epsilon is honest.
        callbacks: Called after each round with its record and a function that returns the current module; one that
            returns False interrupts the run, which the same call resumes.
        directory: Where the run is kept; None is one under `runs` for these settings and this initial module.
        ledger: A ledger that other runs over these clients share; None is the run's own.
        baseline: A result or a run's directory whose metrics the report shows beside this run's.
        backend: auto, processes or in-process.
        workers: How many worker processes; None is one per core.
        seed: A number repeats the run, and protects nobody from whoever knows it; not with a shared ledger.
        progress: Whether to show a bar on standard error; None shows it in a terminal or notebook.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the run.
    """
    model = own_model(module, trainable=trainable, loss=loss, forward=forward, step=step, device=device)
    own = OwnClients.of(clients, population, model.device)
    scope = scope_of(
        privacy,
        dimension=model.dimension,
        population=own.population,
        rounds=rounds,
        cohort_size=cohort_size,
        count_units=lambda: RecordTrainer(model, own, groups).count_all(),
    )
    local = LocalTraining(optimizer=optimizer, lr=lr, momentum=momentum, epochs=epochs, batch_size=batch_size)  # type: ignore[arg-type]
    by_record = scope.target is not None and scope.target.unit is Unit.RECORD
    check_local(local, groups, by_record=by_record)
    server = ServerOptimizer(
        lr=server_lr * lr if by_record else server_lr,
        momentum=server_momentum,
        second_moment=server_second_moment,
        lr_decay=server_lr_decay,
        averaging=server_averaging,
    )
    stop = checked_stop(early_stop, validation)
    own_weights, cap = checked_weights(weights, max_weight, own.population, scope)
    details = Details(
        local,
        scope.sampling.cohort_size,
        function_name(step or loss),
        fixed_digest(model),
        stop,
        cap,
        None if groups is None else "owner",
    )
    settings = RunSettings(
        title=type(module).__name__,
        data=f"{own.population:,} clients",
        target=scope.target,
        rounds=scope.rounds,
        optimizer=server,
        arrays=array_shapes(model),
        seed=checked_seed(seed),
        details=details,
    )
    run = OwnRun(
        model=model,
        clients=own,
        groups=groups,
        weights=own_weights,
        scope=scope,
        settings=settings,
        details=details,
        evaluator=OwnEvaluator(model, validation, test, checked_metrics(metrics, model)),
        evaluate_every=whole_number("evaluate_every", evaluate_every, 1),
        callbacks=checked_callbacks(callbacks),
        path=run_directory(directory, settings, model),
    )
    where = backend_named(backend), None if workers is None else whole_number("workers", workers, 1)
    shared = ledger_path(ledger, None if scope.target is None else settings.seed)
    keep_baseline(run.path, baseline)
    with watching(scope.rounds, progress=progress) as watch, one_thread(model):
        return run.execute(watch, where, shared)
