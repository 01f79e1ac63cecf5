"""Every decision: a pure state machine, the same in the twin and in front of the real replicas.

Build a policy from its parameters, put a ``Runner`` around it, feed it events and carry out what it
decides. Nothing here reads a clock, a file or a random source; what does is in ``policy.files``
(presets, policy files, profiles, the hash of this code), which the rest never imports.

The public API, here:

- ``build_policy``, ``restore``: a policy from ``Parameters``, or from a snapshot of itself;
- ``Policy``, ``Service``, ``Mechanism``: its contract, the whole of it, and what its parts share;
- ``Event`` and its kinds (``Arrived`` ... ``Warmed``): what it is told;
- ``Decision`` and its kinds (``Dispatch`` ... ``Warm``): what it decides; ``Score`` is why;
- ``Runner``, ``Log``: order, one timer, and where steps are logged: ``FullLog``, ``HashLog``,
  ``SampleLog``, each segment begun by a ``Header``;
- ``read_segment``, ``Record``, ``LogError``: a log, read; ``replay``, ``Difference``: its audit;
- ``Parameters``, ``canonical``, ``from_canonical``, ``render``: the policy file.

The files, from the outside in:

- ``contract``, ``events``, ``decisions``, ``mechanism``: the contract;
- ``runner``, ``log``, ``audit``: the loop around a policy, its log, and the proof by replay;
- ``compose``, ``service``, ``fleet``, ``tiered``, ``fifo``: a policy put together; a request's way;
  the replicas; the tiered queue at work; the baseline;
- ``facts``, ``announce``, ``leases``: what is true; of a new replica; of what controllers share;
- mechanisms: ``complexity``, ``tiers``, ``placement``, ``limits``, ``breakers``, ``confidence``,
  ``chains``, ``health``, ``capacity``, ``rollout``, ``drift``, ``alerts``, ``canary``;
- ``hosts``, ``prefixes``: replicas as placement sees them, and what their caches hold;
- ``cost``: the profile's schema and the one step-time formula; ``outcomes``: HTTP codes by cause;
- ``evidence``, ``deployment``, ``sequential``, ``drills``: judging a policy, and a drill;
- ``bounded``: a mapping with a bound;
- ``parameters``: the policy file; ``presets`` and ``profiles``: data that ``files`` reads;
- ``forecast``, ``signals``: the rooms that may use numpy and torch, or read text.
"""

from policy.audit import Difference, replay
from policy.compose import build_policy, restore
from policy.contract import Policy
from policy.decisions import (
    Abort,
    Alert,
    BreakerMoved,
    Decision,
    Dispatch,
    Lease,
    LookUp,
    ReadProgress,
    Refused,
    Release,
    Reset,
    Rotated,
    SaveCheckpoint,
    Scaled,
    Settled,
    Start,
    Stop,
    Undo,
    Verify,
    Warm,
)
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    ChainFound,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    FirstToken,
    Forecasted,
    GpuFault,
    GpuRead,
    LookedUp,
    PolicySwitched,
    Progress,
    QuotaLeased,
    ReplicaDown,
    ReplicaShare,
    ReplicaUp,
    Restored,
    RolloutRequested,
    Scraped,
    SessionOwned,
    Standby,
    StepsRead,
    StoreChanged,
    Ticked,
    Verified,
    Warmed,
)
from policy.log import FullLog, HashLog, Header, LogError, Record, SampleLog, read_segment
from policy.mechanism import Mechanism
from policy.parameters import Parameters, canonical, from_canonical, render
from policy.placement import Score
from policy.runner import Log, Runner
from policy.service import Service

__all__ = [
    "Abort",
    "Alert",
    "Arrived",
    "BreakerMoved",
    "CanaryEnded",
    "CanaryStarted",
    "Cancelled",
    "ChainFound",
    "CheckpointFailed",
    "CheckpointSaved",
    "Decision",
    "Difference",
    "Dispatch",
    "Event",
    "Failed",
    "Finished",
    "FirstToken",
    "Forecasted",
    "FullLog",
    "GpuFault",
    "GpuRead",
    "HashLog",
    "Header",
    "Lease",
    "Log",
    "LogError",
    "LookUp",
    "LookedUp",
    "Mechanism",
    "Parameters",
    "Policy",
    "PolicySwitched",
    "Progress",
    "QuotaLeased",
    "ReadProgress",
    "Record",
    "Refused",
    "Release",
    "ReplicaDown",
    "ReplicaShare",
    "ReplicaUp",
    "Reset",
    "Restored",
    "RolloutRequested",
    "Rotated",
    "Runner",
    "SampleLog",
    "SaveCheckpoint",
    "Scaled",
    "Score",
    "Scraped",
    "Service",
    "SessionOwned",
    "Settled",
    "Standby",
    "Start",
    "StepsRead",
    "Stop",
    "StoreChanged",
    "Ticked",
    "Undo",
    "Verified",
    "Verify",
    "Warm",
    "Warmed",
    "build_policy",
    "canonical",
    "from_canonical",
    "read_segment",
    "render",
    "replay",
    "restore",
]
