"""Whether a client or a server works, for its operator and its supervisor. None of it leaves the machine."""

import fcntl
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.monitoring import FILE as METRICS
from d2pfed.deploy.rosters import read_own_issue, read_roster
from d2pfed.deploy.targets import last_run
from d2pfed.errors import ConfigError, DamagedFile
from d2pfed.ledger import decode_release
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.files import opened_for_lines, read_file, replace_file
from d2pfed.plan import Policy
from d2pfed.plan.bounds import check_name
from d2pfed.runs import End, RoundRecord, RunSummary
from d2pfed.runs.json_files import from_json, read_text

HEALTH = "health.json"  # in a client's directory
RENEWAL_DAYS = 7  # before a roster expires, its authority should have signed the next
STALLED_SECONDS = 300  # a running server renews its metrics every ten seconds, but not while it evaluates a model
_DAY = 86_400
_MOST_TEXT = 500  # letters of an error


class Event(StrEnum):
    """What happens to a client: a request is answered or refused, training succeeds or fails."""

    ANSWERED = "answered"
    REFUSED = "refused"
    TRAINED = "trained"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Noted:
    """When an event happened last, in seconds since 1970, and what there is to say about it; 0: never."""

    seconds: int = 0
    text: str = ""


def note(directory: Path, event: Event, what: str | BaseException = "") -> None:
    """Note an event in a client's directory. An operator's file must not decide what a client sends: it never fails."""
    with suppress(BaseException):  # the text of a user's error may itself raise
        text = f"{type(what).__name__}: {what}" if isinstance(what, BaseException) else what
        try:
            events = read_events(directory)
        except DamagedFile:
            events = {}
        events[event] = Noted(int(time.time()), text[:_MOST_TEXT])
        content = {each: [noted.seconds, noted.text] for each, noted in events.items()}
        replace_file(directory / HEALTH, json.dumps(content).encode())


def read_events(directory: Path) -> dict[Event, Noted]:
    """Return the last events that were noted in a client's directory."""
    data = read_file(directory / HEALTH)
    try:
        found = {} if data is None else json.loads(data)
        return {Event(each): Noted(int(seconds), str(text)) for each, (seconds, text) in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{directory / HEALTH} is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class Status:
    """The facts of a client or server, and what an operator must do something about."""

    facts: Mapping[str, object]
    problems: tuple[str, ...]

    def metrics(self, prefix: str) -> str:
        """Return the numbers among the facts as a text for Prometheus."""
        numbers = {name: fact for name, fact in self.facts.items() if isinstance(fact, (int, float))}
        numbers["problems"] = len(self.problems)
        lines = [
            f"# TYPE {prefix}_{name} gauge\n{prefix}_{name} {value:.10g}\n" for name, value in numbers.items()
        ]
        return "".join(lines)


def client_status(config: ClientConfig) -> Status:
    """Return how a client is: what it has agreed to, what it has spent, what it answered and what failed last."""
    history, now, delta = config.log.read(), time.time(), config.budget.delta
    spending, roster, events = ClientSpending.of(history), read_own_issue(config), read_events(config.directory)
    spent, budget = spending.epsilon(delta), config.budget.epsilon
    last = {event: events.get(event, Noted()) for event in Event}
    charges, apps = history.bodies(Entry.CHARGE), dict[str, object]()
    for name, terms in config.apps.items():
        own = ClientSpending.of(history, name)
        rules = {
            rule: value for rule, value in rules_of(terms.policy).items() if value != rules_of(config.policy)[rule]
        }
        limit = min(terms.epsilon, budget)
        apps[name] = {"vectors": len(own.releases), "spent": own.epsilon(delta), "limit": limit, **rules}
    facts: dict[str, object] = {
        "client": config.client,
        "policy": rules_of(config.policy),
        "apps": apps or "every app that its node runs",
        "vectors": len(spending.releases),
        "epsilon_spent": spent,
        "epsilon_budget": budget,
        "delta": delta,
        "last_run": str(charges[-1]["run"]) if charges else "",
        "last_round": decode_release(str(charges[-1]["release"])).round + 1 if charges else 0,
        **{f"last_{event}_seconds": noted.seconds for event, noted in last.items()},
        "last_failure": last[Event.FAILED].text,
    }
    problems = []
    if last[Event.REFUSED].seconds > last[Event.ANSWERED].seconds:
        problems.append(f"the last request was refused: {last[Event.REFUSED].text}")
    if last[Event.FAILED].seconds > last[Event.TRAINED].seconds:
        problems.append(f"training fails, so only noise is sent: {last[Event.FAILED].text}")
    if spent >= budget:
        problems.append(f"the budget is spent: epsilon {spent:.4g} of {budget:g}")
    if roster is not None:
        facts |= {"roster_serial": roster.serial, "roster_expires_seconds": roster.expires}
        problems += _expiry(roster.serial, roster.expires - now)
    return Status(facts, tuple(problems))


def rules_of(policy: Policy) -> dict[str, object]:
    """Return the rules of a policy by name, as client.toml has them."""
    found = ((each.name, getattr(policy, each.name)) for each in fields(policy))
    return {name: list(map(str, value)) if isinstance(value, tuple) else value for name, value in found}


def server_status(directory: Path, name: str = "") -> Status:
    """Return how a run in a server's directory is: at work, at its end, or stopped without an end.

    Without a name it is the last one.
    """
    if name:
        check_name("a run's", name)
    run, now = directory / name if name else last_run(directory), time.time()
    if not (run / "plan.json").exists():
        raise ConfigError(f"there is no run in {run}")
    problems, facts = list[str](), dict[str, object]({"run": run.name})
    records, summary = run / "metrics.jsonl", run / "summary.json"
    lines = read_text(records).splitlines() if records.exists() else []
    if lines:
        last = from_json(RoundRecord, lines[-1], str(records))
        facts |= {"rounds": last.round, "attempts_charged": last.charged, "survivors": last.survivors}
    ended = from_json(RunSummary, read_text(summary), str(summary)) if summary.exists() else None
    if _is_locked(run / "lock"):
        renewed = (
            (run / METRICS).stat().st_mtime if (run / METRICS).exists() else (run / "plan.json").stat().st_mtime
        )
        facts |= {"state": "at work", "idle_seconds": int(now - renewed)}
        if now - renewed > STALLED_SECONDS:
            problems.append(f"the run has shown no sign of life for {now - renewed:.0f} s")
    elif ended is not None and ended.end in (End.COMPLETE, End.STOPPED) and len(lines) <= ended.rounds:
        facts["state"] = ended.end.value
    else:
        facts["state"] = "not at work"
        why = f": {ended.stopped}" if ended is not None and ended.stopped else ""
        problems.append(f"the run has stopped before its end{why}; submit the app again to go on")
    if (directory / "roster").exists():
        roster = read_roster(directory / "roster", (directory / "authority").read_text().strip()).roster
        facts["roster_expires_seconds"] = roster.expires
        problems += _expiry(roster.serial, roster.expires - now)
    return Status(facts, tuple(problems))


def _expiry(serial: int, left: float) -> list[str]:
    if left > RENEWAL_DAYS * _DAY:
        return []
    when = f"expires in {left / _DAY:.1f} days" if left > 0 else "has expired"
    return [f"roster {serial} {when}: the authority must sign the next one"]


def _is_locked(file: Path) -> bool:
    """Say whether another process works on a run."""
    if not file.exists():
        return False
    with opened_for_lines(file) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
