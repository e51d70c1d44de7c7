"""How a bound is printed: rounded up, so that what is printed is still a bound."""

import math
from decimal import ROUND_CEILING, Context, Decimal


def upward(value: float, digits: int) -> str:
    """Return a bound in so many significant digits, rounded up."""
    if not math.isfinite(value):
        return "infinite" if value > 0 else "not a number"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value)).normalize()
    if rounded != 0 and not Decimal("0.001") <= abs(rounded) < Decimal(1_000_000):
        mantissa, exponent = f"{rounded:e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{rounded:,f}"
