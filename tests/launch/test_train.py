"""The command: its messages, and what it sets before CUDA starts."""

import os
import warnings
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from megatron.energon.errors import FatalSampleError
from torch.utils.data import DataLoader, Dataset

from launch.loop import setup
from launch.train import cli, failing_in_one_line, start_logging
from launch.train_transformers import main
from offline_packing.errors import DiskFullError, StageError


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


def test_the_rank_whose_disk_is_full_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others do not know; what all know alike is said by the first of a node."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    for error in (DiskFullError("a cannot be written"), StageError("no packs")):
        with pytest.raises(SystemExit), failing_in_one_line(debug=False):
            raise error
    assert capsys.readouterr().err == "error: a cannot be written\n"


def test_the_package_that_stops_an_import_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Imports fail as where torchvision does not match torch."""
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'.")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(SystemExit), failing_in_one_line(debug=False):
        raise error
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'PreTrainedModel'. RuntimeError: operator torchvision::nms does not exist; " in said
    assert said.endswith("that fits your PyTorch, or remove it\n")


def test_names_that_libraries_will_replace_are_not_told() -> None:
    deprecated = ["torch.distributed.all_gather_into_tensor", "gradient_checkpointing_enable"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        start_logging()
        for name in [*deprecated, "is_gradient_checkpointing", "an_option"]:
            warnings.warn(f"`{name}` is deprecated", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["`an_option` is deprecated"]


ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("command", "capability", "overrides", "given", "expected"),
    [
        (cli, "9.0", ["parallel.tensor=2"], None, "1"),
        (cli, "8.0", ["parallel.context=2"], None, "1"),
        (cli, "9.0", [], None, None),
        (cli, "10.0", ["parallel.tensor=2"], None, None),
        (cli, "12.0", ["parallel.context=2"], None, None),
        (cli, "9.0", ["parallel.tensor=2"], "32", "32"),
        (main, "9.0", ["model.fsdp=true"], None, None),
    ],
)
def test_kernels_start_in_order_where_ranks_share_layers_or_rows(
    command: click.Command,
    capability: str,
    overrides: list[str],
    given: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs before Blackwell, unless a value is set; nvidia-smi tells the kind."""
    monkeypatch.chdir(tmp_path)
    stub = tmp_path / "bin" / "nvidia-smi"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\necho {capability}\necho {capability}\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(ORDER, "")  # so that it is as before in the end
    monkeypatch.delenv(ORDER)
    if given is not None:
        monkeypatch.setenv(ORDER, given)
    seen = []
    monkeypatch.setattr(setup, "run", lambda *_: seen.append(os.environ.get(ORDER)) or 0)
    Path("run.yaml").write_text(
        "data: {path: packs}\noutput: {path: out}\nbatch: {global_batch_packs: 4}\n"
    )
    result = CliRunner().invoke(command, ["run.yaml", *overrides], catch_exceptions=False)
    assert (result.exit_code, seen) == (0, [expected]), result.output
