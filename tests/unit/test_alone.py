"""One engine alone: what its server adds to the engine's times."""

from policy.cost import Overheads
from policy.files import load_profile
from tests.support import bare_fleet, engine_settings, flat_cost
from twin.alone import Asked, Served, serve_alone

STEP_NS = 1000
IN_NS, OUT_NS, TOKEN_NS = 5000, 400, 20


def served(asked: list[Asked], overheads: Overheads | None) -> list[Served]:
    return serve_alone(engine_settings(), flat_cost(STEP_NS), asked, overheads)


def overheads(token_ns: int = TOKEN_NS) -> Overheads:
    fleet = bare_fleet(
        1, engine_settings(), flat_cost(STEP_NS), overhead_ns=(IN_NS, OUT_NS, token_ns)
    )
    return fleet[0].profile.overheads


def test_first_tokens_are_sent_after_the_outputs_in_front() -> None:
    asked = [Asked(0, 5, 4), Asked(1500, 5, 9), Asked(5500, 5, 9)]
    seen = served(asked, overheads())
    bare = served([Asked(each.at_ns + IN_NS, 5, each.output_tokens) for each in asked], None)
    # When the last one is admitted, the first one is over and the second still runs.
    assert [a.first_ns - b.first_ns for a, b in zip(seen, bare, strict=True)] == [20, 40, 40]
    for each, plain, ask in zip(seen, bare, asked, strict=True):
        assert each.last_ns == plain.last_ns + OUT_NS + TOKEN_NS * ask.output_tokens


def test_a_short_answer_does_not_overtake_its_first_token() -> None:
    asked = [Asked(0, 5, 1), Asked(0, 5, 1), Asked(0, 5, 9)]
    one, two, nine = served(asked, overheads(900))
    done_ns = IN_NS + 1 + STEP_NS
    assert [each.first_ns for each in (one, two, nine)] == [
        done_ns + 900, done_ns + 2 * 900, done_ns + 3 * 900
    ]  # fmt: skip
    assert [each.last_ns for each in (one, two)] == [
        one.first_ns + OUT_NS, two.first_ns + OUT_NS
    ]  # fmt: skip
    assert nine.last_ns == IN_NS + 1 + 9 * STEP_NS + 9 * 900 + OUT_NS


def test_decoding_is_timed_on_the_engines_clock() -> None:
    asked = [Asked(0, 5, 6), Asked(0, 5, 9)]
    for around in (None, overheads(), load_profile("h100-sxm/qwen3-8b").overheads):
        assert [each.decode_ns for each in served(asked, around)] == [5 * STEP_NS, 8 * STEP_NS]
