"""Features of an answer as whole numbers, from its logprobs and its text.

Drivers call these and put the numbers into events; the rest of the policy never sees a text.
"""

from policy.signals.logprobs import Certainty, certainty
from policy.signals.text import answers_match, contradicts

__all__ = ["Certainty", "answers_match", "certainty", "contradicts"]
