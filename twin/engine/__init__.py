"""One vLLM replica, exact and fast: the V1 scheduler of vLLM 0.32 in closed form.

``Engine`` knows nothing of SimPy: it is told when to wake and says when it wants to be woken next.
"""

from twin.engine.blocks import BlockPool
from twin.engine.scheduler import Engine, EngineError, Load, StepRecord, Totals, UnfitError
from twin.engine.sequence import EngineSettings, Sequence

__all__ = [
    "BlockPool",
    "Engine",
    "EngineError",
    "EngineSettings",
    "Load",
    "Sequence",
    "StepRecord",
    "Totals",
    "UnfitError",
]
