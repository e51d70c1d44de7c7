"""The benchmarks' rows as tables for people and as dictionaries for JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.table import Table

from benchmarks.arithmetic import SpeedRow
from benchmarks.deployment import DeploymentGoal, DeploymentRow, in_words
from benchmarks.engines_row import EngineRow
from benchmarks.goals import GoalRow
from benchmarks.growth import GrowthRow
from benchmarks.lattice import ProtocolRow
from benchmarks.ledger import LedgerRow
from benchmarks.mean import MeanRow
from benchmarks.secagg import SecAggRow
from benchmarks.silos_row import SiloRow
from benchmarks.statistics import StatisticsRow
from benchmarks.traffic import TrafficRow
from benchmarks.training_row import TrainingRow

Row = (
    SpeedRow
    | EngineRow
    | SecAggRow
    | TrainingRow
    | LedgerRow
    | GoalRow
    | GrowthRow
    | StatisticsRow
    | DeploymentRow
    | DeploymentGoal
    | SiloRow
    | ProtocolRow
)

_TEXT = {
    "what",
    "mechanism",
    "peer",
    "note",
    "implementation",
    "engine",
    "protocol",
}  # columns that are not numbers


def as_dict(row: Row) -> dict[str, object]:
    """Return a row with what is computed from it."""
    match row:
        case SpeedRow() | TrainingRow():
            return asdict(row) | {"ratio": row.ratio, "met": row.met}
        case LedgerRow() | GoalRow() | StatisticsRow() | DeploymentGoal() | SiloRow():
            return asdict(row) | {"met": row.met}
    return asdict(row)


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """Return the table of the arithmetic."""
    table = _table(
        "Millions of coordinates a second",
        ("what", "coordinates", "threads", "rate", "peer", "its rate", "ratio", "goal", "met", "note"),
    )
    for row in rows:
        peer_rate = None if row.peer_rate is None else row.peer_rate / 1e6
        table.add_row(
            *(row.what, f"{row.dimension:,}", str(row.threads), f"{row.rate / 1e6:.4g}", row.peer),
            *(_number(value) for value in (peer_rate, row.ratio, row.goal)),
            *(_met(row.met), row.peer_error),
        )
    return table


def traffic_table(rows: Sequence[TrafficRow]) -> Table:
    """Return the table of what a client sends and receives."""
    table = _table(
        "Bytes of an ordinary client in one attempt, in all; the roster comes once, on top",
        ("clients", "epsilon", "compression", "coordinates", "bits", "vector", "sent", "received", "float32"),
    )
    for row in rows:
        sizes = (row.vector, row.sent, row.received, row.floats)
        table.add_row(
            *(f"{row.clients:,}", f"{row.epsilon:g}", row.compression, f"{row.coordinates:,}", str(row.bits)),
            *("" if size is None else f"{size:,}" for size in sizes),
        )
    return table


def deployment_table(rows: Sequence[DeploymentRow]) -> Table:
    """Return the table of rounds of a real federation."""
    table = _table(
        "One round over Flower, on one machine; median wall-clock seconds",
        ("what", "executor", "clients", "rounds", "seconds", "mean", "stages"),
    )
    for row in rows:
        table.add_row(
            *(row.what, row.executor, str(row.clients), str(row.rounds)),
            *(_number(value) for value in (row.seconds, row.mean_seconds)),
            row.error or in_words(row.stages),
        )
    return table


def deployment_goals_table(
    goals: Sequence[DeploymentGoal], title: str = "Goals of a federation over Flower"
) -> Table:
    """Return the table of goals, of a federation unless it says otherwise."""
    table = _table(title, ("what", "measured", "at most", "met"))
    for goal in goals:
        table.add_row(goal.what, _number(goal.value), _number(goal.limit), _met(goal.met))
    return table


def secagg_table(rows: Sequence[SecAggRow]) -> Table:
    """Return the table of rounds of secure aggregation."""
    table = _table(
        "One round of secure aggregation; processor seconds, but wall-clock seconds for the round",
        ("implementation", "clients", "coordinates", "bits", "lost"),
        ("client", "server", "round", "upload bytes", "peak MiB", "note"),
    )
    for row in rows:
        sizes = (row.clients, row.dimension, row.bits, row.dropouts)
        table.add_row(
            row.implementation,
            *(f"{size:,}" for size in sizes),
            *(_number(seconds) for seconds in (row.client_seconds, row.server_seconds, row.round_seconds)),
            *(
                "" if row.upload_bytes is None else f"{row.upload_bytes:,}",
                _number(row.server_peak_mib),
                row.error,
            ),
        )
    return table


def protocol_table(rows: Sequence[ProtocolRow]) -> Table:
    """Return the table of rounds by protocol."""
    table = _table(
        "One signed round by protocol; bytes beside the model, and processor seconds",
        ("protocol", "clients", "coordinates", "bits", "lost", "client sends", "receives", "seconds"),
        ("member sends", "receives", "seconds", "server seconds", "note"),
    )
    for row in rows:
        sizes = (row.clients, row.dimension, row.bits, row.dropouts)
        table.add_row(
            *(row.protocol, *(f"{size:,}" for size in sizes)),
            *(_whole(row.client_up), _whole(row.client_down), _number(row.client_seconds)),
            *(_whole(row.member_up), _whole(row.member_down), _number(row.member_seconds)),
            *(_number(row.server_seconds), row.note),
        )
    return table


def engine_table(rows: Sequence[EngineRow]) -> Table:
    """Return the table of simulated rounds by engine."""
    table = _table("One simulated round; seconds", ("engine", "clients", "start and first round", "round", "note"))
    for row in rows:
        times = (_number(row.start_seconds), _number(row.round_seconds))
        table.add_row(row.engine, f"{row.clients:,}", *times, row.error)
    return table


def training_table(rows: Sequence[TrainingRow]) -> Table:
    """Return the table of rounds of training."""
    table = _table(
        "One round of training, wall-clock seconds",
        ("what", "clients", "examples", "epochs", "parameters", "seconds"),
        ("peer", "its seconds", "ratio", "goal", "met", "note"),
    )
    for row in rows:
        sizes = (row.clients, row.examples, row.epochs, row.dimension)
        table.add_row(
            *(row.what, *(f"{size:,}" for size in sizes), f"{row.seconds:.3g}", row.peer),
            *(_number(value) for value in (row.peer_seconds, row.ratio, row.goal)),
            *(_met(row.met), row.peer_error),
        )
    return table


def ledger_table(rows: Sequence[LedgerRow]) -> Table:
    """Return the table of long ledgers."""
    table = _table("A long ledger, processor seconds", ("what", "releases", "seconds", "goal", "met"))
    for row in rows:
        times = _number(row.seconds), _number(row.goal)
        table.add_row(row.what, f"{row.releases:,}", *times, _met(row.met))
    return table


def silo_table(rows: Sequence[SiloRow]) -> Table:
    """Return the table of rounds with privacy of a record."""
    table = _table(
        "Privacy of a record, milliseconds a round",
        (
            "what",
            "parameters",
            "rounds",
            "clock",
            "processor",
            "clock / DP-SGD",
            "processor / DP-SGD",
            "goal",
            "met",
        ),
    )
    for row in rows:
        times = _number(1e3 * row.seconds), _number(1e3 * row.processor_seconds)
        ratios = _number(row.ratio), _number(row.processor_ratio), _number(row.goal)
        table.add_row(row.what, f"{row.dimension:,}", f"{row.rounds:,}", *times, *ratios, _met(row.met))
    return table


def growth_table(rows: Sequence[GrowthRow]) -> Table:
    """Return the table of how cost grows."""
    table = _table("How cost grows; seconds", ("what", "across", "size", "seconds"))
    for row in rows:
        table.add_row(row.what, row.across, f"{row.size:,}", _number(row.seconds))
    return table


def statistics_table(rows: Sequence[StatisticsRow]) -> Table:
    """Return the table of private sums."""
    table = _table(
        "Error of a private sum over a trusted server's times sqrt(n / honest)",
        ("clients", "coordinates", "sums", "stated", "measured", "bias", "seconds", "goal", "met"),
    )
    for row in rows:
        sizes = f"{row.clients:,}", f"{row.dimension:,}", str(row.sums)
        numbers = (row.stated, row.measured, row.bias, row.seconds, row.goal)
        table.add_row(*sizes, *(_number(value) for value in numbers), _met(row.met))
    return table


def goal_table(rows: Sequence[GoalRow]) -> Table:
    """Return the table of goals."""
    table = _table(
        "Goals; wall-clock seconds where nothing else is said",
        ("what", "measured", "processor seconds", "goal", "met", "note"),
    )
    for row in rows:
        numbers = (_number(value) for value in (row.seconds, row.processor_seconds, row.goal))
        table.add_row(row.what, *numbers, _met(row.met), row.error or row.note)
    return table


def progress(row: Row) -> str:
    """Return a line about a row, for who waits."""
    match row:
        case SpeedRow():
            return f"{row.what}, {row.dimension:,} coordinates, {row.threads} threads: {row.rate / 1e6:.4g} M/s"
        case SecAggRow():
            result = row.error if row.round_seconds is None else f"{row.round_seconds:.3g} s"
            return f"{row.implementation}: {row.clients} clients, {row.dimension:,} coordinates, {result}"
        case EngineRow():
            result = row.error if row.round_seconds is None else f"{row.round_seconds:.3g} s"
            return f"{row.engine}, {row.clients:,} clients: {result}"
        case TrainingRow():
            peer = row.peer_error if row.peer_seconds is None else f"{row.peer_seconds:.3f} s"
            return f"{row.what}: {row.seconds:.3f} s a round; {row.peer}: {peer}"
        case LedgerRow():
            return f"{row.what}, {row.releases:,} releases: {row.seconds:.3g} s"
        case GoalRow():
            return f"{row.what}: {row.error if row.seconds is None else f'{row.seconds:.3g}'}, goal {row.goal:g}"
        case GrowthRow():
            return f"{row.what}, {row.size:,} {row.across}: {row.seconds:.3g} s"
        case StatisticsRow():
            sizes = f"{row.clients:,} clients, {row.dimension:,} coordinates"
            return f"{sizes}: {row.measured:.4g} times a trusted server's error"
        case DeploymentRow():
            result = row.error if row.seconds is None else f"{row.seconds:.1f} s a round"
            stages = f" ({in_words(row.stages)})" if row.stages else ""
            return f"{row.what}, {row.executor}, {row.clients} clients: {result}{stages}"
        case DeploymentGoal():
            return f"{row.what}: {row.value}, at most {row.limit:g}"
        case ProtocolRow():
            sizes = f"{row.clients:,} clients, {row.dimension:,} coordinates, {row.dropouts:,} lost"
            seconds = f"client {_number(row.client_seconds)} s, server {_number(row.server_seconds)} s"
            return f"{row.protocol}: {sizes}: {seconds}; {row.note}"
        case SiloRow():
            return f"{row.what}, {row.dimension:,} parameters: {1e3 * row.seconds:.3g} ms"


def mean_table(rows: Sequence[MeanRow]) -> Table:
    """Return the table of private means."""
    table = _table(
        "Squared error of a private mean over that of a trusted server",
        ("what", "mechanism", "clients", "dimension", "epsilon", "bits", "bytes", "error", "ratio"),
    )
    for row in rows:
        sizes = (f"{value:,}" for value in (row.clients, row.dimension))
        numbers = (
            f"{row.epsilon:g}",
            str(row.bits),
            f"{row.size_bytes:,}",
            _number(row.error),
            f"{row.ratio:.3f}",
        )
        table.add_row(row.what, row.mechanism, *sizes, *numbers)
    return table


def tables_of(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the table of each kind of row."""
    for kind, table in _TABLES.items():
        if own := [row for row in rows if isinstance(row, kind)]:
            yield table(own)


_TABLES: dict[type, Callable[..., Table]] = {
    GoalRow: goal_table,
    SpeedRow: speed_table,
    SecAggRow: secagg_table,
    ProtocolRow: protocol_table,
    EngineRow: engine_table,
    TrainingRow: training_table,
    LedgerRow: ledger_table,
    SiloRow: silo_table,
    DeploymentRow: deployment_table,
    StatisticsRow: statistics_table,
    GrowthRow: growth_table,
}


def _table(title: str, *columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (name for group in columns for name in group):
        table.add_column(name, justify="left" if name in _TEXT else "right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _whole(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"
