"""Parameters of ``policy.confidence``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.breakers import ACTIONS, Action
from policy.parameters.section import Permille, Section


class Confidence(Section, frozen=True, forbid_unknown_fields=True):
    """How far an answer is trusted, and when it is run a second time."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    candidates_most: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="Likeliest candidates of each token that the engine is asked for; 20 is"
            " the most that vLLM gives, and what lies outside of them is only bounded. 0: no"
            " answer is scored.",
        ),
    ] = 20
    lines: Annotated[
        tuple[str, ...],
        Meta(
            max_length=1000,
            description="Business lines whose answers are scored: logprobs cost the engine time."
            " Empty: all.",
        ),
    ] = ()
    verify_below_permille: Annotated[
        int,
        Meta(
            ge=0,
            le=1001,
            description="Per mille; an answer that scores lower is run again elsewhere and"
            " compared. At 650 an overloaded service recovered that more checking had brought"
            " down. 1001: every answer is.",
        ),
    ] = 650
    degrade_below_permille: Annotated[
        Permille,
        Meta(
            description="Per mille; an answer that scores lower is degraded at once: a second run"
            " would only confirm that the model does not know."
        ),
    ] = 300
    gap_min_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of probability between a token's two likeliest candidates; at"
            " temperature 0 two runs that part where it is smaller do not contradict each other:"
            " batching alone decides such near-ties."
        ),
    ] = 30
    same_tokens_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of the tokens that two sampled answers have in common, in"
            " order, from which they say the same."
        ),
    ] = 500
    budget_permille: Annotated[
        int,
        Meta(
            ge=0,
            le=2000,
            description="Per mille of the tokens served that second runs may take: without a"
            " bound, verification takes the capacity whose lack made the model unsure. 0: none."
            " 1000: each answer once.",
        ),
    ] = 50
    burst_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000,
            description="Tokens of unused budget saved up at most, so that a quiet night does not"
            " pay for an hour of doubt.",
        ),
    ] = 100_000
    entropy_mean_zero_milli: Annotated[
        int,
        Meta(
            ge=1,
            le=20_000,
            description="Thousandths of a nat; a mean token entropy that leaves no trust. 2 nats"
            " are seven equally likely words for each.",
        ),
    ] = 2000
    entropy_worst_zero_milli: Annotated[
        int,
        Meta(
            ge=1,
            le=20_000,
            description="Thousandths of a nat; an entropy of the least certain token that leaves no"
            " trust: twenty equally likely words, all that logprobs usually show, are 3 nats.",
        ),
    ] = 3000
    close_zero_permille: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Per mille of tokens decided by a hair that leave no trust.",
        ),
    ] = 300
    worst_weight_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of the score that the least certain token makes up: it may be"
            " the number that matters, but most often is a choice of style."
        ),
    ] = 150
    close_weight_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of the score that closely decided tokens make up: where two"
            " words are about as likely, another run, batch or card decides otherwise. The mean"
            " entropy makes up the rest."
        ),
    ] = 250
    contradiction_most_permille: Annotated[
        Permille,
        Meta(
            description="Per mille, the highest score of an answer that contradicts its prompt,"
            " however sure the model is: enough to have it checked, not enough to deliver it."
        ),
    ] = 450
    actions: Annotated[
        tuple[Action, ...],
        Meta(
            description="What a degraded caller gets, tried in this order. A template always works."
        ),
    ] = ACTIONS

    def __post_init__(self) -> None:
        if self.candidates_most == 1:
            raise ValueError("candidates_most is 1: a score compares the two likeliest at least")
        if self.degrade_below_permille > self.verify_below_permille:
            raise ValueError(
                f"degrade_below_permille is {self.degrade_below_permille}, above"
                f" verify_below_permille, {self.verify_below_permille}"
            )
        weights = self.worst_weight_permille + self.close_weight_permille
        if weights > 1000:
            raise ValueError(f"the weights add up to {weights} per mille")
        if len(set(self.actions)) < len(self.actions):
            raise ValueError(f"an action stands twice: {', '.join(self.actions)}")
