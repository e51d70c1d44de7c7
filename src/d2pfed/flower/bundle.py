"""An app's bundle that a client has pinned by its hash: unpacked afresh, and imported from there or not at all."""

import stat
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from zipfile import ZipFile

from flwr.clientapp import ClientApp

from d2pfed.errors import PeerError

_COMPILED = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)


@contextmanager
def loaded(content: bytes, place: Path) -> Iterator[tuple[str, ClientApp]]:
    """Yield the name and the ClientApp of a bundle, from a directory below `place` that this makes and removes.

    Guarantee: a module whose name is in the bundle is the bundle's own: nothing that was unpacked, compiled, imported
    or on the path before takes its place. Checked: test_flower_bundle.py.
    """
    with TemporaryDirectory(dir=place) as fresh:  # for its owner alone
        names = unpack(content, Path(fresh))
        if there := sorted(names & set(sys.modules)):  # the app would get that module in place of its own
            raise PeerError(
                f"an app's modules must have new names, but this process has already loaded {there[0]!r}"
            )
        own = OwnModules(fresh, names)
        sys.meta_path.insert(0, own)
        sys.path.insert(0, fresh)  # for processes that the app itself starts
        try:
            config = tomllib.loads((Path(fresh) / "pyproject.toml").read_text("utf-8"))
            reference = str(config["tool"]["flwr"]["app"]["components"]["clientapp"])
            module, _, attribute = reference.partition(":")
            if not own.has(module):
                raise PeerError(f"an app's clientapp must be in a module of its bundle, got {reference[:80]!r}")
            app = attrgetter(attribute)(import_module(module))
            if not isinstance(app, ClientApp):
                raise PeerError(f"an app's clientapp must be a ClientApp, got a {type(app).__name__}")
            yield f"{config['tool']['flwr']['app']['publisher']}/{config['project']['name']}", app
        finally:
            sys.path.remove(fresh)
            sys.meta_path.remove(own)
            for name in [name for name in sys.modules if own.has(name)]:
                del sys.modules[name]


def unpack(content: bytes, directory: Path) -> frozenset[str]:
    """Write a bundle's files into a fresh directory; return the first names of its modules."""
    with ZipFile(BytesIO(content)) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        # Plain files below the bundle, and none that Python would run in place of its source.
        for entry in entries:
            parts = entry.filename.replace("\\", "/").split("/")
            is_file = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG)
            if {"", ".", ".."} & set(parts) or not is_file or parts[-1].endswith(_COMPILED):
                name = entry.filename[:80]
                raise PeerError(f"an app's bundle must hold plain files and no compiled ones, got {name!r}")
        for entry in entries:
            file = directory / entry.filename
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as opened:  # a name that comes twice is an error
                opened.write(archive.read(entry))
    return frozenset(
        entry.filename.partition("/")[0].removesuffix(".py") for entry in entries if entry.filename.endswith(".py")
    )


@dataclass(frozen=True, slots=True)
class OwnModules:
    """Finds the modules of a bundle in its directory and, before Python looks elsewhere, says so if they are not there.

    Python itself prefers a package of the same name further down the path to a folder without `__init__.py`, and adds
    the folders of all other directories to such a one.
    """

    directory: str
    names: frozenset[str]

    def has(self, name: str) -> bool:
        """Whether a module is the bundle's by its first name."""
        return name.partition(".")[0] in self.names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of the bundle is; None for all others."""
        if not self.has(name):
            return None
        spec = PathFinder.find_spec(name, [self.directory] if path is None else path)
        if spec is None:
            raise ModuleNotFoundError(f"the app's bundle has no module {name}", name=name)
        if spec.loader is None:
            spec.submodule_search_locations = list(spec.submodule_search_locations or ())
        return spec
