"""Simulated federations: the clients of a cohort in this process or on a cluster."""

from d2pfed.simulation.dropouts import Dropouts
from d2pfed.simulation.engine import Fidelity, Simulation, Updates

__all__ = ["Dropouts", "Fidelity", "Simulation", "Updates"]
