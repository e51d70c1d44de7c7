"""Privacy targets, plans, and how the one becomes the other."""

from d2pfed.noise.mechanisms import MechanismName, Protocol
from d2pfed.plan.bounds import VERIFIED_DRAWS
from d2pfed.plan.calibrate import calibrate, ideal_multiplier
from d2pfed.plan.describe import PlanSummary, describe, record_terms
from d2pfed.plan.plan import Plan, decode_plan, guarantees, observers
from d2pfed.plan.policy import PROFILES, Enrolled, Policy, Request, require_deployable, require_standing
from d2pfed.plan.target import DEFAULT_TARGET, PrivacyTarget, ProtocolChoice, RotationName
