"""Privacy targets, plans, and how the one becomes the other."""

from d2pfed.noise.mechanisms import MechanismName, Protocol
from d2pfed.plan.bounds import VERIFIED_DRAWS
from d2pfed.plan.calibrate import calibrate, ideal_multiplier
from d2pfed.plan.describe import PlanSummary, describe, record_terms
from d2pfed.plan.plan import Plan, decode_plan, guarantees, observers
from d2pfed.plan.policy import Enrolled, Policy
from d2pfed.plan.profiles import PROFILES, Request, require_deployable, require_standing
from d2pfed.plan.target import DEFAULT_TARGET, PrivacyTarget, RotationName

__all__ = [
    "DEFAULT_TARGET",
    "PrivacyTarget",
    "VERIFIED_DRAWS",
    "MechanismName",
    "RotationName",
    "calibrate",
    "ideal_multiplier",
    "Plan",
    "decode_plan",
    "Policy",
    "Enrolled",
    "PROFILES",
    "Protocol",
    "Request",
    "require_deployable",
    "require_standing",
    "observers",
    "record_terms",
    "guarantees",
    "PlanSummary",
    "describe",
]
