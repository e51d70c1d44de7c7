"""Simulated federations: the clients of a cohort in this process, in others, or on a cluster."""

from d2pfed.round import Fidelity
from d2pfed.simulation.backend import Backend, Encoder, SerialBackend, Silos, TrainClients, warm_up
from d2pfed.simulation.federation import EXCHANGES, ClearFederation, Dropouts, SimulatedFederation
from d2pfed.simulation.standing import StandingFederation

__all__ = [
    "EXCHANGES",
    "Backend",
    "ClearFederation",
    "Dropouts",
    "Encoder",
    "Fidelity",
    "SerialBackend",
    "TrainClients",
    "Silos",
    "SimulatedFederation",
    "StandingFederation",
    "warm_up",
]
