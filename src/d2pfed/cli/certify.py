"""`d2pfed certify`: a signed statement of what a run guarantees, and its check."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d2pfed.cli.options import TRAIN_PACKAGES, AsJson, Group, SectionedCommand, application
from d2pfed.cli.show import out, print_json
from d2pfed.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from click import Context


class RunOrCommand(Group):
    """A group whose first argument may be a run: `certify RUN` is `certify run RUN`."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Put the command's name before anything that is neither a command nor a call for help."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args.insert(0, "run")
        return super().parse_args(ctx, args)


app = application(
    "Write a signed statement of what a run guarantees (certify RUN), or check one (certify verify FILE).",
    RunOrCommand,
)


@app.command("run", cls=SectionedCommand)
def run_command(
    run: Annotated[Path, typer.Argument(help="The run's directory, such as runs/NAME, or a ledger.")],
    *,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that the run shares with others.")] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="File of the private Ed25519 key, 32 bytes; made if it is missing.", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to write to. Default: the run's.")] = None,
    json: AsJson = False,
) -> None:
    """Write certificate.json (signed), certificate.html and registry.yaml (for OpenDP's deployments registry)."""
    with needs_extra("train", *TRAIN_PACKAGES):
        from d2pfed.api.certify import certify  # noqa: PLC0415 - an extra

    made = certify(run, ledger=ledger, key=key, output=output)
    if json:
        print_json(made)
        return
    new = ", which was made just now and only its owner can read: keep it" if made.key_is_new else ""
    out().print(
        f"The certificate is in {made.certificate}, its page in {made.page}, its entry for the registry in "
        f"{made.registry}. It is signed with the key in {made.key}{new}. Tell those who rely on it its public half, "
        f"and the command that checks it:\n  d2pfed certify verify {made.certificate} --key {made.public_key}",
        soft_wrap=True,
    )


@app.command("verify", cls=SectionedCommand)
def verify_command(
    file: Annotated[Path, typer.Argument(help="The certificate, a file of JSON.")],
    *,
    key: Annotated[
        list[str] | None,
        typer.Option(help="The signer's public key; may be repeated. Default: this user's own, if there is one."),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that the certificate is bound to.")] = None,
    json: AsJson = False,
) -> None:
    """Recompute every claimed epsilon independently, and find any changed byte.

    Ends with 0 if all of it holds, 1 if something is wrong, 2 if the file cannot be read, and 3 if something that is
    named could not be checked.
    """
    from d2pfed.certificate_verifier import read, verify  # noqa: PLC0415 - slow to load

    try:
        found = verify(file, key or _own_key())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if ledger is not None and not ledger.is_file():
        raise ConfigError(f"there is no ledger at {ledger}")
    if ledger is not None and found.status != 1:
        with needs_extra("train", *TRAIN_PACKAGES):
            from d2pfed.api.certify import check_ledger  # noqa: PLC0415 - an extra

        content = read(file)[1]["statement"]
        found.note("ledger", lambda: check_ledger(content, ledger))
    if json:
        print_json(
            {"status": found.status, "findings": [{"kind": kind, "text": text} for kind, text in found.lines]}
        )
    else:
        for kind, text in found.lines:
            print(f"{kind:12}{text}")
    sys.exit(found.status)


def _own_key() -> list[str]:
    """Return the public half of this user's own key, if there is one."""
    from d2pfed.deploy.config import default_signing_key, read_secret  # noqa: PLC0415 - slow to load
    from d2pfed.secagg.crypto import signing_public  # noqa: PLC0415 - as above

    file = default_signing_key()
    return [signing_public(read_secret(file)).hex()] if file.exists() else []
