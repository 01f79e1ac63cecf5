"""Features of an answer as whole numbers, from its logprobs and its text.

Drivers call these and put the numbers into events; the rest of the policy never sees a text.
"""

from policy.signals.compare import Said, compare
from policy.signals.logprobs import Certainty, certainty
from policy.signals.text import answers_match, contradictions, contradicts

__all__ = [
    "Certainty",
    "Said",
    "answers_match",
    "certainty",
    "compare",
    "contradictions",
    "contradicts",
]
