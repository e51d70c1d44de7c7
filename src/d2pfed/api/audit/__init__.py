"""Attacks on what is claimed: on the mechanism, on a training run, and on a released model."""

from d2pfed.api.audit.mechanism import MechanismAudit, Worlds, audit_mechanism, audited_plan
from d2pfed.api.audit.membership import MembershipCurve, attack_membership, write_plot
from d2pfed.api.audit.training import audit_training
