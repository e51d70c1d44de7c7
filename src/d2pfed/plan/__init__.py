"""What is wished, what is agreed, and how the one becomes the other."""

from d2pfed.plan.agreement import Plan, decode_plan, observers, promises
from d2pfed.plan.calibrate import calibrate, ideal_multiplier
from d2pfed.plan.collusion import VERIFIED_DRAWS
from d2pfed.plan.explain import Explanation, explain
from d2pfed.plan.policy import Enrolled, Policy
from d2pfed.plan.target import Kind, Target, Turn

__all__ = [
    "Target",
    "VERIFIED_DRAWS",
    "Kind",
    "Turn",
    "calibrate",
    "ideal_multiplier",
    "Plan",
    "decode_plan",
    "Policy",
    "Enrolled",
    "observers",
    "promises",
    "Explanation",
    "explain",
]
