"""`d2pfed client`, `deploy` and `roster`: a client's directory, a server's, and the list that an authority signs."""

import math
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from d2pfed.accounting import Unit, round_up
from d2pfed.cli.options import AsJson, SectionedCommand, application
from d2pfed.cli.show import delta_as_given, out, print_json
from d2pfed.deploy import rosters
from d2pfed.deploy.account import ALL, RUNS, ClientSpending, carried_over, charged
from d2pfed.deploy.config import (
    decode_public,
    init_client,
    make_secret,
    read_client_config,
    read_secret,
    require_identity,
)
from d2pfed.deploy.heads import publish_head
from d2pfed.deploy.health import Status, client_status, server_status
from d2pfed.deploy.state import AcceptedRuns
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.files import create_file, read_given, replace_file
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, decode_plan
from d2pfed.runs.json_files import read_text
from d2pfed.secagg import decode_roster, encode_roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.roster import LIFETIME_DAYS

client_app = application("Set up and maintain a client of a federation.")
deploy_app = application("Show whether the server of a federation works.")
roster_app = application("Sign and check the list of a federation's clients.")

ClientDirectory = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The client's directory.")]
KeyFile = Annotated[Path, typer.Argument(metavar="KEY", help="The authority's private key.")]
MetricsFile = Annotated[
    Path | None, typer.Option("--metrics", help="Write the numbers to this file, for Prometheus.")
]
RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster.")]


@client_app.command("init", cls=SectionedCommand)
def init(
    directory: ClientDirectory,
    identity: Annotated[
        int, typer.Argument(metavar="ID", help="The client's identity, unique in the federation.")
    ],
    authority: Annotated[str, typer.Argument(help="The authority's public key.")],
    anchor: Annotated[
        Path | None, typer.Option(help="Directory for the head of the log, outside DIRECTORY.")
    ] = None,
    epsilon: Annotated[
        float, typer.Option(help="The client's budget against server and colluders, over all runs.")
    ] = 10.0,
    *,
    unit: Annotated[
        Unit, typer.Option(help="What a plan must protect: all data of this client, or each record.")
    ] = Unit.CLIENT,
) -> None:
    """Make a client's directory, key and log, and print ID=PUBLIC for the authority; overwrites nothing."""
    public = init_client(directory, identity, decode_public(authority), anchor, epsilon, unit=unit)
    print(f"{identity}={public.hex()}")


@client_app.command("enrol", cls=SectionedCommand)
def enrol(
    directory: ClientDirectory,
    roster: Annotated[Path, typer.Argument(help="The signed roster.")],
) -> None:
    """Accept a roster from a file; one also comes with each run, and is checked in the same way."""
    accepted = rosters.accept_roster(read_client_config(directory), read_given(roster))[0].roster
    print(f"roster {accepted.serial} with {len(accepted.keys)} clients, valid until {_day(accepted.expires)}")


@client_app.command("adopt", cls=SectionedCommand)
def adopt(
    directory: ClientDirectory,
    carried: Annotated[
        str, typer.Option(help="What counts as spent in addition to the log: all or nothing.")
    ] = "",
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: a run since the backup, charged for the whole plan in FILE; may be repeated."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="Reason, for the log.")] = "",
) -> None:
    """Declare what was spent but is missing from a log that was lost, rolled back or restored, and continue with it.

    Without --carried or --run the whole budget counts as spent, because the missing rows are unknown. Take each
    plan.json from people you trust: a server may have announced another plan under the same name.
    """
    if carried and run:
        raise ConfigError(f"--carried {carried} and --run exclude each other")
    config = read_client_config(directory)
    runs: dict[str, Plan] = {}
    for name, is_named, file in (each.partition("=") for each in run or ()):
        if not (name and is_named and file):
            raise ConfigError(f"--run must be NAME=FILE, a run and the file of its plan, got {name}")
        runs[name] = decode_plan(read_text(Path(file)))
    history = config.log.adopt({**carried_over(carried or (RUNS if runs else ALL), runs), "why": why})
    print(f"position {history.head.seq}, carried over: {history.rows[-1].body['carried']}")
    for name, plan in runs.items():
        spent = ClientSpending((charged(plan, name, 0, 0),) * plan.max_participations, is_all_spent=False)
        print(
            f"run {name}: epsilon {round_up(spent.epsilon(config.budget.delta), 4)}, plan {plan.digest.hex()[:16]}"
        )


@client_app.command("show", cls=SectionedCommand)
def show_client(directory: ClientDirectory, json: AsJson = False) -> None:
    """Print what this client has spent, the position of its log, and who would detect a rollback."""
    config = read_client_config(directory)
    history = config.log.read()
    spending = ClientSpending.of(history)
    roster, spent = rosters.read_own_issue(config), spending.epsilon(config.budget.delta)
    found = {
        "client": config.client,
        "position": history.head.seq,
        "attempts": len(history.bodies(Entry.BEGUN)),
        "vectors": len(spending.releases),
        "epsilon": spent,
        "budget": config.budget.epsilon,
        "delta": config.budget.delta,
        "declarations": [dict(body) for body in history.bodies(Entry.DECLARATION)],
        "anchor": str(config.anchor),
        "roster": None
        if roster is None
        else {"serial": roster.serial, "issued": roster.issued, "expires": roster.expires},
    }
    if json:
        print_json(found)
        return
    out().print(
        f"Client {config.client}: {len(spending.releases)} vectors sent, epsilon {round_up(spent, 4)} of "
        f"{round_up(config.budget.epsilon, 6)} charged. The guarantee is the budget, over all runs, at delta "
        f"{delta_as_given(config.budget.delta)} against the server and the colluders of each plan; the amount charged "
        "so far is no guarantee."
    )
    for body in history.bodies(Entry.DECLARATION):
        why = f" ({body['why']})" if body.get("why") else ""
        out().print(f"This rests on a declaration of {_day(body['time'])}{why}: carried over {body['carried']}.")
    out().print(
        f"Peers and server learn how many attempts this client has begun: {found['attempts']} so far, "
        f"position {history.head.seq}."
    )
    met = " that meet it again"
    if begun := history.bodies(Entry.BEGUN):
        with suppress(PeerError):  # the run's file is lost or damaged
            sampling = decode_plan(AcceptedRuns(directory).terms(str(begun[-1]["run"])).plan).sampling
            size, population = sampling.cohort_size, sampling.population
            missed = 0.0 if size == population else math.exp(-(size**2) / population)
            met = f" (they miss a lost attempt with probability about {missed:.2g})"
    dated = (
        "no roster yet"
        if roster is None
        else f"roster of {_day(roster.issued)}, valid until {_day(roster.expires)}"
    )
    out().print(
        f"A rollback is detected by: anchor ({config.anchor}), server, peers{met}, {dated}. "
        "If directory and anchor are restored together, only the others detect it."
    )


@client_app.command("status", cls=SectionedCommand)
def status_client(directory: ClientDirectory, metrics: MetricsFile = None, json: AsJson = False) -> None:
    """Print what this client has agreed to and spent, and whether it works; exit with 1 if someone must act."""
    _show_status(client_status(read_client_config(directory)), "d2pfed_client", metrics, json)


@deploy_app.callback()
def deploy() -> None:
    """Show whether the server of a federation works."""


@deploy_app.command("status", cls=SectionedCommand)
def status_server(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The server's directory.")],
    run: Annotated[str, typer.Option(help="Name of the run. Default: the last one.")] = "",
    metrics: MetricsFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no process works on the run.")] = False,
    json: AsJson = False,
) -> None:
    """Print the state of a run in a server's directory; exit with 1 if an operator must act."""
    found = server_status(directory, run)
    while wait and found.facts["state"] == "at work":
        time.sleep(1)
        found = server_status(directory, run)
    _show_status(found, "d2pfed_server", metrics, json)


def _show_status(found: Status, prefix: str, metrics: Path | None, json: bool) -> None:
    if metrics is not None:
        replace_file(metrics, found.metrics(prefix).encode(), mode=0o644)
    if json:
        print_json({**found.facts, "problems": found.problems})
    else:
        for name, fact in found.facts.items():
            _print_fact(name.removesuffix("_seconds").replace("_", " "), _shown(name, fact))
            if name == "apps" and isinstance(fact, dict):
                for app, terms in fact.items():
                    _print_fact(f"  {app}", _shown(app, terms))
        for problem in found.problems:
            print(f"PROBLEM: {problem}")
    if found.problems:
        raise typer.Exit(1)


def _shown(name: str, fact: object) -> str:
    """Return a fact of a status as people read it."""
    match fact:
        case dict() if name == "apps":
            return f"{len(fact)}, and no other"
        case dict():
            return ", ".join(f"{key.replace('_', ' ')} {_shown(key, value)}" for key, value in fact.items())
        case list():
            return "/".join(map(str, fact))
        case int() if name.endswith("_seconds") and not name.startswith("idle"):
            return datetime.fromtimestamp(fact, UTC).isoformat() if fact else "never"
        case float():
            return round_up(fact, 4)
        case _:
            return str(fact) if fact or fact == 0 else "none"


def _print_fact(name: str, text: str) -> None:
    """Print a fact in as many lines as eighty columns need."""
    lines = wrap(text, 59, break_on_hyphens=False) or [""]
    print(f"{name:20} {lines[0]}")
    for line in lines[1:]:
        print(f"{'':20} {line}")


@roster_app.command("authority", cls=SectionedCommand)
def authority(file: KeyFile) -> None:
    """Make the authority's key and print its public half, which everyone needs."""
    print(make_secret(file).hex())


@roster_app.command("draws", cls=SectionedCommand)
def draws(
    file: Annotated[Path, typer.Argument(help="Where the server keeps its secret tree of draws.")],
    depth: Annotated[int, typer.Option(help="2^depth draws serve all runs under one roster.")] = rosters.DEPTH,
) -> None:
    """Make the draws of the next roster, on the server, and print DEPTH:ROOT for the authority."""
    print(rosters.make_draws(file, depth).encode())


@roster_app.command("sign", cls=SectionedCommand)
def sign(  # noqa: PLR0917 - typer declares options as parameters
    key: KeyFile,
    file: RosterFile,
    clients: Annotated[
        list[str] | None, typer.Argument(metavar="ID=PUBLIC...", help="What new clients printed.")
    ] = None,
    draws: Annotated[
        str, typer.Option(metavar="DEPTH:ROOT", help="What the server printed for this roster.")
    ] = "",
    previous: Annotated[
        Path | None, typer.Option(help="The previous roster, whose clients and floors are kept.")
    ] = None,
    remove: Annotated[list[int] | None, typer.Option(help="A client to remove; may be repeated.")] = None,
    positions: Annotated[
        list[Path] | None,
        typer.Option(help="A server's file of clients' positions, which become floors; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until the roster expires.")] = LIFETIME_DAYS,
    deep: Annotated[bool, typer.Option("--deep", help="Allow more than 2^16 draws.")] = False,
) -> None:
    """Sign the next roster, and draw its nonce after the server has committed to its draws."""
    secret = read_secret(key)
    public = signing_public(secret)
    before = None if previous is None else decode_roster(read_given(previous), public)
    taken = ConfigError(f"{file} already exists: a signed roster is not overwritten")
    if file.exists() or file.is_symlink():
        raise taken
    added = {}
    for text in clients or ():
        number, _, key_text = text.partition("=")
        if not number.isascii() or not number.isdigit() or len(number) > 20:
            raise ConfigError(f"a client is ID=PUBLIC, as `d2pfed client init` prints it, got {text[:80]!r}")
        require_identity(int(number))
        added[int(number)] = decode_public(key_text)
    signed = rosters.next_roster(
        public,
        before,
        added=added,
        removed=frozenset(remove or ()),
        shown=rosters.shown_positions(before, positions or ()),
        draws=rosters.DrawCommitment.decode(draws) if draws else None,
        most_depth=20 if deep else 16,
        days=days,
        now=int(time.time()),
        entropy=Entropy.system().require_system(),
    )
    try:
        create_file(file, encode_roster(signed, secret), mode=0o644)
        publish_head(file, signed, secret)
    except FileExistsError:
        raise taken from None
    print(f"roster {signed.serial} with {len(signed.keys)} clients in {file}, valid until {_day(signed.expires)}")


@roster_app.command("show", cls=SectionedCommand)
def show_roster(
    file: RosterFile,
    authority_key: Annotated[str, typer.Argument(metavar="AUTHORITY", help="The authority's public key.")],
    json: AsJson = False,
) -> None:
    """Check a roster's signature and print its content."""
    found = decode_roster(read_given(file), decode_public(authority_key))
    if json:
        keys = {str(client): found.keys[client].hex() for client in found.clients}
        facts = {"serial": found.serial, "issued": found.issued, "expires": found.expires, "depth": found.depth}
        print_json({**facts, "digest": found.digest, "keys": keys})
        return
    verified = "cohorts are not verified" if found.depth is None else f"{1 << found.depth} verified draws"
    out().print(
        f"Roster {found.serial} of {_day(found.issued)}, valid until {_day(found.expires)}: {len(found.keys)} clients, "
        f"{verified}."
    )


def _day(seconds: object) -> str:
    return datetime.fromtimestamp(int(str(seconds)), UTC).date().isoformat()
