"""`d2pfed data`: fetch a data set's official files, or show where they were found."""

from pathlib import Path
from typing import Annotated

import typer

from d2pfed.cli.options import TRAIN_PACKAGES, AsJson, DataDirectory, SectionedCommand, application
from d2pfed.cli.show import out, print_json
from d2pfed.errors import needs_extra

app = application("Fetch data sets, or show where they are.")

TaskName = Annotated[str, typer.Argument(help="infimnist, mnist-writers, cifar10 or shakespeare.")]


@app.command("fetch", cls=SectionedCommand)
def fetch_command(
    name: TaskName,
    directory: Annotated[Path | None, typer.Option("--data", help="Where to put it. Default: the cache.")] = None,
    json: AsJson = False,
) -> None:
    """Download a data set's official files and check them."""
    with needs_extra("train", *TRAIN_PACKAGES):
        from d2pfed.learning import cache_directory, fetch  # noqa: PLC0415 - an extra

    files = fetch(name, directory or cache_directory())
    if json:
        print_json({"files": [str(file) for file in files]})
    elif not files:
        out().print(f"Nothing is missing: {name} has all of its files, or needs none.")
    else:
        for file in files:
            out().print(f"{file}")


@app.command("where", cls=SectionedCommand)
def where_command(name: TaskName, directory: DataDirectory = None, json: AsJson = False) -> None:
    """Show which files of a data set were found, and where."""
    with needs_extra("train", *TRAIN_PACKAGES):
        from d2pfed.learning import where  # noqa: PLC0415 - an extra

    found = where(name, directory)
    if json:
        print_json({file: str(path) if path else None for file, path in found.items()})
        return
    if not found:
        out().print(f"{name} needs no files.")
    for file, path in found.items():
        out().print(f"{file}: {path or 'not found'}")
