"""Messages of a run."""

import warnings

import pytest
from megatron.energon.errors import FatalSampleError
from torch.utils.data import DataLoader, Dataset

from launch.train import failing_in_one_line, start_logging
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


def test_other_errors_keep_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), failing_in_one_line(debug=False):
        raise ValueError("data.path: no such folder")
    assert capsys.readouterr().err == "error: data.path: no such folder\n"


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
