"""Federated learning with secure aggregation and distributed differential privacy.

The names here are what most programs need: what is asked for (`PrivacyTarget`), what it takes (`calibrate`,
`describe`), what it costs, and private sums. Training needs the extra `train`.
"""

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Adjacency,
    CohortSampling,
    Guarantee,
    Observer,
    Release,
    Sampling,
    account,
    colluding,
)
from d2pfed.errors import BudgetExceeded, ConfigError, D2PFedError, LedgerError, PeerError, TooFewClients
from d2pfed.ledger import Budget, Ledger, verify
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, Plan, PlanSummary, Policy, PrivacyTarget, calibrate, describe
from d2pfed.round import Participant, aggregate, private_sum
from d2pfed.training import ServerOptimizer, train

__all__ = [
    "PrivacyTarget",
    "MechanismName",
    "calibrate",
    "Plan",
    "Policy",
    "describe",
    "PlanSummary",
    "account",
    "Guarantee",
    "Observer",
    "RELEASED",
    "SERVER",
    "CLIENT",
    "colluding",
    "ALONE",
    "Release",
    "Adjacency",
    "CohortSampling",
    "Sampling",
    "Ledger",
    "Budget",
    "verify",
    "Entropy",
    "private_sum",
    "Participant",
    "aggregate",
    "train",
    "ServerOptimizer",
    "D2PFedError",
    "ConfigError",
    "PeerError",
    "TooFewClients",
    "BudgetExceeded",
    "LedgerError",
]
