"""Federated learning with secure aggregation and distributed differential privacy.

The names here are the whole of what most programs need: wish (`Target`), plan (`calibrate`), explain, account, and
run private rounds. Training needs the extra `train` and lives in `d2pfed.learning` and `d2pfed.api`.
"""

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Adjacency,
    Observer,
    Release,
    Sampling,
    Scheme,
    Spent,
    colluding,
    spent,
)
from d2pfed.errors import BudgetExceeded, ConfigError, D2PFedError, LedgerError, PeerError, TooFewClients
from d2pfed.ledger import Budget, Ledger, verify
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Explanation, Kind, Plan, Policy, Target, calibrate, explain
from d2pfed.round import Participant, aggregate, private_sum
from d2pfed.training import ServerStep, train

__all__ = [
    "Target",
    "Kind",
    "calibrate",
    "Plan",
    "Policy",
    "explain",
    "Explanation",
    "spent",
    "Spent",
    "Observer",
    "RELEASED",
    "SERVER",
    "CLIENT",
    "colluding",
    "ALONE",
    "Release",
    "Adjacency",
    "Sampling",
    "Scheme",
    "Ledger",
    "Budget",
    "verify",
    "Entropy",
    "private_sum",
    "Participant",
    "aggregate",
    "train",
    "ServerStep",
    "D2PFedError",
    "ConfigError",
    "PeerError",
    "TooFewClients",
    "BudgetExceeded",
    "LedgerError",
]
