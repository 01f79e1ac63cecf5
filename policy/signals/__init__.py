"""Features of an answer as whole numbers, from its logprobs and its text.

Drivers call these and put the numbers into events; the rest of the policy never sees a text.

- ``certainty`` gives a ``Certainty``: entropies in millinats, close calls in per mille;
- ``contradicts``, ``contradictions``: does an answer contradict its prompt;
- ``compare`` of two ``Said``, ``answers_match``: do two answers say the same.

The words behind the last two are in ``rules.yaml``, read by ``rules``; ``words`` cuts texts up.
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
