"""One row split over the ranks of a context parallel group; each rank holds a part of its tokens.

Every segment is cut into 2·n chunks for n ranks. Rank r holds chunks r and 2n - 1 - r ("zigzag",
as in Megatron-LM), so that causal attention takes all ranks equally long:

    n = 2, segments     [a a a a|b b b b b b b b]
    rank 0 holds         a     a|b b         b b
    rank 1 holds           a a  |    b b b b

Every layer gathers the keys and values of the whole row, as in Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2). Attention is then one call of an ordinary kernel:
each chunk is a segment, whose keys are its sample's up to the chunk's end.

The group is an argument of the row (`PackedSeqParams.cp_group`): rows may differ in it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd

from launch.model.prefix_trees import boundaries_of, layout_of, ranges


@dataclasses.dataclass
class RowPart(PackedSeqParams):
    """One rank's part of a row of S tokens on n ranks: boundaries of its 2·P chunks
    (`cu_seqlens_q`), and of the keys that these chunks attend to (`cu_seqlens_kv`)."""

    #: (S / n,) places in the row of the tokens held here, ascending
    own: torch.Tensor = dataclasses.field(kw_only=True)
    #: (S,) the rank of the group that holds each token
    owner: torch.Tensor = dataclasses.field(kw_only=True)
    #: (cu_seqlens_kv[-1],) places of the keys in the ranks' parts, one after another
    keys: torch.Tensor = dataclasses.field(kw_only=True)

    @contextmanager
    def gather_keys(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gather keys and values (S / n, G, D) of all ranks, in the order of `cu_seqlens_kv`."""
        both = _Gather.apply(torch.stack([key, value], dim=1), self.cp_group)
        key, value = both[self.keys].unbind(dim=1)
        yield key, value


def cut_row(params: PackedSeqParams) -> RowPart | None:
    """Return this rank's part of the row that `params` describe; None: the rank holds the whole
    row. Raises ValueError, see `part_of_rank`."""
    group = params.cp_group
    if group is None or distributed.get_world_size(group) == 1:
        return None
    return part_of_rank(params, distributed.get_world_size(group), distributed.get_rank(group))


def part_of_rank(params: PackedSeqParams, size: int, rank: int) -> RowPart:
    """Return the part of a row that `rank` of `size` ranks holds, and the keys that it attends to.
    Raises ValueError if a segment cannot be cut into equal chunks."""
    boundaries = layout_of(params).long()
    lengths = boundaries.diff()
    if (lengths % (2 * size)).any():
        raise ValueError(
            f"segments of {lengths.tolist()} tokens cannot be cut into {2 * size} chunks for "
            f"{size} context parallel ranks; pad each to a multiple (pad_multiple={2 * size})"
        )
    num_tokens, chunks = int(boundaries[-1]), lengths // (2 * size)
    parts = []  # places in the row of each rank's chunks
    for one in range(size):
        starts = [boundaries[:-1] + chunks * number for number in (one, 2 * size - 1 - one)]
        pairs = torch.stack(starts, dim=1).flatten()
        parts.append(ranges(pairs, chunks.repeat_interleave(2), num_tokens // size))
    place = torch.cat(parts).argsort()
    ends = torch.stack([chunks * (rank + 1), chunks * (2 * size - rank)], dim=1).flatten()
    num_keys = num_tokens // (2 * size) * (2 * size + 1)
    longest = params.max_seqlen_q // (2 * size)
    return RowPart(
        qkv_format=params.qkv_format,
        cu_seqlens_q=boundaries_of(chunks.repeat_interleave(2)),
        cu_seqlens_kv=boundaries_of(ends),
        max_seqlen_q=longest,
        max_seqlen_kv=longest * (2 * size - rank),
        local_cp_size=size,
        cp_group=params.cp_group,
        own=parts[rank],
        owner=place // (num_tokens // size),
        keys=place[ranges(boundaries[:-1].repeat_interleave(2), ends, num_keys)],
    )


class _Gather(torch.autograd.Function):
    """Gathering of (m, …) of each rank to (n·m, …); every rank's gradients are added up."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = own.new_empty(distributed.get_world_size(group) * len(own), *own.shape[1:])
        distributed.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        size = distributed.get_world_size(ctx.group)
        own = gradient.new_empty(len(gradient) // size, *gradient.shape[1:])
        distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


def hand_over(
    features: torch.Tensor, bounds: Sequence[int], receivers: torch.Tensor, part: RowPart
) -> torch.Tensor:
    """Exchange features, and return those of this rank's tokens, in order. A collective.

    Args:
        features: numbers bounds[rank] to bounds[rank + 1], computed on this rank.
        bounds: (n + 1,) boundaries of the features of each rank, N in all.
        receivers: (N,) the rank that needs each feature.
    """
    size, rank = distributed.get_world_size(part.cp_group), distributed.get_rank(part.cp_group)
    sizes = torch.tensor(bounds, device=receivers.device).diff()
    senders = torch.arange(size, device=receivers.device).repeat_interleave(sizes)
    table = torch.bincount(senders * size + receivers, minlength=size * size).view(size, size)
    sent = table.tolist()
    order = receivers[bounds[rank] : bounds[rank + 1]].argsort(stable=True)
    received = [row[rank] for row in sent]
    return all_to_all_single_autograd(features[order], received, sent[rank], part.cp_group)
