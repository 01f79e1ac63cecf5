"""What the canary should show, said beforehand: effect, sample size, band."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.deployment import BELIEVED, FIRST_STAGE, MISSES, DeploymentPlan
from policy.evidence import Band, Expected
from twin.validate.numbers import GROUP_BLOCKS, counts, difference, pairs_of
from twin.validate.reading import BLOCK_NS, CLASSES, NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.evidence import Kind
    from twin.validate.numbers import Pair
    from twin.validate.playing import Played

    Array = np.ndarray[Any, np.dtype[Any]]

PLAN = DeploymentPlan()
"""As deployments are judged unless somebody says otherwise."""
HARM_RATIO = 5.0
"""A candidate that misses this many times as often must be found out."""
EVIDENCE = 1000 / (PLAN.alpha_permille * FIRST_STAGE * MISSES * dict(BELIEVED)[HARM_RATIO])
"""What the bettor who believes in that ratio must have won before a canary in its first stage goes
back, for only so much of all wealth is this bettor's."""
POWER_Z = 0.84
"""Standard normal quantile of four times in five."""
DRAWS = 2000
OUTSIDE = 0.005
"""Of such windows, the part that the band leaves out on each side."""
ANSWERS_LEAST = 40
"""Fewer in a window say nothing about its 95th percentile."""
SHARE_ROOM = 0.01
RARE_MISS_SHARE = PLAN.miss_share_most_permille / 1000
"""Taken where the live policy missed nothing at all: below it deployments do not compare."""
ERROR_LEAST = 0.1
"""Times on live machines differ from the profile's at least by so much."""


def expected(
    played: Sequence[Played], share_permille: int, error_percent: float, kind: Kind
) -> Expected:
    """From the candidate's and the live policy's runs on recorded traces."""
    pairs = [pair for pair in pairs_of(played) if pair.candidate.run.kind == "trace"]
    found = counts(pairs)
    share = share_permille / 1000
    missed = int(found.live.sum())
    miss_share = missed / found.requests if missed else RARE_MISS_SHARE
    struck = int((found.live > 0).sum())
    incidents_per_miss = min(1.0, struck / missed) if missed else 1.0
    return Expected(
        effect=difference("miss_share_difference", found, kind),
        share_permille=share_permille,
        sample_size=sample_size(miss_share, incidents_per_miss, share),
        hurt_budget=PLAN.hurt_budget,
        window_s=PLAN.window_s,
        band=bands(pairs, share, max(ERROR_LEAST, error_percent / 100)),
    )


def sample_size(miss_share: float, incidents_per_miss: float, share: float) -> int:
    """The canary's requests after which a policy that misses ``HARM_RATIO`` times as often is found
    out, four times in five.

    The test bets on whose the next incident is: the canary's with the chance ``share`` under the
    null hypothesis, and q if it misses k times as often. An incident then adds g = q log(q / p) +
    (1 - q) log((1 - q) / (1 - p)) to the logarithm of the evidence on average, with a standard
    deviation s, and ``EVIDENCE`` takes the n incidents for which n g - z s sqrt(n) is its logarithm
    (Wald 1945, for the mean; the normal approximation for the power).
    """
    if not 0 < share < 1:
        return 0
    wrong = min(1.0, HARM_RATIO * miss_share)
    q = wrong * share / (wrong * share + miss_share * (1 - share))
    up, down = math.log(q / share), math.log((1 - q) / (1 - share))
    gain = q * up + (1 - q) * down
    sd = abs(up - down) * math.sqrt(q * (1 - q))
    half = POWER_Z * sd / 2
    root = (half + math.sqrt(half * half + gain * math.log(EVIDENCE))) / gain
    return math.ceil(root * root * q / (wrong * incidents_per_miss))


def bands(pairs: Sequence[Pair], share: float, error: float) -> tuple[Band, ...]:
    """Where the candidate's figures of a window will lie, with 99 %.

    Windows are put together from half minutes of the twin's runs, thinned to the canary's share of
    the keys. Times are widened by what the profile may be off.
    """
    found = counts(pairs)
    if not found.requests:
        return ()
    made = [_miss_band(found.offered, found.candidate, share)]
    requests = found.requests / len(pairs)
    span_s = sum(pair.candidate.run.setup.duration_s for pair in pairs) / len(pairs)
    for sla in CLASSES:
        runs = [np.array(pair.candidate.story.ttft_s.get(sla, ())) for pair in pairs]
        runs = [run for run in runs if run.size]
        answers = sum(run.size for run in runs) / max(1, len(pairs))
        size = int(answers / span_s * PLAN.window_s * share)
        if requests and size >= ANSWERS_LEAST:
            made.append(_ttft_band(sla, runs, size, error))
    return tuple(made)


def _miss_band(offered: Array, missed: Array, share: float) -> Band:
    generator = np.random.default_rng(1)
    groups = max(1, round(PLAN.window_s * NS / (BLOCK_NS * GROUP_BLOCKS)))
    rows = generator.integers(0, len(offered), (DRAWS, groups))
    asked = generator.binomial(offered[rows].sum(axis=1).astype(np.int64), share)
    lost = generator.binomial(np.rint(missed[rows].sum(axis=1)).astype(np.int64), share)
    shares = np.minimum(1.0, lost[asked > 0] / asked[asked > 0])
    if not shares.size:
        return Band("slo_miss_share", 0.0, 1.0)
    low, high = (float(end) for end in np.quantile(shares, (OUTSIDE, 1 - OUTSIDE)))
    return Band("slo_miss_share", max(0.0, low - SHARE_ROOM), min(1.0, high + SHARE_ROOM))


def _ttft_band(sla: str, runs: Sequence[Array], size: int, error: float) -> Band:
    generator = np.random.default_rng(2)
    found = [
        np.quantile(generator.choice(runs[int(generator.integers(len(runs)))], size), 0.95)
        for _ in range(DRAWS // 4)
    ]
    low, high = (float(end) for end in np.quantile(found, (OUTSIDE, 1 - OUTSIDE)))
    return Band(f"ttft_s_p95/{sla}", low * (1 - error), high * (1 + error))
