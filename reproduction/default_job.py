"""The default job as a user runs it: `d2pfed train` from several seeds, by how many numbers a client sends."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from d2pfed.errors import ConfigError
from d2pfed.learning import build_model, load_task
from d2pfed.runs.json_files import read_text
from d2pfed.runs.report.plots import Ink
from reproduction.curves import Hue, style_axes
from reproduction.result import Cell, Context, Result, Table
from reproduction.runs import FIRST_SEED

_TRAIN = (sys.executable, "-c", "from d2pfed.cli import main; main()", "train")
_COLUMNS = (
    *("digits", "what is sent", "numbers", "bits", "bytes of the vector", "model bits, down"),
    *("accuracy", "lowest", "highest", "on MNIST's 10,000", "lowest there", "highest there", "seeds"),
)
_EMBEDDED, _MNIST = "embedded", "MNIST"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the job; what its arguments do not say is as `d2pfed train` has it."""

    digits: str
    sent: str
    arguments: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.digits}, {self.sent}"

    @property
    def name(self) -> str:
        """Its name in files."""
        words = (word.strip("-").replace(":", "-") for word in self.arguments)
        return "-".join(["default-job", self.digits.lower(), *words])


_SHORT, _WHOLE = ("--download-bits", "8"), ("--compression", "off")
_UNEVEN = ("--partition", "dirichlet:0.1")
VARIANTS = (
    Variant(_EMBEDDED, "as by default"),
    Variant(_EMBEDDED, "the model at 8 bits", _SHORT),
    Variant(_EMBEDDED, "not compressed", _WHOLE),
    Variant(_MNIST, "as by default"),
    Variant(_MNIST, "the model at 8 bits", _SHORT),
    Variant(_MNIST, "not compressed", _WHOLE),
    Variant(_EMBEDDED, "labels by Dirichlet 0.1", _UNEVEN),
    Variant(_EMBEDDED, "labels by Dirichlet 0.1, not compressed", (*_UNEVEN, *_WHOLE)),
)


def make(context: Context) -> Result:
    """Return test accuracy over seeds, compressed and not."""
    found: dict[Variant, list[dict[str, Any]]] = {}
    seeds, done = range(FIRST_SEED, FIRST_SEED + context.repeats), 0
    wanted = [each for each in VARIANTS if context.data is not None or each.digits == _EMBEDDED]
    for seed in seeds:
        for variant in wanted:
            context.report(f"{variant.label}, seed {seed}", done / len(seeds) / len(wanted))
            record = context.folder / "records" / f"{variant.name}-{seed}.json"
            if not record.exists() and not context.kept:
                _train(variant, seed, record, context.data)
            if record.exists():
                found.setdefault(variant, []).append(json.loads(read_text(record)))
            done += 1
    if not found:
        raise ConfigError(f"{context.folder / 'records'} must hold a run of the default job, got none")
    return Result(
        name="default-job",
        title="The default job by what is sent",
        table=Table(_COLUMNS, tuple(_row(variant, runs) for variant, runs in found.items())),
        words=_words(found),
        ran={variant.label: runs for variant, runs in found.items()},
        reduced="" if context.data is not None else "no MNIST digits",
        draw=partial(_draw, found=found),
    )


def _train(variant: Variant, seed: int, record: Path, data: Path | None) -> None:
    """Run the command, which goes on where it was stopped, and keep what it printed."""
    where = ("--data", str(data.resolve())) if data is not None and variant.digits == _MNIST else ()
    command = ("--name", record.stem, "--seed", str(seed), *variant.arguments)
    folder = record.parents[1] / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    text = _printed((*_TRAIN, *command, *where, "--json"), folder)
    commit = _printed(("/usr/bin/env", "git", "rev-parse", "HEAD"), Path(__file__).parent).strip()
    folder /= f"runs/{record.stem}"
    kept = {"command": " ".join(("d2pfed train", *command[2:])), "commit": commit, "summary": json.loads(text)}
    if data is not None:
        kept["official_accuracy"] = official_accuracy(folder, data)
    partly = record.with_suffix(".partial")
    partly.write_text(f"{json.dumps(kept)}\n")
    partly.replace(record)


def official_accuracy(run: Path, data: Path) -> float:
    """Return the accuracy of a run's model on MNIST's 10,000 test digits, whatever digits it was trained on."""
    task = load_task("infimnist", data_dir=data)
    module = build_model("edges", task, 0).module
    module.load_state_dict(load_file(run / "model.safetensors"), strict=False)  # the edges are fixed
    test = task.test()
    with torch.no_grad():
        return float((module(test.inputs).argmax(1) == test.labels).double().mean())


def _printed(command: tuple[str, ...], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own


def _accuracies(runs: list[dict[str, Any]]) -> list[float]:
    return [100 * float(run["summary"]["test_metrics"]["accuracy"]) for run in runs]


def _official(runs: list[dict[str, Any]]) -> list[float]:
    return [100 * float(run["official_accuracy"]) for run in runs if "official_accuracy" in run]


def _row(variant: Variant, runs: list[dict[str, Any]]) -> tuple[Cell, ...]:
    summary, found = runs[0]["summary"], _accuracies(runs)
    there = _official(runs) or found
    numbers = 8 * summary["upload_bytes"] // summary["bits"]
    return (
        variant.digits,
        variant.sent,
        numbers,
        summary["bits"],
        summary["upload_bytes"],
        8 if _SHORT[0] in variant.arguments else 32,
        *(round(value, 2) for value in (mean(found), min(found), max(found))),
        *(round(value, 2) for value in (mean(there), min(there), max(there))),
        len(found),
    )


def _words(found: Mapping[Variant, list[dict[str, Any]]]) -> tuple[str, ...]:
    told = [
        f"{variant.label}: {mean(ends):.2f} % ({', '.join(f'{end:.2f}' for end in ends)})"
        for variant, runs in found.items()
        for ends in [_official(runs) or _accuracies(runs)]
    ]
    return (
        f"`d2pfed train`, epsilon 1 against the server, test accuracy by seed: {'; '.join(told)}.",
        (
            "Cohorts, order and initial model are those of the same seed in all rows. The command itself tests runs "
            "with the embedded digits on 1,000 of them, so that 0.5 points either way are chance; the sentence above "
            "has the same models on MNIST's 10,000 test digits."
        ),
    )


def _draw(figure: Figure, found: Mapping[Variant, list[dict[str, Any]]]) -> None:
    axes = figure.subplots()
    shown = list(found.items())[::-1]
    for place, (variant, runs) in enumerate(shown):
        ends, hue = _official(runs) or _accuracies(runs), Hue.PLAIN if _WHOLE[0] in variant.arguments else Hue.OURS
        axes.plot(ends, [place] * len(ends), "o", color=hue, alpha=0.5, markersize=5)
        axes.plot(mean(ends), place, "|", color=hue, markersize=16)
    names = [f"{variant.label}, {runs[0]['summary']['upload_bytes']:,} bytes" for variant, runs in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8, color=Ink.TEXT)
    axes.set_xlabel("test accuracy, % (a point per seed, and their mean)", color=Ink.TEXT)
    style_axes(axes)
