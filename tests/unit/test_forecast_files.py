"""A saved forecaster says the same when it is loaded, and what does not fit is refused."""

from __future__ import annotations

import ast
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from policy.forecast import files
from policy.forecast.files import (
    CARD,
    DECIDING,
    WEIGHTS,
    ForecastError,
    Score,
    code_version,
    data_hash,
    load,
    read_card,
    save,
)
from policy.forecast.forecaster import LoadForecaster
from policy.forecast.series import TARGETS, Series

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOWS = 110
CREATED = "2024-05-10T08:30:00+00:00"
SCORE = Score("requests", "mean", 1, 20, 0.1, 0.2, 0.01, 0.02, 0.95, "week.parquet")


def series(seed: int = 0) -> Series:
    rng = np.random.default_rng(seed)
    mean = 5 + np.sin(np.arange(WINDOWS) / 9) + rng.random(WINDOWS)
    mean[30] = np.nan
    return Series(300.0, mean, 1.2 * mean, start_s=3600.0, name="requests")


@pytest.fixture(scope="module")
def fitted() -> LoadForecaster:
    return LoadForecaster(horizons=(1, 2), members=1, epochs=1).fit([series()])


@pytest.fixture(scope="module")
def kept(fitted: LoadForecaster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "forecaster"
    save(folder, fitted, [series()], created=CREATED, metrics=[SCORE])
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "forecaster"))


def edit_card(folder: Path, **changed: object) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, **changed}))


def edit_arrays(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Other arrays, and a card that knows the file's hash."""
    arrays = load_file(folder / WEIGHTS)
    edit(arrays)
    save_file(arrays, folder / WEIGHTS)
    edit_card(folder, weights_sha256=sha256((folder / WEIGHTS).read_bytes()).hexdigest())


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(ForecastError) as caught:
        load(folder)
    text = str(caught.value)
    assert str(folder) in text
    assert "twinkeel forecast train" in text
    for part in said:
        assert part in text


def test_a_loaded_forecaster_says_the_same_bit_for_bit(
    fitted: LoadForecaster, folder: Path
) -> None:
    loaded, card = load(folder)
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, CARD}
    unseen = series(seed=1)
    origins = np.arange(20, WINDOWS)
    for target in TARGETS:
        before = fitted.predict(unseen, origins, target)
        assert np.ptp(before) > 0
        assert np.array_equal(loaded.predict(unseen, origins, target), before)
    assert loaded.get_params() == fitted.get_params()
    assert (card.window_s, card.horizons, card.created) == (300.0, (1, 2), CREATED)
    assert card.metrics == (SCORE,)
    assert card.data_hash == data_hash([series()])
    assert card.learned[0].name == "requests"
    assert (card.learned[0].windows, card.learned[0].unknown) == (WINDOWS, 1)
    assert set(card.versions) == {"numpy", "scikit-learn", "torch"}


def test_the_data_hash_tells_series_apart() -> None:
    one = series()
    peakless = Series(one.window_s, one.mean, start_s=one.start_s)
    later = Series(one.window_s, one.mean, one.peak, start_s=7200.0)
    hashes = {data_hash([each]) for each in (one, series(1), peakless, later)}
    assert len(hashes) == 4
    assert data_hash([one, peakless]) != data_hash([peakless, one])


def test_other_code_is_refused_but_its_card_can_be_read(folder: Path) -> None:
    edit_card(folder, code="0123")
    refused(folder, "other forecasting code (0123)", code_version())
    assert read_card(folder).code == "0123"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": 2}, "schema 2 is not known"),
        ({"kind": "oracle"}, "is of kind 'oracle'"),
        ({"colour": "blue"}, "colour"),
        ({"window_s": "long"}, "window_s"),
        ({"weights_sha256": "00"}, "sha256 is "),
        ({"horizons": [1, 3]}, "[1, 3] differ from"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(
    folder: Path, changed: dict[str, object], said: str
) -> None:
    edit_card(folder, **changed)
    refused(folder, said)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"schema": 1}'])
def test_a_card_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / CARD).write_text(text)
    refused(folder, CARD)


def test_missing_files_are_told(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, WEIGHTS, "is missing")
    refused(tmp_path / "nowhere", f"holds no {CARD}")


def test_damaged_weights_are_refused(folder: Path) -> None:
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    refused(folder, "sha256 is ", "damaged")


def test_weights_that_are_no_safetensors_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\x80\x04]\x94.")  # what pickle writes
    edit_card(folder, weights_sha256=sha256(b"\x80\x04]\x94.").hexdigest())
    refused(folder, "is no safetensors file")


def first_float(arrays: dict[str, Any]) -> str:
    return min(name for name, each in arrays.items() if each.dtype.kind == "f" and each.size)


def test_arrays_must_be_those_of_the_card(folder: Path, tmp_path: Path) -> None:
    name = first_float(load_file(folder / WEIGHTS))
    edits: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda arrays: arrays.pop(name), f"lacks {name}"),
        (lambda arrays: arrays.update(more=np.zeros(2)), "has more too many"),
        (lambda arrays: arrays.update({name: np.zeros(77)}), f"{name} is float64 [77]"),
    ]
    for number, (edit, said) in enumerate(edits):
        copy = Path(shutil.copytree(folder, tmp_path / str(number)))
        edit_arrays(copy, edit)
        refused(copy, said)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    name = first_float(load_file(folder / WEIGHTS))
    edit_arrays(folder, lambda arrays: arrays[name].flat.__setitem__(0, value))
    refused(folder, f"of {name} are not finite")


def test_arrays_for_other_parameters_are_refused(folder: Path) -> None:
    parameters = json.loads((folder / CARD).read_text())["parameters"]
    edit_card(folder, parameters={**parameters, "members": 2})
    refused(folder, "do not make a forecaster")
    edit_card(folder, parameters={**parameters, "colour": 2})
    refused(folder, "do not make a forecaster")


def test_saving_replaces_what_was_there(fitted: LoadForecaster, folder: Path) -> None:
    save(folder, fitted, [series()], created="2025-01-01T00:00:00+00:00")
    _, card = load(folder)
    assert card.created == "2025-01-01T00:00:00+00:00"
    assert card.metrics == ()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_cannot_be_saved_leaves_nothing_and_harms_nothing(
    fitted: LoadForecaster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ForecastError, match="is a file"):
        save(tmp_path / "file", fitted, [series()], created=CREATED)
    good = fitted.state()
    monkeypatch.setattr(fitted, "state", lambda: {**good, "bad": np.array([1.0, np.inf])})
    for place in (folder, tmp_path / "new"):
        with pytest.raises(ForecastError, match="1 of 2 values of bad are not finite"):
            save(place, fitted, [series()], created=CREATED)
    assert {path.name for path in tmp_path.iterdir()} == {"file", folder.name}
    load(folder)


def test_a_write_that_fails_leaves_no_half_forecaster(
    fitted: LoadForecaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == CARD:
            raise OSError(28, "No space left on device")
        return written(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "new", fitted, [series()], created=CREATED)
    assert not list(tmp_path.iterdir())


def test_all_code_that_decides_is_in_the_hash() -> None:
    root = Path(files.__file__).parent
    waiting, found = ["forecaster"], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((root / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "policy.forecast."
            ):
                waiting.append(str(node.module).rpartition(".")[2])
    assert set(DECIDING) == found


def test_the_hash_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(files.__file__).parent
    for name in DECIDING:
        shutil.copy(root / f"{name}.py", tmp_path)
    here = code_version.__wrapped__()
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    assert code_version.__wrapped__() == here
    with (tmp_path / "blend.py").open("a") as source:
        source.write("MORE = 1\n")
    assert code_version.__wrapped__() != here
