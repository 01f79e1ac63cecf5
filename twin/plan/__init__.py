"""Capacity planning: how many replicas, of which card, hold the promises, and what they bear."""

from twin.plan.estimates import Estimate
from twin.plan.inputs import PlanError, Prices, Promise, SloFile, load_prices, load_slo, promise_of
from twin.plan.machines import Machine, candidates, machine_of
from twin.plan.planning import FaultCell, Knee, Plan, Setting, Size, coarse, make_plan
from twin.plan.questions import Answer, Asking
from twin.plan.runs import Runs
from twin.plan.words import sentences
from twin.plan.workload import Workload, workload_of

__all__ = [
    "Answer", "Asking", "Estimate", "FaultCell", "Knee", "Machine", "Plan", "PlanError", "Prices",
    "Promise", "Runs", "Setting", "Size", "SloFile", "Workload", "candidates", "coarse",
    "load_prices", "load_slo", "machine_of", "make_plan", "promise_of", "sentences", "workload_of",
]  # fmt: skip
