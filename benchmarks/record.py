"""The JSON file of a whole run of the benchmarks: date, machine, versions and every row."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from d2pfed.cli.show import plain

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PACKAGES = (
    "d2pfed", "numpy", "scipy", "numba", "cryptography", "torch", "flwr", "nvflare", "tenseal", "ray", "pfl", "opendp",
    "opacus",
)  # fmt: skip


def surroundings() -> dict[str, object]:
    """Return when, on which machine and with which versions the benchmarks run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_at_start": [round(load, 2) for load in os.getloadavg()],
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def line(about: Mapping[str, object]) -> str:
    """Return machine and versions in one line."""
    machine, versions = about["machine"], about["versions"]
    if not isinstance(machine, Mapping) or not isinstance(versions, Mapping):
        return str(about["date"])
    known = ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
    load = " ".join(str(each) for each in machine["load_at_start"])
    return f"{about['date']}; {machine['processor']}, {machine['cores']} cores, load {load}; {known}"


def write(path: Path, about: Mapping[str, object], benchmarks: Mapping[str, object]) -> None:
    """Write everything measured so far, so that a benchmark that fails loses nothing of those before it."""
    path.write_text(json.dumps(plain({**about, "benchmarks": dict(benchmarks)}), indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
