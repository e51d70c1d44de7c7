"""What a run was begun with: a resumed run is refused another module, function or data set."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from d2pfed.errors import ConfigError
from d2pfed.ledger.files import replace_file
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.runs.json_files import parse, read_text

FILE = "fingerprint.json"  # in a run's directory, for its owner alone


def keep_fingerprint(directory: Path, found: Mapping[str, str]) -> None:
    """Write down what a run is begun with; refuse to go on with something else, and name what differs."""
    if not (directory / FILE).exists():
        salt = Entropy.system().stream().bytes(KEY_BYTES).hex()
        replace_file(directory / FILE, json.dumps({"salt": salt} | _salted(found, salt)).encode())
        return
    stored = parse(read_text(directory / FILE), f"{directory / FILE}")
    salted = _salted(found, str(stored.pop("salt", "")))
    differing = [name for name in salted | stored if salted.get(name) != stored.get(name)]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ConfigError(
            f"the run in {directory} was begun with other parts: {', '.join(differing[:5])}{more}; a run goes on with "
            "the same module, functions and data only: choose another directory"
        )


def _salted(found: Mapping[str, str], salt: str) -> dict[str, str]:
    # Without it, equal data would show as such in the files of two runs.
    return {name: blake2b(f"{salt} {text}".encode(), digest_size=8).hexdigest() for name, text in found.items()}
