"""The policy file: every parameter with its unit, its range, its default and why.

One module for each mechanism's section; ``render`` writes a policy as YAML with these comments, and
``policy.files`` reads one.
"""

from policy.parameters.queue import Classes, History, Inflight, Line, Tiers
from policy.parameters.render import render
from policy.parameters.whole import SCHEMA, Parameters, canonical, from_canonical, policy_hash

__all__ = [
    "SCHEMA", "Classes", "History", "Inflight", "Line", "Parameters", "Tiers", "canonical",
    "from_canonical", "policy_hash", "render",
]  # fmt: skip
