"""Settings that a manifest brings back are those that were measured with, and a checkpoint is of
the family that they name."""

import json
from pathlib import Path

import pytest

from task_encoders.families import FAMILIES, build_sample_encoder, model_options, require_family
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from tests.helpers.tiny_tokenizer import save_with_template, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_survive_json(family: str) -> None:
    """To the type: a fingerprint writes 200 and 200.0 differently."""
    settings = model_options(family=family)
    again = model_options(**json.loads(settings.model_dump_json()))
    assert again == settings
    before, after = ({name: type(value) for name, value in one} for one in (settings, again))
    assert after == before


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
        ("llama", None),
        (None, None),
    ],
)
def test_a_checkpoint_of_another_family_is_refused(
    model_type: str | None, found: str | None, tmp_path: Path
) -> None:
    save_with_template(tiny_tokenizer(), QWEN2_VL_TEMPLATE, tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for family in ("qwen2_5_vl", "qwen3_vl"):
        if model_type and family != found:
            message = f"of model_type llama, not {family}; the families are qwen2_vl, "
            if found:
                message = f"of family {found}, not {family}; set model.family={found}"
            with pytest.raises(ValueError, match=message):
                build_sample_encoder(family, str(tmp_path))
        else:
            assert build_sample_encoder(family, str(tmp_path)).pad_token_id


def test_internvls_own_form_is_sent_to_transformers(tmp_path: Path) -> None:
    save_with_template(tiny_tokenizer(), QWEN2_VL_TEMPLATE, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(
        ValueError, match=r"internvl_chat, not internvl3; .* whose name ends in -hf"
    ):
        build_sample_encoder("internvl3", str(tmp_path))
    with pytest.raises(ValueError, match=r"is a 'internvl_chat'; .* whose name ends in -hf"):
        require_family(str(tmp_path))
