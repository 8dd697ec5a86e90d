"""The configuration of a run, and the files in launch/ that hold one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import train_transformers
from launch.config import load_config
from offline_packing.errors import ConfigError

LAUNCH = Path(__file__).parents[2] / "launch"
EXAMPLES = ["pretrain_stage1.yaml", "pretrain_stage1_5.yaml", "sft.yaml"]
MINIMAL = "data: {path: out/packed}\nbatch: {global_batch_size: 64}\noutput: {path: out/run}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_valid(name: str) -> None:
    config = load_config(LAUNCH / name)
    assert config.data.path.startswith("demo_output/")
    assert config.model.preset == "tiny"


def test_overrides_are_yaml(file: Path) -> None:
    config = load_config(
        file,
        ["schedule.learning_rate=1e-5", "model.freeze=[vision, projector]", "train.iterations=7"],
    )
    assert config.schedule.learning_rate == 1e-5
    assert config.model.freeze == {"vision", "projector"}
    assert config.train.iterations == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.pth=x", "data.pth is not a known field; valid: path, micro_batch_size"),
        ("optimiser.eps=1", "optimiser is not a known field; valid: model, data, batch"),
        ("train.normalization=tokens", "choose 'token', 'sample' or 'sqrt'"),
        ("train.iterations=true", "a number is needed"),
        ("schedule.min_learning_rate=1", "min_learning_rate 1 > learning_rate 1e-05"),
        (
            "schedule.learning_rate=1e5",
            "learning_rate=100000.0: input should be less than or equal",
        ),
        (
            "schedule={decay: constant, min_learning_rate: 1e-6}",
            "min_learning_rate 1e-06 is never reached with decay=constant; choose cosine",
        ),
        ("optimizer.eps=1", "eps=1: input should be less than or equal to 0.001"),
        ("output.path=out/../out/packed", "is data.path, the folder of the packs; give the run"),
        ("model.preset=13b", "choose one of: tiny, 2b, 7b"),
        ("model.family=qwen3_5", "use python -m launch.train_transformers"),
        ("model.family=llava_onevision_1_5", "; train it with its own code, on batches as"),
        ("model.family=qwen", "choose one of: qwen2_vl"),
        ("data.path.x=1", "data.path is 'out/packed', not a mapping"),
        ("data.path", "is not of the form a.b=value"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(override: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stored", "overrides", "samples", "packs"),
    [
        ("size", ["packs=8"], None, 8),
        ("packs", ["size=8"], 8, None),
        ("size", ["size=8"], 8, None),
        ("size", ["size=null", "packs=8"], None, 8),
        ("size", ["packs=null"], 64, None),
        ("size", ["packs=8", "size=8"], "both set; leave out one", None),
        ("packs", ["packs=null"], "set one of", None),
    ],
)
@pytest.mark.parametrize("load", [load_config, train_transformers.load_config])
def test_a_batch_size_of_the_command_replaces_the_files(
    load: Any, stored: str, overrides: list[str], samples: Any, packs: Any, file: Path
) -> None:
    file.write_text(MINIMAL.replace("batch_size", f"batch_{stored}"))
    given = [f"batch.global_batch_{one}" for one in overrides]
    if isinstance(samples, str):
        with pytest.raises(ConfigError, match=samples):
            load(file, given)
        return
    batch = load(file, given).batch
    assert (batch.global_batch_size, batch.global_batch_packs) == (samples, packs)


def test_samples_without_boundaries_cannot_weigh_the_same(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.normalization=token"):
        load_config(file, ["data.cross_sample_attention=true", "train.normalization=sample"])


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_a_configuration_is_checked_without_torch() -> None:
    """Importing it takes seconds, and a mistyped key should answer at once."""
    code = "import sys, launch.start, launch.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
