"""The waterfall of a chain in a terminal: what can be read from it without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from click.testing import CliRunner

from controller.store.samples import Sample
from controller.store.steps import FILE, ChainView, StepStore, StepView
from controller.trace_cli import show, waterfall
from tests.unit.test_store_steps import Clock, step

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WIDTH = 100


def view(name: str, began_s: float, ended_s: float, **more: Any) -> StepView:
    given: dict[str, Any] = {
        "step": name, "request": f"r-{name}", "began_s": began_s, "ended_s": ended_s,
        "outcome": "answered", "why": "", "model": "qwen", "tier": "turbo", "replica": "a:8000",
        "prompt_tokens": 120, "output_tokens": 30, "gateway_s": None, "queue_s": None,
        "schedule_s": None, "prefill_s": None, "decode_s": None, "network_s": None,
        "checkpoint": "", "confidence": None, "verification": "", "external": False,
        "attributes": {},
    }  # fmt: skip
    return StepView(**(given | more))


CHAIN = ChainView(
    "c-1", "ann", "shop", "ab" * 16, 8.0, 0.0, True, True,
    (
        view("plan", 0, 4, queue_s=0.5, schedule_s=0.5, prefill_s=1.0, decode_s=1.5,
             checkpoint="cp-1", confidence=0.82, verification="match"),
        view("db", 4, 6, external=True, request="", outcome="done", model="", tier="", replica="",
             prompt_tokens=None, output_tokens=None, attributes={"rows": 42, "s": "x", "n": None}),
        view("", 6, 8, queue_s=0.1, outcome="degraded", why="chain_budget", prompt_tokens=None,
             output_tokens=None),
    ),
)  # fmt: skip


def shown(chain: ChainView = CHAIN, samples: dict[str, Sample] | None = None) -> list[str]:
    return [line.plain for line in waterfall(chain, WIDTH, samples)]


def test_what_callers_call_things_does_not_steer_the_terminal() -> None:
    evil = "a\x1b[2J\x9b31m\u202ez\nforged"
    step = view(evil, 0, 1, attributes={"note": evil}, checkpoint=evil)
    chain = msgspec.structs.replace(CHAIN, chain=evil, user=evil, line=evil, steps=(step,))
    for line in shown(chain):
        assert all(char.isprintable() for char in line), line


def test_the_parts_of_each_step_stand_where_they_were() -> None:
    lines = shown()
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[:4] == [
        "chain c-1 of ann, line shop",
        f"trace {'ab' * 16}",
        "3 steps in 8.000 s; 0.000 s of 8 s were left after the last; its budget is over",
        "partial: the budget ended before all of its steps did",
    ]
    axis = lines[4]
    start, end = axis.index("0 s"), axis.index("8.000 s") + len("8.000 s")
    cells = end - start
    plan, own, last = (next(line for line in lines if line.startswith(name))
                       for name in ("plan", "db", "(no name)"))  # fmt: skip
    bar = plan[start:end]
    half = cells // 2
    assert bar.rstrip() == bar[: len(bar.rstrip())]
    for char, share in ((".", 1.0), ("=", 1.0), ("#", 1.5), ("-", 0.5)):
        assert abs(bar.count(char) - cells * share / 8) <= 1, (char, bar)
    assert sorted(bar.strip(), key=".=#-".index) == list(bar.strip())
    assert abs(len(bar.rstrip()) - half) <= 1
    assert set(own[start:end].strip()) == {"~"}
    assert abs(own[start:end].index("~") - half) <= 1
    assert last[start:end].rstrip()[-1] == "-"
    assert last[:end].endswith("-")
    assert plan[end:].split() == ["0.000", "4.000", "answered"]
    text = "\n".join(lines)
    assert "qwen, turbo, on a:8000, 120 + 30 tokens, confidence 0.820, verification match" in text
    assert "checkpoint cp-1, request r-plan" in text
    assert "rows=42, s=x, n=null" in text
    assert "why: chain_budget" in text


def test_a_chain_that_took_no_time_is_shown_too() -> None:
    one = view("x" * 60, 0, 0)
    lines = shown(ChainView("c", "", "", "", None, None, False, False, (one,)))
    assert lines[0] == "chain c"
    assert lines[1] == "1 step in 0.000 s"
    assert any("-" in line and line.startswith("x" * 24) for line in lines)


def test_texts_cannot_steer_the_terminal() -> None:
    sample = Sample(
        "k", 0.0, "c-1", "plan", "r-plan", "qwen", "chat", "answered", "",
        "one\x1b[31m\ntwo", "",
    )  # fmt: skip
    text = "\n".join(shown(samples={"r-plan": sample}))
    assert "\x1b" not in text
    assert "one\ufffd[31m" in text
    assert "(none)" in text
    assert "its texts were not sampled" in text


def test_the_data_folder_is_read_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    store = StepStore(tmp_path / FILE, wall_s=Clock())
    for number in range(8):
        store.add(step("plan", number, chain=f"c-{number}"))
    store.close()
    run = CliRunner().invoke
    result = run(show, ["c-7", "--data", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.output, type=ChainView).chain == "c-7"
    result = run(show, ["c-9", "--data", str(tmp_path)])
    assert result.exit_code == 2
    assert "the youngest are: c-7 of ann, c-6 of ann, c-5 of ann, c-4 of ann, c-3 of ann" in (
        result.output
    )
    result = run(show, ["c-7", "--data", str(tmp_path), "--texts"])
    assert "its texts were not sampled" in result.output
    (tmp_path / FILE).write_bytes(b"nonsense" * 1000)
    result = run(show, ["c-7", "--data", str(tmp_path)])
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert "cannot be read" in result.output


def test_without_a_controller_it_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWINKEEL_ADMIN_TOKEN", raising=False)
    result = CliRunner().invoke(show, ["c", "--data", str(tmp_path)])
    assert result.exit_code == 2
    assert "no admin token" in result.output
    token = tmp_path / "admin.token"
    token.write_text("a-token-long-enough-for-it")
    result = CliRunner().invoke(
        show, ["c", "--data", str(tmp_path), "--admin", "http://127.0.0.1:9"]
    )
    assert result.exit_code == 2
    assert "no controller answers there" in result.output
