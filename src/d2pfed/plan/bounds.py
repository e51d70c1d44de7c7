"""How large the numbers of a plan may be, and what names: bounds that are checked before any work is done on them."""

import re

from d2pfed.errors import ConfigError, shown

MOST_ROUNDS = 100_000  # more take minutes to account for
MOST_ATTEMPTS = 2 * MOST_ROUNDS  # of a whole run
MOST_ATTEMPTS_PER_ROUND = 1_000
MOST_POPULATION = 10**9
MOST_COHORT = 1_000_000  # where the server is believed; signed cohorts have at most 20,000
LEAST_DELTA = 1e-50  # smaller ones are beyond what the accountants resolve, and what anyone could notice
LONGEST_NAME = 100  # of a run, an evaluation, a plot: each becomes the name of a file or a directory


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a whole number outside of its range."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must be in [{least}, {most}], got {shown(value)}")


def is_plain(name: str) -> bool:
    """Whether a name is safe as that of a file: it leads nowhere else, and hides nothing."""
    return len(name) <= LONGEST_NAME and re.fullmatch(r"\w[\w.-]*", name) is not None


def check_name(whose: str, name: str) -> None:
    """Refuse a name that is to become that of a directory, and is not plain."""
    if not is_plain(name):
        raise ConfigError(
            f"{whose} name must be letters, digits and underscores, after the first also dashes and dots, at most "
            f"{LONGEST_NAME} of all, got {name[: 2 * LONGEST_NAME]!r}"
        )
