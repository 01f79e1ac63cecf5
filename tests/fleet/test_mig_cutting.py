"""Cutting a card for real, as far as pynvml can tell: the fake library keeps what is made, and
refuses what a driver refuses."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pynvml
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gpus.mig import MigError, plan_of
from controller.gpus.mig_device import (
    Unfinished,
    carry_out,
    opened,
    read_card,
    read_cards,
    read_work,
)
from controller.partition_cli import partition
from tests.fleet.fakes import CUT, LARGE_SLICE, WHOLE, FakeCards, in_this_process

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "twinkeel", "gpu", "partition")
LAYOUT = "3g.40gb+3x1g.10gb"
NAMES = ("3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb")
SEVEN = ("1g.10gb",) * 7
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
FILL = "nvmlGpuInstanceCreateComputeInstance"
DESTROY = "nvmlGpuInstanceDestroy"


def run(cards: FakeCards, *arguments: str) -> tuple[int, str]:
    """The real command in a process of its own: exit code, all that it says."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT, env={**os.environ, **cards.environ}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def here(*arguments: str) -> tuple[int, str]:
    """The same in this process, where starting one would show nothing more."""
    done = CliRunner().invoke(partition, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def cut(names: tuple[str, ...]) -> list[str]:
    """Bring the whole card into a layout, in this process; what was said."""
    said: list[str] = []
    card = read_card(WHOLE)
    carry_out(card, plan_of(card, names), said.append)
    return said


def sizes() -> Counter[str]:
    """How the card is cut now; only what a process can have counts."""
    card = read_card(WHOLE)
    filled = {part.instance for part in card.slices}
    return Counter(one.profile.name for one in card.instances if one.id in filled)


def begun(cards: FakeCards, pid: int, uuid: str, memory_mb: int = 1000) -> None:
    """A process computes there."""
    cards.set(f"PID-{pid}", kind="process", on=uuid, memory_mb=memory_mb)


def facts(cards: FakeCards) -> str:
    return cards.path.read_text()


# The command


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(cards: FakeCards) -> None:
    before = facts(cards)
    code, said = run(cards, "--card", WHOLE, "--layout", LAYOUT)
    assert code == 0, said
    assert "1/5: turn MIG mode on\n" in said
    assert "2/5: create 3g.40gb at memory slices 0 to 3: 40448 MB\n" in said
    assert "5/5: create 1g.10gb at memory slice 6: 9984 MB\n" in said
    assert "Nothing was changed: give --yes to do it." in said
    assert facts(cards) == before


def test_it_is_done_with_yes_and_once(cards: FakeCards) -> None:
    code, said = run(cards, "--card", WHOLE, "--layout", LAYOUT, "--yes", "--model", "qwen=38000")
    assert code == 0, said
    assert sizes() == Counter(NAMES)
    # What it prints at the end can be pasted into a fleet file.
    pasted = [line for line in said.splitlines() if line.startswith("  gpus:")]
    uuids = [yaml.safe_load(line)["gpus"] for line in pasted]
    card = next(card for card in read_cards() if card.uuid == WHOLE)
    assert uuids == [[part.uuid] for part in card.slices]
    assert pasted[0].endswith("# 3g.40gb, 40448 MB: qwen")

    before = facts(cards)
    code, again = run(cards, "--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 0, again
    assert "Nothing to do: the card is cut like that already." in again
    assert [line[:50] for line in again.splitlines() if line.startswith("  gpus:")] == [
        line[:50] for line in pasted
    ]
    assert facts(cards) == before


def test_it_refuses_while_work_runs_and_names_the_processes(cards: FakeCards) -> None:
    cut(NAMES)
    slices = read_card(WHOLE).slices
    begun(cards, 4711, slices[1].uuid)
    begun(cards, 815, slices[0].uuid)
    before = facts(cards)
    for yes in ((), ("--yes",)):
        code, said = run(cards, "--card", WHOLE, "--layout", "7x1g.10gb", *yes)
        assert code == 2, said
        where = f"process 815 on GPU instance {slices[0].instance}"
        assert f"work runs on {WHOLE}: {where}, process 4711 on" in said
        assert "Nothing was changed" in said
    assert facts(cards) == before
    # The layout that is there is no change.
    code, said = run(cards, "--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 0, said


def test_a_card_that_is_not_cut_is_refused_while_work_runs(cards: FakeCards) -> None:
    begun(cards, 4711, WHOLE)
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 2, said
    assert f"work runs on {WHOLE}: process 4711." in said
    assert cards.get(WHOLE, "mig") == "0"


def test_a_reset_that_is_needed_is_said_and_waited_for(cards: FakeCards) -> None:
    cards.set(WHOLE, mig_reset=1)
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 1, said
    assert "is on after a reset of the card (the card needs a reset)" in said
    assert f"nvidia-smi --gpu-reset --id={WHOLE}" in said
    assert read_card(WHOLE).pending
    code, said = here("--card", WHOLE, "--layout", LAYOUT)
    assert code == 0, said
    assert "turn MIG mode on, which waits for a reset of the card" in said
    cards.set(WHOLE, mig=1, mig_reset=None)  # the machine was restarted
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 0, said
    assert sizes() == Counter(NAMES)


def test_a_failure_in_the_middle_says_what_exists_and_the_next_run_goes_on(
    cards: FakeCards,
) -> None:
    cards.set(WHOLE, **{f"fail_after.{CREATE}": 2})
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 1, said
    assert "step 4 of 5 failed (create 1g.10gb at memory slice 5: 9984 MB)" in said
    now = "These GPU instances exist now: 1 (3g.40gb at memory slices 0 to 3), 2 (1g.10gb at"
    assert now in said
    assert sizes() == Counter(NAMES[:2])
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--yes")
    assert code == 0, said
    assert "1/2: create 1g.10gb" in said
    assert sizes() == Counter(NAMES)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--layout", "3g.40gb+3x3g.40gb"), "4x3g.40gb needs 12 of 7 compute slices and 16 of 8"),
        (("--layout", "nonsense"), "layout 'nonsense': 'nonsense' is no slice"),
        (("--layout", LAYOUT, "--model", "qwen=50000"), "qwen needs 50000 MB: the largest slice"),
        (("--layout", LAYOUT, "--model", "qwen"), "give its size, as qwen=MB, or --fleet"),
        (("--layout", LAYOUT, "--model", "qwen=4g"), "NAME=MB is expected"),
        (("--layout", LAYOUT, "--fleet", "/no/fleet.yaml"), "/no/fleet.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    cards: FakeCards, arguments: tuple[str, ...], why: str
) -> None:
    code, said = here("--card", WHOLE, "--yes", *arguments)
    assert code == 2, said
    assert said.startswith("Error: ")
    assert why in said
    assert len(said.splitlines()) == 1
    assert cards.get(WHOLE, "mig") == "0"


def test_a_fleet_file_says_what_its_models_need(cards: FakeCards, tmp_path: Path) -> None:
    weights = tmp_path / "qwen"
    weights.mkdir()
    with (weights / "model.safetensors").open("wb") as file:
        file.truncate(40_000 << 20)
    fleet = tmp_path / "fleet.yaml"
    document = {
        "schema": 1,
        "models": {
            "qwen": {"versions": {"v1": str(weights)}, "version": "v1", "replicas": [{}]},
            "embed": {
                "versions": {"v1": "org/embed"}, "version": "v1", "replicas": [{}],
                "memory_mb": 8000,
            },
        },
    }  # fmt: skip
    fleet.write_text(yaml.safe_dump(document))
    code, said = here("--card", WHOLE, "--layout", LAYOUT, "--fleet", str(fleet))
    assert code == 2, said
    total = "weights 40000 MB + KV cache 256 MB + overhead 4000 MB = 44256 MB"
    assert f"qwen needs {total}: the largest slice for it, 3g.40gb, has 40448 MB" in said
    arguments = ("--card", WHOLE, "--layout", LAYOUT, "--fleet", str(fleet))
    code, said = here(*arguments, "--model", "embed")
    assert code == 0, said
    assert "embed needs 8000 MB (memory_mb): fits 1g.10gb with 9984 MB" in said
    code, said = here(*arguments, "--model", "embbed")
    assert code == 2, said
    assert "no model 'embbed' (hint: did you mean embed?)" in said


# The device


@pytest.mark.parametrize(
    ("uuid", "why"),
    [
        ("1", "card '1': the UUID of a card is expected; known: GPU-1"),
        (LARGE_SLICE, f"{LARGE_SLICE} is a slice of {CUT}: give the card"),
        (WHOLE[:-1] + "3", f"no card {WHOLE[:-1]}3 here, or it does not answer: did you mean"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_uuid_only(cards: FakeCards, uuid: str, why: str) -> None:
    with pytest.raises(MigError, match=re.escape(why)):
        read_card(uuid)


def test_without_root_and_without_a_driver_it_says_so(cards: FakeCards) -> None:
    cards.set("system", root=0)
    with pytest.raises(MigError, match="cannot be read: only root may"):
        read_card(WHOLE)
    cards.set("system", init=12)
    with pytest.raises(MigError, match="NVML cannot be used here: NVML Shared Library Not Found"):
        read_card(WHOLE)


def test_a_card_that_knows_no_mig_says_so(cards: FakeCards) -> None:
    cards.set(WHOLE, mig=None, mig_most=None)
    with pytest.raises(MigError, match="cannot be cut: it offers no MIG profile"):
        plan_of(read_card(WHOLE), NAMES)


def test_the_profiles_are_the_cards_own(cards: FakeCards) -> None:
    found = {one.name: one for one in read_card(WHOLE).profiles}
    assert set(found) == {
        "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb",
    }  # fmt: skip
    assert [place.start for place in found["3g.40gb"].placements] == [0, 4]
    assert (read_card(WHOLE).compute, read_card(WHOLE).memory) == (7, 8)


def test_a_slice_that_is_not_filled_is_filled_by_the_next_run(cards: FakeCards) -> None:
    cards.set(WHOLE, **{f"fail_after.{FILL}": 1})
    with pytest.raises(Unfinished, match="not filled by a compute instance"):
        cut(NAMES)
    assert cut(NAMES)[0] == "1/3: fill GPU instance 2 (1g.10gb) with a compute instance"
    assert sizes() == Counter(NAMES)


def test_a_failed_destruction_is_gone_on_from_as_well(cards: FakeCards) -> None:
    cut(NAMES)
    cards.set(WHOLE, **{f"fail_after.{DESTROY}": 2})
    with pytest.raises(Unfinished, match=r"step \d+ of \d+ failed \(destroy GPU instance"):
        cut(("7g.80gb",))
    cut(("7g.80gb",))
    assert sizes() == Counter(["7g.80gb"])


def test_a_process_that_came_in_between_is_not_torn_down(cards: FakeCards) -> None:
    """The check is before the first step; the driver refuses what came after it."""
    cut(("7g.80gb",))
    plan = plan_of(read_card(WHOLE), NAMES)
    begun(cards, 99, read_card(WHOLE).slices[0].uuid)
    with pytest.raises(Unfinished, match="it is in use: a process has it open"):
        carry_out(read_card(WHOLE), plan, lambda _: None)
    assert sizes() == Counter(["7g.80gb"])


def test_a_lost_card_in_the_middle_is_said(cards: FakeCards) -> None:
    plan = plan_of(read_card(WHOLE), NAMES)
    card = read_card(WHOLE)
    with pytest.raises(Unfinished, match=r"the card is lost.*What exists now cannot be read"):
        carry_out(card, plan, lambda said: cards.set(WHOLE, lost=1) if "2/5" in said else None)


def test_work_is_told_once_for_each_process(cards: FakeCards) -> None:
    cut(NAMES)
    first, second = read_card(WHOLE).slices[:2]
    begun(cards, 5, second.uuid)
    begun(cards, 4, first.uuid)
    begun(cards, 3, CUT)
    for root in (1, 0):  # a card tells of its slices to root only, a slice to everybody
        cards.set("system", root=root)
        assert [(work.pid, work.instance) for work in read_work(WHOLE)] == [
            (4, first.instance), (5, second.instance),
        ]  # fmt: skip


def test_a_slice_has_the_same_uuid_where_nothing_was_changed(cards: FakeCards) -> None:
    cut(("3g.40gb", "2g.20gb"))
    large = read_card(WHOLE).slices[0]
    cut(NAMES)
    assert large in read_card(WHOLE).slices


def test_the_library_refuses_what_a_driver_refuses(cards: FakeCards) -> None:
    """Else a wrong plan would go through, and the tests here would show nothing."""
    cut(("3g.40gb",))
    with opened():
        device = pynvml.nvmlDeviceGetHandleByUUID(WHOLE)
        profiles = {one.name: one for one in read_card(WHOLE).profiles}

        def create(name: str, start: int, size: int) -> None:
            where = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
            pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                device, profiles[name].id, ctypes.byref(where)
            )

        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            create("1g.10gb", 3, 1)  # taken
        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            create("7g.80gb", 0, 8)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            create("2g.20gb", 5, 2)  # no placement of the profile
        instance = pynvml.nvmlDeviceGetGpuInstanceById(device, 1)
        with pytest.raises(pynvml.NVMLError_InUse):
            pynvml.nvmlGpuInstanceDestroy(instance)  # before its compute instance
        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)  # it is filled
    assert sizes() == Counter(["3g.40gb"])


LAYOUTS = st.sampled_from([
    ("7g.80gb",), ("4g.40gb", "3g.40gb"), ("3g.40gb", "3g.40gb"), NAMES, SEVEN, ("1g.20gb",) * 4,
    ("2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb+me"), ("3g.40gb", "2g.20gb", "1g.20gb"),
    ("4g.40gb", "1g.20gb", "1g.10gb", "1g.10gb"), ("1g.10gb",), ("1g.10gb+me", "3g.40gb"),
])  # fmt: skip
FAULTS = st.sampled_from([(name, n) for name in (CREATE, FILL, DESTROY) for n in range(4)])


@given(st.lists(st.tuples(LAYOUTS, st.one_of(st.none(), FAULTS)), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_any_layout_follows_any_other_whatever_failed_between(
    walk: list[tuple[tuple[str, ...], tuple[str, int] | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cards = FakeCards(Path(folder))
        with in_this_process(cards):
            for names, fault in walk:
                every = {f"fail_after.{name}": None for name in (CREATE, FILL, DESTROY)}
                cards.set(WHOLE, **every)
                if fault is not None:
                    cards.set(WHOLE, **{f"fail_after.{fault[0]}": fault[1]})
                try:
                    cut(names)
                except Unfinished:
                    assert fault is not None
                    cut(names)
                assert sizes() == Counter(names)
                assert cut(names) == []
