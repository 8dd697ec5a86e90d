"""Segments of a row that share a prefix: attention of each branch to its trunk and to itself.

    a trunk, two branches   tokens         [a a a a|b b|c c c]
                            parents        [-1       0   0]
    queries                 cu_seqlens_q   [0 4 6 9]
    keys                    cu_seqlens_kv  [0 4 10 17]      [a a a a|a a a a b b|a a a a c c c]

All other layers see each token once, at the position that it has in its own sample; recurrent
layers hand a trunk's state to its branches (`segments`). Attention gathers the keys of every
segment and calls an ordinary kernel, causal and aligned at the end; the backward of gathering adds
up the trunk's gradients. So each branch has the logits, the loss and the gradient of its sample
alone.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.graph import saved_tensors_hooks

from task_encoders.concatenate import check_parents
from task_encoders.model_inputs import to_packed_seq_params

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch


@dataclasses.dataclass
class RowTrees(PackedSeqParams):
    """A row of S tokens whose segments attend to their trunk as well: `cu_seqlens_q` are the
    layout's, padding included; `cu_seqlens_kv` leave out a trunk's padding."""

    #: (cu_seqlens_kv[-1],) places of the keys in the row
    keys: torch.Tensor = dataclasses.field(kw_only=True)
    #: the trunk of each segment, -1: none
    parents: list[int] = dataclasses.field(kw_only=True)
    #: (S,) number of the image of each token, -1: none; for models whose images see themselves
    blocks: torch.Tensor | None = None

    @contextmanager
    def gather_keys(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gather keys and values (S, G, D) in the order of `cu_seqlens_kv`, for a kernel that is
        called in this context. They are not kept for the backward pass, but gathered again: a trunk
        of 8,000 tokens with 100 branches would take 100 times its memory in every layer."""
        gathered = key[self.keys], value[self.keys]
        # Hooks hide outer hooks, such as those of torch's checkpoint, which keeps nothing at all.
        # Torch has no public name for them.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            yield gathered
            return
        sources = {
            copy.untyped_storage().data_ptr(): source.detach()
            for copy, source in zip(gathered, (key, value), strict=True)
        }

        def pack(saved: torch.Tensor) -> Any:
            source = sources.get(saved.untyped_storage().data_ptr())
            if source is None:
                return saved
            shape, stride, first = saved.shape, saved.stride(), int(saved.storage_offset())
            last = first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            width = source[0].numel()
            rows = slice(first // width, last // width + 1)  # those that the view touches
            return source, rows, (shape, stride, first - rows.start * width)

        def unpack(kept: Any) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            source, rows, view = kept
            return source[self.keys[rows]].as_strided(*view)

        with saved_tensors_hooks(pack, unpack):
            yield gathered


def segment_params(batch: "PackedBatch", cp_group: Any = None) -> PackedSeqParams:
    """Describe the segments of a row; with prefix trees as `RowTrees`. Raises ValueError if a row
    with trees is to be cut over ranks, or its trunks are not before their branches, or are branches
    themselves."""
    params = to_packed_seq_params(batch, cp_group, trees=True)
    return row_trees(params, batch.parents, batch.attn_mask) if batch.parents.numel() else params


def layout_of(params: PackedSeqParams) -> torch.Tensor:
    """Return the boundaries of the segments in their row, padding included."""
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded


def row_trees(params: PackedSeqParams, parents: torch.Tensor, attn_mask: torch.Tensor) -> RowTrees:
    """Describe the attention of a row with trees, see `segment_params`.

    Args:
        params: the row's P segments.
        parents: (P,) the trunk of each segment, an earlier one; -1: none.
        attn_mask: (S,) True = padding.
    """
    if params.cp_group is not None and params.cp_group.size() > 1:
        raise ValueError(
            "rows with shared prefixes cannot be split over context parallel ranks; set "
            "parallel.context=1, or pack without pack.share_prefixes"
        )
    layout = layout_of(params).long()
    parents = parents.flatten().long()
    numbers: list[int] = parents.tolist()
    check_parents(numbers, len(layout) - 1)
    has_trunk, trunks = parents >= 0, parents.clamp(min=0)
    real = torch.nn.functional.pad((~attn_mask.flatten()).long().cumsum(0), (1, 0))
    shared = (real[layout[1:]] - real[layout[:-1]])[trunks] * has_trunk
    own = layout.diff()
    lengths = torch.stack([shared, own], dim=1).flatten()
    starts = torch.stack([layout[trunks], layout[:-1]], dim=1).flatten()
    seen = shared + own
    return RowTrees(
        qkv_format=params.qkv_format,
        cu_seqlens_q=layout.to(torch.int32),
        cu_seqlens_kv=boundaries_of(seen),
        max_seqlen_q=params.max_seqlen_q,
        max_seqlen_kv=int(seen.max()),
        keys=ranges(starts, lengths, int(seen.sum())),
        parents=numbers,
    )


def ranges(starts: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Enumerate ranges: starts [0, 7] and lengths [2, 3] -> [0, 1, 7, 8, 9]; `total` numbers."""
    before = starts - (lengths.cumsum(0) - lengths)
    shifts = before.repeat_interleave(lengths, output_size=total)
    return shifts + torch.arange(total, device=starts.device)


def boundaries_of(lengths: torch.Tensor) -> torch.Tensor:
    """Add up lengths to boundaries: [2, 3] -> [0, 2, 5], int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
