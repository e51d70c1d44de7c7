"""A pinned app: what runs is what was hashed, whatever lies on the machine; each attack with the check taken away."""

import hashlib
import importlib.util
import io
import py_compile
import stat
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower import bundle, runtime
from d2pfed.flower.runtime import Apps, LocalApp, PinnedApp
from support.twins import twin

LIGHT = Path(__file__).resolve().parent / "flower_light"
CONFIG = """
[project]
name = "own"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "own.server_app:app"
clientapp = "own.client_app:app"
"""


def app_of(whose: str) -> str:
    return f"from flwr.clientapp import ClientApp\napp = ClientApp()\napp.whose = {whose!r}\n"


PINNED = {"pyproject.toml": CONFIG, "own/__init__.py": "", "own/client_app.py": app_of("pinned")}
PLANTED = PINNED | {"own/client_app.py": app_of("planted")}


def packed(files: dict[str, str | bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return data.getvalue()


def planted(directory: Path, files: dict[str, str] = PLANTED) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return directory


def whose(content: bytes, place: Path) -> str:
    with bundle.loaded(content, place) as (_name, app):
        return app.whose


@pytest.fixture(autouse=True)
def own_imports(monkeypatch):
    """What an attack puts on the path, or imports, does not outlive its test."""
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own", "light")]:
        del sys.modules[name]


def run_of(name: str = "tests/own", version: str = "1.0.0") -> SimpleNamespace:
    return SimpleNamespace(fab_id=name, fab_version=version)


def test_an_app_that_was_installed_before_is_not_loaded(tmp_path, monkeypatch):
    home = tmp_path / "flower"
    monkeypatch.setenv("FLWR_HOME", str(home))
    manifest = [f"{name},{hashlib.sha256(text.encode()).hexdigest()},0" for name, text in PINNED.items()]
    content = packed(PINNED | {".info/CONTENT": "\n".join(manifest)})
    pin = hashlib.sha256(content).hexdigest()
    planted(home / "apps" / f"tests.own.1.0.0.{pin[:8]}")
    source = Apps((PinnedApp(pin, tmp_path),))
    for run in (run_of(), run_of("tests/own", "../../elsewhere")):
        with source.load(run, SimpleNamespace(content=content)) as (name, app):
            assert (name, app.whose) == ("tests/own", "pinned")
    # Flower's own way, which finds a directory of that name and looks no further.
    install_from_fab(content, skip_prompt=True)
    assert get_load_client_app_fn("", None, multi_app=True)("tests/own", "1.0.0", pin).whose == "planted"


def test_another_bundle_than_the_pinned_one_is_not_unpacked(tmp_path, monkeypatch):
    unpacked = []
    monkeypatch.setattr(bundle, "unpack", lambda *given: unpacked.append(given))
    with pytest.raises(PeerError, match=r"this client runs the app 0000000000000000\.\.\., and was sent"):
        Apps((PinnedApp("0" * 64, tmp_path),)).load(run_of(), SimpleNamespace(content=packed(PLANTED))).__enter__()
    assert unpacked == []


def test_of_several_apps_the_one_of_the_run_answers_under_its_own_name(tmp_path):
    content = packed(PINNED)
    pin = hashlib.sha256(content).hexdigest()
    apps = Apps((LocalApp(LIGHT), PinnedApp(pin, tmp_path)))
    apps.preload()  # of one only: with several, modules of one name would be the first app's
    assert "light.client_app" not in sys.modules
    local = runtime.get_metadata_from_config(runtime.get_project_config(LIGHT))
    with apps.load(run_of(*local), SimpleNamespace(content=b"")) as (name, _app):
        assert name == local[0]
    with apps.load(run_of("someone/else"), SimpleNamespace(content=content)) as (name, app):
        assert (name, app.whose) == ("tests/own", "pinned")  # as the bundle says, whatever the run is called
    with pytest.raises(PeerError, match=r"runs the app .*light.*; this client runs the app"):
        apps.load(run_of("someone/else"), SimpleNamespace(content=b"")).__enter__()


@pytest.mark.parametrize("pin", ["", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_a_pin_is_a_hash_as_sha256sum_prints_it(pin, tmp_path):
    with pytest.raises(ConfigError, match="a bundle's SHA-256 must be 64 digits of 0-9 and a-f"):
        PinnedApp(pin, tmp_path)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_bundle_that_flower_builds_is_loaded_and_removed(tmp_path):
    paths, finders = list(sys.path), list(sys.meta_path)
    with bundle.loaded(build_fab_from_disk(LIGHT), tmp_path) as (_name, app):
        assert isinstance(app, ClientApp)
        (fresh,) = tmp_path.iterdir()
        assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
        assert Path(sys.modules["light.client_app"].__file__) == fresh / "light" / "client_app.py"
    assert list(tmp_path.iterdir()) == []
    assert (sys.path, sys.meta_path) == (paths, finders)
    assert "light.client_app" not in sys.modules


def test_a_package_further_down_the_path_takes_no_folders_place(tmp_path, monkeypatch):
    folder = {name: text for name, text in PINNED.items() if name != "own/__init__.py"}
    (tmp_path / "place").mkdir()
    sys.path.append(str(planted(tmp_path / "installed")))
    assert whose(packed(folder), tmp_path / "place") == "pinned"
    monkeypatch.setattr(bundle.OwnModules, "find_spec", lambda *_: None)
    assert whose(packed(folder), tmp_path / "place") == "planted"


def test_a_module_that_the_bundle_lacks_comes_from_nowhere_else(tmp_path, monkeypatch):
    asks = "try:\n    from own.extra import app\nexcept ModuleNotFoundError:\n    " + "\n    ".join(
        app_of("pinned").splitlines()
    )
    content = packed(PINNED | {"own/client_app.py": asks})
    extra = planted(tmp_path / "elsewhere", {"extra.py": app_of("planted")}) / "extra.py"
    # As an installation for development does.
    finds = {"own.extra": importlib.util.spec_from_file_location("own.extra", extra)}
    sys.meta_path.append(SimpleNamespace(find_spec=lambda name, *_: finds.get(name)))
    assert whose(content, tmp_path) == "pinned"
    monkeypatch.setattr(bundle.OwnModules, "find_spec", lambda *_: None)
    assert whose(content, tmp_path) == "planted"


def test_folders_of_one_name_elsewhere_add_nothing(tmp_path):
    folder = {name: text for name, text in PINNED.items() if name != "own/__init__.py"}
    sys.path.append(str(planted(tmp_path / "installed", {"own/extra.py": "x = 1"})))
    with bundle.loaded(packed(folder), tmp_path):
        sys.path.append(str(tmp_path))  # Python looks for all folders of that name again
        with pytest.raises(ModuleNotFoundError, match=r"the app's bundle has no module own\.extra"):
            importlib.import_module("own.extra")


def test_a_module_that_is_loaded_already_is_not_the_apps(tmp_path, monkeypatch):
    def plant() -> None:
        for name in ("own", "own.client_app"):
            sys.modules[name] = ModuleType(name)
        exec(app_of("planted"), sys.modules["own.client_app"].__dict__)

    plant()
    with pytest.raises(PeerError, match="new names, but this process has already loaded 'own'"):
        whose(packed(PINNED), tmp_path)
    lax = twin(bundle.loaded, "if there := sorted(names & set(sys.modules)):", "if there := ():")
    monkeypatch.setattr(bundle, "loaded", lax)
    assert whose(packed(PINNED), tmp_path) == "planted"


def test_a_compiled_file_does_not_run_in_place_of_its_source(tmp_path, monkeypatch):
    source, compiled = tmp_path / "client_app.py", tmp_path / "client_app.pyc"
    source.write_text(app_of("planted"))
    py_compile.compile(source, compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    name = Path(importlib.util.cache_from_source("own/client_app.py")).as_posix()
    content = packed(PINNED | {name: compiled.read_bytes()})
    with pytest.raises(PeerError, match="plain files and no compiled ones, got 'own/__pycache__"):
        whose(content, tmp_path)
    monkeypatch.setattr(bundle, "unpack", twin(bundle.unpack, "raise PeerError(", "str("))
    assert whose(content, tmp_path) == "planted"


@pytest.mark.parametrize("name", ["../outside.py", "own/../../outside.py", "{place}/outside.py"])
def test_no_file_is_written_outside_of_the_fresh_directory(name, tmp_path, monkeypatch):
    content = packed(PINNED | {name.format(place=tmp_path): "planted"})
    with pytest.raises(PeerError, match="an app's bundle must hold plain files"):
        whose(content, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(bundle, "unpack", twin(bundle.unpack, "raise PeerError(", "str("))
    whose(content, tmp_path)
    assert (tmp_path / "outside.py").read_text() == "planted"


@pytest.mark.parametrize("name", ["own/./a", "own//a", "..\\a", f"own/a{EXTENSION_SUFFIXES[-1]}", "own/a.pyc"])
def test_a_name_that_is_not_plain_is_refused(name, tmp_path):
    with pytest.raises(PeerError, match="an app's bundle must hold plain files and no compiled ones"):
        whose(packed(PINNED | {name: "planted"}), tmp_path)


def test_a_link_in_a_bundle_is_refused(tmp_path):
    data, link = io.BytesIO(), zipfile.ZipInfo("own/data")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(link, "/etc")
    with pytest.raises(PeerError, match="plain files and no compiled ones, got 'own/data'"):
        whose(data.getvalue(), tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_comes_twice_is_refused(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for text in (app_of("pinned"), app_of("planted")):
            archive.writestr("own/client_app.py", text)
    with pytest.raises(FileExistsError):
        whose(data.getvalue(), tmp_path)


@pytest.mark.parametrize(
    ("reference", "why"),
    [("os.path:join", "be in a module of its bundle"), ("own.client_app:app.whose", "be a ClientApp, got a str")],
)
def test_a_bundle_names_a_client_of_its_own(reference, why, tmp_path):
    config = CONFIG.replace("own.client_app:app", reference)
    with pytest.raises(PeerError, match=f"an app's clientapp must {why}"):
        whose(packed(PINNED | {"pyproject.toml": config}), tmp_path)
