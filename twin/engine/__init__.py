"""One vLLM replica, exact and fast: the V1 scheduler of vLLM 0.32 in closed form.

``Engine`` knows nothing of SimPy: it is told when to wake and says when it wants to be woken next.

- ``Engine``, ``EngineSettings``, ``Sequence``: a replica, what it is set up with, what it works on;
- ``Load``, ``StepRecord``, ``Totals``: how full it is now, one step, all of them;
- ``BlockPool``: KV blocks and the prefix cache, without listing blocks;
- ``UnfitError``: a request that never fits; ``EngineError``: a fault in the code or its use.
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
