"""plan_packs: every sample once, nothing over a limit, the same plan for the same seed; its passes,
bad input, and the plan on disk."""

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.config.sections import PackConfig
from offline_packing.planner.mixture import Mixture
from offline_packing.planner.options import PlanOptions, PlanRequest
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.passes import asked_passes
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.samples import admit_samples
from offline_packing.planner.strategies import STRATEGIES, lacks_limits


def assert_valid(plan: PackPlan, num_tokens: np.ndarray) -> None:
    """Samples in = packed + set aside; no pack empty or over seq_length."""
    ids = np.concatenate([plan.sample_ids, plan.set_aside_ids])
    assert np.array_equal(np.sort(ids), np.arange(len(num_tokens)))
    assert len(plan.set_aside_ids) == len(plan.set_aside_reasons)
    assert (np.diff(plan.pack_offsets) > 0).all()
    multiple = plan.info.pad_multiple
    padded = -(-np.asarray(num_tokens, np.int64) // multiple) * multiple
    if plan.num_packs:
        loads = np.add.reduceat(padded[plan.sample_ids], plan.pack_offsets[:-1])
        assert loads.max() <= plan.info.seq_length
        assert plan.info.num_tokens == loads.sum()
    assert plan.num_packs >= plan.info.lower_bound


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 6)), max_size=80),
    limit=st.sampled_from([None, 5, 9]),
    seed=st.integers(0, 2**32),
    pad_multiple=st.sampled_from([1, 2, 8, 16]),
)
def test_each_sample_once_nothing_over_a_limit(
    strategy, samples, limit, seed, pad_multiple
) -> None:
    num_tokens, images = np.array(samples, np.int64).reshape(-1, 2).T
    arguments = {"strategy": strategy, "seed": seed, "pad_multiple": pad_multiple}
    if limit and not lacks_limits(strategy):
        arguments["budgets"] = {"images": (images, limit)}
    plan = plan_packs(num_tokens, 128, **arguments)
    assert_valid(plan, num_tokens)
    assert "budgets" not in arguments or all(images[pack].sum() <= limit for pack in plan)
    again = plan_packs(num_tokens, 128, **arguments)
    assert np.array_equal(plan.sample_ids, again.sample_ids)
    assert np.array_equal(plan.pack_offsets, again.pack_offsets)


@pytest.mark.parametrize("strategy", ["auto", "hash_bucket"])
def test_shuffle_changes_the_choice_but_not_the_composition(strategy: str) -> None:
    num_tokens = np.random.default_rng(0).integers(1, 900, 5000)
    plans = [plan_packs(num_tokens, 1024, strategy=strategy, seed=seed) for seed in (1, 2)]
    for plan in plans:
        assert_valid(plan, num_tokens)
    assert not np.array_equal(plans[0].sample_ids, plans[1].sample_ids)
    first, second = (sorted(sorted(num_tokens[pack].tolist()) for pack in one) for one in plans)
    assert first == second


@pytest.mark.parametrize(("count", "seq_length"), [(448, 81_920_000), (448, 60_000), (900, 65_536)])
def test_what_is_left_is_one_pack_if_it_fits(count: int, seq_length: int) -> None:
    """Under a budget that never binds, too."""
    lengths = np.random.default_rng(0).lognormal(4, 1, count).astype(int) + 1
    sizes = np.stack([lengths, 4 * lengths], axis=1)
    packs = STRATEGIES["auto"](sizes, np.array([seq_length, 10**9]))
    assert packs.num_packs == -(-int(lengths.sum()) // seq_length)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_are_in_random_order_whatever_the_strategy(strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(50, 2000, 3000)
    plan = plan_packs(lengths, 4096, strategy=strategy)
    longest = [lengths[pack].max() for pack in plan]
    assert len(longest) > 700
    assert 0.3 < np.mean(np.diff(longest) < 0) < 0.7


def test_samples_inside_packs() -> None:
    """In random order, and as another packer put them."""
    lengths = np.random.default_rng(0).integers(10, 900, 2000)
    assert np.mean([lengths[pack].argmax() > 0 for pack in plan_packs(lengths, 1000)]) > 0.3
    for strategy in ("first_fit_decreasing", "to_constant_volume"):
        longest_first = plan_packs(lengths, 1000, strategy=strategy)
        assert all((np.diff(lengths[pack]) <= 0).all() for pack in longest_first)


def test_a_plan_is_saved_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    """And is refused if it is damaged, or of another version."""
    plan = plan_packs([5, 4, 3, 8, 20], 8, seed=7)
    assert len(plan) == plan.num_packs == len([*plan]) == 3
    assert repr(plan) == (
        "PackPlan(3 packs of 8 tokens, 4 samples, 1 set aside, fill 83.33%, gap 0.000%)"
    )
    plan.save(tmp_path)
    loaded = PackPlan.load(tmp_path)
    assert loaded.info == plan.info
    assert loaded.statistics() == plan.statistics()
    for name in ("sample_ids", "pack_offsets", "set_aside_ids", "set_aside_reasons"):
        before, after = getattr(plan, name), getattr(loaded, name)
        assert before.dtype == after.dtype
        assert before.tolist() == after.tolist()
    assert isinstance(loaded.sample_ids, np.memmap)

    def fail(*args, **kwargs) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array_header_1_0", fail)
        with pytest.raises(OSError, match="disk full"):
            plan.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="run the plan stage again"):
        PackPlan.load(tmp_path)
    plan.save(tmp_path)
    np.save(tmp_path / "sample_ids.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"sample_ids\.npy has shape"):
        PackPlan.load(tmp_path)
    text = (tmp_path / "plan.json").read_text()
    text = text.replace('"format_version": 1', '"format_version": 99')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="format_version 99"):
        PackPlan.load(tmp_path)


def test_reasons_are_aligned_and_ordered() -> None:
    tokens = np.array([10, 0, 2**40, 50, 50, 100])
    patches = np.array([1, 1, 9, 9, 1, 4])
    images = np.array([1, 1, 1, 5, 1, 3])
    result = admit_samples(tokens, 100, budgets={"patches": (patches, 4), "images": (images, 2)})
    assert result.sample_ids.tolist() == [0, 4]  # type: ignore[union-attr]
    assert result.set_aside_ids.tolist() == [1, 2, 3, 5]
    reasons = [result.reason_names[code] for code in result.set_aside_reasons]
    limits = ["over_budget:patches", "over_budget:images"]
    assert reasons == ["empty", "over_seq_length", *limits]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_any_integer_type_is_accepted_and_lengths_are_padded(dtype) -> None:
    tokens = np.array([1, 8, 9, 100], dtype)
    tokens.setflags(write=False)
    result = admit_samples(tokens, 100, multiple=8)
    # 100 pads to 104 > 100, so it cannot be packed at this multiple.
    assert result.samples.lengths.tolist() == [8, 8, 16]
    assert result.samples.lengths.dtype == np.int32
    assert result.samples.lengths.flags.writeable
    assert result.set_aside_ids.tolist() == [3]
    assert admit_samples(tokens, 100).samples.lengths.flags.writeable


LOCALITY = {"assignment": "locality", "source_order": np.arange(9)}
IMAGES = {"budgets": {"images": (np.ones(9, int), 4)}}
MIXTURE = {"mixture": Mixture((0.7, 0.3), (0.2, 0.8)), "source": np.arange(9) % 2}
MIXTURE |= {"source_order": np.arange(9)}
GROUPS = {"homogeneous": True, "groups": np.zeros(9, int)}


def test_passes_stand_in_the_order_in_which_they_run() -> None:
    layout = RankLayout(2, uniform=True)
    ordered = asked_passes(PlanRequest(PlanOptions(), layout=layout))
    assert [one.name for one in ordered] == "compose uniform equal_cost sample_order".split()
    shuffled = asked_passes(PlanRequest(PlanOptions(max_samples=4)))
    assert [one.name for one in shuffled] == "limits compose shuffle sample_order".split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": np.array([3, -2])}, r"num_tokens\[1\] is -2 < 0"),
        ({"num_tokens": np.array([1.5])}, "one-dimensional integer"),
        ({"num_tokens": np.array([[1]])}, "one-dimensional integer"),
        ({"budgets": {"images": (np.array([1]), 4)}}, "1 entries for 9 samples"),
        ({"budgets": {"images": (np.ones(9, int), 0)}}, "limit 0"),
        ({"budgets": {"images": (np.arange(-1, 8), 3)}}, r"budgets\['images'\]\[0\] is -1"),
        ({"strategy": "bdf"}, r"strategy is 'bdf'; not a known name; choose one of.*, best_fit_de"),
        ({"assignment": "locallity"}, "'locallity'.*; it must be 'shuffle' or 'locality'"),
        ({"max_samples": 0}, "max_samples is 0; it must be at least 1"),
        ({"pad_multiple": 0}, "pad_multiple is 0; it must be at least 1"),
        ({"pad_multiple": 640}, "pad_multiple 640 > seq_length 512; no sample would fit a pack"),
        ({"assignment": "locality"}, "assignment locality needs source_order, an array with one "),
        ({"homogeneous": True}, "homogeneous needs groups"),
        ({"order": RankLayout(2, uniform=True)}, "order.uniform needs media"),
        ({"groups": np.zeros(2)}, r"groups has shape \(2,\) for 9 samples"),
        ({"max_samples": 2, "strategy": "best_fit_decreasing"}, "cannot keep a limit of samples"),
        (IMAGES | {"strategy": "hash_bucket"}, "keep a limit of images: .*; choose one of auto, "),
        (IMAGES | LOCALITY, "assignment locality cannot keep a limit of images: its win"),
        (LOCALITY | {"order": RankLayout(2)}, "order cannot keep assignment locality"),
        (LOCALITY | {"strategy": "knapsack"}, "locality cannot keep strategy 'knapsack'"),
        (IMAGES | {"strategy": "mixed"}, "strategy 'mixed' cannot keep a limit of images"),
        (MIXTURE | {"order": RankLayout(2)}, "order cannot keep mixture"),
        (MIXTURE | {"strategy": "first_fit_decreasing"}, "mixture cannot keep strategy 'first_fit"),
        (MIXTURE | {"max_samples": 9}, "mixture cannot keep a limit of samples"),
        (MIXTURE | LOCALITY, "mixture cannot keep assignment locality"),
        (MIXTURE | GROUPS, "mixture cannot keep homogeneous"),
    ],
)
def test_what_is_missing_or_cannot_be_kept_is_named(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packs(**{"num_tokens": np.full(9, 8), "seq_length": 512, **arguments})


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="max_sample is unknown; valid: seq_length, strategy, seed"):
        plan_packs(np.array([3, 4, 5]), 10, max_sample=2)


def test_options_are_said_once() -> None:
    """Every option of a plan is a field of the configuration and an argument, and in the guide."""
    for name, field in PlanOptions.model_fields.items():
        assert PackConfig.model_fields[name].default == field.default
        assert name in (plan_packs.__doc__ or "")
    config = PackConfig(strategy="best_fit_decreasing", pad_multiple=4, homogeneous=True)
    options = config.model_dump(include=set(PlanOptions.model_fields))
    plan = plan_packs(np.array([3, 4, 5]), groups=np.zeros(3, int), **options)
    assert (plan.info.strategy, plan.info.pad_multiple) == ("best_fit_decreasing", 4)
    assert plan.info.settings["homogeneous"]


def test_the_signature_shows_plain_types() -> None:
    shown = inspect.signature(plan_packs).parameters
    assert (shown["seq_length"].annotation, shown["window_packs"].annotation) == (int, int)
    assert "Annotated" not in str(inspect.signature(plan_packs))
