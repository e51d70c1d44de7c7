"""Nothing here rests on a default of the library."""

import ast
from dataclasses import fields
from pathlib import Path

from d2pfed.learning import LocalTraining
from d2pfed.plan import PrivacyTarget
from d2pfed.training import ServerOptimizer
from reproduction import explicit

SETTINGS = {
    kind.__name__: {field.name for field in fields(kind)}
    for kind in (PrivacyTarget, LocalTraining, ServerOptimizer)
}


def left_to_defaults(source: str) -> dict[str, set[str]]:
    """Return the fields that a source's calls of the settings' classes do not name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [
        (node.func.id, {word.arg for word in node.keywords}) for node in calls if isinstance(node.func, ast.Name)
    ]
    return {name: SETTINGS[name] - given for name, given in named if name in SETTINGS and SETTINGS[name] - given}


def test_every_setting_is_written_out():
    sources = [path for path in Path(explicit.__file__).parent.rglob("*.py") if "tests" not in path.parts]
    assert explicit.__file__ in map(str, sources)
    assert {str(path): left for path in sources if (left := left_to_defaults(path.read_text()))} == {}


def test_a_forgotten_setting_is_seen():
    given = ", ".join(f"{name}=1" for name in SETTINGS["LocalTraining"] - {"optimizer", "momentum"})
    assert left_to_defaults(f"LocalTraining({given})") == {"LocalTraining": {"optimizer", "momentum"}}
