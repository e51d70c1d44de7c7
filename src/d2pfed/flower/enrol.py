"""Make the keys of a federation: `python -m d2pfed.flower.enrol authority | client | roster`.

The authority is whoever says which clients there are; it must not be the server. It signs the roster, which every
client and the server keep. Private keys are written readable by their owner alone, and never leave their machine.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.flower.home import read_secret
from d2pfed.randomness import Entropy
from d2pfed.secagg import Roster, decode_roster, encode_roster, issue_roster
from d2pfed.secagg.crypto import signing_public

_SETTINGS = """client = {client}
authority = "{authority}"

[policy]  # what this client insists on, whatever a server proposes
least_cohort = 10
least_quorum = 8
most_epsilon = 10.0
most_delta = 1e-4

[budget]  # what all runs together may spend of this client against the server
epsilon = 10.0
delta = 1e-5
"""

app = typer.Typer(add_completion=False, help="Make the keys of a federation.")


@app.command()
def authority(file: Annotated[Path, typer.Argument(help="Where the private key goes.")]) -> None:
    """Make the authority's key and print its public half."""
    print(make_secret(file).hex())


@app.command()
def client(
    home: Annotated[Path, typer.Argument(help="The client's directory.")],
    number: Annotated[int, typer.Argument(help="The client's identity, unique in the federation.")],
    public: Annotated[str, typer.Argument(metavar="AUTHORITY", help="The authority's public key.")],
) -> None:
    """Make a client's directory and key, and print IDENTITY=PUBLIC for the authority."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "client.toml").write_text(_SETTINGS.format(client=number, authority=public))
    print(f"{number}={make_secret(home / 'key').hex()}")


@app.command()
def roster(
    key: Annotated[Path, typer.Argument(help="The authority's private key.")],
    file: Annotated[Path, typer.Argument(help="Where the roster goes.")],
    clients: Annotated[list[str], typer.Argument(metavar="IDENTITY=PUBLIC...", help="What the clients printed.")],
    serial: Annotated[int, typer.Option(help="Number of this roster: more than the last one's.")] = 1,
) -> None:
    """Sign the roster of a federation's clients."""
    pairs = [entry.partition("=") for entry in clients]
    keys = {int(number): bytes.fromhex(public) for number, _, public in pairs}
    secret = read_secret(key)
    issued = issue_roster(
        keys, signing_public(secret), serial=serial, issued=int(time.time()), entropy=Entropy.system()
    )
    file.write_bytes(encode_roster(issued, secret))
    print(f"{len(pairs)} clients in {file}")


def make_secret(file: Path) -> bytes:
    """Make a private signing key, readable by its owner alone, and return its public half; never overwrites one."""
    secret = Entropy.system().require_system().stream().bytes(32)
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        raise ConfigError(f"{file} holds a key already") from None
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(secret)
    return signing_public(secret)


def read_roster(file: Path, authority_public: str) -> Roster:
    """Return the roster in a file, if this authority (its public key in hexadecimal) has signed it."""
    return decode_roster(file.read_bytes(), bytes.fromhex(authority_public))


if __name__ == "__main__":
    try:
        app()
    except D2PFedError as error:
        raise SystemExit(str(error)) from error
