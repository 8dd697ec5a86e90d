"""Packs that hold token ids train as those that hold text alone, without a tokenizer."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offline_packing.errors import ConfigError
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch
from task_encoders.packed_task_encoder import PackedTaskEncoder
from tests.helpers.datasets import make_config, make_run, mixed_pairs, pack_all
from tests.helpers.energon_batches import batches_of, encoder_of

SEQ_LENGTH = 1024


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Run]:
    root = tmp_path_factory.mktemp("pretokenized")
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source")), "task": "bmr"}
    runs = {}
    for pretokenize in (False, True):
        runs[pretokenize] = make_run(
            source,
            root / str(pretokenize),
            pack={"seq_length": SEQ_LENGTH},
            output={"pretokenize": pretokenize},
        )
        pack_all(runs[pretokenize])
    return runs


def batches(run: Run, encoder: PackedTaskEncoder | None = None) -> list[PackedBatch]:
    return batches_of(run.workspace.root, encoder or encoder_of(run))


def test_rows_are_the_same_without_a_tokenizer(folders: dict[bool, Run]) -> None:
    without = encoder_of(folders[False])
    without.encoder.texts = SimpleNamespace()  # type: ignore[attr-defined]
    expected = batches(folders[False])
    found = batches(folders[True], without)
    assert len(expected) > 2
    for one, other in zip(expected, found, strict=True):
        for name in BATCH_TENSORS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert batches(folders[False], without) == []


def test_ids_of_another_tokenizer_are_not_used(folders: dict[bool, Run]) -> None:
    encoder = encoder_of(folders[True])
    encoder.digest = "0" * 16
    for one, other in zip(batches(folders[False]), batches(folders[True], encoder), strict=True):
        assert torch.equal(one.tokens, other.tokens)
    encoder.encoder.texts = SimpleNamespace()  # type: ignore[attr-defined]
    assert batches(folders[True], encoder) == []


def test_they_are_verified_as_others_are(folders: dict[bool, Run]) -> None:
    assert verify(folders[True], deep=True).ok


def test_a_layout_without_room_for_them_is_refused(tmp_path: Path) -> None:
    output = {"pretokenize": True, "layout": "llava_onevision"}
    with pytest.raises(ConfigError, match="layout llava_onevision holds no token ids"):
        make_config(mixed_pairs(tmp_path / "source", 2), tmp_path, output=output)
