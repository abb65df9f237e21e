"""Audits: is what a plan claims contradicted by what its training releases, and is a run's folder what it says?"""

from dpoptim.app.audit.check import Check
from dpoptim.app.audit.plan_audit import PlanAudit, audit_plan, games_needed
from dpoptim.app.audit.run_folder import audit_folder, epsilon_check

__all__ = ["Check", "PlanAudit", "audit_folder", "audit_plan", "epsilon_check", "games_needed"]
