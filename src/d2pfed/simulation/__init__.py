"""Simulated federations: the clients of a cohort in this process or on a cluster."""

from d2pfed.simulation.dropouts import EXCHANGES, Dropouts
from d2pfed.simulation.engine import Fidelity, Simulation, Updates

__all__ = ["EXCHANGES", "Dropouts", "Fidelity", "Simulation", "Updates"]
