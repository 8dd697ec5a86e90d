"""How other trainers cut a pack for a rank, without the other ranks, against our own cut."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from launch.loop.parallel import shutdown_parallel
from launch.model.megatron.context_parallel import part_of_rank
from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.peers import open_packs
from tests.helpers.videos import video_pairs

#: What a trainer gives a rank of a row: by name, with the tokens along the last axis.
Cut = Callable[[PackedBatch, PackedSeqParams], dict[str, torch.Tensor]]


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one of several context-parallel ranks, none of which it can speak to."""
    shutdown_parallel()  # a test before may have joined one
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=size, create_gloo_process_groups=False
        )
        yield
    finally:
        shutdown_parallel()


def partitioned_indices(cu_seqlens: torch.Tensor, total: int, size: int, rank: int) -> torch.Tensor:
    """Transformer Engine's `thd_get_partitioned_indices`, as documented: each sequence is cut into
    2 · size chunks, of which a rank has its own and, from the end, its own."""
    found: list[int] = []
    ends = cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            found += range(start + number * chunk, start + (number + 1) * chunk)
    assert len(found) * size == total
    return torch.tensor(found)


def use_partitioned_indices(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module in which trainers look for it."""
    module = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)  # type: ignore[misc]
    return module


def packs_for_ranks(root: Path, size: int) -> Any:
    """More than 200 packs of images and videos for so many ranks."""
    folders = mixed_pairs(root / "images", 380), video_pairs(root / "videos", 48)
    source = [{"format": "pairs", "path": str(folder), "task": "bmr"} for folder in folders]
    limits = {"min_pixels": 4096, "max_pixels": 65_536, "video_max_pixels": 65_536}
    model = {"family": "qwen3_vl", "video_min_pixels": 4096, "video_max_frames": 8, **limits}
    pack = {"seq_length": 256, "context_parallel": size}
    pack_all(make_run(source, root / "packed", model=model, pack=pack))
    packs = open_packs(root / "packed", pad_multiple=2 * size)
    media = packs.columns().media
    assert len(packs) > 200
    assert {0, 1, 3} <= {*media.tolist()}  # neither, images, both
    return packs


def differing_cuts(packs: Any, size: int, cut: Cut) -> list[tuple[int, int, str]]:
    """Pack, rank and name of each tensor that is not what `part_of_rank` gives the rank."""
    found = []
    rows = [packs.batch([number]) for number in range(len(packs))]
    for rank in range(size):
        with as_rank(rank, size):
            for number, row in enumerate(rows):
                params = to_packed_seq_params(row)
                own = part_of_rank(params, size, rank).own
                given = cut(row, params)
                assert {"tokens", "labels"} <= given.keys()
                for name, tensor in given.items():
                    wanted = getattr(row, name)[..., own]
                    if not torch.equal(tensor.view_as(wanted), wanted):
                        found.append((number, rank, name))
    return found


def boundaries(params: PackedSeqParams) -> torch.Tensor:
    """(P + 1,) where segments begin, with their padding."""
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded
