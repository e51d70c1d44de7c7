"""`d2pfed client`: a client's own directory on its own machine."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from d2pfed.accounting import Unit, round_up
from d2pfed.cli.options import AsJson, SectionedCommand, application
from d2pfed.cli.show import delta_as_given, out, print_json
from d2pfed.deploy.account import ALL, RUNS, ClientSpending, carried_over, charged
from d2pfed.deploy.config import decode_public, init_client, read_client_config
from d2pfed.deploy.rosters import accept_roster, read_own_roster
from d2pfed.deploy.state import AcceptedRuns
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.plan import Plan, decode_plan
from d2pfed.runs.plain import read_text

app = application("Set up and maintain a client of a federation.")

ClientDirectory = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The client's directory.")]


@app.command("init", cls=SectionedCommand)
def init(
    directory: ClientDirectory,
    identity: Annotated[
        int, typer.Argument(metavar="ID", help="The client's identity, unique in the federation.")
    ],
    authority: Annotated[str, typer.Argument(help="The authority's public key.")],
    anchor: Annotated[
        Path | None, typer.Option(help="Directory for the head of the log, outside of DIRECTORY.")
    ] = None,
    epsilon: Annotated[
        float, typer.Option(help="The client's budget against server and colluders, over all runs.")
    ] = 10.0,
    *,
    unit: Annotated[
        Unit, typer.Option(help="What a plan must protect: all that this client holds, or single records of it.")
    ] = Unit.CLIENT,
) -> None:
    """Make a client's directory, key and log, and print ID=PUBLIC for the authority; overwrites nothing."""
    public = init_client(directory, identity, decode_public(authority), anchor, epsilon, unit=unit)
    print(f"{identity}={public.hex()}")


@app.command("enrol", cls=SectionedCommand)
def enrol(
    directory: ClientDirectory,
    roster: Annotated[Path, typer.Argument(help="The signed roster.")],
) -> None:
    """Accept a roster from a file; one also comes with each run, and is checked in the same way."""
    accepted = accept_roster(read_client_config(directory), roster.read_bytes())[0].roster
    print(f"roster {accepted.serial} with {len(accepted.keys)} clients, {_until(accepted.expires)}")


@app.command("adopt", cls=SectionedCommand)
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
    """Declare what a log that was lost, rolled back or restored does not know, and go on with it.

    Without --carried or --run all of the budget counts as spent: nobody knows what the missing rows were. A plan comes
    from a file of yours (plan.json of the run's directory): a server may have announced another under the same name.
    """
    if carried and run:
        raise ConfigError(f"--carried {carried} and --run exclude each other")
    config = read_client_config(directory)
    runs: dict[str, Plan] = {}
    for name, is_named, file in (each.partition("=") for each in run or ()):
        if not (name and is_named and file):
            raise ConfigError(f"a run must be given with its plan, NAME=FILE, got {name}")
        runs[name] = decode_plan(read_text(Path(file)))
    history = config.log.adopt({**carried_over(carried or (RUNS if runs else ALL), runs), "why": why})
    print(f"position {history.head.seq}, carried over: {history.rows[-1].body['carried']}")
    for name, plan in runs.items():
        spent = ClientSpending((charged(plan, name, 0, 0),) * plan.max_participations, is_all_spent=False)
        print(
            f"run {name}: epsilon {round_up(spent.epsilon(config.budget.delta), 4)}, plan {plan.digest.hex()[:16]}"
        )


@app.command("show", cls=SectionedCommand)
def show(directory: ClientDirectory, json: AsJson = False) -> None:
    """Print what this client has spent, how far its log is, and what would notice if it were rolled back."""
    config = read_client_config(directory)
    history = config.log.read()
    spending = ClientSpending.of(history)
    roster, spent = read_own_roster(config), spending.epsilon(config.budget.delta)
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
        f"{round_up(config.budget.epsilon, 6)} counted. The budget holds, at delta "
        f"{delta_as_given(config.budget.delta)} against the server and the colluders that each plan allows for, over "
        "all runs; what was counted so far is no guarantee by itself."
    )
    for body in history.bodies(Entry.DECLARATION):
        why = f" ({body['why']})" if body.get("why") else ""
        out().print(f"This rests on a declaration of {_day(body['time'])}{why}: carried over {body['carried']}.")
    out().print(
        f"Peers and server learn how many attempts this client has begun: {found['attempts']} so far, "
        f"position {history.head.seq}."
    )
    dated = "no roster yet" if roster is None else f"roster of {_day(roster.issued)}, {_until(roster.expires)}"
    out().print(
        f"A rolled-back client is noticed by: anchor ({config.anchor}), server, "
        f"peers{_chance(directory, history)}, {dated}. "
        "Directory and anchor restored together are noticed by the others only."
    )


def _chance(directory: Path, history: ClientHistory) -> str:
    """Return how likely it is that the peers of the last run do not meet this client again."""
    begun = history.bodies(Entry.BEGUN)
    if not begun:
        return " that meet it again"
    try:
        sampling = decode_plan(AcceptedRuns(directory).terms(str(begun[-1]["run"])).plan).sampling
    except PeerError:  # the run's file is lost or damaged
        return " that meet it again"
    missed = (
        0.0
        if sampling.cohort_size == sampling.population
        else math.exp(-(sampling.cohort_size**2) / sampling.population)
    )
    return f" (a lost attempt stays unnoticed by them with chance about {missed:.2g})"


def _day(seconds: object) -> str:
    return datetime.fromtimestamp(int(str(seconds)), UTC).date().isoformat()


def _until(seconds: int) -> str:
    return f"good until {_day(seconds)}"
