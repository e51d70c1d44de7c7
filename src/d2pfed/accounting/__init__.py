"""Privacy accounting: pure functions from what was released to what it cost."""

from d2pfed.accounting.accountants import Accountant, epsilon_of
from d2pfed.accounting.amplification import CAP_SHARE, cap_excess, is_amplified
from d2pfed.accounting.binomial import cpsgd_epsilon
from d2pfed.accounting.events import (
    RATE_STEPS,
    Adjacency,
    BatchSampling,
    BinomialSum,
    CohortSampling,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Noise,
    Release,
    Sampling,
    SkellamSum,
    Unit,
    check_unit,
)
from d2pfed.accounting.formatting import round_up
from d2pfed.accounting.observers import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    UNCOUNTED,
    Guarantee,
    Observer,
    View,
    account,
    colluding,
    realised_epsilon,
    upper_bound,
)
from d2pfed.accounting.own_account import client_epsilon

__all__ = [
    "Accountant",
    "epsilon_of",
    "cpsgd_epsilon",
    "client_epsilon",
    "Observer",
    "View",
    "RELEASED",
    "SERVER",
    "CLIENT",
    "ALONE",
    "colluding",
    "Guarantee",
    "UNCOUNTED",
    "account",
    "realised_epsilon",
    "upper_bound",
    "round_up",
    "cap_excess",
    "is_amplified",
    "CAP_SHARE",
    "Release",
    "Unit",
    "Adjacency",
    "BatchSampling",
    "RATE_STEPS",
    "check_unit",
    "CohortSampling",
    "Sampling",
    "Noise",
    "DiscreteGaussianSum",
    "SkellamSum",
    "BinomialSum",
    "ContinuousGaussian",
]
