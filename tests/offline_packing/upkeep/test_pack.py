"""A packed dataset in one call from Python."""

from pathlib import Path

import pytest
import yaml

import offline_packing
from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError, StageError
from tests.helpers.datasets import captioning_pairs


def test_a_dict_a_file_and_a_configuration_give_the_same(tmp_path: Path) -> None:
    content = {
        "source": {
            "format": "pairs",
            "path": str(captioning_pairs(tmp_path / "data", 20)),
            "task": "captioning",
        },
        "model": {"max_pixels": 50_176},
        "pack": {"seq_length": 512},
        "output": {"path": str(tmp_path / "from_dict")},
        "engine": {"workers": 0},
    }
    packed = offline_packing.pack(content, deep=True)
    assert packed.path == tmp_path / "from_dict"
    assert packed.manifest.counts.packed == packed.verified.num_samples == 20
    assert packed.report.is_file()
    file = tmp_path / "pack.yaml"
    file.write_text(yaml.safe_dump(content))
    from_file = offline_packing.pack(file, f"output.path={tmp_path / 'from_file'}")
    assert from_file.manifest == packed.manifest
    assert offline_packing.pack(parse_config(content)).manifest == packed.manifest  # as it is


def test_what_goes_wrong_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pack"):
        offline_packing.pack({"pack": {"sequence_length": 1}})
    source = {"format": "pairs", "path": str(tmp_path), "task": "captioning"}
    content = {"source": source, "output": {"path": str(tmp_path.parent / "out")}}
    with pytest.raises(StageError, match=str(tmp_path)):
        offline_packing.pack(content)
    with pytest.raises(TypeError, match="overrides"):
        offline_packing.pack(content, "pack.seed=1")
