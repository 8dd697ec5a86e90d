"""The three environment variables: every combination, and what contradicts the data."""

import pytest

from task_encoders.settings import BMR, PACKED, VQA, PackingSettings, PackingSettingsError

CAPTIONING = PackingSettings(packed=True)


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({PACKED: "1"}, "captioning"),
        ({PACKED: "1", VQA: "0", BMR: "0"}, "captioning"),
        ({PACKED: "1", VQA: "1"}, "vqa"),
        ({PACKED: "1", BMR: "1"}, "bmr"),
    ],
)
def test_what_the_variables_mean(environ: dict[str, str], task: str) -> None:
    settings = PackingSettings.from_env(environ)
    assert settings.packed
    assert settings.resolve_task(None) == task


def test_unset_and_zero_mean_no_packs() -> None:
    unset, zero = PackingSettings.from_env({}), PackingSettings.from_env({PACKED: "0", VQA: "0"})
    assert unset == zero == PackingSettings(packed=False)
    assert PackingSettings.from_env({PACKED: "1", VQA: "", BMR: ""}) == PackingSettings(packed=True)


@pytest.mark.parametrize("value", ["true", "yes", " ", " 1", "2", "True", "on"])
@pytest.mark.parametrize("name", [PACKED, VQA, BMR])
def test_any_other_value_stops(name: str, value: str) -> None:
    with pytest.raises(PackingSettingsError, match=name) as error:
        PackingSettings.from_env({PACKED: "1", name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environ", "names"),
    [({PACKED: "1", VQA: "1", BMR: "1"}, VQA), ({VQA: "1"}, PACKED), ({BMR: "1"}, PACKED)],
)
def test_contradictions_name_what_to_set(environ: dict[str, str], names: str) -> None:
    with pytest.raises(PackingSettingsError, match=f"{names}"):
        PackingSettings.from_env(environ)


def test_meta_comes_before_subflavors_before_the_variables() -> None:
    assert PackingSettings(True, vqa=True).resolve_task("vqa", "bmr") == "vqa"
    assert PackingSettings(True, bmr=True).resolve_task(None, "bmr") == "bmr"
    assert PackingSettings(True, bmr=True).resolve_task(None, None) == "bmr"


@pytest.mark.parametrize("declared", ["vqa", "bmr"])
def test_variables_that_contradict_the_data_stop(declared: str) -> None:
    with pytest.raises(PackingSettingsError, match=f"OFFLINE_PACKING_{declared.upper()}=1"):
        CAPTIONING.resolve_task(declared)
    with pytest.raises(PackingSettingsError, match=r"OFFLINE_PACKED_DATA=1 \(and neither"):
        PackingSettings(True, vqa=declared == "vqa", bmr=declared == "bmr").resolve_task(
            "captioning"
        )


def test_in_a_blend_packed_data_alone_is_enough() -> None:
    for task in ("captioning", "vqa", "bmr"):
        assert CAPTIONING.resolve_task(task, blend=True) == task
    with pytest.raises(PackingSettingsError):
        PackingSettings(True, vqa=True).resolve_task("bmr", blend=True)


@pytest.mark.parametrize("declared", [None, "captioning", "vqa", "bmr"])
def test_packs_without_packed_data_stop(declared: str | None) -> None:
    with pytest.raises(PackingSettingsError, match="set OFFLINE_PACKED_DATA=1"):
        PackingSettings(packed=False).resolve_task(declared, blend=True)


def test_an_unknown_task_in_the_data_stops() -> None:
    with pytest.raises(PackingSettingsError, match="'ocr'"):
        CAPTIONING.resolve_task("ocr")
