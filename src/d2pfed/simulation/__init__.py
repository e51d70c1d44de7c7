"""Simulated federations: the clients of a cohort in this process or on a cluster."""

from d2pfed.simulation.crew import Crew, Hire, InProcess, Learn
from d2pfed.simulation.dropouts import EXCHANGES, Dropouts
from d2pfed.simulation.engine import Fidelity, Simulation, Updates

__all__ = ["EXCHANGES", "Crew", "Dropouts", "Fidelity", "Hire", "InProcess", "Learn", "Simulation", "Updates"]
