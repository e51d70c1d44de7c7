"""How numbers are written for people: bounds rounded up, long ones by their size."""

import math
from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Return a bound in so many significant digits, never below it: what is promised must not shrink in print."""
    nearest = f"{value:.{digits}g}"
    if not math.isfinite(value) or float(nearest) >= value:
        return nearest
    above = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(value)
    return f"{float(above):.{digits}g}"


def shown(number: int) -> str:
    """Return a whole number as an error shows it; one that nobody would read, and Python may not print, by its size."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"
