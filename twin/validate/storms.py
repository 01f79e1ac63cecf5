"""Gates on what a policy may do to itself: verification storms, breaker flaps, starvation, retry
storms. Each is seen in a stress run that invites it, and told with what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.evidence import Gate
from twin.validate.numbers import spread

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from policy.evidence import Kind
    from policy.parameters import Parameters
    from twin.validate.playing import Played

SECOND_RUNS_MOST = 0.2
"""Part of what the replicas compute that second runs may take: the shipped policy takes 5 %, and
the services that were brought down by checking spent half."""
OPENINGS_PER_MIN_MOST = 6.0
"""A breaker that opens every ten seconds protects nobody: its probes are the traffic."""
STARVED_S_MOST = 15.0
"""Half as long again as background work is usually given before it counts as late."""
ATTEMPTS_MOST = 2.0
"""A caller's attempts for each message in a burst: from there on the burst feeds itself."""
AGAIN_SHARE_MOST = 0.25
"""Part of what is sent to replicas that may be tries after a failure."""
_LEAST = {
    "P0": "tiers.stable_least_permille and the other guaranteed shares lower",
    "P1": "tiers.stable_least_permille above {stable}",
    "P2": "tiers.batch_least_permille above {batch}",
}


def verification_storm(played: Sequence[Played], parameters: Parameters, kind: Kind) -> Gate:
    """Second runs of unsure answers leave the replicas to the first ones."""
    name = "verification_storm"
    ours, theirs = _both(played, ("doubt",), second_share)
    figures = (
        spread("second_run_share", ours, kind), spread("live second_run_share", theirs, kind),
    )  # fmt: skip
    worst = max(ours, default=0.0)
    if worst <= SECOND_RUNS_MOST:
        why = f"with a model that doubts itself second runs took {worst:.1%} of what was computed"
        return Gate(name, True, f"{why} (at most {SECOND_RUNS_MOST:.0%})", figures)
    doubtful = max(_of(played, "candidate", ("doubt",)), key=second_share)
    budget = int(1000 * SECOND_RUNS_MOST / (1 - SECOND_RUNS_MOST))
    below = _threshold(doubtful.story.scores)
    section = parameters.confidence
    why = (
        f"verification storm: second runs took {worst:.0%} of what the replicas computed while the"
        f" model doubted itself (at most {SECOND_RUNS_MOST:.0%}; the live policy:"
        f" {max(theirs, default=0.0):.0%}); set confidence.budget_permille to {budget} or less (it"
        f" is {section.budget_permille}) or confidence.verify_below_permille below {below} (it is"
        f" {section.verify_below_permille})"
    )
    return Gate(name, False, why, figures)


def breaker_flap(played: Sequence[Played], parameters: Parameters, kind: Kind) -> Gate:
    """With single failures among good answers, no breaker opens and closes all the time."""
    name = "breaker_flap"
    ours, theirs = _both(played, ("flapping",), openings_per_min)
    figures = (
        spread("openings_per_min", ours, kind, "1/min"),
        spread("live openings_per_min", theirs, kind, "1/min"),
    )
    worst = max(ours, default=0.0)
    if worst <= OPENINGS_PER_MIN_MOST:
        why = f"with single failures no breaker opened more than {worst:.1f} times a minute"
        return Gate(name, True, f"{why} (at most {OPENINGS_PER_MIN_MOST:g})", figures)
    flapping = max(_of(played, "candidate", ("flapping",)), key=openings_per_min)
    openings = flapping.story.openings
    key = max(openings, key=lambda key: openings[key])
    rule = next((rule for rule in parameters.breakers.rules if rule.name == key.split()[0]), None)
    now = (
        ""
        if rule is None
        else f" (they are {rule.volume_least}, {rule.failures_least} and {rule.successes_least},"
        f" open_ms {rule.open_ms})"
    )
    why = (
        f"breaker flap: with single failures among good answers the breaker {key!r} opened"
        f" {openings[key]} times, {worst:.1f} times a minute (at most {OPENINGS_PER_MIN_MOST:g};"
        f" the live policy: {max(theirs, default=0.0):.1f}); raise volume_least, failures_least or"
        f" successes_least of its rule, or open_ms{now}"
    )
    return Gate(name, False, why, figures)


def starvation(played: Sequence[Played], parameters: Parameters, kind: Kind) -> Gate:
    """No class waits for long while only others are started."""
    name = "starvation"
    kinds = ("overload", "long_prompts")
    ours, theirs = _both(played, kinds, starved_s)
    figures = (spread("starved_s", ours, kind, "s"), spread("live starved_s", theirs, kind, "s"))
    worst = max(ours, default=0.0)
    if worst <= STARVED_S_MOST:
        why = f"under overload no class waited longer than {worst:.1f} s while others were started"
        return Gate(name, True, f"{why} (at most {STARVED_S_MOST:g} s)", figures)
    starving = max(_of(played, "candidate", kinds), key=starved_s)
    of = starving.story.starved_s
    sla = max(of, key=lambda sla: of[sla])
    tiers = parameters.tiers
    change = _LEAST[sla].format(
        stable=tiers.stable_least_permille, batch=tiers.batch_least_permille
    )
    why = (
        f"starvation: in {starving.run.name} {sla} waited {worst:.0f} s while only others were"
        f" started (at most {STARVED_S_MOST:g} s; the live policy: {max(theirs, default=0.0):.1f}"
        f" s); set {change}, or tiers.aging_ms lower (it is {tiers.aging_ms})"
    )
    return Gate(name, False, why, figures)


def retry_storm(played: Sequence[Played], parameters: Parameters, kind: Kind) -> Gate:
    """Callers who are refused in a burst do not make it last, and neither do tries of our own."""
    name = "retry_storm"
    ours, theirs = _both(played, ("retries",), attempts_per_message)
    own, live_own = _both(played, ("flapping", "fault"), again_share)
    figures = (
        spread("attempts_per_message", ours, kind),
        spread("live attempts_per_message", theirs, kind),
        spread("again_share", own, kind), spread("live again_share", live_own, kind),
    )  # fmt: skip
    attempts, again = max(ours, default=1.0), max(own, default=0.0)
    shedding, retries = parameters.shedding, parameters.retries
    if attempts > ATTEMPTS_MOST:
        why = (
            f"retry storm: in a burst callers asked {attempts:.1f} times for each message (at most"
            f" {ATTEMPTS_MOST:g}; the live policy: {max(theirs, default=1.0):.1f}); raise"
            f" shedding.retry_after_least_ms (it is {shedding.retry_after_least_ms}) or let more"
            f" wait with shedding.queue_max (it is {shedding.queue_max})"
        )
        return Gate(name, False, why, figures)
    if again > AGAIN_SHARE_MOST:
        why = (
            f"retry storm: {again:.0%} of what was sent to replicas were tries after a failure (at"
            f" most {AGAIN_SHARE_MOST:.0%}; the live policy: {max(live_own, default=0.0):.0%});"
            f" lower retries.budget_permille (it is {retries.budget_permille}) or"
            f" retries.tries_most (it is {retries.tries_most})"
        )
        return Gate(name, False, why, figures)
    why = (
        f"in a burst callers asked {attempts:.2f} times for each message (at most"
        f" {ATTEMPTS_MOST:g}), and at most {again:.1%} of what was sent were tries after a failure"
    )
    return Gate(name, True, why, figures)


# ---- what is looked at in one run ----


def second_share(one: Played) -> float:
    """Tokens of second runs, of all that were computed."""
    story = one.story
    computed = story.tokens + story.second_tokens
    return story.second_tokens / computed if computed else 0.0


def openings_per_min(one: Played) -> float:
    """Of the breaker that opened most often."""
    most = max(one.story.openings.values(), default=0)
    return 60 * most / one.run.setup.duration_s


def starved_s(one: Played) -> float:
    """Of the class that waited longest."""
    return max(one.story.starved_s.values(), default=0.0)


def attempts_per_message(one: Played) -> float:
    """Of the clients that needed most."""
    found = (client["attempts_per_message"] for client in one.figures["clients"].values())
    return max((each for each in found if each is not None), default=1.0)


def again_share(one: Played) -> float:
    """Tries after a failure, of all that was sent."""
    return one.story.again / one.story.sent if one.story.sent else 0.0


def _threshold(scores: Counter[int]) -> int:
    """The highest threshold below which no more answers score than second runs may be."""
    most = SECOND_RUNS_MOST / (1 - SECOND_RUNS_MOST) * scores.total()
    below = 0
    for score in sorted(scores):
        below += scores[score]
        if below > most:
            return score
    return 1001


def _of(played: Sequence[Played], side: str, kinds: tuple[str, ...]) -> list[Played]:
    return [one for one in played if one.side == side and one.run.kind in kinds]


def _both(
    played: Sequence[Played], kinds: tuple[str, ...], look: Callable[[Played], float]
) -> tuple[list[float], list[float]]:
    return (
        [look(one) for one in _of(played, "candidate", kinds)],
        [look(one) for one in _of(played, "live", kinds)],
    )
