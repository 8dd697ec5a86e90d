"""pack.context_parallel: samples are padded to what the ranks of a pack cut."""

from pathlib import Path
from typing import Any

import pytest

from launch.data.packed_data import read_packed_data
from offline_packing.config.sections import PackConfig
from offline_packing.errors import ConfigError
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.verify.verify import verify
from task_encoders import PackedTaskEncoder, required_pad_multiple
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_config, mixed_pairs, packed_run, plan_summary


@pytest.mark.usefixtures("bmr_environment")
def test_samples_of_rows_divide_among_the_ranks(tmp_path: Path) -> None:
    pairs = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "source", 60)), "task": "bmr"}
    pack = {"seq_length": 400, "context_parallel": 2}
    run = packed_run(pairs, tmp_path / "packed", pack=pack)
    assert verify(run, deep=True).problems == []
    manifest, plan = require_manifest(run.workspace.root), open_plan(run).packs
    assert (manifest.pad_multiple, plan.info.pad_multiple) == (4, 4)
    assert "ranks of a pack         2, samples padded to multiples of 4" in plan_summary(run)
    model = read_packed_data(run.workspace.root).model
    encoder = PackedTaskEncoder(pad_multiple=4, model=model, seq_length=400)
    packs = PackedFolder(run.workspace.root, encoder)
    for number in range(len(packs)):
        row = packs.batch([number])
        assert row.tokens.shape[1] <= 400
        assert (row.cu_lengths.diff() % 4 == 0).all()


@pytest.mark.parametrize(
    ("size", "multiple", "padding"), [(1, 1, 1), (2, 1, 4), (4, 2, 8), (4, 4, 16), (2, 16, 32)]
)
def test_padding_is_what_ranks_cut(size: int, multiple: int, padding: int) -> None:
    """`pad_multiple` holds for each rank's share: tensor ranks under sequence parallelism, FP8."""
    assert PackConfig(context_parallel=size, pad_multiple=multiple).padding == padding
    if multiple <= 4:
        options = {"context_parallel": size, "tensor_parallel": multiple}
        assert padding == required_pad_multiple(**options, sequence_parallel=multiple > 1)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (512, "context_parallel 512 pads samples to multiples of 1024 > seq_length 512; no sample"),
        (0, "context_parallel=0: input should be greater than or equal to 1"),
        ({"size": 4}, "context_parallel: write a number, the ranks of each pack, in place of {'si"),
    ],
)
def test_other_ranks_are_refused(tmp_path: Path, ranks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path / "source", tmp_path / "packed", pack={"context_parallel": ranks})
