"""Settings that a manifest brings back are those that were measured with."""

import json

import pytest

from task_encoders.families import FAMILIES, ModelSettings


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_survive_json(family: str) -> None:
    """To the type: a fingerprint writes 200 and 200.0 differently."""
    settings = ModelSettings(family=family)
    again = ModelSettings.model_validate(json.loads(settings.model_dump_json()))
    assert again == settings
    before, after = ({name: type(value) for name, value in one} for one in (settings, again))
    assert after == before
