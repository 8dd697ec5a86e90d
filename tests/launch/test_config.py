"""The configuration of a run, and the command: its messages, and what it sets before CUDA
starts."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from megatron.energon.errors import FatalSampleError
from torch.utils.data import DataLoader, Dataset

from launch import train_transformers
from launch.config import load_config
from launch.loop import setup
from launch.train import cli, failing_in_one_line, start_logging
from launch.train_transformers import main
from offline_packing.errors import ConfigError, DiskFullError, StageError

LAUNCH = Path(__file__).parents[2] / "launch"
EXAMPLES = ["pretrain_stage1.yaml", "pretrain_stage1_5.yaml", "sft.yaml"]
STAGES = "data.path=[out/a, out/b]"
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.pth=x", "data.pth is not a known field; valid: path, micro_batch_size"),
        ("optimiser.eps=1", "optimiser is not a known field; valid: model, data, batch"),
        ("train.normalization=tokens", "choose 'token', 'sample' or 'sqrt'"),
        ("train.iterations=true", "a number is needed"),
        ("schedule.min_learning_rate=1", "min_learning_rate 1 > learning_rate 1e-05"),
        ("schedule.learning_rate=1e5", "learning_rate=100000.0: input should be less than or eq"),
        (
            "schedule={decay: constant, min_learning_rate: 1e-6}",
            "min_learning_rate 1e-06 is never reached with decay=constant; choose cosine",
        ),
        ("optimizer.eps=1", "eps=1: input should be less than or equal to 0.001"),
        ("output.path=out/../out/packed", "is data.path, the folder of the packs; choose another"),
        ("model.preset=13b", "model.preset='13b' is not valid; choose 'tiny'"),
        ("model.freeze=[vision, projector, language]", "nothing would be trained"),
        ("model={checkpoint: x, text: {hidden_size: 8}}", "come from the checkpoint; remove"),
        ("model.family=qwen3_5", "use python -m launch.train_transformers"),
        ("model.family=llava_onevision_1_5", "; train it with its own code, on batches as"),
        ("model.family=qwen", "choose one of: qwen2_vl"),
        ("data.path.x=1", "data.path is 'out/packed', not a mapping"),
        ("data.path", "is not of the form a.b=value"),
        ("data.cross_sample_attention=true; train.normalization=sample", "normalization=token"),
        (f"{STAGES}; train.iterations=3", "stages of train.epochs passes each; remove train.iter"),
        (f"{STAGES}; data.repeat=false; train.epochs=2", "data.repeat=true for more than one pass"),
        (f"{STAGES}; data.online.seq_length=64", "packs during training and has no stages"),
        (f"{STAGES}; output.path=out/b", "output.path 'out/b' is data.path"),
        ("data.online.seq_length=64; data.order=balanced", "data.online makes packs during train"),
        ("data.online.seq_length=64; validation.every=2", "validation.every=0"),
        ("data.path=[out/a, 5]", "['out/a', 5] is not a path or a list of paths"),
        ("data.path=[]", "[] is not a path or"),
        ("data.path=['s3:/out/a', out/b]", "'s3:/out/a' lacks a slash; write s3://"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(override: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, override.split("; "))
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


def test_a_configuration_is_checked_without_torch() -> None:
    """Importing it takes seconds, and a mistyped key should answer at once."""
    code = "import sys, launch.start, launch.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


class Moved(Dataset[int]):
    """Fails as Energon's datasets do."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        try:
            raise FatalSampleError("pack 'ps_1': a b.jpg changed: x, y; restore it")
        except FatalSampleError as error:
            sample = {"__key__": "ps_1", "json": "…" * 99}
            text = f"MapDataset(cook) failed due to system exception: {error}"
            raise FatalSampleError.from_sample(sample, text) from error


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_loader_is_said_without_its_traceback(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), failing_in_one_line(debug=False):
        list(DataLoader(Moved(), num_workers=workers))
    assert capsys.readouterr().err == "error: pack 'ps_1': a b.jpg changed: x, y; restore it\n"


BROKEN = ModuleNotFoundError("Could not import module 'PreTrainedModel'.")
BROKEN.__cause__ = RuntimeError("operator torchvision::nms does not exist")


NMS = "'PreTrainedModel'. RuntimeError: operator torchvision::nms does not exist;"


@pytest.mark.parametrize(
    ("rank", "error", "status", "said"),
    [
        # Others do not know; what all know alike is said by the first of a node.
        ("1", DiskFullError("a cannot be written"), 1, "error: a cannot be written"),
        ("1", StageError("no packs"), 1, ""),
        ("0", BROKEN, 1, NMS),
        ("0", KeyboardInterrupt(), 130, "stopped by SIGINT; run again to continue"),
    ],
)
def test_an_error_is_one_line(
    rank: str,
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as end, failing_in_one_line(debug=False):
        raise error
    assert end.value.code == status
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == bool(said)


def test_names_that_libraries_will_replace_are_not_told() -> None:
    deprecated = ["torch.distributed.all_gather_into_tensor", "gradient_checkpointing_enable"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        start_logging()
        for name in [*deprecated, "is_gradient_checkpointing", "an_option"]:
            warnings.warn(f"`{name}` is deprecated", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["`an_option` is deprecated"]


OWN = ["launch.data.micro_batches", "task_encoders.storage.remote_requests", "torch.distributed"]
COMMON = ["launch.loop.plan", "launch.data.packed_data", "task_encoders.loading.folder_shards"]


@pytest.mark.parametrize(("rank", "shown"), [("0", COMMON + OWN), ("1", OWN)])
def test_a_warning_is_told_once_by_a_rank_that_sees_it(
    rank: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    code = (
        "import logging, sys; from launch.train import start_logging; start_logging()\n"
        "for name in sys.argv[1:]: logging.getLogger(name).warning(name)"
    )
    arguments = [sys.executable, "-c", code, *COMMON, *OWN]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == shown


ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("command", "overrides", "given", "expected"),
    [
        (cli, ["parallel.tensor=2"], None, "1"),
        (cli, ["parallel.context=2"], None, "1"),
        (cli, [], None, None),
        (cli, ["parallel.tensor=2"], "32", "32"),
        (main, ["model.fsdp=true"], None, None),
    ],
)
def test_kernels_start_in_order_where_ranks_share_layers_or_rows(
    command: click.Command,
    overrides: list[str],
    given: str | None,
    expected: str | None,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a value is set."""
    monkeypatch.setenv(ORDER, given or "")
    if given is None:
        monkeypatch.delenv(ORDER)
    seen = []
    monkeypatch.setattr(setup, "run", lambda *_: seen.append(os.environ.get(ORDER)) or 0)
    result = CliRunner().invoke(command, [str(file), *overrides], catch_exceptions=False)
    assert (result.exit_code, seen) == (0, [expected]), result.output
