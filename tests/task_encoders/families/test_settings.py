"""Options of families: kept in JSON, refused for other checkpoints, and named nowhere else; a
family of one's own."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from offline_packing.verify.verify import verify
from task_encoders.families import FAMILIES, build_sample_encoder, model_options, require_family
from task_encoders.families.qwen2_vl import QWEN2_VL, Qwen2VLEncoder, Qwen2VLOptions
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.energon_batches import batches_of
from tests.helpers.tiny_families import save_tokenizer
from tests.world import task_encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_survive_json(family: str) -> None:
    """To the type: a fingerprint writes 200 and 200.0 differently."""
    settings = model_options(family=family)
    again = model_options(**json.loads(settings.model_dump_json()))
    assert again == settings
    before, after = ({name: type(value) for name, value in one} for one in (settings, again))
    assert after == before


BUILT_IN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision_1_5", "llava_onevision_2")
OTHERS = [family for family in FAMILIES if family not in BUILT_IN]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        *((family, {}, f"{family} has no built-in vocabulary") for family in OTHERS),
        ("llava_1_5", {"min_pixels": 3136}, "llava_1_5 has no min_pixels"),
        ("qwen2_vl", {"image_size": 336}, "qwen2_vl has no image_size"),
        ("qwen2_vl", {"min_pixels": 100, "max_pixels": 9999}, "784 <= min_pixels <= max_pixels"),
        ("qwen2_vl", {"min_pixels": 9999, "max_pixels": 5000}, "min_pixels 9999 > max_pixels 5000"),
        ("qwen2_vl", {"min_pixels": 0}, "min_pixels"),
        ("qwen2_vl", {"video_min_frames": 1}, "2 <= video_min_frames <= video_max_frames"),
        ("qwen2_vl", {"video_max_pixels": 8}, "2 <= video_min_pixels <= video_max_pixels"),
        *(
            ("glm4v", {f"{kind}min_pixels": least, f"{kind}max_pixels": most}, f"784 <= {kind}min_")
            for kind in ("", "video_")
            for least, most in ((783, 784), (1000, 900))
        ),
        ("internvl3", {"min_tiles": 5, "max_tiles": 4}, "min_tiles 5 > max_tiles 4"),
        ("internvl3", {"image_size": 450}, "image_size 450 is not a multiple of 28"),
    ],
)
def test_options_that_are_refused(family: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_sample_encoder(family, **options)


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("qwen2_vl", "qwen2_vl"),
        ("qwen2_5_vl", "qwen2_5_vl"),
        ("qwen3_vl_moe", "qwen3_vl"),
        ("llava", "llava_1_5"),
        ("mistral3", "mistral3"),
        ("internvl", "internvl3"),
        ("gemma4_unified", "gemma4_unified"),
        ("llavaonevision1_5", "llava_onevision_1_5"),
        ("llava_onevision2", "llava_onevision_2"),
        ("internvl_chat", None),
        ("llama", None),
        (None, None),
    ],
)
def test_a_checkpoint_of_another_family_is_refused(
    model_type: str | None, found: str | None, tmp_path: Path
) -> None:
    save_tokenizer("qwen2_vl", tmp_path)
    remedy = "the families are qwen2_vl, "
    if model_type == "internvl_chat":  # InternVL's own form
        remedy = "whose name ends in -hf"
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for family in ("qwen2_5_vl", "qwen3_vl"):
        if model_type and family != found:
            message = f"of model_type {model_type}, not {family}; .*{remedy}"
            if found:
                message = f"of family {found}, not {family}; set model.family={found}"
            with pytest.raises(ValueError, match=message):
                build_sample_encoder(family, str(tmp_path))
        else:
            assert build_sample_encoder(family, str(tmp_path)).pad_token_id
    if model_type and not found:
        with pytest.raises(ValueError, match=f"is a '{model_type}'; .*{remedy}"):
            require_family(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not JSON: "):
        build_sample_encoder("qwen2_vl", str(tmp_path))


ROOT = Path(__file__).parents[3]


def test_no_name_of_a_family_elsewhere() -> None:
    names = re.compile(rf"(?<![\w.])(?:{'|'.join(FAMILIES)})(?!\w)")
    packages = ("task_encoders", "offline_packing", "launch")
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    outside = [path for path in paths if path.parent.name != "families"]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in outside
        for line in path.read_text("utf-8").splitlines()
        if names.search(line)
    ]
    assert len(outside) > 100
    assert found == []


class PlainEncoder(Qwen2VLEncoder):
    """Qwen2-VL whose positions count tokens, and whose pixels are not normalised."""

    LENGTHS_OF = "plain_vl"
    POSITION_ROWS = 1
    MEAN = (0.0, 0.0, 0.0)
    STD = (1.0, 1.0, 1.0)


class PlainOptions(Qwen2VLOptions):
    """With smaller images."""

    max_pixels: int = 28 * 28 * 16


PLAIN_VL = dataclasses.replace(QWEN2_VL, name="plain_vl", Options=PlainOptions, build=PlainEncoder)


def test_a_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, PLAIN_VL.name, PLAIN_VL)
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "data")), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model={"family": "plain_vl", "max_pixels": None})
    manifest = pack_all(run)
    assert manifest.config["model"]["max_pixels"] == 28 * 28 * 16
    assert verify(run, deep=True).ok
    batches = batches_of(tmp_path / "out", task_encoder(run))
    keys = [key for batch in batches for key in batch.sub_sample_keys]
    assert len(keys) == len(set(keys)) == manifest.counts.packed == 30
    for batch in batches:
        assert batch.position_ids.shape == (1, 1, batch.tokens.shape[1])
        assert batch.imgs.min() >= 0
        assert batch.imgs.max() <= 1
    assert any(batch.imgs.max() > 0.5 for batch in batches)
    other = {"family": "qwen2_vl", "max_pixels": 28 * 28 * 16}
    with pytest.raises(ValueError, match="plain_vl"):
        batches_of(tmp_path / "out", task_encoder(run, model=model_options(**other)))
