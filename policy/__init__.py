"""Every decision: a pure state machine, the same in the twin and in front of the real replicas.

Build a policy from its parameters, put a ``Runner`` around it, feed it events and carry out what it
decides. Nothing here reads a clock, a file or a random source; what does is in ``policy.files``
(presets, policy files, profiles, the hash of this code), which the rest never imports.
"""

from policy.audit import Difference, replay
from policy.compose import build_policy, restore
from policy.contract import Policy
from policy.decisions import Abort, Decision, Dispatch, Refused, Settled
from policy.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    FirstToken,
    ReplicaDown,
    ReplicaUp,
    Scraped,
    Ticked,
)
from policy.log import FullLog, HashLog, Header, LogError, Record, SampleLog, read_segment
from policy.parameters import Parameters, canonical, from_canonical, render
from policy.runner import Log, Runner

__all__ = [
    "Abort",
    "Arrived",
    "Cancelled",
    "Decision",
    "Difference",
    "Dispatch",
    "Event",
    "Failed",
    "Finished",
    "FirstToken",
    "FullLog",
    "HashLog",
    "Header",
    "Log",
    "LogError",
    "Parameters",
    "Policy",
    "Record",
    "Refused",
    "ReplicaDown",
    "ReplicaUp",
    "Runner",
    "SampleLog",
    "Scraped",
    "Settled",
    "Ticked",
    "build_policy",
    "canonical",
    "from_canonical",
    "read_segment",
    "render",
    "replay",
    "restore",
]
