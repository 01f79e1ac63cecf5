"""The policy file: every parameter with its unit, its range, its default and why.

- ``whole``: the file, its canonical text and hash; ``section``: what each part is built from;
- ``queue``: classes, tiers, what is in flight, shedding, retries;
- ``alerts``, ``breakers``, ``capacity``, ``chains``, ``confidence``, ``drift``, ``health``,
  ``limits``, ``placement``, ``rollout``: the section of the mechanism of that name;
- ``render``: a policy as YAML with these comments. ``policy.files`` reads one.
"""

from policy.parameters.queue import Classes, History, Inflight, Line, Tiers
from policy.parameters.render import render
from policy.parameters.whole import SCHEMA, Parameters, canonical, from_canonical, policy_hash

__all__ = [
    "SCHEMA", "Classes", "History", "Inflight", "Line", "Parameters", "Tiers", "canonical",
    "from_canonical", "policy_hash", "render",
]  # fmt: skip
