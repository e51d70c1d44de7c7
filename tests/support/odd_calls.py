"""Every public name with arguments that it takes, out of which odd calls are made."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d2pfed
from d2pfed import CohortSampling, Entropy, Ledger, Participant, PrivacyTarget, ServerOptimizer
from d2pfed.errors import TooFewClients
from d2pfed.plan.policy import Request
from d2pfed.round import Attempt, Outcome, run_plan, session_of

CLIENTS = 8
_numbers = count()


@dataclass(frozen=True)
class Call:
    """A function with arguments that it takes, and what is done with its result."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, object]]
    use: Callable[[Any], object] = field(default=lambda result: result)

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of its parameters."""
        fixed = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        every = inspect.signature(self.function).parameters.values()
        return tuple(each.name for each in every if each.kind not in fixed)


@cache
def target() -> PrivacyTarget:
    return PrivacyTarget(
        dimension=3,
        population=CLIENTS,
        cohort_size=CLIENTS,
        rounds=2,
        epsilon=50.0,
        delta=1e-3,
        against="server",
        sampling="none",
    )


@cache
def plan() -> d2pfed.Plan:
    return d2pfed.calibrate(target())


@cache
def ledger() -> Ledger:
    """A ledger in this directory that stays open, with a run that is charged."""
    made = Ledger.create(Path("open.sqlite"), run_plan(plan()).budget)
    made.begin("run", "owner", run_plan(plan()))
    return made


@cache
def trained() -> d2pfed.FitResult:
    return d2pfed.fit(**fitted(directory="run"))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(4, 3) * each, torch.tensor([0, 1, 0, 1])) for each in range(CLIENTS)]


def fitted(**changes: object) -> dict[str, Any]:
    privacy = {"epsilon": 50.0, "sampling": "none", "dropouts": 0.0, "colluders": 0.0}
    usual = {"module": torch.nn.Linear(3, 2), "clients": data(), "privacy": privacy, "rounds": 1}
    return usual | {"cohort_size": CLIENTS, "run": {"progress": False, "backend": "in-process"}} | changes


def of_value(value: object) -> dict[str, object]:
    """The fields of a dataclass's value."""
    return {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]


def release() -> d2pfed.Release:
    return plan().release("run", 1, 0, tuple(range(CLIENTS)), CLIENTS)


class Nobody:
    """Attempts in which nobody answers."""

    def draw(self, _attempt: Attempt) -> tuple[int, ...]:
        return tuple(range(CLIENTS))

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> object:
        return session_of(plan(), attempt, cohort)

    def collect(self, *_given: object) -> object:
        raise TooFewClients("nobody answers")


def participant() -> Participant:
    return Participant(plan=plan(), client=1, entropy=Entropy.replay(b"odd"), participations=0)


def session() -> object:
    return session_of(plan(), Attempt("run", 1, 0), tuple(range(CLIENTS)))


def prepare(place: Path) -> None:
    """Make what calls name: a folder, a text, a run and its ledger."""
    (place / "folder").mkdir()
    (place / "text").write_text("a text that is no ledger and no plan " * 10)
    for made in (target, plan, ledger, trained):
        made.cache_clear()  # type: ignore[attr-defined]
    trained()


STATISTIC = {"epsilon": 50.0, "delta": 1e-3, "privacy": {"against": "server", "dropouts": 0.0}, "fidelity": "sum"}
NUMBERS = [[0.5, float(each)] for each in range(CLIENTS)]


def _named(function: Callable[..., Any], arguments: Callable[[], dict[str, object]], **more: Any) -> Call:
    return Call(function.__qualname__, function, arguments, **more)


def _of_one(kind: type) -> Call:
    """An enumeration or an error, which takes one value."""

    def function(value: object) -> object:
        with suppress(TypeError):
            hash(value)
            return kind(value)
        return None  # Python itself compares it with every member

    return Call(kind.__name__, function, lambda: {"value": "fixed"})


def _rounds() -> dict[str, object]:
    step = ServerOptimizer(momentum=0.5)
    state = step.start(np.zeros(3, np.float32))
    return {
        "state": state,
        "step": step,
        "rounds": 2,
        "aggregate": lambda _: Outcome(np.ones(3, np.float32), 0, 1),
    }


def _method(name: str, receiver: Callable[[], object], arguments: Callable[[], dict[str, object]]) -> Call:
    """A call of a method, of an object that is made when it is called."""
    kind, _, method = name.partition(".")
    declared = getattr(getattr(d2pfed, kind), method)

    def function(*given: object, **named: object) -> object:
        return getattr(receiver(), method)(*given, **named)

    own = list(inspect.signature(declared).parameters.values())[1:]
    function.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return Call(name, function, arguments)


def _new() -> Path:
    return Path(f"new-{next(_numbers)}.sqlite")


FUNCTIONS: tuple[Call, ...] = (
    _named(d2pfed.fit, lambda: fitted(privacy=None)),
    _named(d2pfed.fit, fitted),
    _named(d2pfed.fit, lambda: fitted(training={"weights": [1.0] * CLIENTS, "max_weight": 2.0, "trainable": "*"})),
    _named(d2pfed.fit, lambda: fitted(privacy={"unit": "record", "epsilon": 50.0, "records": 32})),
    _named(d2pfed.fit, lambda: fitted(validation=data()[0], test=data()[1], loss=torch.nn.CrossEntropyLoss())),
    _named(d2pfed.certify, lambda: {"run": Path("run"), "key": Path("key"), "output": Path("out")}),
    _named(d2pfed.calibrate, lambda: {"target": target()}),
    _named(d2pfed.describe, lambda: {"target": target(), "plan": plan()}),
    _named(
        d2pfed.account,
        lambda: {
            "releases": [release()] * 2,
            "observer": d2pfed.SERVER,
            "delta": 1e-3,
            "max_participations": 2,
        },
    ),
    _named(d2pfed.colluding, lambda: {"colluders": 1}),
    _named(d2pfed.verify, lambda: {"path": Path("run/ledger.sqlite")}),
    _named(d2pfed.private_sum, lambda: {"vectors": NUMBERS, "clip": 1.0} | STATISTIC),
    _named(d2pfed.private_mean, lambda: {"vectors": np.array(NUMBERS), "bounds": (0, 10)} | STATISTIC),
    _named(
        d2pfed.private_mean,
        lambda: (
            {"vectors": [1.0] * CLIENTS, "clip": 1.0, "weights": [1.0] * CLIENTS, "max_weight": 2.0} | STATISTIC
        ),
    ),
    _named(d2pfed.private_histogram, lambda: {"values": NUMBERS, "bins": [0, 1, 2, 5]} | STATISTIC),
    _named(
        d2pfed.private_table,
        lambda: {"rows": [[("yes", 1)]] * CLIENTS, "categories": [["yes", "no"], [1, 2]]} | STATISTIC,
    ),
    _named(
        d2pfed.private_quantile,
        lambda: {"values": NUMBERS, "levels": [0.5, 0.9], "bounds": (0.0, 9.0), "bins": 8} | STATISTIC,
    ),
    _named(
        d2pfed.private_metrics,
        lambda: {"clients": [([0.9, 0.2], [1, 0])] * CLIENTS, "metrics": ["accuracy", "loss"]} | STATISTIC,
    ),
    _named(
        d2pfed.aggregate,
        lambda: {
            "plan": plan(),
            "first": Attempt("run", 1, 0),
            "model": np.zeros(3, np.float32),
            "attempts": Nobody(),
            "ledger": ledger(),
        },
    ),
    _named(d2pfed.train, _rounds, use=list),
)
CLASSES: tuple[Call, ...] = (
    _named(PrivacyTarget, lambda: of_value(target())),
    _named(d2pfed.Plan, lambda: of_value(plan())),
    _named(d2pfed.Policy, lambda: of_value(d2pfed.Policy())),
    _named(d2pfed.PlanSummary, lambda: of_value(d2pfed.describe(target(), plan()))),
    _named(d2pfed.Guarantee, lambda: of_value(trained().guarantees[0])),
    _named(d2pfed.Observer, lambda: of_value(d2pfed.SERVER)),
    _named(d2pfed.Release, lambda: of_value(release())),
    _named(CohortSampling, lambda: of_value(plan().sampling)),
    _named(d2pfed.Budget, lambda: of_value(ledger().budget)),
    _named(Entropy, lambda: {"key": bytes(32), "is_replayed": True}),
    _named(d2pfed.Statistic, lambda: of_value(d2pfed.private_sum(NUMBERS, **STATISTIC))),  # type: ignore[arg-type]
    _named(Participant, lambda: of_value(participant())),
    _named(ServerOptimizer, lambda: of_value(ServerOptimizer())),
    _named(d2pfed.EarlyStop, lambda: of_value(d2pfed.EarlyStop()) | {"milestones": (1, 2)}),
    _named(d2pfed.Training, lambda: of_value(d2pfed.Training())),
    _named(d2pfed.RunOptions, lambda: of_value(d2pfed.RunOptions())),
    _named(d2pfed.FitResult, lambda: of_value(trained())),
    *map(_of_one, (d2pfed.Adjacency, d2pfed.Sampling, d2pfed.MechanismName)),
    *map(_of_one, (d2pfed.D2PFedError, d2pfed.ConfigError, d2pfed.PeerError, d2pfed.TooFewClients)),
    *map(_of_one, (d2pfed.BudgetExceeded, d2pfed.LedgerError, d2pfed.DamagedFile, d2pfed.DownloadError)),
    _of_one(d2pfed.MissingExtra),
)
METHODS: tuple[Call, ...] = (
    _named(Ledger.create, lambda: {"path": _new(), "budget": ledger().budget}, use=Ledger.close),
    _named(Ledger.open, lambda: {"path": Path("run/ledger.sqlite")}, use=Ledger.close),
    _method("Ledger.begin", ledger, lambda: {"run": "run", "owner": "owner", "plan": run_plan(plan())}),
    _method("Ledger.reserve", ledger, lambda: {"release": release()}),
    _method("Ledger.commit", ledger, lambda: {"release": release()}),
    _method("Ledger.void", ledger, lambda: {"run": "run", "number": 1, "attempt": 0}),
    _method("Ledger.require_own", ledger, lambda: {"run": "run", "head": ledger().head(), "rounds": 1}),
    _method("Ledger.require_head", ledger, lambda: {"head": ledger().head()}),
    _method("Ledger.require_plan", ledger, lambda: {"run": "run", "plan": plan().digest}),
    _method("Ledger.participations", ledger, lambda: {"run": "run", "clients": (1, 2)}),
    _method("Ledger.charged", ledger, lambda: {"run": "run"}),
    _method("Ledger.next_attempt", ledger, lambda: {"run": "run", "number": 1}),
    _named(Entropy.replay, lambda: {"seed": b"seed"}),
    _method("Entropy.child", lambda: Entropy.replay(b"odd"), dict),
    _method("Plan.noise", plan, lambda: {"survivors": CLIENTS}),
    _method(
        "Plan.release",
        plan,
        lambda: {"run": "run", "number": 1, "attempt": 0, "participants": (1, 2), "survivors": CLIENTS},
    ),
    _method("Policy.check", d2pfed.Policy, lambda: {"plan": plan()}),
    _method("Policy.require_request", d2pfed.Policy, lambda: {"request": Request.TRAINING}),
    _method(
        "Participant.encode",
        participant,
        lambda: {"session": session(), "update": np.zeros(3, np.float32), "group": None},
    ),
    _method("Participant.join", participant, lambda: {"session": session(), "train": lambda *_: np.zeros(3)}),
)
# Functions and settings come more often: they are what users call.
CALLS: tuple[Call, ...] = (*FUNCTIONS, *FUNCTIONS, *CLASSES, *METHODS)
