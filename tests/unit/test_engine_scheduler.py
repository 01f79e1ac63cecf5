"""The scheduler's rules, one by one: vLLM 0.32's, with steps of 1000 ns and blocks of 4 tokens.

An idle engine decides 1 ns after a submission, so a request handed over at 0 starts at 1.
"""

from __future__ import annotations

import pytest

from tests.support import (
    Abort,
    Input,
    Look,
    Played,
    Request,
    Submit,
    assert_empty,
    engine_settings,
    flat_cost,
    play,
)
from twin.engine import Engine, EngineError, EngineSettings, Load

STEP_NS = 1000
COST = flat_cost(STEP_NS)
BOTH = pytest.mark.parametrize("lag", [False, True], ids=["sync", "async"])


def run(settings: EngineSettings, *inputs: Input) -> Played:
    """A recorded run, checked to be equal to the skipping one."""
    played = play(settings, COST, inputs, record=True)
    assert play(settings, COST, inputs).facts() == played.facts()
    assert_empty(played.engine)
    return played


def after(steps: int) -> int:
    """The end of the so-many-th step of an engine that was given its first work at 0."""
    return 1 + steps * STEP_NS


def at_once(*requests: Request) -> list[Input]:
    return [Submit(0, request) for request in requests]


def scheduled(played: Played) -> list[dict[int, int]]:
    """Tokens by id, step by step; empty steps left out."""
    return [dict(step.scheduled) for step in played.steps if step.scheduled]


def shared(id: int, tokens: int, output: int = 1, limit: int = 0) -> Request:
    """A request whose first two blocks hold what those of all others hold."""
    return Request(id, tokens, output, limit, prefix=(1, 2), prefix_block_tokens=4)


# When tokens come


@BOTH
def test_a_first_token_knows_its_place_among_the_outputs_of_its_step(lag: bool) -> None:
    settings = engine_settings(async_scheduling=lag, max_num_batched_tokens=6, max_num_seqs=3)
    requests = Request(1, 4, 2), Request(2, 4, 9), Request(3, 1, 1), Request(4, 2, 3)
    played = run(settings, *at_once(*requests))
    assert [record.running for record in played.steps[:2]] == [[1, 2], [1, 2, 3]]
    # 2 is a chunk at first, beside 1, and puts out nothing; 3 comes with what is left of it. 4 has
    # a seat when both others are over, beside 2.
    assert {id: played.seq(id).turn for id in (1, 2, 3, 4)} == {1: 1, 2: 2, 3: 3, 4: 2}


def test_what_is_computed_past_an_end_puts_out_nothing() -> None:
    """The end of 1 is not seen coming, so with async scheduling it is scheduled once too often."""
    seen: set[bool] = set()
    for at_step in range(1, 7):
        requests = [Submit(0, Request(1, 4, 3, 9)), Submit(0, Request(2, 4, 20))]
        late = Submit(after(at_step) - 1, Request(3, 4, 2))
        played = run(engine_settings(async_scheduling=True), *requests, late)
        (record,) = (each for each in played.steps if (3, 4) in each.scheduled)
        place = len(record.scheduled)
        overruns = [each.step for each in played.steps if 1 in dict(each.scheduled)][3:]
        assert len(overruns) == 1
        assert played.seq(3).turn == place - (record.step in overruns)
        seen.add(record.step in overruns)
    assert seen == {True, False}


@BOTH
def test_the_first_token_comes_at_the_end_of_the_step_that_completes_the_prefill(
    lag: bool,
) -> None:
    settings = engine_settings(async_scheduling=lag)
    played = run(settings, Submit(0, Request(1, 64, 3, 3)), Submit(0, Request(2, 65, 3, 3)))
    assert played.first_ns(1) == after(1)
    # 64 tokens a step: one of the second step goes to the decoding first request.
    assert scheduled(played)[1:3] == [{1: 1, 2: 63}, {1: 1, 2: 2}]
    assert played.first_ns(2) == after(3)


@BOTH
def test_an_output_of_one_token_finishes_in_its_prefill_step(lag: bool) -> None:
    played = run(engine_settings(async_scheduling=lag), Submit(0, Request(1, 5, 1, 1)))
    assert played.calls == [(after(1), "first", 1), (after(1), "finish", 1)]
    assert played.engine.steps == 1


@BOTH
@pytest.mark.parametrize("outputs", [2, 3, 40])
def test_every_further_token_takes_one_step(lag: bool, outputs: int) -> None:
    settings = engine_settings(async_scheduling=lag)
    played = run(settings, Submit(0, Request(1, 5, outputs, outputs)))
    assert played.finish_ns(1) == after(outputs)
    assert played.engine.steps == outputs


@BOTH
def test_a_pooling_request_finishes_with_its_prefill_and_has_no_first_token(lag: bool) -> None:
    request = Request(1, 100, 50, pooling=True)
    played = run(engine_settings(async_scheduling=lag), Submit(0, request))
    assert played.calls == [(after(2), "finish", 1)]


def test_the_last_output_token_is_never_computed() -> None:
    """8 tokens of prompt and 5 of output hold 12: three blocks, not four."""
    played = run(engine_settings(kv_blocks=4), Submit(0, Request(1, 8, 5, 5)))
    assert played.finish_ns(1) == after(5)
    assert min(step.free_blocks for step in played.steps) == 0


@BOTH
@pytest.mark.parametrize(
    ("limit", "true_length", "made"),
    [(7, 7, 7), (7, 20, 7), (0, 6, 6), (0, 90, 10), (90, 90, 10)],
)
def test_the_answer_ends_at_eos_at_max_tokens_or_at_max_model_len(
    lag: bool, limit: int, true_length: int, made: int
) -> None:
    settings = engine_settings(max_model_len=15, async_scheduling=lag)
    played = run(settings, Submit(0, Request(1, 5, true_length, limit)))
    assert played.seq(1).outputs == made
    assert played.finish_ns(1) == after(made)


def test_an_eos_under_async_scheduling_runs_one_step_too_far() -> None:
    """The next step was decided before the token was seen; a known end is not overrun."""
    eos = Submit(0, Request(1, 5, 3, 10))
    known = Submit(0, Request(1, 5, 3, 3))
    ahead, plain = engine_settings(async_scheduling=True), engine_settings()
    assert run(plain, eos).engine.steps == run(ahead, known).engine.steps == 3
    overrun = run(ahead, eos)
    assert overrun.finish_ns(1) == after(3)
    assert overrun.engine.steps == 4
    assert overrun.engine.busy_ticks == 4 * STEP_NS * 1024


# Who is seen, and when


@BOTH
@pytest.mark.parametrize(("at_ns", "decision"), [(1000, 1), (1001, 2), (1002, 2), (2000, 2)])
def test_a_submission_is_seen_by_the_first_decision_strictly_after_it(
    lag: bool, at_ns: int, decision: int
) -> None:
    """Steps end at 1001, 2001 and so on; async scheduling decides a step one step ahead."""
    settings = engine_settings(async_scheduling=lag)
    played = run(settings, Submit(0, Request(1, 5, 9, 9)), Submit(at_ns, Request(2, 5, 2, 2)))
    assert played.seq(2).scheduled_ns == after(decision)
    assert played.first_ns(2) == after(decision + 1 + lag)


@BOTH
def test_a_decision_that_sees_one_submission_does_not_see_one_of_its_own_instant(
    lag: bool,
) -> None:
    played = run(
        engine_settings(async_scheduling=lag),
        Submit(0, Request(1, 5, 9, 9)),
        Submit(500, Request(2, 5, 2, 2)),
        Submit(1001, Request(3, 5, 2, 2)),
    )
    assert played.seq(2).scheduled_ns == after(1)
    assert played.seq(3).scheduled_ns == after(2)


@pytest.mark.parametrize("at_ns", [0, 7, 123_456])
def test_an_idle_engine_starts_a_nanosecond_after_the_submission(at_ns: int) -> None:
    played = run(engine_settings(), Submit(at_ns, Request(1, 5)))
    assert played.seq(1).scheduled_ns == at_ns + 1
    assert played.finish_ns(1) == at_ns + 1 + STEP_NS


def test_a_submission_may_be_stamped_in_the_future() -> None:
    played = run(engine_settings(), Submit(0, Request(1, 5), 5000), Submit(10, Request(2, 5), 100))
    assert played.finish_ns(2) == 111 + STEP_NS
    assert played.finish_ns(1) == 5001 + STEP_NS


# Budget and seats


def test_running_requests_go_before_waiting_ones_and_prompts_are_cut_to_the_budget() -> None:
    settings = engine_settings(max_num_batched_tokens=10)
    played = run(settings, *at_once(Request(1, 4, 4, 4), Request(2, 20, 2, 2), Request(3, 3, 2, 2)))
    assert scheduled(played)[:4] == [
        {1: 4, 2: 6},
        {1: 1, 2: 9},
        {1: 1, 2: 5, 3: 3},
        {1: 1, 2: 1, 3: 1},
    ]


def test_no_more_than_max_num_seqs_run() -> None:
    settings = engine_settings(max_num_seqs=2)
    played = run(settings, *at_once(*(Request(number, 5, 4, 4) for number in range(5))))
    assert max(len(step.running) for step in played.steps) == 2
    assert [played.finish_ns(number) for number in range(5)] == [after(n) for n in (4, 4, 8, 8, 12)]


def test_under_async_scheduling_a_seat_comes_back_one_decision_later() -> None:
    settings = engine_settings(max_num_seqs=1, async_scheduling=True)
    played = run(settings, *at_once(Request(1, 5, 4, 4), Request(2, 5, 4, 4)))
    assert played.finish_ns(1) == after(4)
    assert played.seq(2).scheduled_ns == after(4)
    assert played.finish_ns(2) == after(8)  # an empty step stood in between: it takes no time


def test_under_priority_the_lowest_number_goes_first_then_the_earliest_then_the_lowest_id() -> None:
    settings = engine_settings(max_num_seqs=1, scheduling_policy="priority")
    played = run(
        settings,
        Submit(0, Request(9, 5, 4, 4)),
        Submit(5, Request(4, 5, 1, 1, priority=2)),
        Submit(10, Request(8, 5, 1, 1, priority=1)),
        Submit(10, Request(7, 5, 1, 1, priority=1)),
        Submit(9, Request(6, 5, 1, 1, priority=1)),
    )
    assert [who for _, what, who in played.calls if what == "finish"] == [9, 6, 7, 8, 4]


def test_under_fcfs_priorities_mean_nothing() -> None:
    settings = engine_settings(max_num_seqs=1)
    played = run(settings, *at_once(Request(1, 5, priority=9), Request(2, 5, priority=0)))
    assert played.finish_ns(1) < played.finish_ns(2)


# Preemption


def test_under_fcfs_the_last_of_running_is_preempted_and_comes_back_first() -> None:
    """Two blocks each; with the fifth block only two of the three can go on."""
    settings = engine_settings(kv_blocks=7, prefix_caching=False)
    played = run(settings, *at_once(*(Request(number, 7, 6, 6) for number in (1, 2, 3))))
    (at,) = (index for index, step in enumerate(played.steps) if step.preempted)
    step = played.steps[at]
    assert step.preempted == [3]
    assert step.running == [1, 2]
    assert step.waiting == 1
    assert played.seq(3).preemptions == played.engine.preemptions == 1
    assert played.finish_ns(3) > played.finish_ns(1) == played.finish_ns(2) == after(6)


def test_a_preempted_request_keeps_its_output_and_has_one_first_token() -> None:
    """Its two tokens are prompt now: nine tokens are prefilled, and the third comes out."""
    settings = engine_settings(kv_blocks=7, prefix_caching=False)
    played = run(settings, *at_once(*(Request(number, 7, 6, 6) for number in (1, 2, 3))))
    chunks = [dict(step.scheduled)[3] for step in played.steps if 3 in dict(step.scheduled)]
    assert chunks == [7, 1, 9, 1, 1, 1]
    assert [who for _, what, who in played.calls if what == "first"] == [1, 2, 3]


def test_a_resumed_request_goes_to_the_end_of_running() -> None:
    settings = engine_settings(kv_blocks=7, prefix_caching=False, scheduling_policy="priority")
    played = run(
        settings,
        Submit(0, Request(1, 7, 4, 4, priority=1)),
        Submit(0, Request(2, 7, 6, 6, priority=5)),
        Submit(500, Request(3, 7, 9, 9, priority=1)),
    )
    orders = [step.running for step in played.steps]
    assert orders[1:3] == [[1, 2, 3], [1, 3]]
    assert [3, 2] in orders


def test_the_priority_victim_is_the_worst_then_the_latest_then_the_first_in_running() -> None:
    settings = engine_settings(kv_blocks=9, prefix_caching=False, scheduling_policy="priority")

    def victim(*requests: Request, late: int = -1) -> int:
        inputs = [Submit(20 if request.id == late else 10, request) for request in requests]
        played = run(settings, Submit(0, Request(0, 1, 1, 1)), *inputs)
        return next(step.preempted[0] for step in played.steps if step.preempted)

    # Four requests of two blocks fill the pool of eight, and then each needs a third.
    worst = [Request(n, 8, 3, 3, priority=7 if n == 2 else 1) for n in (1, 2, 3, 4)]
    assert victim(*worst) == 2
    # Of equal priority, the latest.
    equal = [Request(n, 8, 6, 6, priority=1) for n in (1, 2, 3, 4)]
    assert victim(*equal, late=4) == 4
    # All equal: the first in RUNNING, whatever the ids.
    assert victim(*equal) == 1
    assert victim(*reversed(equal)) == 1  # admitted by id, so the order of submission is no matter


def test_when_one_preempts_itself_all_later_ones_stand_still_in_that_step() -> None:
    """The worst stands in the middle of RUNNING and needs a block that nobody else can give."""
    settings = engine_settings(kv_blocks=8, prefix_caching=False, scheduling_policy="priority")
    played = run(
        settings,
        Submit(0, Request(1, 9, 9, 9, priority=1)),
        Submit(0, Request(2, 7, 9, 9, priority=8)),
        Submit(500, Request(3, 5, 9, 9, priority=1)),
    )
    step = next(step for step in played.steps if step.preempted)
    assert step.preempted == [2]
    assert dict(step.scheduled) == {1: 1}
    assert step.running == [1, 3]


def test_a_step_that_preempts_admits_nobody_and_the_next_may() -> None:
    settings = engine_settings(kv_blocks=5, prefix_caching=False)
    played = run(settings, *at_once(Request(1, 8, 5, 5), Request(2, 8, 5, 5), Request(3, 2, 1, 1)))
    at = next(index for index, step in enumerate(played.steps) if step.preempted)
    assert played.steps[at].scheduled == [(1, 1)]
    # Number 2 heads the queue again and does not fit: number 3 waits behind it.
    assert played.finish_ns(1) == after(5)
    assert played.seq(3).scheduled_ns >= played.finish_ns(1)


def test_the_head_blocks_those_behind_it_even_where_they_would_fit() -> None:
    settings = engine_settings(kv_blocks=5)
    played = run(settings, *at_once(Request(1, 8, 5, 5), Request(2, 12), Request(3, 1)))
    assert played.seq(2).scheduled_ns == played.seq(3).scheduled_ns == after(5)


def test_a_request_preempted_with_its_last_token_in_flight_finishes_from_waiting() -> None:
    settings = engine_settings(kv_blocks=3, async_scheduling=True, prefix_caching=False)
    played = run(settings, *at_once(Request(1, 4, 5, 5), Request(2, 4, 1, 1)))
    assert played.seq(2).preemptions == 1
    assert played.finish_ns(2) == after(1)
    assert played.finish_ns(1) == after(5)


def test_the_blocks_of_running_requests_come_first_and_may_make_the_head_need_less() -> None:
    """Content lies there twice: number 1's free copy, and the one that number 2 holds.

    At the second decision the head would need two blocks, and one is left beside number 2's. But
    what number 2 takes is the free copy: now the copy in use is hit, and the head needs only one.
    """
    settings = engine_settings(kv_blocks=5)
    played = run(
        settings,
        *at_once(shared(1, 8, 1, 1), shared(2, 8, 5, 5), Request(3, 4, 1, 1)),
        Submit(500, shared(4, 9, 1, 1)),
    )
    assert played.finish_ns(1) == played.finish_ns(3) == after(1)
    assert played.seq(4).cached_tokens == 8
    assert played.seq(4).scheduled_ns == after(1)
    assert dict(played.steps[1].scheduled) == {2: 1, 4: 1}
    assert played.steps[1].free_blocks == 0


# The prefix cache in a schedule


def test_an_equal_prompt_admitted_in_the_same_step_hits() -> None:
    """Blocks are known from when they are scheduled, before they are computed."""
    played = run(engine_settings(), *at_once(shared(1, 10), shared(2, 10)))
    assert scheduled(played)[0] == {1: 10, 2: 2}
    assert [played.seq(1).cached_tokens, played.seq(2).cached_tokens] == [0, 8]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    played = run(engine_settings(), *at_once(shared(1, 8), shared(2, 8)))
    assert played.seq(2).cached_tokens == 4


@pytest.mark.parametrize(
    ("second", "cached"), [((1, 2, 3), 12), ((1, 2, 9), 8), ((9, 2, 3), 0), ((1,), 4), ((), 0)]
)
def test_content_is_equal_as_far_as_the_ids_agree_from_the_start(
    second: tuple[int, ...], cached: int
) -> None:
    first = Request(1, 20, 2, 2, prefix=(1, 2, 3), prefix_block_tokens=4)
    other = Request(2, 20, 2, 2, prefix=second, prefix_block_tokens=4)
    played = run(engine_settings(), Submit(0, first), Submit(50_000, other))
    assert played.seq(2).cached_tokens == cached


@pytest.mark.parametrize(("id_tokens", "cached"), [(2, 4), (3, 8), (5, 12), (8, 24), (6, 16)])
def test_only_blocks_all_of_whose_tokens_are_shared_are_found(id_tokens: int, cached: int) -> None:
    """Three shared ids of so many tokens, in blocks of 4."""
    requests = [
        Request(number, 40, 2, 2, prefix=(1, 2, 3, 10 + number), prefix_block_tokens=id_tokens)
        for number in (1, 2)
    ]
    played = run(engine_settings(), *at_once(*requests))
    assert played.seq(2).cached_tokens == cached == 3 * id_tokens // 4 * 4


def test_without_prefix_caching_nothing_is_found() -> None:
    requests = [shared(number, 10) for number in (1, 2)]
    played = run(engine_settings(prefix_caching=False), *at_once(*requests))
    assert played.engine.prefix_tokens_hit == 0


def test_the_hit_rate_counts_first_admissions() -> None:
    played = run(engine_settings(), *at_once(*(shared(n, 10) for n in range(4))))
    assert played.engine.prefix_tokens_queried == 40
    assert played.engine.prefix_tokens_hit == 24


# Refusals


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(7, 0), "request 7 has 0 prompt tokens"),
        (Request(7, 50), "request 7 has 50 prompt tokens: .*max_model_len is 50"),
        (Request(7, 51, pooling=True), "request 7 has 51 prompt tokens: .*max_model_len is 50"),
        (Request(7, 41), "request 7 has 41 prompt tokens and 1 output tokens: .* 40 tokens"),
        (Request(7, 30, 12, 12), "30 prompt tokens and 12 output tokens: .* 40 tokens"),
        (Request(7, 30, 12), "30 prompt tokens and 12 output tokens: .* 40 tokens"),
        (Request(7, 30, 99, 12), "30 prompt tokens and 12 output tokens: .* 40 tokens"),
        (Request(7, 41, pooling=True), "request 7 has 41 prompt tokens .* 40 tokens"),
    ],
)
def test_what_can_never_be_served_is_refused(request_: Request, text: str) -> None:
    """The real engine would hang: the head of its queue would wait for ever."""
    engine = Engine(engine_settings(kv_blocks=11, max_model_len=50), COST)
    with pytest.raises(EngineError, match=text):
        engine.submit(request_.sequence(), 0)
    assert engine.next_wake_ns is None


@pytest.mark.parametrize(
    "request_", [Request(7, 40), Request(7, 30, 11, 11), Request(7, 30, 99, 5)]
)
def test_what_just_fits_is_served(request_: Request) -> None:
    run(engine_settings(kv_blocks=11, max_model_len=50), Submit(0, request_))


def test_an_id_in_use_is_refused_until_it_is_free() -> None:
    engine = Engine(engine_settings(), COST)
    engine.submit(Request(7, 5).sequence(), 0)
    with pytest.raises(EngineError, match="request id 7 is already in the engine"):
        engine.submit(Request(7, 5).sequence(), 0)
    engine.wake(1)
    engine.wake(after(1))
    engine.submit(Request(7, 5).sequence(), after(1))


def test_every_step_is_only_reported_without_skipping() -> None:
    with pytest.raises(EngineError, match="skip=False"):
        Engine(engine_settings(), COST, on_step=print)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_blocks", 1), ("block_tokens", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 0),
     ("max_model_len", 0), ("max_num_seqs", 65), ("scheduling_policy", "lifo")],
)  # fmt: skip
def test_settings_out_of_range_are_refused_with_their_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        engine_settings(**{field: value})


# Aborts


@BOTH
@pytest.mark.parametrize(
    ("at_ns", "gone_ns"), [(500, 1001), (1000, 1001), (1001, 2001), (3500, 4001)]
)
def test_a_running_request_is_dropped_by_the_first_decision_after_its_abort(
    lag: bool, at_ns: int, gone_ns: int
) -> None:
    """And no call-back follows; its first token was told ahead, when its step was decided."""
    looks = [Look(gone_ns - 1), Look(gone_ns + 1)]
    played = run(
        engine_settings(async_scheduling=lag), Submit(0, Request(1, 5, 9, 9)), Abort(at_ns, 1),
        *looks,
    )  # fmt: skip
    before, behind = (load for _, load in played.looks)
    assert before.running + before.waiting == 1
    assert behind == Load(0, 0, 0)
    assert played.calls == [(after(1), "first", 1)]


@BOTH
def test_an_abort_of_a_waiting_request_lets_the_next_one_pass(lag: bool) -> None:
    settings = engine_settings(max_num_seqs=1, async_scheduling=lag)
    requests = [Request(number, 5, 4, 4) for number in (1, 2, 3)]
    played = run(settings, *at_once(*requests), Abort(500, 2))
    assert played.seq(3).scheduled_ns == after(4)
    assert {who for _, _, who in played.calls} == {1, 3}


@BOTH
def test_an_abort_in_the_middle_of_a_prefill_frees_its_blocks_and_the_budget(lag: bool) -> None:
    settings = engine_settings(async_scheduling=lag)
    played = run(
        settings,
        Submit(0, Request(1, 640)),
        Submit(0, Request(2, 5, 1, 1)),
        Abort(1500, 1),
        Look(5000),
    )
    assert scheduled(played) == [{1: 64}] * (2 + lag) + [{2: 5}]
    assert played.looks == [(5000, Load(0, 0, 0))]
    assert [who for _, what, who in played.calls if what == "finish"] == [2]


@BOTH
def test_an_abort_of_a_preempted_request_leaves_nothing_of_it(lag: bool) -> None:
    settings = engine_settings(kv_blocks=7, async_scheduling=lag)
    requests = [Request(number, 7, 6, 6) for number in (1, 2, 3)]
    preempted = run(settings, *at_once(*requests))
    assert preempted.seq(3).preemptions == 1
    played = run(settings, *at_once(*requests), Abort(after(2) + 500, 3))
    assert played.seq(3).preemptions == 1
    assert [who for _, what, who in played.calls if what == "finish"] == [1, 2]


def test_an_abort_under_priority_takes_the_right_one_out_of_the_heap() -> None:
    settings = engine_settings(max_num_seqs=1, scheduling_policy="priority")
    requests = [Request(number, 5, 3, 3, priority=number) for number in (1, 2, 3, 4)]
    played = run(settings, *at_once(*requests), Abort(500, 2), Abort(600, 4))
    assert [who for _, what, who in played.calls if what == "finish"] == [1, 3]


def test_an_abort_says_whether_the_engine_still_had_the_request() -> None:
    engine = Engine(engine_settings(), COST)
    assert not engine.abort(1, 0)
    engine.submit(Request(1, 5).sequence(), 0)
    assert engine.abort(1, 0)
    assert not engine.abort(1, 0)


def test_an_aborted_request_does_not_free_what_its_twin_still_holds() -> None:
    played = run(
        engine_settings(),
        Submit(0, shared(1, 10, 9, 9)),
        Submit(0, shared(2, 10, 9, 9)),
        Abort(2500, 1),
        Look(2500), Look(3500),
    )  # fmt: skip
    with_both, with_one = (load.kv_blocks_used for _, load in played.looks)
    assert with_both == 2 + 1 + 1  # 12 tokens each, of which 8 are shared
    assert with_one == 2 + 2  # 13 tokens


# Looking on


@pytest.mark.parametrize("skip", [False, True])
def test_an_observer_sees_blocks_being_used_up_in_the_middle_of_a_span(skip: bool) -> None:
    """Step n, from n * 1000 + 1 on, computes token 6 + n: a new block at every fourth."""
    looks = [Look(step * STEP_NS + 500) for step in range(12)]
    inputs: list[Input] = [Submit(0, Request(1, 6, 12, 12)), *looks]
    played = play(engine_settings(), COST, inputs, skip=skip)
    assert [load.kv_blocks_used for _, load in played.looks] == [
        -(-(6 + step) // 4) for step in range(12)
    ]


def test_a_submission_in_the_inbox_counts_as_waiting_from_its_stamp_on() -> None:
    played = run(
        engine_settings(max_num_seqs=1),
        Submit(0, Request(1, 5, 3, 3)),
        Submit(0, Request(2, 5), 700),
        Look(600), Look(800), Look(1500),
    )  # fmt: skip
    assert [load.waiting for _, load in played.looks] == [0, 1, 1]


def test_skipping_wakes_a_handful_of_times_not_once_a_step() -> None:
    inputs = [Submit(0, Request(1, 5, 900, 900))]
    slow = play(engine_settings(), COST, inputs, skip=False)
    fast = play(engine_settings(), COST, inputs)
    assert len(slow.wakes) > 900
    assert len(fast.wakes) < 5
