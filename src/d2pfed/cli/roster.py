"""`d2pfed roster`: the list of a federation's clients, signed by an authority that is not the server."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from d2pfed.cli.options import AsJson, SectionedCommand, application
from d2pfed.cli.show import out, print_json
from d2pfed.deploy.config import decode_public, make_secret, read_secret, require_identity
from d2pfed.deploy.rosters import DEPTH, DrawCommitment, make_draws, next_roster, shown_positions
from d2pfed.errors import ConfigError
from d2pfed.ledger.files import create_file
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import decode_roster, encode_roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.roster import LIFETIME_DAYS

app = application("Sign and check the list of a federation's clients.")

KeyFile = Annotated[Path, typer.Argument(metavar="KEY", help="The authority's private key.")]
RosterFile = Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster.")]


@app.command("authority", cls=SectionedCommand)
def authority(file: KeyFile) -> None:
    """Make the authority's key and print its public half, which everyone needs."""
    print(make_secret(file).hex())


@app.command("draws", cls=SectionedCommand)
def draws(
    file: Annotated[Path, typer.Argument(help="Where the server keeps its secret tree of draws.")],
    depth: Annotated[int, typer.Option(help="2^depth draws serve all runs under one roster.")] = DEPTH,
) -> None:
    """Make the draws of the next roster, on the server, and print DEPTH:ROOT for the authority."""
    print(make_draws(file, depth).encode())


@app.command("sign", cls=SectionedCommand)
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
        Path | None, typer.Option(help="The roster before: its clients stay, its floors only rise.")
    ] = None,
    remove: Annotated[list[int] | None, typer.Option(help="A client to remove; may be repeated.")] = None,
    positions: Annotated[list[Path] | None, typer.Option(help="Positions that a server has seen: floors.")] = None,
    days: Annotated[int, typer.Option(help="Days until the roster expires.")] = LIFETIME_DAYS,
    deep: Annotated[bool, typer.Option("--deep", help="Allow more than 2^16 draws.")] = False,
) -> None:
    """Sign the next roster; its nonce is drawn here and now, after the server's draws are known."""
    secret = read_secret(key)
    public = signing_public(secret)
    before = None if previous is None else decode_roster(previous.read_bytes(), public)
    if file.exists() or file.is_symlink():
        raise _taken(file)
    signed = next_roster(
        public,
        before,
        added=dict(_pair(text) for text in clients or ()),
        removed=frozenset(remove or ()),
        shown=shown_positions(before, positions or ()),
        draws=DrawCommitment.decode(draws) if draws else None,
        most_depth=20 if deep else 16,
        days=days,
        now=int(time.time()),
        entropy=Entropy.system().require_system(),
    )
    try:
        create_file(file, encode_roster(signed, secret), mode=0o644)
    except FileExistsError:
        raise _taken(file) from None
    print(f"roster {signed.serial} with {len(signed.keys)} clients in {file}, good until {_day(signed.expires)}")


@app.command("show", cls=SectionedCommand)
def show(
    file: RosterFile,
    authority_key: Annotated[str, typer.Argument(metavar="AUTHORITY", help="The authority's public key.")],
    json: AsJson = False,
) -> None:
    """Check a roster's signature and print its content."""
    found = decode_roster(file.read_bytes(), decode_public(authority_key))
    if json:
        keys = {str(client): found.keys[client].hex() for client in found.clients}
        facts = {"serial": found.serial, "issued": found.issued, "expires": found.expires, "depth": found.depth}
        print_json({**facts, "digest": found.digest, "keys": keys})
        return
    verified = "cohorts are not verified" if found.depth is None else f"{1 << found.depth} verified draws"
    out().print(
        f"Roster {found.serial} of {_day(found.issued)}, good until {_day(found.expires)}: {len(found.keys)} clients, "
        f"{verified}."
    )


def _taken(file: Path) -> ConfigError:
    return ConfigError(f"{file} is there already: a signed roster is not overwritten")


def _pair(text: str) -> tuple[int, bytes]:
    number, _, public = text.partition("=")
    if not number.isascii() or not number.isdigit() or len(number) > 20:
        raise ConfigError(f"a client is ID=PUBLIC, as `d2pfed client init` prints it, got {text[:80]!r}")
    require_identity(int(number))
    return int(number), decode_public(public)


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
