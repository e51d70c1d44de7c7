"""From a model, a target and what an app's run is told to all that a private strategy needs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.rosters import SignedRoster, read_roster
from d2pfed.errors import ConfigError
from d2pfed.fields import checked_fields
from d2pfed.plan import PrivacyTarget
from d2pfed.plan.bounds import check_name
from d2pfed.plan.target import USUAL_LONGEST_MEAN
from d2pfed.runs import End, RunSummary
from d2pfed.runs.json_files import from_json, read_text
from d2pfed.secagg.trust import Consistency

DIRECTORY_SETTING = "d2pfed-directory"  # in the app's configuration: the server's directory
RUN_SETTING = "d2pfed-run"  # there, too: the name of the run; without it the last one goes on until it is done
ROUNDS_SETTING = "num-server-rounds"  # as Flower's own templates call it

DEFAULTS: Mapping[str, object] = {
    "against": SERVER,
    "delta": 1e-5,
    "dropouts": 0.2,
    "colluders": 0.1,
    "rotation": "auto",
    "compression": "auto",
    "download_bits": 8,
    "longest_mean": USUAL_LONGEST_MEAN,
}


def read_server_directory(run_config: Mapping[str, object]) -> tuple[Path, SignedRoster | None, Path | None]:
    """Return where the run is kept, who is enrolled, and the server's file of draws, as the app's configuration says.

    The directory has the `roster` as the authority has signed it, its public key in `authority`, and `draws`. Without
    a roster it is a simulation's, which protects nobody. A run that is done is followed by a new one, in a directory
    of its own; one that is named goes on, or begins, under that name.
    """
    named = run_config.get(DIRECTORY_SETTING)
    if not named:
        raise ConfigError(
            f"the app's configuration must name the server's directory: {DIRECTORY_SETTING} in "
            f"[tool.flwr.app.config], or flwr run --run-config '{DIRECTORY_SETTING}=\"DIRECTORY\"'"
        )
    root, name = Path(str(named)), str(run_config.get(RUN_SETTING) or "")
    if name:
        check_name("a run's", name)
    run = root / name if name else next_run(root)
    roster, authority, draws = (root / file for file in ("roster", "authority", "draws"))
    if not roster.exists():
        return run, None, None
    if not authority.exists():
        raise ConfigError(f"{authority} must hold the public key that signed the roster")
    return run, read_roster(roster, authority.read_text().strip()), draws if draws.exists() else None


def numbered_run(root: Path, number: int) -> Path:
    """Return where a server's first, second, ... run is kept."""
    return root / ("run" if number == 1 else f"run-{number}")


def last_run(root: Path) -> Path:
    """Return the directory of the last run that a server has begun without a name; of its first if there is none."""
    names = (each.name.removeprefix("run-") for each in root.glob("run-*"))
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    return numbered_run(root, max(numbers, default=1))


def next_run(root: Path) -> Path:
    """Return the directory of the run to go on with: the last one, or after its end a new one.

    Guarantee: what a finished run has charged stays where it is; a new run has a name of its own, so that clients
    charge it beside the others. Checked: test_flower_apps.py::test_a_finished_run_is_followed_by_a_new_one.
    """
    last = last_run(root)
    file = last / "summary.json"
    if not file.exists() or from_json(RunSummary, read_text(file), str(file)).end not in (
        End.COMPLETE,
        End.STOPPED,
    ):
        return last
    return numbered_run(root, int(last.name.partition("-")[2] or 1) + 1)


def trained_sizes(model: object, personal: Sequence[str] = ()) -> dict[str, int]:
    """Return the names of what is trained and how many numbers each has: all arrays, or a torch module's parameters.

    What a pattern of `personal` names stays with each client.
    """
    if hasattr(model, "named_parameters"):
        found = {name: int(value.numel()) for name, value in model.named_parameters() if value.requires_grad}
    elif isinstance(model, Mapping):
        found = {str(name): int(np.prod(value.shape)) for name, value in model.items()}
    else:
        raise ConfigError(f"a model must be a torch module or arrays by name, got {type(model).__name__}")
    for pattern in personal:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ConfigError(f"personal must name trained parameters, {pattern!r} names none")
    found = {name: size for name, size in found.items() if not any(fnmatchcase(name, each) for each in personal)}
    if not found:
        raise ConfigError("a model must have something to train: no parameter requires a gradient")
    return found


def complete_target(
    privacy: PrivacyTarget | Mapping[str, object],
    sizes: Mapping[str, int],
    roster: SignedRoster | None,
    run_config: Mapping[str, object],
) -> PrivacyTarget:
    """Fill in what follows from the model, the roster and the app's configuration.

    A mapping gets the defaults of a deployment: against the server, delta 1e-5, a fifth of a cohort may drop out, a
    tenth of the population may collude, models go
    down at 8 bits per parameter. Unless a smaller cohort is asked for, everyone is asked in every round. Under
    a roster without draws the server picks the cohorts, and may put all colluders into one.
    """
    if isinstance(privacy, PrivacyTarget):
        asked = privacy
    else:
        asked = PrivacyTarget(**{**DEFAULTS, **checked_fields(PrivacyTarget, privacy, "privacy")})
    known = {"dimension": sum(sizes.values())}
    if roster is not None:
        known["population"] = len(roster.roster.clients)
    if "rounds" in asked.missing and ROUNDS_SETTING in run_config:
        known["rounds"] = int(str(run_config[ROUNDS_SETTING]))
    asked = asked.completed("the app", **known)
    if missing := sorted(set(asked.missing) - {"cohort_size"}):
        raise ConfigError(
            f"the privacy target must state its {missing[0]}: a roster says the population, and {ROUNDS_SETTING} in "
            f"the app's configuration the rounds"
        )
    cohort = asked.population if "cohort_size" in asked.missing else asked.cohort_size
    everyone = cohort == asked.population and asked.sampling is Sampling.FIXED
    return replace(
        asked,
        cohort_size=cohort,
        sampling=Sampling.NONE if everyone else asked.sampling,
        consistency=Consistency.ASSUMED if roster is None else Consistency.SIGNED,
        draws=0 if roster is not None and roster.roster.depth is None else asked.draws,
    )
