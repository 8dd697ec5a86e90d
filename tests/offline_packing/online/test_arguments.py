"""Arguments that a tired person could pass: refused by name, value and what is valid."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from offline_packing import WindowOptions, plan_packs
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedIterableDataset,
)
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.online.pools import PackingPool
from offline_packing.online.prefetch import Prefetched
from offline_packing.online.ranks.rank_schedule import RankSchedule
from offline_packing.planner.ranks.layout import RankLayout
from task_encoders.loading.packed_dataset import get_packed_loader, get_packed_train_dataset
from task_encoders.loading.schedule import RankSampler
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import SampleError
from tests.helpers.online_samples import Stream, numbered

SAMPLES = numbered([3, 4, 5])
TOKENS = np.array([3, 4, 5])
packed = partial(PackedIterableDataset, SAMPLES, seq_length=8)
constant = partial(ConstantLengthDataset, SAMPLES, seq_length=8)
dynamic = partial(DynamicBatches, SAMPLES, max_seq_len=8)
encoder = partial(PackedTaskEncoder, seq_length=8)
online = partial(get_online_train_dataset, "nowhere", None)
schedule = partial(RankSchedule, TOKENS)
planned = partial(plan_packs, TOKENS, seq_length=8)
windows = partial(WindowOptions, seq_length=8)

INTEGER, BOOLEAN = "it must be a valid integer", "it must be a valid boolean"
ONE, ZERO = "it must be at least 1", "it must be at least 0"


@pytest.mark.parametrize(
    ("call", "argument", "value", "valid"),
    [
        (packed, "seq_length", "100", INTEGER),
        (packed, "leftovers", "drop", "it must be 'carry' or 'emit'"),
        (packed, "shuffle", "no", BOOLEAN),
        (packed, "encode", "tokenize", "it must be callable"),
        (constant, "delta", -1, ZERO),
        (constant, "queue_size", True, "a number is needed"),
        (dynamic, "dyn_bsz", "no", BOOLEAN),
        (dynamic, "max_seq_len", float("nan"), INTEGER),
        (dynamic, "pad_to_length", "8", f"{BOOLEAN} or a valid integer"),
        (partial(Prefetched, SAMPLES), "queue_size", 0, ONE),
        (schedule, "num_ranks", 0, ONE),
        (partial(RankSampler, RankSchedule(TOKENS)), "rank", 0.0, INTEGER),
        (online, "buffer", "1000", INTEGER),
        (online, "budgets", {"images": 0}, ONE),
        (windows, "seq_length", "8192", INTEGER),
        (windows, "full_at", "1", "it must be a valid number"),
        (encoder, "seq_length", 8192.0, INTEGER),
        (encoder, "encode_threads", 0, ONE),
        (encoder, "pad_multiple", 16, "it must be at most seq_length 8"),
        (encoder, "pixel_transport", "int8", "it must be 'float32' or 'uint8'"),
        (partial(get_packed_train_dataset, "nowhere", None), "micro_batch_size", 0, ONE),
        (planned, "seq_length", 8.5, INTEGER),
    ],
)
def test_a_bad_value_is_named(call: Any, argument: str, value: Any, valid: str) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*; {valid}") as raised:
        call(**{argument: value})
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert len(list(packed(seq_length=np.int64(8)))) == 2
    assert windows(seq_length=np.int32(8), full_at=np.float32(0.5)).seq_length == 8
    assert planned(seq_length=np.int64(8), seed=np.uint8(1)).num_packs == 2


STREAM = Stream([])
#: Images are in samples, and not in their lengths.
WITH_IMAGES = [{"length": 3, "images": []}] * 3
ones = np.ones(4, int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(packed, strategy="best"), "strategy 'best' is unknown"),
        (partial(online, budgets={"pixels": 9}), "budget 'pixels' is unknown; choose one of visio"),
        (partial(packed, rank=1), "rank and world_size go together"),
        (partial(packed, rank=2, world_size=2), "rank is 2"),
        (partial(packed, lengths=TOKENS * 1.5), "pass a one-dimensional integer array"),
        (partial(packed, lengths=[3, -4, 5]), r"lengths\[1\] is -4 < 0"),
        (
            partial(PackedIterableDataset, STREAM, seq_length=8, shuffle=True),
            "shuffle needs a dataset with indices",
        ),
        (
            partial(ConstantLengthDataset, WITH_IMAGES, seq_length=8, lengths=[3, 3, 3]),
            "lengths do not count images",
        ),
        (partial(dynamic, micro_batch_size=2, pad_to_length=9), "is 9, less than .* = 16"),
        (partial(get_packed_loader, [1]), "dataset is a list; it must be a dataset of Energon"),
        (partial(OnlineTaskEncoder, seq_length=8, min_pixels=-1), "min_pixels"),
        (partial(encoder, pad_to_seq_length=True, pad_multiple=3), "8 is not a multiple of pad_mu"),
        *((partial(RankLayout, *layout), "must be at least") for layout in ((0,), (2, -1))),
        (partial(RankSchedule, TOKENS * 1.5), "pass a one-dimensional integer array"),
        (partial(RankSchedule, TOKENS[:0], budget=8), "none of 0 items to schedule fits"),
        (partial(RankSchedule, TOKENS + 8, budget=8), "none of 3 items to schedule fits"),
        (partial(schedule, kinds=[0.5, 1, 1]), "pass an integer per length"),
        (partial(schedule, tower_cost=[1, 17, 1]), r"tower_cost\[1\] is 17.* > cost 16.*; cost is"),
        *(
            (partial(schedule, **{name: ones}), rf"{name} \(4,\) must have a value per length \(3,")
            for name in ("cost", "tower_cost", "kinds", "features")
        ),
        (partial(RankSampler, RankSchedule(TOKENS, None, 2), 2), "rank 2 is not one of 2 ranks"),
        *(
            (partial(made, cost=np.array(cost)), message)
            for made in (schedule, planned)
            for cost, message in (
                ([1, float("nan"), 1], r"cost\[1\] is nan; it must be finite and at least 0"),
                ([1, 1, -2.0], r"cost\[2\] is -2.0; it must be finite"),
                ([1, 1, float("inf")], r"cost\[2\] is inf; it must be finite"),
                (["1", "2", "3"], "cost has type .*; pass an array of numbers"),
            )
        ),
    ],
)
def test_what_does_not_go_together_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "other",
    [
        RankSchedule(TOKENS + 1),
        *(RankSchedule(TOKENS, **{name: np.ones(3, int)}) for name in ("tower_cost", "kinds")),
        RankSchedule(TOKENS, features=np.ones((3, 1), int)),
    ],
)
def test_a_state_of_another_schedule_is_refused(other: RankSchedule) -> None:
    state = RankSampler(RankSchedule(TOKENS), 0).state_dict()
    with pytest.raises(ValueError, match="schedule with other lengths"):
        RankSampler(other, 0).load_state_dict(state)


def test_an_item_that_fits_no_pack_is_refused() -> None:
    pool = PackingPool[str](windows(budgets={"images": 2}))
    for tokens, images in ((5.5, 1), (5, 0.5)):
        with pytest.raises(ValueError, match=r"sizes of an item are .*; they must be integers"):
            pool.add("item", tokens, {"images": images})
    with pytest.raises(ValueError, match=r"amounts has no images, which options\.budgets limits"):
        pool.add("item", 5)
    for sizes, reason in (((9, 0), "overlong"), ((3, 3), "over_budget"), ((0, 0), "bad_record")):
        with pytest.raises(SampleError, match=reason):
            pool.add("item", sizes[0], {"images": sizes[1]})
    assert pool.waiting == []
