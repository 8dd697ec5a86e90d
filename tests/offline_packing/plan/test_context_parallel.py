"""pack.context_parallel: samples are padded to what the ranks of a pack cut."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.config.sections import PackConfig
from offline_packing.errors import ConfigError
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.manifest import require_manifest
from task_encoders import required_pad_multiple
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_config
from tests.world import World, task_encoder


def test_samples_of_rows_divide_among_the_ranks(world: World) -> None:
    run = world.run("bmr", pack={"seq_length": 400, "context_parallel": 2})
    manifest, plan = require_manifest(run.workspace.root), open_plan(run).packs
    assert (manifest.pad_multiple, plan.info.pad_multiple) == (4, 4)
    summary = (run.workspace.plan / "summary.txt").read_text()
    assert "ranks of a pack         2, samples padded to multiples of 4" in summary
    packs = PackedFolder(run.workspace.root, task_encoder(run, pad_multiple=4))
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
