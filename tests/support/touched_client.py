"""A client with a request for its vector in hand, which it answers again and again from the same state."""

import gc
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import _lru_cache_wrapper
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.accounting import Sampling
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.requests import ExchangeRequest, RequestKind
from d2pfed.deploy.transport import Deadlines
from d2pfed.flower.client import PrivateRecords, private
from d2pfed.flower.grid import from_record
from d2pfed.flower.statistics import private_evaluate, private_metrics, private_total, statistic_reply
from d2pfed.ledger.client_log import ClientLog
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, anchor_in, directory_of, enrol
from support.failing_lines import Line, Progress
from support.local_grid import LocalGrid, make_grid, make_strategy

CLIENTS = 3
VICTIM = 0
DEADLINES = Deadlines(joining=60.0, keys=60.0, training=1e5, poll=0.001)  # no attempt expires while it is repeated
MODEL = ArrayRecord({"params": Array(np.zeros(DIMENSION, np.float32)), "mean": Array(np.zeros(3, np.float32))})

# What a client's process computes once; but for the 256 tables of `centered`, which take seconds.
_CACHES = [
    found
    for found in gc.get_objects()
    if type(found) is _lru_cache_wrapper
    and found.__module__.startswith(("d2pfed.noise", "d2pfed.round", "d2pfed.numerics.rotation"))
    and found.__name__ != "_table"
]

UserFunction = Callable[..., object]  # as an app registers it, or as PrivateRecords takes it


class _Held(BaseException):
    """Ends the server once it has sent the request for the victim's vector."""


@dataclass(frozen=True)
class Seen:
    """What others can see of a request: the answer without its numbers, and the client's log without its times."""

    answer: tuple[object, ...]
    rows: tuple[object, ...]
    anchor: tuple[object, ...]


@dataclass
class TouchedClient:
    """The victim; `function` is the user's, `works` is one that does what it should."""

    directory: Path
    grid: LocalGrid
    works: UserFunction
    function: UserFunction
    progress: Progress = field(default_factory=Progress)
    request: Message | None = None
    kept: dict[Path, bytes | None] = field(default_factory=dict)  # None: a directory
    log: ClientLog | None = None

    def call(self, *given: object) -> object:
        self.progress.touch()
        return self.function(*given)

    def going(self, client: int, message: Message) -> Message:
        """Hold the server at the request for the victim's vector."""
        kind, data = from_record(message.content)
        if client == VICTIM and kind is RequestKind.EXCHANGE:
            asked = kind_of(ExchangeRequest.decode(data).frame)
            if asked in (MessageKind.MASK_REQUEST, MessageKind.STANDING_REQUEST):
                self.request = message
                raise _Held
        return message

    def hold(self, ask: Callable[[LocalGrid], object]) -> "TouchedClient":
        """Have a server ask until it has sent the request, and keep what the victim has then."""
        self.grid.going = self.going
        with suppress(_Held):
            ask(self.grid)
        self.log = read_client_config(directory_of(self.directory, VICTIM)).log
        for place in self._places:
            found = [place, *sorted(place.rglob("*"))]
            self.kept |= {path: None if path.is_dir() else path.read_bytes() for path in found}
        return self

    @property
    def _places(self) -> list[Path]:
        places = directory_of(self.directory, VICTIM), anchor_in(self.directory, VICTIM), self.directory / "keys"
        return [place for place in places if place.exists()]

    def restore(self) -> None:
        """Put back what the victim had when the request came, in files that nobody has locked."""
        for cache in _CACHES:  # a client's process begins without them
            cache.cache_clear()
        for place in self._places:
            shutil.rmtree(place)
        for path, content in self.kept.items():
            if content is None:
                path.mkdir(mode=0o700)
            else:
                path.write_bytes(content)
                path.chmod(0o600)

    def ask(self) -> Message | BaseException:
        """What Flower gets from the app: a message, or its process ends."""
        try:
            return self.grid.answer(100 + VICTIM, self.request)
        except BaseException as error:  # noqa: BLE001 - whatever ends it
            return error

    def see(self, reply: Message | BaseException) -> Seen:
        """What others see after a request, which may have failed with the log's lock in its hand."""
        (anchor_in(self.directory, VICTIM) / "lock").unlink(missing_ok=True)
        history = self.log.read()
        rows = tuple((row.entry, {**row.body, "time": 0}) for row in history.rows)
        return Seen(_answer(reply), rows, (history.head.seq, history.serial, history.roster))

    def lines(self, function: UserFunction) -> Counter[Line]:
        """How often each line is reached with a function of the user's."""
        self.restore()
        self.function = function
        return self.progress.record(self.ask)

    def failing(
        self, line: Line, time: int, error: BaseException, function: UserFunction | None = None
    ) -> tuple[Seen, bool]:
        """What others see of the request when a line fails for this time, and whether the line was reached."""
        replies: list[Message | BaseException] = []
        self.restore()
        self.function = function or self.works
        is_reached = self.progress.fail(lambda: replies.append(self.ask()), line, time, error)
        return self.see(replies[0]), is_reached

    def using(self, function: UserFunction) -> Seen:
        """What others see of the request with a function of the user's."""
        self.restore()
        self.function = function
        return self.see(self.ask())


def _answer(reply: Message | BaseException) -> tuple[object, ...]:
    if isinstance(reply, BaseException):
        return "nothing", type(reply)
    if reply.has_error():
        return "refused", reply.error.reason
    kind, data = from_record(reply.content)
    return "answer", kind, kind_of(data), len(data)


def trained(message: Message, _context: object) -> Message:
    """Training that moves the parameters and an array that stays with its client."""
    arrays = {name: array.numpy() + 1 for name, array in message.content["arrays"].items()}
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return Message(RecordDict({"arrays": record}), reply_to=message)


def counted(message: Message, _context: object) -> Message:
    return statistic_reply(message, np.full(DIMENSION, 0.2))


def measured(message: Message, _context: object) -> Message:
    found = MetricRecord({"accuracy": 0.5, "loss": 3.0, "num-examples": 10})
    return Message(RecordDict({"metrics": found}), reply_to=message)


def scored(message: Message, _context: object) -> Message:
    found = {"scores": Array(np.array([0.2, 0.9, 0.6])), "labels": Array(np.array([0.0, 1.0, 1.0]))}
    return Message(RecordDict({"arrays": ArrayRecord(found)}), reply_to=message)


@dataclass
class Rows:
    """A silo's records: each row is what one adds to the model."""

    rows: np.ndarray

    @property
    def count(self) -> int:
        return len(self.rows)

    def gradients(self, chosen: np.ndarray):
        yield self.rows[chosen]


def listed(_arrays: object, _settings: object, _context: object) -> Rows:
    return Rows(np.ones((20, DIMENSION), np.float32))


def target(**changes: object) -> PrivacyTarget:
    values: dict[str, object] = {
        "dimension": DIMENSION,
        "population": CLIENTS,
        "cohort_size": CLIENTS,
        "rounds": 1,
        "sampling": Sampling.NONE,
        "against": "server",
        "epsilon": 5000.0,
        "delta": 1e-5,
        "dropouts": 0.0,
        "colluders": 0.0,
        "consistency": "signed",
    }
    return PrivacyTarget(**(values | changes))


def _ready(directory: Path, works: UserFunction, depth: int | None, **changes: object):
    """The clients with their apps, and a strategy for them."""
    directory.mkdir()
    goal = target(**changes)
    grid = make_grid(directory, CLIENTS)
    client = TouchedClient(directory, grid, works, works)
    for node, (_, context) in list(grid.apps.items()):
        function = client.call if node == 100 + VICTIM else works
        app = ClientApp(mods=[PrivateRecords(function) if works is listed else private])
        app.train()(function)
        app.evaluate()(function)
        grid.apps[node] = app, context
    standing = {"keys": "standing", "draws": None} if depth is None else {}
    roster = enrol(directory, CLIENTS, depth, mechanisms=["centered", "ddgauss", "skellam", "shared"])
    for node in range(CLIENTS):
        file = directory_of(directory, node) / "client.toml"
        file.write_text(f'state = "{directory}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    strategy = make_strategy(calibrate(goal), directory, roster, deadlines=DEADLINES, **standing)
    return client, replace(strategy, target=goal)


def _training(directory: Path, depth: int | None, **changes: object) -> TouchedClient:
    client, strategy = _ready(directory, trained, depth, **changes)
    own = replace(strategy, trained=("params",))
    return client.hold(lambda grid: own.start(grid, MODEL, 1, 1e4))


def _statistics(directory: Path) -> TouchedClient:
    client, strategy = _ready(directory, counted, 6, mechanism="ddgauss")
    return client.hold(lambda grid: private_total(strategy, grid, "a sum", DIMENSION, timeout=1e4))


def _evaluation(directory: Path) -> TouchedClient:
    client, strategy = _ready(directory, measured, 6, mechanism="skellam")
    bounds = {"accuracy": (0.0, 1.0), "loss": (0.0, 10.0)}
    options = {"epsilon": 5000.0, "max_examples": 30.0, "timeout": 1e4}
    return client.hold(lambda grid: private_evaluate(strategy, grid, MODEL, bounds, **options))


def _scores(directory: Path) -> TouchedClient:
    client, strategy = _ready(directory, scored, 6, mechanism="shared")
    return client.hold(
        lambda grid: private_metrics(strategy, grid, MODEL, epsilon=5000.0, classes=2, max_values=4, timeout=1e4)
    )


def _records(directory: Path) -> TouchedClient:
    record = {"unit": "record", "records": 100, "batch_rate": 0.5}
    client, strategy = _ready(directory, listed, None, **record)
    params = ArrayRecord({"params": MODEL["params"]})
    return client.hold(lambda grid: strategy.start(grid, params, 1, 1e4))


# Each protocol, unit and kind of request, over all mechanisms that deployments take
REQUESTS: dict[str, Callable[[Path], TouchedClient]] = {
    "pairwise training": lambda directory: _training(directory, 6),
    "pairwise statistics": _statistics,
    "pairwise evaluation": _evaluation,
    "pairwise evaluation of scores": _scores,
    "standing training": lambda directory: _training(directory, None),
    "standing records": _records,
}
