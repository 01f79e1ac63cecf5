"""Capacity planning: how many replicas, of which card, hold the promises, and what they bear.

``make_plan`` gives a ``Plan``, ``Asking`` each ``Answer``; ``sentences`` says a plan in words.

- ``preparing``: what a plan is made from, read and checked; ``inputs``: promises and prices;
- ``workload``: the requests; ``machines``: what a replica can be made of;
- ``formula``: a size without any run; ``search``: the fewest that hold; ``planning``: the plan;
- ``cell``: one run; ``runs``: many, in several processes; ``effects``: what a fault costs;
- ``questions``: the twelve; ``catalogue``: their list, for who asks without knowing them;
- ``estimates``: figures with kind and interval; ``causes``: what gives way first; ``doubts``: what
  would make an answer wrong; ``words``: a plan in sentences;
- ``show``, ``page``, ``charts``: in a terminal and a file, as a page; ``cli``: the command.
"""

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
