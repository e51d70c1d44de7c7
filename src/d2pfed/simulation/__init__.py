"""Simulated federations: the clients of a cohort in this process, in others, or on a cluster."""

from d2pfed.round import Fidelity
from d2pfed.simulation.backend import Backend, Encoder, InProcess, TrainClients
from d2pfed.simulation.clear import ClearFederation, plain_mean
from d2pfed.simulation.dropouts import EXCHANGES, Dropouts
from d2pfed.simulation.federation import SimulatedFederation, collect
from d2pfed.simulation.silos import Silos
from d2pfed.simulation.standing import StandingFederation
from d2pfed.simulation.warming import warm_up

__all__ = [
    "EXCHANGES",
    "Backend",
    "ClearFederation",
    "Dropouts",
    "Encoder",
    "Fidelity",
    "InProcess",
    "TrainClients",
    "Silos",
    "SimulatedFederation",
    "StandingFederation",
    "collect",
    "plain_mean",
    "warm_up",
]
