"""The budget of second runs is never overdrawn, and scores keep their order."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from policy.confidence import Confidence, ConfidenceState
from policy.events import Finished
from policy.parameters.confidence import Confidence as Section

FIGURES = st.tuples(st.integers(0, 12_000), st.integers(0, 12_000), st.integers(0, 1000))
ANSWERS = st.lists(
    st.tuples(
        st.integers(0, 5000), st.integers(-1, 1000), st.integers(0, 3000), st.booleans(),
        st.booleans(),
    ),
    max_size=60,
)  # fmt: skip


def finished(figures: tuple[int, int, int], contradiction: bool = False) -> Finished:
    return Finished(1, 0, 10, 0, 10, *figures, contradiction)


@given(
    answers=ANSWERS,
    permille=st.integers(0, 2000),
    burst=st.sampled_from((0, 100, 10**6)),
    split=st.integers(0, 60),
)
def test_second_runs_take_no_more_than_their_share(
    answers: list[tuple[int, int, int, bool, bool]], permille: int, burst: int, split: int
) -> None:
    section = Section(budget_permille=permille, burst_tokens=burst)
    ours, theirs = Confidence(section), Confidence(section)
    served = spent = 0
    for number, (tokens, score, second, stream, can_verify) in enumerate(answers):
        if number == split:
            packed = msgspec.msgpack.encode(ours.state(number))
            theirs = Confidence(section)
            theirs.load(msgspec.msgpack.decode(packed, type=ConfidenceState), 0)
        ours.served(tokens)
        theirs.served(tokens)
        served += tokens
        action, verification = ours.judge(score, stream, second, can_verify)
        assert theirs.judge(score, stream, second, can_verify) == (action, verification)
        if action == "verify":
            spent += second
            assert can_verify
            assert not stream
            assert second <= burst
            assert 300 <= score < 650
        elif action == "degrade":
            assert 0 <= score < 650
            assert verification in ("not_needed", "skipped_budget")
        assert spent * 1000 <= permille * served


@given(figures=FIGURES, more=FIGURES, contradiction=st.booleans())
def test_more_doubt_never_scores_higher(
    figures: tuple[int, int, int], more: tuple[int, int, int], contradiction: bool
) -> None:
    confidence = Confidence(Section())
    score = confidence.score(finished(figures, contradiction))
    worse = (figures[0] + more[0], figures[1] + more[1], figures[2] + more[2])
    assert 0 <= confidence.score(finished(worse, contradiction)) <= score <= 1000
    assert confidence.score(finished(figures, True)) <= 450
