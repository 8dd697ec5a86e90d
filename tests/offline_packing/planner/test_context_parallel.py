"""A context-parallel size per pack: sizes, slots, and what cannot be planned."""

import pytest

from offline_packing.planner.context_parallel import ContextParallel, cut_multiple


def test_ranks_are_a_power_of_two_and_hold_the_longest_pack() -> None:
    ranks = ContextParallel(8, 100)
    assert ranks.sizes == [1, 2, 4, 8]
    assert ranks.capacities(640).tolist() == [100, 200, 400, 640]
    ranks.check(800, pad_multiple=1)
    with pytest.raises(ValueError, match=r"ranks is 6; .*power of two"):
        ContextParallel(6, 100)
    with pytest.raises(ValueError, match="tokens_per_rank is 0"):
        ContextParallel(8, 0)
    with pytest.raises(ValueError, match=r"seq_length 816 > 8 ranks x 100 tokens per rank"):
        ranks.check(816, pad_multiple=1)
    with pytest.raises(ValueError, match=r"seq_length 790 is not a multiple of 16, .*; take 784"):
        ranks.check(790, pad_multiple=1)
    with pytest.raises(ValueError, match=r"tokens_per_rank 100 is not a multiple of 6, .* take 96"):
        ranks.check(480, pad_multiple=3)


@pytest.mark.parametrize(
    ("cp_size", "tensor_ranks", "multiple"), [(1, 1, 2), (4, 1, 8), (4, 2, 8), (4, 3, 24)]
)
def test_sub_samples_are_padded_to_what_context_and_sequence_parallelism_cut(
    cp_size: int, tensor_ranks: int, multiple: int
) -> None:
    """lcm(2 * CP, CP * TP), as Megatron-Bridge's documents state."""
    assert cut_multiple(cp_size, tensor_ranks) == multiple
