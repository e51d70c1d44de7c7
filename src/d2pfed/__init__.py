"""Federated learning with secure aggregation and distributed differential privacy.

The names here are what most programs need: training (`fit`), what is asked for (`PrivacyTarget`), what it takes
(`calibrate`, `describe`), what it costs, and private statistics. Training needs the extra `train`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from d2pfed.api import EarlyStop, FitResult, RunOptions, Training, fit
    from d2pfed.api.certify import certify
    from d2pfed.errors import (
        BudgetExceeded,
        ConfigError,
        D2PFedError,
        DamagedFile,
        DownloadError,
        LedgerError,
        MissingExtra,
        PeerError,
        TooFewClients,
    )
    from d2pfed.ledger import Budget, Ledger, verify
    from d2pfed.numerics.randomness import Entropy
    from d2pfed.plan import MechanismName, Plan, PlanSummary, Policy, PrivacyTarget, calibrate, describe
    from d2pfed.round import Participant, aggregate
    from d2pfed.statistics.metrics import private_metrics
    from d2pfed.statistics.queries import (
        private_histogram,
        private_mean,
        private_quantile,
        private_sum,
        private_table,
    )
    from d2pfed.statistics.release import Statistic
    from d2pfed.training import ServerOptimizer, train

__all__ = [
    "fit",
    "FitResult",
    "EarlyStop",
    "Training",
    "RunOptions",
    "certify",
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
    "private_mean",
    "private_histogram",
    "private_table",
    "private_quantile",
    "private_metrics",
    "Statistic",
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
    "DamagedFile",
    "DownloadError",
    "MissingExtra",
]

# Where each public name is defined: its module is imported when the name is first used.
_NAMES = {
    "d2pfed.accounting": "ALONE CLIENT RELEASED SERVER Adjacency CohortSampling Guarantee Observer Release Sampling "
    "account colluding",
    "d2pfed.api": "EarlyStop FitResult RunOptions Training fit",
    "d2pfed.api.certify": "certify",
    "d2pfed.errors": "BudgetExceeded ConfigError D2PFedError DamagedFile DownloadError LedgerError MissingExtra "
    "PeerError TooFewClients",
    "d2pfed.ledger": "Budget Ledger verify",
    "d2pfed.numerics.randomness": "Entropy",
    "d2pfed.plan": "MechanismName Plan PlanSummary Policy PrivacyTarget calibrate describe",
    "d2pfed.round": "Participant aggregate",
    "d2pfed.statistics.metrics": "private_metrics",
    "d2pfed.statistics.queries": "private_histogram private_mean private_quantile private_sum private_table",
    "d2pfed.statistics.release": "Statistic",
    "d2pfed.training": "ServerOptimizer train",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
