"""How certain a model was, from what it lists of its tokens."""

from __future__ import annotations

from math import inf, log, nan

from hypothesis import given
from hypothesis import strategies as st

from policy.signals import Certainty, certainty


def test_a_certain_answer_has_no_entropy() -> None:
    assert certainty([[0.0, -9999.0], [0.0, -inf]]) == Certainty(0, 0, 0)


def test_equal_candidates_have_the_logarithm_of_their_number() -> None:
    half, quarter = [log(1 / 2)] * 2, [log(1 / 4)] * 4
    assert certainty([half]) == Certainty(693, 693, 1000)
    assert certainty([half, quarter]) == Certainty(1040, 1386, 1000)


def test_what_is_not_listed_is_at_most_as_likely_as_the_last_that_is() -> None:
    assert certainty([[log(1 / 2)]]) == Certainty(693, 693, 0)
    assert certainty([[log(1 / 4)] * 2]) == Certainty(1386, 1386, 1000)
    assert certainty([[log(0.8), log(0.15)]]) == Certainty(613, 613, 0)  # one more, of 0.05


def test_the_top_20_of_a_uniform_model_show_all_its_entropy() -> None:
    assert certainty([[-log(4096)] * 20]) == Certainty(8318, 8318, 1000)
    assert certainty([[-log(151_936)] * 20]) == Certainty(11_931, 11_931, 1000)


def test_a_geometric_distribution_is_exact_where_all_of_it_is_listed() -> None:
    weights = [log(1 / 2) * at for at in range(1, 60)]
    assert certainty([weights]) == Certainty(1386, 1386, 0)  # 2 ln 2
    few = certainty([weights[:4]])  # the rest, a sixteenth, could be one token
    assert few == Certainty(1300, 1300, 0)


def test_a_sampled_token_that_is_none_of_the_likeliest_bounds_nothing() -> None:
    top, sampled = [log(1 / 8)] * 4, -20.0
    least = certainty([top])
    assert least == Certainty(2079, 2079, 1000)
    assert certainty([[*top, sampled]], candidates=4) == least
    assert certainty([[sampled, *top]], candidates=4) == least
    assert certainty([[sampled, *top]]) == least
    assert certainty([[sampled, *top[:3]]], candidates=4) == least  # it took the fourth's place
    assert certainty([top], candidates=20) == least


def test_a_candidate_that_cannot_be_is_no_bound() -> None:
    assert certainty([[log(1 / 2), -inf]]) == Certainty(693, 693, 0)
    assert certainty([[log(1 / 2), -9999.0]]) == Certainty(693, 693, 0)
    assert certainty([[log(1 / 2), -700.0]]) is not None
    assert certainty([[-inf]]) == Certainty(0, 0, 1000)


WEIGHTS = st.lists(st.floats(1e-12, 1.0), min_size=1, max_size=300)


@given(st.lists(WEIGHTS, min_size=1, max_size=3), st.integers(1, 20), st.data())
def test_entropy_is_never_overstated_nor_less_than_one_more_candidate_proves(
    tokens: list[list[float]], listed: int, data: st.DataObject
) -> None:
    logprobs: list[list[float]] = []
    true: list[float] = []
    one_more: list[float] = []
    for weights in tokens:
        shares = sorted([weight / sum(weights) for weight in weights], reverse=True)
        top, outside = shares[:listed], shares[listed:]
        given = [*top, *data.draw(st.sampled_from([[], *([share] for share in outside)]))]
        logprobs.append([log(share) for share in given])
        rest = max(0.0, 1.0 - sum(given))
        true.append(entropy(shares))
        one_more.append(entropy([*given, rest]))
    counted = certainty(logprobs, candidates=listed)
    assert counted is not None
    assert max(one_more) * 1000 - 1 <= counted.entropy_worst_millinats <= max(true) * 1000 + 1
    mean = counted.entropy_mean_millinats * len(tokens)
    assert sum(one_more) * 1000 - 3 <= mean <= sum(true) * 1000 + 3


def entropy(shares: list[float]) -> float:
    return -sum([share * log(share) for share in shares if share > 0.0])


def test_candidates_within_three_hundredths_are_close() -> None:
    tokens = [[log(0.5), log(0.48)], [log(0.5), log(0.46)], [log(0.46), log(0.5)], [log(0.9)]]
    counted = certainty(tokens)
    assert counted is not None
    assert counted.close_permille == 250


def test_no_logprobs_no_figures() -> None:
    assert certainty([]) is None
    assert certainty([[], [nan]]) is None
    assert certainty([[], [0.0], [nan]]) == Certainty(0, 0, 0)


def test_a_logprob_rounded_above_zero_is_certain() -> None:
    assert certainty([[1e-6]]) == Certainty(0, 0, 0)
