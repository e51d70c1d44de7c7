"""The results by name; what makes one is loaded when it is asked for, since torch takes seconds."""

from dataclasses import dataclass
from importlib import import_module

from d2pfed.errors import ConfigError
from reproduction.result import Context, Make, Result


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a result is made, and how long that takes: `weight` is its share of the work of all, when quick."""

    module: str
    function: str
    weight: float

    def make(self, context: Context) -> Result:
        """Make the result."""
        make: Make = getattr(import_module(f"reproduction.{self.module}"), self.function)
        return make(context)


CATALOGUE: dict[str, Entry] = {
    "errata": Entry("errata", "make", 0.3),
    "fig1a": Entry("headline", "make_fig1a", 10),
    "fig1b": Entry("headline", "make_fig1b", 1),
    "fig2": Entry("ball", "make", 0.1),
    "fig3": Entry("sweeps", "make_fig3", 6),
    "fig4": Entry("sweeps", "make_fig4", 4),
    "fig5": Entry("sweeps", "make_fig5", 5),
    "table-mse": Entry("error", "make", 0.3),
    "table-comm": Entry("communication", "make", 0.4),
    "frontier": Entry("frontier", "make", 8),
    "at-server": Entry("at_server", "make", 4),
    "default-job": Entry("default_job", "make", 8),
    "folds-writers": Entry("folds", "make_writers", 4),
    "folds-cifar10-server": Entry("folds", "make_cifar", 8),
    "folds-cnn": Entry("folds", "make_cnn", 4),
    "cifar10-honest": Entry("honest", "make", 4),
    "writers": Entry("comparisons", "make_writers", 1),
    "speakers": Entry("comparisons", "make_speakers", 1),
    "cifar10-server": Entry("comparisons", "make_cifar", 4),
    "cifar10-server-4": Entry("comparisons", "make_cifar_at_4", 4),
    "cifar10-server-2": Entry("comparisons", "make_cifar_at_2", 4),
    "visits": Entry("comparisons", "make_visits", 1),
    "idx28": Entry("comparisons", "make_idx", 1),
}


def select(name: str) -> dict[str, Entry]:
    """Return the entry of that name, or those of all."""
    if name == "all":
        return CATALOGUE
    if name not in CATALOGUE:
        raise ConfigError(f"name must be all, page or one of {', '.join(CATALOGUE)}, got {name}")
    return {name: CATALOGUE[name]}
