"""Megatron-SWIFT's cut of packs for context parallelism."""
# ruff: noqa: E402  what stands for Transformer Engine comes first

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from tests.helpers import megatron_bridge_stubs  # noqa: F401  stands for Transformer Engine
from tests.peers import Say

# It changes classes of Transformer Engine, which are not there.
sys.modules["mcore_bridge.patcher"] = SimpleNamespace(apply_patch=lambda: None)  # type: ignore[assignment]

# isort: split
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from swift.megatron.utils import get_batch_on_this_cp_rank

from task_encoders.energon_samples import PackedBatch
from tests.helpers.context_ranks import boundaries, differing_cuts, packs_for_ranks

VERSION = f"ms-swift {version('ms-swift')}, mcore-bridge {version('mcore-bridge')}"


@pytest.mark.parametrize("size", [2, 4])
def test_its_cut_gives_each_rank_what_it_should(size: int, tmp_path: Path, say: Say) -> None:
    """Of multimodal models it cuts embeddings in the place of tokens, in the same way."""
    args = SimpleNamespace(is_multimodal=False, task_type="causal_lm")

    def cut(row: PackedBatch, params: PackedSeqParams) -> dict[str, torch.Tensor]:
        batch = {
            "input_ids": row.tokens,
            "labels": row.labels,
            "loss_scale": row.loss_mask,
            "position_ids": row.position_ids,
            "packed_seq_params": SimpleNamespace(cu_seqlens_q=boundaries(params)),
        }
        found = get_batch_on_this_cp_rank(args, batch)
        return {
            "tokens": found["input_ids"],
            "labels": found["labels"],
            "loss_mask": found["loss_scale"],
            "position_ids": found["position_ids"],
        }

    packs = packs_for_ranks(tmp_path, size)
    assert differing_cuts(packs, size, cut) == []
    say(f"CP {size} cuts {len(packs)} packs as launch does")
