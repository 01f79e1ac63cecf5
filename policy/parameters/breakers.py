"""Parameters of ``policy.breakers``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from policy.parameters.section import Permille, Section

Action = Literal["cached", "lighter", "template"]
"""What is done instead: a similar answer that is kept, a lighter model, a structured template."""
ACTIONS: tuple[Action, ...] = ("cached", "lighter", "template")
KeyPart = Literal["model", "version", "line", "kind", "replica"]
FailureKind = Literal[
    "timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "silent", "replica_lost",
    "controller_lost", "mismatch",
]  # fmt: skip
"""What can count against a breaker: the caller's own errors (4xx) and backpressure cannot."""


class Rule(Section, frozen=True, forbid_unknown_fields=True):
    """When a breaker opens, for each key of its own, and how it is tried again."""

    name: Annotated[
        str,
        Meta(pattern=r"^[a-z][a-z0-9_-]*$", max_length=40, description="Begins the breaker's key."),
    ]
    by: Annotated[
        tuple[KeyPart, ...],
        Meta(
            description="What has a breaker of its own; kind: each of the kinds; empty: all one."
            " replica: alone, and for mismatches and low confidence only. Such a breaker opens"
            " where the replica's answers are worse than its peers', and takes the replica out of"
            " the rotation in place of its callers."
        ),
    ] = ("model",)
    kinds: Annotated[
        tuple[FailureKind, ...],
        Meta(description="Errors that are failures here; any other kind changes nothing."),
    ] = ()
    low_confidence_below_permille: Annotated[
        Permille,
        Meta(
            description="Per mille; an answer whose confidence is lower is a failure, and one"
            " without a score changes nothing. 0: confidence plays no part."
        ),
    ] = 0
    window_ms: Annotated[
        int,
        Meta(ge=1000, le=86_400_000, description="ms in which outcomes are counted: 5 minutes."),
    ] = 300_000
    windows_least: Annotated[
        int,
        Meta(
            ge=1,
            le=60,
            description="Whole windows in a row in which the share must be reached. 1: the window"
            " slides, in thirtieths, and the failure that reaches the share opens at once.",
        ),
    ] = 1
    share_permille: Annotated[
        Permille,
        Meta(description="Per mille of failures from which it opens. 0: the share plays no part."),
    ] = 0
    volume_least: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Outcomes in a window before its share counts."),
    ] = 100
    failures_least: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Failures in a window before its share counts: with few outcomes a small"
            " share would else be one bad request.",
        ),
    ] = 5
    consecutive_least: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Failures without a success between them that open it, whatever the share."
            " 0: they do not.",
        ),
    ] = 0
    consecutive_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms that such a run lasts at least: all the streams of one lost replica"
            " fail within an instant, which says nothing about the others.",
        ),
    ] = 200
    probes_most: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Requests at a time that may try a half-open breaker: callers who may be"
            " let down. A replica is always tried by one.",
        ),
    ] = 2
    successes_least: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Probes in a row that must succeed to close it. Where only a share of the"
            " answers fails, it takes many to tell.",
        ),
    ] = 2
    probe_wait_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms a probe's outcome is waited for; a long answer takes half a minute."
            " Then it has failed.",
        ),
    ] = 30_000
    open_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000, description="ms before the first probes; doubles if they fail."),
    ] = 2000
    open_most_ms: Annotated[
        int, Meta(ge=1, le=86_400_000, description="ms between probes at most.")
    ] = 30_000

    def __post_init__(self) -> None:
        if not (self.kinds or self.low_confidence_below_permille):
            raise ValueError(
                f"rule {self.name} has neither kinds nor low_confidence_below_permille"
            )
        if not (self.share_permille or self.consecutive_least):
            raise ValueError(f"rule {self.name} has neither share_permille nor consecutive_least")
        if len(set(self.by)) < len(self.by) or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"rule {self.name} names a part of its key or a kind twice")
        if "version" in self.by and "model" not in self.by:
            raise ValueError(f"rule {self.name} is by version: add model, whose version it is")
        if "kind" in self.by and self.low_confidence_below_permille:
            raise ValueError(f"rule {self.name} is by kind, and low confidence is none")
        if "replica" in self.by and (len(self.by) > 1 or set(self.kinds) - {"mismatch"}):
            raise ValueError(
                f"rule {self.name} is by replica, and has {', '.join((*self.by, *self.kinds))}: it"
                " stands alone, with no kind but mismatch (errors are the health section's)"
            )
        if self.open_ms > self.open_most_ms:
            raise ValueError(
                f"rule {self.name}: open_ms is {self.open_ms}, above open_most_ms,"
                f" {self.open_most_ms}"
            )


DEFAULT_RULES = (
    Rule(
        name="errors",
        by=("model", "line"),  # prompts that run out of memory are often one line's own
        kinds=("timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed"),
        share_permille=5,
    ),
    Rule(
        name="transport",
        kinds=("timeout", "http_5xx", "stream_cut", "silent", "replica_lost"),
        window_ms=60_000,
        consecutive_least=5,
    ),
    Rule(
        name="doubt",
        by=("model", "line"),  # a line that asks for prose is less certain than one for facts
        kinds=("mismatch",),
        low_confidence_below_permille=300,
        window_ms=60_000,
        windows_least=3,
        share_permille=150,
        volume_least=20,
        probes_most=4,
        successes_least=25,  # with 15 % bad answers all of them succeed once in 58 times
        open_ms=60_000,  # weights do not heal in seconds, and each try lets someone down
        open_most_ms=120_000,
    ),
    Rule(
        name="doubtful",
        by=("replica",),
        kinds=("mismatch",),
        low_confidence_below_permille=650,  # what is worth a second run: peers say what is usual
        window_ms=60_000,
        share_permille=400,
        volume_least=8,  # seconds of load; how sure that is, the comparison with its peers says
        failures_least=6,
        successes_least=4,
        probe_wait_ms=60_000,  # a long answer, and the second run of it
        open_ms=30_000,
        open_most_ms=600_000,
    ),
)


class Breakers(Section, frozen=True, forbid_unknown_fields=True):
    """Circuit breakers: when a model, a line or an error kind is cut off, and what then."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    rules: Annotated[
        tuple[Rule, ...],
        Meta(
            description="One breaker for each rule and key: 0.5 % errors in 5 minutes, 5 transport"
            " failures in a row, or a confidence below 0.3 in 15 % of the answers of each of 3"
            " minutes; and for a replica 40 % mismatches or answers below 0.65 in a minute.",
            max_length=20,
        ),
    ] = DEFAULT_RULES
    keys_max: Annotated[
        int,
        Meta(
            ge=2,
            le=1_000_000,
            description="Keys of a rule remembered at most: callers invent business lines. Half as"
            " many are open at most; of the closed, the quiet and the least used are forgotten.",
        ),
    ] = 2000
    actions: Annotated[
        tuple[Action, ...],
        Meta(
            description="What a blocked request gets, tried in this order; with none left it is"
            " refused. A template always works."
        ),
    ] = ACTIONS

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError(f"two rules have one name: {', '.join(names)}")
        by_replica = [rule.name for rule in self.rules if "replica" in rule.by]
        if len(by_replica) > 1:
            raise ValueError(f"two rules are by replica: {', '.join(by_replica)}")
        if len(set(self.actions)) < len(self.actions):
            raise ValueError(f"an action stands twice: {', '.join(self.actions)}")
