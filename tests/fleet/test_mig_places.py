"""Which slice a place may have, what fails with it, and how much a model needs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner

from controller.cli import serve
from controller.fleet.config import Model, Place
from controller.fleet.memory import needed_mb
from controller.gpus.mig import Card, Slice, check_places, domain_of, domain_of_place
from controller.gpus.mig_device import read_cards
from policy.files import FileError
from tests.fleet.fakes import CUT, LARGE_SLICE, SMALL_SLICES, WHOLE
from twin.fleet import within

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fleet.fakes import FakeCards

CARDS = (
    Card("GPU-a", "H100", 0, True, True, (Slice("MIG-a1", 1, 0), Slice("MIG-a2", 5, 0))),
    Card("GPU-b", "H100", 1, False),
    Card("GPU-c", "H100", 2, True, True),
)
MIB = 1 << 20


def test_a_slice_is_a_failure_domain_within_its_card() -> None:
    domains = [domain_of(uuid, CARDS) for uuid in ("GPU-a", "MIG-a1", "MIG-a2", "GPU-b")]
    assert domains == ["host0/card0", "host0/card0/mig1", "host0/card0/mig5", "host0/card1"]
    assert domain_of("MIG-a1", CARDS, "rack7-3") == "rack7-3/card0/mig1"
    assert domain_of("GPU-gone", CARDS) == ""


def test_the_twin_reads_these_domains_as_its_own() -> None:
    large, small = domain_of("MIG-a1", CARDS), domain_of("MIG-a2", CARDS)
    assert within(large, "host0/card0")
    assert within(small, "host0/card0")
    assert not within(large, small)
    assert not within(large, "host0/card1")


@pytest.mark.parametrize(
    ("uuids", "domain"),
    [
        ((), ""),
        (("MIG-a2",), "host0/card0/mig5"),
        (("GPU-b",), "host0/card1"),
        (("GPU-c", "GPU-b"), "host0/card1+2"),
        (("GPU-b", "GPU-elsewhere"), "GPU-b+GPU-elsewhere"),
    ],
)
def test_a_place_fails_with_all_that_it_has(uuids: tuple[str, ...], domain: str) -> None:
    assert domain_of_place(uuids, CARDS) == domain
    if len(uuids) > 1 and domain.startswith("host0"):
        assert within(domain, "host0/card1")
        assert within(domain, "host0/card2")


def test_cards_and_slices_are_read_without_privilege(cards: FakeCards) -> None:
    cards.set("system", root=0)
    found = read_cards()
    assert [(card.uuid, card.mig) for card in found] == [(CUT, True), (WHOLE, False)]
    assert [part.uuid for part in found[0].slices] == [LARGE_SLICE, *SMALL_SLICES]
    assert domain_of(LARGE_SLICE, found) == "host0/card0/mig2"
    assert domain_of(WHOLE, found) == "host0/card1"


def test_a_lost_card_does_not_hide_the_others(cards: FakeCards) -> None:
    cards.set(CUT, lost=1)
    assert [card.uuid for card in read_cards()] == [WHOLE]


def test_without_a_driver_there_are_no_cards(cards: FakeCards) -> None:
    cards.set("system", init=9)
    assert read_cards() == ()


def test_good_places_are_not_complained_of() -> None:
    places = {
        "chat-0": ("MIG-a1",), "embed-0": ("MIG-a2",), "large-0": ("GPU-b",), "cpu": (),
        "large-1": ("GPU-b",),  # two processes may share a whole card
    }  # fmt: skip
    assert check_places(places, CARDS) == []


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"chat": ("MIG-a1", "MIG-a2")}, ["chat: 2 MIG slices (MIG-a1, MIG-a2)"]),
        ({"chat": ("MIG-a1", "GPU-a")}, ["chat: MIG-a1 beside GPU-a", "chat: GPU-a is in MIG"]),
        ({"chat": ("MIG-a1", "GPU-b")}, ["chat: MIG-a1 beside GPU-b"]),
        ({"chat": ("MIG-a1",), "embed": ("MIG-a1",)}, ["embed: MIG-a1 is chat's already"]),
        ({"chat": ("MIG-a1", "MIG-a1")}, ["chat: MIG-a1 stands twice"]),
        ({"chat": ("GPU-a",)}, ["chat: GPU-a is in MIG mode, and cannot be used whole: its"]),
        ({"chat": ("GPU-c",)}, ["chat: GPU-c is in MIG mode, and cannot be used whole: cut it"]),
        ({"chat": ("MIG-a9",)}, ["chat: MIG-a9 is neither a card nor a slice of this machine"]),
        ({"chat": ("0",)}, ["chat: '0' is no UUID"]),
    ],
)  # fmt: skip
def test_a_place_that_cannot_work_is_named(
    places: dict[str, tuple[str, ...]], words: list[str]
) -> None:
    found = check_places(places, CARDS)
    assert len(found) == len(words), found
    for text, begin in zip(found, words, strict=True):
        assert text.startswith(begin)


def test_without_cards_only_the_uuids_are_compared() -> None:
    assert check_places({"a": ("MIG-x",), "b": ("GPU-y",)}, ()) == []
    assert len(check_places({"a": ("MIG-x", "MIG-y"), "b": ("MIG-x",)}, ())) == 2


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([[LARGE_SLICE], [LARGE_SLICE]], "chat.replicas[1].gpus: {0} is models.chat.replicas[0]"),
        ([[LARGE_SLICE, SMALL_SLICES[0]]], "replicas[0].gpus: 2 MIG slices ({0}, "),
        ([[CUT]], f"replicas[0].gpus: {CUT} is in MIG mode, and cannot be used whole: its slices"),
        ([[LARGE_SLICE, CUT]], "replicas[0].gpus: {0} beside " + CUT),
        ([[LARGE_SLICE[:-4] + "0000"]], "is neither a card nor a slice of this machine: did you"),
    ],
)
def test_serve_refuses_a_fleet_file_that_cannot_work(
    cards: FakeCards, tmp_path: Path, gpus: list[list[str]], why: str
) -> None:
    code, said = checked(tmp_path, gpus)
    assert code == 2, said
    assert why.format(LARGE_SLICE) in said


def test_serve_takes_a_fleet_file_with_a_slice_for_each(cards: FakeCards, tmp_path: Path) -> None:
    code, said = checked(tmp_path, [[LARGE_SLICE], [SMALL_SLICES[0]], [WHOLE]])
    assert code == 0, said


def checked(folder: Path, gpus: list[list[str]]) -> tuple[int, str]:
    """What ``serve --check`` says of a model on these."""
    model = {
        "versions": {"v1": "h100-sxm/qwen3-8b"}, "version": "v1",
        "command": [sys.executable, "{weights}", "{port}"],
        "replicas": [{"gpus": given} for given in gpus],
    }  # fmt: skip
    fleet = folder / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"schema": 1, "models": {"chat": model}}))
    data = str(folder / "data")
    done = CliRunner().invoke(serve, ["--fleet", str(fleet), "--data", data, "--check"])
    return done.exit_code, done.output


# Memory


def model_of(**changes: object) -> Model:
    return Model({"v1": "unused"}, "v1", (Place(),), **changes)  # type: ignore[arg-type]


def weights_in(folder: Path, **config: object) -> str:
    """A folder as one finds it: 3000 MB of weights (sparse files), twice, and their index."""
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        with (folder / name).open("wb") as file:
            file.truncate(1500 * MIB)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


SHAPE = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 4096, "max_position_embeddings": 40960,
}  # fmt: skip


def test_what_the_file_says_is_taken() -> None:
    need = needed_mb(model_of(memory_mb=18000), "/no/such/folder")
    assert need.total_mb == 18000
    assert str(need) == "18000 MB (memory_mb)"


def test_a_need_is_weights_overhead_and_one_long_request(tmp_path: Path) -> None:
    need = needed_mb(model_of(), weights_in(tmp_path, **SHAPE))
    # 36 layers x 2 x 8 heads x 128 x 2 bytes = 144 KiB a token, for 40,960 tokens.
    assert need == (3000, 5760, 1024, 9784)
    assert str(need) == ("weights 3000 MB + KV cache 5760 MB + overhead 1024 MB = 9784 MB")


def test_a_latent_kv_cache_is_one_for_all_heads(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    need = needed_mb(model_of(), weights_in(tmp_path, **SHAPE, **latent))
    # 36 layers x (512 + 64) x 2 bytes = 40.5 KiB a token, for 40,960 tokens.
    assert need.kv_mb == 1620


@pytest.mark.parametrize(
    ("args", "kv_mb"),
    [
        (("--max-model-len", "8192"), 1152),
        (("--max-model-len=8K",), 1152),
        (("--max-model-len", "8k"), 1125),
        (("--max-model-len", "auto"), 5760),
        (("--max-model-len", "8192", "--kv-cache-dtype", "fp8_e4m3"), 576),
        (("--max-model-len", "16"), 256),
    ],
)
def test_arguments_change_what_a_request_can_take(
    tmp_path: Path, args: tuple[str, ...], kv_mb: int
) -> None:
    assert needed_mb(model_of(args=args), weights_in(tmp_path, **SHAPE)).kv_mb == kv_mb
    assert needed_mb(model_of(), weights_in(tmp_path, **SHAPE), args).kv_mb == kv_mb


def test_a_tenth_of_large_weights_is_overhead(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 16_000 * MIB}, "weight_map": {}})
    )
    need = needed_mb(model_of(), weights_in(tmp_path))
    assert need == (16_000, 256, 1600, 17_856)


def test_a_model_with_text_and_pictures_has_its_shape_inside(tmp_path: Path) -> None:
    need = needed_mb(model_of(), weights_in(tmp_path, text_config=SHAPE, model_type="vl"))
    assert need.kv_mb == 5760


def test_a_hub_name_is_looked_for_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--Qwen--Qwen3-8B"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc\n")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    weights_in(kept / "snapshots" / "abc")
    assert needed_mb(model_of(), "Qwen/Qwen3-8B").weights_mb == 3000
    with pytest.raises(FileError, match=r"Qwen/Qwen3-9B: memory_mb: is neither a folder.*give mem"):
        needed_mb(model_of(), "Qwen/Qwen3-9B")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no weights .*give memory_mb"):
        needed_mb(model_of(), str(tmp_path))


def test_a_file_that_is_not_there_any_more_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(FileError, match=r"model.safetensors: cannot be read: No such file"):
        needed_mb(model_of(), str(tmp_path))
