"""pack.context_parallel.size from plan to rows: padding, and pictures that divide by number."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.data.packed_data import check_room, read_packed_data
from offline_packing.config.sections import PackConfig
from offline_packing.errors import StageError
from offline_packing.index.rows import split_of_packs
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders import PackedTaskEncoder, required_pad_multiple
from task_encoders.families import model_cost
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_run, mixed_pairs, pack_all, packed_run, plan_summary

SIZE = 2
PACK: dict[str, Any] = {
    "seq_length": 400,
    "context_parallel": {"size": SIZE},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = mixed_pairs(tmp_path_factory.mktemp("split") / "source", 120)
    return {"format": "pairs", "path": str(path), "task": "bmr"}


@pytest.fixture(scope="module")
def run(source: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """References of two epochs, in two splits."""
    output = {"layout": "references", "split": {"train": 0.8, "val": 0.2}}
    folder = tmp_path_factory.mktemp("packed") / "packed"
    return packed_run(source, folder, pack={**PACK, "epochs": 2}, output=output)


def rows_of(folder: Path, size: int = SIZE) -> Any:
    settings = {"model": read_packed_data(folder).model, "seq_length": PACK["seq_length"]}
    multiple = required_pad_multiple(context_parallel=size)
    return PackedFolder(folder, PackedTaskEncoder(pad_multiple=multiple, **settings))


def shares_of_rows(packs: Any) -> np.ndarray:
    """Operations of each rank's tower, (num_packs, SIZE), for pictures cut by their number."""
    cost = model_cost(packs.task_encoder.encoder.options)
    shares = []
    for number in range(len(packs)):
        batch = packs.batch([number])
        assert (batch.cu_lengths.diff() % (2 * SIZE) == 0).all()
        height_width = batch.image_grid_thw[:, 1:].prod(1).numpy()
        work = np.array_split(cost.tower_flops(height_width.astype(float)), SIZE)
        shares.append([some.sum() for some in work])
    return np.array(shares)


pytestmark = pytest.mark.usefixtures("bmr_environment")


def test_artifacts_say_what_was_planned(run: Run) -> None:
    assert verify(run, deep=True).problems == []
    manifest, plan = require_manifest(run.workspace.root), open_plan(run).packs
    assert (manifest.pad_multiple, plan.info.pad_multiple) == (2 * SIZE, 2 * SIZE)
    assert manifest.config["pack"]["context_parallel"]["size"] == SIZE
    found = split_of_packs(open_index(run), plan, model_cost(run.config.model))
    assert found is not None
    report(run)
    document = json.loads((run.workspace.report / "report.json").read_bytes())
    assert document["pad_multiple"] == 2 * SIZE
    assert document["plan"]["picture_split"] == found._asdict()
    summary = plan_summary(run)
    assert f"ranks of a pack         {SIZE}, samples padded to multiples of {2 * SIZE}" in summary
    assert f"{found.idle:.2%} if ranks of a pack take equally many pictures each" in summary


def test_pictures_of_rows_divide_evenly(source: dict[str, str], run: Run, tmp_path: Path) -> None:
    """Every layout and epoch, cut by count from the rows themselves."""
    idle = {}
    for name, pack in {"plain": {"pad_multiple": 2 * SIZE}, "even": PACK}.items():
        for layout in ("energon", "indexed") if name == "even" else ("energon",):
            folder = tmp_path / name / layout
            pack = {"seq_length": PACK["seq_length"], **pack}
            pack_all(make_run(source, folder, pack=pack, output={"layout": layout}))
            shares = shares_of_rows(rows_of(folder))
            idle[name, layout] = 1 - shares.sum() / (SIZE * shares.max(1).sum())
    assert idle["even", "energon"] == idle["even", "indexed"]
    assert idle["plain", "energon"] > 1.3 * idle["even", "energon"]
    shares = shares_of_rows(rows_of(run.workspace.root))
    assert 1 - shares.sum() / (SIZE * shares.max(1).sum()) < 0.8 * idle["plain", "energon"]


def test_packs_have_room_for_as_many_ranks(run: Run) -> None:
    check_room(run.workspace.root, SIZE)
    with pytest.raises(StageError, match=r"pack it with pack.context_parallel.size=8"):
        check_room(run.workspace.root, 8)


@pytest.mark.parametrize(
    ("size", "multiple", "padding"), [(1, 1, 1), (2, 1, 4), (4, 2, 8), (4, 4, 16), (2, 16, 32)]
)
def test_padding_is_what_ranks_cut(size: int, multiple: int, padding: int) -> None:
    """`pad_multiple` holds for each rank's share: tensor ranks under sequence parallelism, FP8."""
    pack = PackConfig.model_validate({"context_parallel": {"size": size}, "pad_multiple": multiple})
    assert pack.padding == padding
    if multiple <= 4:
        options = {"context_parallel": size, "tensor_parallel": multiple}
        assert padding == required_pad_multiple(**options, sequence_parallel=multiple > 1)
