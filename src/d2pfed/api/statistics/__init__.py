"""Private statistics over the clients' own data: one call and one release each, on the same ledger as training."""

from d2pfed.api.statistics.counts import private_histogram, private_quantile, private_table
from d2pfed.api.statistics.metrics import private_metrics
from d2pfed.api.statistics.result import Statistic
from d2pfed.api.statistics.sums import private_mean, private_sum

__all__ = [
    "Statistic",
    "private_histogram",
    "private_mean",
    "private_metrics",
    "private_quantile",
    "private_sum",
    "private_table",
]
