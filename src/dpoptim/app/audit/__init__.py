"""Audits: attacks on the claim of a plan, and checks that the files of a run agree with each other."""

from dpoptim.app.audit.checks import Check
from dpoptim.app.audit.game import Game
from dpoptim.app.audit.plan_audit import PlanAudit, audit_loop, audit_plan, default_canaries, games_needed
from dpoptim.app.audit.run_files import audit_folder, epsilon_check
from dpoptim.app.audit.training import Training

__all__ = [
    "Check",
    "Game",
    "PlanAudit",
    "Training",
    "audit_folder",
    "audit_loop",
    "audit_plan",
    "default_canaries",
    "epsilon_check",
    "games_needed",
]
