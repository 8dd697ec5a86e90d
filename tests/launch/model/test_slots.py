"""Packs over 1, 2 and 4 of four ranks in one run compute what one process computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron_model import build_model
from task_encoders import PackedTaskEncoder
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.slots import SlotRows
from task_encoders.model_inputs import to_packed_seq_params
from tests.helpers.datasets import image_bytes, make_run, pack_all, write_json
from tests.helpers.packed_runs import IMAGE_TOKEN, TINY_MODEL, fold_vocabulary
from tests.helpers.rank_processes import run_ranks


def losses_and_gradients(root: Path, over_ranks: bool) -> dict[str, Any]:
    """Sum of all token losses of all packs, its gradients, and the ranks that packs went over."""
    device = initialize_parallel(seed=0)
    model = build_model(ModelConfig.model_validate(TINY_MODEL), device=device, seed=0)
    model.hf_config.image_token_id = IMAGE_TOKEN
    encoder = PackedTaskEncoder(seq_length=512, max_pixels=28 * 28 * 64)
    folder = PackedFolder(root, encoder)
    rank, total = distributed.get_rank(), torch.zeros((), dtype=torch.float64)
    groups: dict[tuple[int, int], Any] = {}
    for size in (2, 4):
        for first in range(0, distributed.get_world_size(), size):
            if over_ranks:
                groups[size, first] = distributed.new_group(range(first, first + size))
    slots = SlotRows(folder, rank, 4)  # the one process reads all of the folder instead
    numbers = range(len(slots) if over_ranks else len(folder))
    for number in numbers:
        row = slots[number] if over_ranks else encoder.batch([folder.row(number)])
        row = fold_vocabulary(row)
        size = int(row.local_cp_size or 0)
        params = to_packed_seq_params(row, groups.get((size, rank // size * size)))
        loss = model(
            tokens=row.tokens,
            position_ids=row.position_ids,
            packed_seq_params=params,
            imgs=row.imgs,
            image_grid_thw=row.image_grid_thw,
            labels=shift_labels(row.labels),
            pixel_values_videos=row.pixel_values_videos,
            video_grid_thw=row.video_grid_thw,
        ).sum()
        loss.backward()
        total += loss.detach().double()
    distributed.all_reduce(total)
    gradients = {}
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        distributed.all_reduce(grad)
        gradients[name] = grad
    return {"loss": total, "gradients": gradients, "sizes": set(slots.cp_sizes.tolist())}


def test_four_ranks_train_slots_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i, words in enumerate([100, 75, 40, 30, *range(4, 24)]):
        write_json(source / f"{i:02d}.json", {"caption": "a red hat " * words})
        (source / f"{i:02d}.jpg").write_bytes(image_bytes(56 + 28 * (i % 3), 84))
    ranks = {"ranks": 4, "tokens_per_rank": 128}
    run = make_run(source, tmp_path / "packed", pack={"context_parallel": ranks})
    pack_all(run)
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    root = run.workspace.root
    (alone,) = run_ranks(1, tmp_path / "one", losses_and_gradients, root, False)
    sizes: set[int] = set()
    for found in run_ranks(4, tmp_path / "four", losses_and_gradients, root, True):
        torch.testing.assert_close(found["loss"], alone["loss"], rtol=1e-5, atol=0)
        assert len(alone["gradients"]) > 20
        for name, expected in alone["gradients"].items():
            difference = (found["gradients"][name] - expected).abs().max()
            assert difference <= 1e-5 * expected.abs().max(), name
        sizes |= found["sizes"]
    assert sizes == {1, 2, 4}
