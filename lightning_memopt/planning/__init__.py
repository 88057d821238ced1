"""What a training step will hold, found out without a device that could hold it."""

from lightning_memopt.planning.planner import plan
from lightning_memopt.planning.result import Kinds, MethodPlan, Plan

__all__ = ["Kinds", "MethodPlan", "Plan", "plan"]
