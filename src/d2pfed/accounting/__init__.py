"""Privacy accounting: pure functions from what was released to what it cost."""

from d2pfed.accounting.amplification import CAP_SHARE, Accountant, cap_excess, epsilon_of, is_amplified
from d2pfed.accounting.binomial import cpsgd_epsilon
from d2pfed.accounting.events import (
    RATE_STEPS,
    Adjacency,
    BatchSampling,
    CohortSampling,
    Release,
    Sampling,
    Unit,
    check_unit,
)
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, Noise, SkellamSum
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
    client_epsilon,
    colluding,
    observer_named,
    round_up,
    upper_bound,
)
