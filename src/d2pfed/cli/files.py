"""`d2pfed report`, `certify` and `data`: the page of a run, its signed statement, and the files of data sets."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d2pfed.cli.options import AsJson, DataDirectory, Group, SectionedCommand, application
from d2pfed.cli.show import out, print_json
from d2pfed.errors import ConfigError

if TYPE_CHECKING:
    from click import Context


class RunOrCommand(Group):
    """A group whose first argument may be a run: `certify RUN` is `certify run RUN`."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Put the command's name before anything that is neither a command nor a call for help."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args.insert(0, "run")
        return super().parse_args(ctx, args)


report_app = application()
certify_app = application(
    "Write a signed statement of what a run guarantees (certify RUN), or check one (certify verify FILE).",
    RunOrCommand,
)
data_app = application("Fetch data sets, or show where they are.")

TaskName = Annotated[str, typer.Argument(help="infimnist, mnist-writers, cifar10 or shakespeare.")]


@report_app.command(cls=SectionedCommand)
def report(
    run: Annotated[Path, typer.Argument(help="The run's directory, such as runs/NAME.")], *, json: AsJson = False
) -> None:
    """Write a run's report.html and its plots again, from its plan, settings, metrics and summary."""
    from d2pfed.runs.report import read_report, write_report  # noqa: PLC0415 - slow to load

    page = write_report(read_report(run), run)
    if json:
        print_json({"report": str(page), "plots": sorted(str(file) for file in (run / "plots").iterdir())})
    else:
        out().print(f"The report is in {page}.", soft_wrap=True)


@certify_app.command("run", cls=SectionedCommand)
def certify_run(
    run: Annotated[Path, typer.Argument(help="The run's directory, such as runs/NAME, or a ledger.")],
    *,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that the run shares with others.")] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="File of the private Ed25519 key, 32 bytes; created if missing.", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to write to. Default: the run's.")] = None,
    json: AsJson = False,
) -> None:
    """Write certificate.json (signed), certificate.html and registry.yaml (for OpenDP's deployments registry)."""
    from d2pfed.api.certify import certify  # noqa: PLC0415 - slow to load

    made = certify(run, ledger=ledger, key=key, output=output)
    if json:
        print_json(made)
        return
    new = " (just created, readable only by its owner: keep it)" if made.key_is_new else ""
    out().print(
        f"The certificate is in {made.certificate}, its page in {made.page}, its registry entry in "
        f"{made.registry}. It is signed with the key in {made.key}{new}. Give its readers the public key and this "
        f"command:\n  d2pfed certify verify {made.certificate} --key {made.public_key}",
        soft_wrap=True,
    )


@certify_app.command("verify", cls=SectionedCommand)
def certify_verify(
    file: Annotated[Path, typer.Argument(help="The certificate (JSON).")],
    *,
    key: Annotated[
        list[str] | None,
        typer.Option(help="The signer's public key; may be repeated. Default: your own, if there is one."),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that the certificate is bound to.")] = None,
    json: AsJson = False,
) -> None:
    """Recompute every claimed epsilon independently, and find any changed byte.

    Exits with 0 if everything holds, 1 if something is wrong, 2 if the file is not a certificate, and 3 if something
    could not be checked.
    """
    from d2pfed.certificate_verifier import read, verify  # noqa: PLC0415 - slow to load
    from d2pfed.deploy.config import default_signing_key, read_secret  # noqa: PLC0415 - as above
    from d2pfed.secagg.crypto import signing_public  # noqa: PLC0415 - as above

    if not key and (own := default_signing_key()).exists():
        key = [signing_public(read_secret(own)).hex()]
    try:
        found = verify(file, key or [])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if ledger is not None and not ledger.is_file():
        raise ConfigError(f"there is no ledger at {ledger}")
    if ledger is not None and found.status != 1:
        from d2pfed.api.certify import check_ledger  # noqa: PLC0415 - slow to load

        content = read(file)[1]["statement"]
        found.note("ledger", lambda: check_ledger(content, ledger))
    if json:
        findings = [{"kind": kind, "text": text} for kind, text in found.lines]
        print_json({"status": found.status, "findings": findings})
    else:
        for kind, text in found.lines:
            print(f"{kind:12}{text}")
    sys.exit(found.status)


@data_app.command("fetch", cls=SectionedCommand)
def data_fetch(
    name: TaskName,
    directory: Annotated[Path | None, typer.Option("--data", help="Where to put it. Default: the cache.")] = None,
    json: AsJson = False,
) -> None:
    """Download a data set's official files and check them."""
    from d2pfed.learning import cache_directory, fetch  # noqa: PLC0415 - slow to load

    files = fetch(name, directory or cache_directory())
    if json:
        print_json({"files": [str(file) for file in files]})
    elif not files:
        out().print(f"Nothing is missing: {name} has all of its files, or needs none.")
    else:
        for file in files:
            out().print(f"{file}")


@data_app.command("where", cls=SectionedCommand)
def data_where(name: TaskName, directory: DataDirectory = None, json: AsJson = False) -> None:
    """Show which files of a data set were found, and where."""
    from d2pfed.learning import where  # noqa: PLC0415 - slow to load

    found = where(name, directory)
    if json:
        print_json({file: str(path) if path else None for file, path in found.items()})
        return
    if not found:
        out().print(f"{name} needs no files.")
    for file, path in found.items():
        out().print(f"{file}: {path or 'not found'}")
