"""Text of a bound for people to read: rounded up, never to nearest."""

import math
from decimal import ROUND_CEILING, Context, Decimal


def round_up(value: float, digits: int) -> str:
    """Return a bound in at most so many significant digits, none of which is too small.

    Guarantee: read as a number, the text is at least `value`. Checked: test_accounting_formatting.py.
    """
    if not math.isfinite(value):
        return "infinite" if value == math.inf else "not a number"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(float(value)))).normalize()
    if rounded != 0 and not Decimal("0.001") <= abs(rounded) < Decimal(1_000_000):
        mantissa, exponent = f"{rounded:e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{rounded:f}"
