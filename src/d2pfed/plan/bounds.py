"""How large the numbers of a plan may be: bounds that are checked before any work is done on them."""

from d2pfed.errors import ConfigError, shown

MOST_ROUNDS = 100_000  # more take minutes to account for
MOST_ATTEMPTS = 2 * MOST_ROUNDS  # of a whole run
MOST_ATTEMPTS_PER_ROUND = 1_000
MOST_POPULATION = 10**9
MOST_COHORT = 1_000_000  # where the server is believed; signed cohorts have at most 20,000
LEAST_DELTA = 1e-50  # smaller ones are beyond what the accountants resolve, and what anyone could notice


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a whole number outside of its range."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must be in [{least}, {most}], got {shown(value)}")
