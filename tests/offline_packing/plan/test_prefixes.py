"""Samples that share a prefix: which do, the trees that they form, and plans of trees."""

import itertools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from offline_packing.errors import ConfigError, StageError
from offline_packing.index import table as index
from offline_packing.index.records import record_numbers
from offline_packing.index.rows import Prefixes, of_uses, sample_flops
from offline_packing.index.table import INDEX_SCHEMA, Index, IndexInfo, key_hash
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan, plan
from offline_packing.plan.prefixes import form_trees, group_samples
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import Column, Table
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.figures import as_values, run_figures
from offline_packing.runs.run import Run
from task_encoders.families import model_cost
from tests.helpers.datasets import dialogue, make_run, plan_index, plan_summary
from tests.helpers.formats import lines, write_file
from tests.helpers.shared_media import MODEL, shared_media
from tests.helpers.sizes import as_lists

SEQ_LENGTH = 100


def drawn_uses(
    rng: np.random.Generator, repeated: bool, cut: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Ids of uses round by round, the group of each, and the numbers of their records."""
    num_samples = int(rng.integers(1, 60))
    kept = np.flatnonzero(rng.random(num_samples) < 0.9)
    groups = rng.integers(-1, max(1, num_samples // int(rng.integers(2, 9))), num_samples)
    rounds = [kept]
    while repeated and len(rounds[-1]):
        rounds.append(rounds[-1][rng.random(len(rounds[-1])) < 0.5])
    ids = np.concatenate(rounds)
    records = np.arange(num_samples)
    if cut:
        records = np.cumsum(rng.random(num_samples) < 0.5)
    return ids, groups[ids], records[ids] if repeated or cut else None


def drawn_table(
    rng: np.random.Generator, ids: np.ndarray, groups: np.ndarray, records: np.ndarray | None
) -> Table:
    """Columns of uses, with what their prefixes have of them."""
    of_group = rng.integers(0, [[50], [5], [9]], (3, int(groups.max(initial=0)) + 2))[:, groups]
    own = rng.integers(1, [[30], [3], [20]], (3, int(ids.max(initial=0)) + 1))[:, ids]
    tokens, images, amount = (
        Column(whole, "sum", shared) for whole, shared in zip(of_group + own, of_group, strict=True)
    )
    budgets = {"images": (images, 9)}
    if rng.random() < 0.5:
        ones = np.ones(len(ids), np.int32)
        budgets["samples"] = Column(ones, "sum", 0 * ones), int(rng.integers(1, 9))
    cost = Column(amount.values.astype(np.float64), "sum", amount.of_prefix)
    columns = {"cost": cost, "features[0]": amount, "source_order": Column(ids, "first")}
    if records is not None:
        columns["copy_of"] = Column(records, "joined")
    return Table(tokens, budgets, columns)


def slow_trees(
    ids: np.ndarray, groups: np.ndarray, table: Table, longest: int, most: int
) -> list[list[int]]:
    """The uses of each tree, one after the other."""
    records = table.columns.get("copy_of", Column(ids)).values
    limits = [longest, *(limit for _, limit in table.budgets.values())]

    def fits(uses: list[int]) -> bool:
        return all(
            sum(one.values[uses]) - sum(one.of_prefix[uses[1:]]) <= limit  # type: ignore[index]
            for one, limit in zip(table.sized(), limits, strict=True)
        )

    def adds(use: int) -> int:
        return int(table.num_tokens.values[use] - table.num_tokens.of_prefix[use])  # type: ignore[index]

    firsts: dict[int, int] = {}
    for use, sample in enumerate(ids.tolist()):
        firsts.setdefault(sample, use)
    by_group = defaultdict[int, list[int]](list)
    for use in firsts.values():
        if groups[use] >= 0 and fits([use]):
            by_group[int(groups[use])].append(use)
    of_record = defaultdict[int, list[int]](list)
    for use in sorted(use for members in by_group.values() for use in members):
        of_record[int(records[use])].append(use)
    chunks: list[list[int]] = []
    for group in sorted(by_group):
        # the records that are in this group only, in stretches: in each the first parts, the second
        own = [uses for uses in of_record.values() if {*groups[uses]} == {group}]
        for start in range(0, len(own), 8 * most):
            some = sorted(own[start : start + 8 * most], key=lambda uses: -max(map(adds, uses)))
            for parts in itertools.zip_longest(*some):
                opened: list[list[int]] = []
                for use in (part for part in parts if part is not None):
                    room = (one for one in opened if len(one) < most and fits([*one, use]))
                    if (chunk := next(room, None)) is None:
                        opened.append(chunk := [])
                    chunk.append(use)
                chunks += opened
    chunk_of = {int(ids[use]): i for i, chunk in enumerate(chunks) for use in chunk}
    made: dict[Any, list[int]] = {}
    rounds = Counter[int]()
    for use, sample in enumerate(ids.tolist()):
        key = ("alone", use) if sample not in chunk_of else (chunk_of[sample], rounds[sample])
        made.setdefault(key, []).append(use)
        rounds[sample] += 1
    return list(made.values())


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), repeated=st.booleans(), cut=st.booleans())
def test_trees_are_those_of_slow_code(seed: int, repeated: bool, cut: bool) -> None:
    rng = np.random.default_rng(seed)
    ids, groups, records = drawn_uses(rng, repeated, cut)
    table, multiple = drawn_table(rng, ids, groups, records), int(rng.choice([1, 8]))
    most, longest = int(rng.integers(2, 6)), SEQ_LENGTH // multiple * multiple
    trees = form_trees(ids, groups, table, longest, most)
    found = as_lists(trees.uses)
    assert found == slow_trees(ids, groups, table, longest, most)
    made = trees.table.columns
    sums = [*zip(table.sized(), trees.table.sized(), strict=True)]
    sums += [(table.columns[name], made[name]) for name in ("cost", "features[0]")]
    for number, uses in enumerate(found):
        for own, column in sums:
            whole, shared = own.values[uses], own.of_prefix[uses[1:]]  # type: ignore[index]
            assert column.values[number] == whole.sum() - shared.sum()
        assert made["source_order"].values[number] == ids[uses[0]]
    if records is not None:
        labels = made["copy_of"].values
        for one, other in itertools.combinations(range(len(found)), 2):
            if {*records[found[one]]} & {*records[found[other]]}:
                assert labels[one] == labels[other]


def test_a_column_without_a_rule_is_refused() -> None:
    """A new column never falls into a sum, or the first sample's, silently."""
    values = np.array([3, 4, 5])
    table = Table(Column(values, "sum", values - 2), {}, {"turns": Column(values)})
    with pytest.raises(ValueError, match="column turns does not say what a tree has of it"):
        form_trees(np.arange(3), np.zeros(3, int), table, 50, 2)


# Plans of an index, under all options.

NUM_SAMPLES = 400
RANKS = {"num_ranks": 2, "num_workers": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "order": {"pack": {"order": RANKS}},
    "uniform": {"pack": {"order": {**RANKS, "uniform": True}}},
    "homogeneous": {"pack": {"homogeneous": True}},
    "locality": {"pack": {"assignment": "locality"}, "output": {"packs_per_shard": 4}},
    "budgets": {"pack": {"budgets": {"images": 5, "vision_patches": 300, "videos": 3}}},
    "max_samples": {"pack": {"max_samples": 11}},
    "repeat": {"a": {"repeat": 2.3}},
    "weight": {"a": {"weight": 3}, "b": {"weight": 1}},
    "mixed": {"pack": {"strategy": "mixed"}},
    "splits": {"output": {"split": {"train": 0.7, "val": 0.3}}},
    "split_turns": {"pack": {"on_overlong": "split_turns"}},
    "pad_multiple": {"pack": {"pad_multiple": 16}},
    "best_fit": {"pack": {"strategy": "best_fit_decreasing"}},
    "first_fit": {"pack": {"strategy": "first_fit_shuffle"}},
}


def jsonl(folder: Path, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two sources that are never read, with options of each."""
    sources = [
        {"format": "jsonl", "path": f"{folder}/{name}.jsonl", "task": "bmr", **own}
        for name, own in zip("ab", options, strict=True)
    ]
    for source in sources:
        write_file(Path(source["path"]), b"{}\n")
    return sources


def write_index(folder: Path, rows: list[dict[str, Any]], cut: bool = False) -> Index:
    """Write samples with a few columns each as an index; `cut`: by on_overlong=split_turns."""
    empty = dict.fromkeys(INDEX_SCHEMA.names, 0) | dict.fromkeys(("part", "kept", "unfit"))
    empty |= {"task": "bmr", "json": {"size": 1}, "media": []}
    with index.table_writer(folder / "part-00000.parquet", INDEX_SCHEMA) as write:
        write(pa.Table.from_pylist([empty | row for row in rows], INDEX_SCHEMA))
    split = {"conversations": 1, "samples": 2} if cut else {}
    return Index(folder, IndexInfo({}, {}, [len(rows)], {}, split=split))


def run_with(folder: Path, *names: str, shared: Any = True) -> Run:
    """A run over two sources, under some of OPTIONS. Raises ConfigError where they contradict each
    other."""
    sections: dict[str, dict[str, Any]] = {"pack": {"seq_length": 300}, "output": {}}
    sections |= {"a": {}, "b": {}}  # the sources
    for name in names:
        for section, content in OPTIONS[name].items():
            sections[section] |= content
    if shared is not None:
        sections["pack"]["share_prefixes"] = shared
    sources = jsonl(folder, sections.pop("a"), sections.pop("b"))
    return make_run(sources, folder / "out", **sections)


def make_index(folder: Path, cut: bool, seed: int = 0) -> Index:
    """An index of questions about images and videos, some about two, a few with one more picture
    of their own; texts; and, if `cut`, records in several parts."""
    rng = np.random.default_rng(seed)
    grids, rows = [(1, 2, 2 + i % 5) for i in range(60)], list[dict[str, Any]]()
    record = medium = -1
    for i in range(NUM_SAMPLES):
        is_new = rng.random() < 0.6 or not cut or not rows
        record = i if is_new else record
        if is_new or rng.random() < 0.2:  # most parts of a record show its picture
            medium = int(rng.integers(60)) if rng.random() < 0.85 else -1
        leading = [] if medium < 0 else [medium, medium + 1][: 1 + medium % 2]
        is_video = medium % 7 == 0 and medium >= 0
        others = [] if rng.random() < 0.9 or not leading else [int(rng.integers(60))]
        shown = [*others, *leading] if is_video else [*leading, *others]  # images, then videos
        own = 5 + int(rng.integers(60)) + 12 * len(others) + (300 if rng.random() < 0.02 else 0)
        prefix = 15 * len(leading) + medium % 20 if leading else 0
        sizes = [grids[one % 60] for one in shown]
        videos, first = len(leading) * is_video, i - record
        row = {"key": f"k{i}", "source_id": int(i >= 150), "num_turns": 1}
        row |= dict.fromkeys(("key_hash", "sample_hash"), record + 1)
        row |= {"num_tokens": prefix + own, "num_loss_tokens": own // 2, "prefix_tokens": prefix}
        row |= {"num_vision_patches": sum(int(np.prod(size)) for size in sizes)}
        row |= {"num_images": len(shown) - videos, "num_videos": videos, "prefix_videos": videos}
        row |= {"prefix_images": len(leading) - videos}
        row |= dict.fromkeys(("prefix_hash", "prefix_media"), medium + 1)
        row |= {"grid_thw": [int(n) for size in sizes for n in size]}
        row |= {"media_hash": [one + 1 for one in shown]}
        rows.append(row | ({"part": {"first": first, "end": first + 1}} if cut else {}))
    return write_index(folder, rows, cut)


def check_trees(run: Run, samples: Index, packs: PackPlan) -> None:
    """Every pack holds what it may, counted sample by sample."""
    pack = run.config.pack
    assert packs.branches is not None
    assert pack.share_prefixes is not None
    rows, records = samples.table().to_pylist(), record_numbers(samples)
    limits = {"tokens": pack.seq_length, **pack.budgets}
    apart = bool(samples.info.split) or packs.copy_numbers() is not None
    total, in_trees = 0, 0
    for begin, end in itertools.pairwise(packs.pack_offsets.tolist()):
        ids = packs.sample_ids[begin:end].tolist()
        held, padded, tree, trunk = Counter[str](), 0, 0, 0
        for place, sample in enumerate(ids, begin):
            row = rows[sample]
            sizes = {name: row[f"num_{name}"] for name in limits}
            if packs.branches[place]:
                before = rows[packs.sample_ids[place - 1]]
                assert place > begin
                assert row["prefix_hash"] == before["prefix_hash"] > 0
                kinds = [(one["num_images"] > 0, one["num_videos"] > 0) for one in (row, before)]
                assert kinds[0] == kinds[1]
                grid = row["grid_thw"]
                videos = grid[3 * row["num_images"] :][: 3 * row["prefix_videos"]]
                leading = [*grid[: 3 * row["prefix_images"]], *videos]
                patches = np.reshape(leading, (-1, 3)).prod(axis=1).sum()
                less = {**row, "prefix_vision_patches": int(patches)}
                sizes = {name: size - less[f"prefix_{name}"] for name, size in sizes.items()}
                trunk, in_trees = trunk + 1, in_trees + 1
                assert trunk < pack.share_prefixes.max_branches
            else:
                padded += -(-tree // pack.padding) * pack.padding
                tree = trunk = 0
            tree += sizes["tokens"]
            held.update(sizes)
        padded += -(-tree // pack.padding) * pack.padding
        assert padded <= pack.seq_length
        assert all(held[name] <= limit for name, limit in limits.items())
        assert len(ids) <= (pack.max_samples or len(ids))
        assert not apart or len({*records[ids].tolist()}) == len(ids)
        assert not pack.homogeneous or len({not rows[i]["media_hash"] for i in ids}) == 1
        total += padded
    assert total == packs.info.num_tokens
    assert in_trees > 50
    assert len(packs.sample_ids) - len({*packs.sample_ids.tolist()}) == packs.info.num_copies


BY_TOKENS = ("order", "uniform", "budgets", "max_samples", "mixed", "best_fit", "first_fit")
#: Options that contradict each other, with trees and without.
APART = {
    *itertools.product(["locality"], BY_TOKENS),
    *itertools.product(["budgets", "max_samples"], ["mixed", "best_fit"]),
    ("repeat", "weight"),
}
PAIRS = itertools.combinations(OPTIONS, 2)


@pytest.mark.parametrize(
    "names",
    [*zip(OPTIONS), *(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in PAIRS)],
    ids="-".join,
)
def test_options_with_trees(names: tuple[str, ...], tmp_path: Path) -> None:
    """The plan with trees keeps the options, alone and in pairs, and that without trees uses the
    same samples in more packs."""
    if {names, names[::-1]} & APART:
        for shared in (None, True):
            with pytest.raises(ConfigError, match=r"cannot keep|a weight and a repeat"):
                run_with(tmp_path, *names, shared=shared)
        return
    run, plain = (run_with(tmp_path, *names, shared=own) for own in ({"max_branches": 7}, None))
    samples = make_index(tmp_path, "split_turns" in names)
    made, without = (make_plan(one, samples) for one in (run, plain))
    assert made.set_aside.reasons == without.set_aside.reasons
    uses = [Counter(one.packs.sample_ids.tolist()) for one in (made, without)]
    differ = {"uniform", "weight"} & {*names}  # weights are shares of the tokens in rows
    assert uses[0] == uses[1] or (differ and uses[0].keys() == uses[1].keys())
    assert made.packs.info.settings.keys() == without.packs.info.settings.keys()
    assert made.packs.info.num_tokens < 0.9 * without.packs.info.num_tokens
    assert made.packs.info.reason_names == without.packs.info.reason_names
    check_trees(run, samples, made.packs)


def test_repeated_pictures_are_told(tmp_path: Path) -> None:
    """The estimate for 300 questions on 45 pictures is near the plan with shared prefixes."""
    pattern = r"repeated media +(.*) distinct pictures in (.*) samples; .* need about (.*) packs\n"
    source = shared_media(tmp_path / "data", (300, 0, 10), (45, 0), sides=(168, 224))
    sections: Any = {"model": MODEL, "output": {"media": "refer"}}
    sections["engine"] = {"samples_per_part": 1000}

    def told(**pack: Any) -> tuple[list[int], int]:
        """Return the numbers of the line, if there is one, and the packs of the plan."""
        run = make_run(source, tmp_path / "out", pack={"seq_length": 2048, **pack}, **sections)
        packs = plan(run, measure(run)).packs
        match = re.search(pattern, plan_summary(run))
        return [int(one) for one in (match.groups() if match else ())], packs.num_packs

    for pack in ({}, {"max_samples": 60, "pad_multiple": 16}):
        (pictures, samples, estimate), packs = told(**pack)
        again, needed = told(share_prefixes=True, **pack)
        assert (pictures, samples, again) == (45, 300, [])
        assert estimate == pytest.approx(needed, rel=0.1)
        assert needed < 0.8 * packs
    for pack in ({"max_samples": 12}, {"strategy": "sequential"}):
        assert told(**pack)[0] == []


def test_operations_of_prefixes(tmp_path: Path) -> None:
    """A prefix that is the whole sample costs what the sample costs."""
    samples = make_index(tmp_path, False)
    cost = model_cost(run_with(tmp_path).config.model)
    whole, _ = sample_flops(samples, cost)
    prefix, language = sample_flops(Prefixes(samples), cost)
    rows = samples.table().to_pylist()
    alone = [len(row["media_hash"]) == row["prefix_images"] + row["prefix_videos"] for row in rows]
    assert 0 < sum(alone) < len(alone)
    assert np.array_equal(whole[alone], prefix[alone])
    shows = np.array([bool(row["media_hash"]) for row in rows])
    assert (whole > prefix)[~np.array(alone) & shows].all()
    expected = cost.language_flops(samples.array("prefix_tokens"))
    assert np.allclose(language, expected, rtol=1e-6)
    assert not Prefixes(samples).array("num_loss_tokens").any()


# Which media are the same.


def bitmap(path: Path, shade: int = 0, last: int = 0) -> str:
    """An uncompressed picture, 37 KB of which only the end depends on `last`."""
    pixels = np.full((112, 112, 3), shade, np.uint8)
    pixels[0, -1] = last  # stored from the bottom
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "BMP")
    return path.name


def question(number: int, name: str, before: str = "") -> dict[str, Any]:
    messages = dialogue(f"{before}<image>\nWhat is {number}?", f"It is {number}.")
    return {"id": f"q{number}", "messages": messages, "images": [name]}


def asked(folder: Path, records: list[dict[str, Any]], **sections: Any) -> tuple[Run, Index]:
    write_file(folder / "source" / "r.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(folder / "source" / "r.jsonl"), "task": "bmr"}
    sections["pack"] = {"share_prefixes": True, **sections.get("pack", {})}
    run = make_run(source, folder / "out", **sections)
    return run, measure(run)


def partition(run: Run, samples: Index) -> list[list[str]]:
    """Keys of the samples of each group of several."""
    groups = defaultdict(list)
    for key, group in zip(
        samples.table("key")["key"].to_pylist(), group_samples(run, samples).tolist(), strict=True
    ):
        groups[group if group >= 0 else key].append(key)
    return sorted(keys for keys in groups.values() if len(keys) > 1)


def test_files_are_read_only_where_they_may_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost file is an error only then."""
    source = tmp_path / "source"
    for i, shade in enumerate([0, 1, 0]):
        bitmap(source / f"{i}.bmp", shade=shade)
    run, samples = asked(tmp_path, [question(i, f"{i % 3}.bmp") for i in range(6)])
    assert partition(run, samples) == [["q0", "q2", "q3", "q5"], ["q1", "q4"]]
    (source / "1.bmp").unlink()
    assert len(partition(run, samples)) == 2
    (source / "2.bmp").unlink()
    with pytest.raises(StageError, match=r"2\.bmp"):
        group_samples(run, samples)
    monkeypatch.setattr("offline_packing.plan.prefixes.MediaRoot", int)  # as if it were remote
    assert partition(run, samples) == [["q0", "q3"], ["q1", "q4"], ["q2", "q5"]]


def test_pictures_in_tables_and_in_files(tmp_path: Path) -> None:
    """Measuring holds the bytes of pictures in tables only; two pictures differ where the sampled
    hash does not read, and each is in several files."""
    source = tmp_path / "source"
    files = [source / bitmap(source / f"{i}.bmp", last=i % 2) for i in range(4)]
    assert len({file.read_bytes()[:16384] for file in files}) == 1
    write_file(source / "r.jsonl", lines([question(i, f"{i}.bmp") for i in range(4)]))
    rows = [question(i, "") | {"id": f"t{i}"} for i in range(3)]
    for row, file in zip(rows, files, strict=False):
        row["images"] = [{"bytes": file.read_bytes(), "path": file.name}]
    (tmp_path / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table" / "t.parquet")
    sources = [
        {"format": "jsonl", "path": str(source / "r.jsonl"), "task": "bmr", "name": "a"},
        {"format": "parquet", "path": str(tmp_path / "table"), "task": "bmr", "name": "b"},
    ]
    run = make_run(sources, tmp_path / "out", pack={"share_prefixes": True})
    found = partition(run, samples := measure(run))
    assert len({*samples.array("prefix_hash").tolist()}) == 1
    assert found == [["a/q0", "a/q2", "b/t0", "b/t2"], ["a/q1", "a/q3", "b/t1"]]


def held_shares(samples: Index, packs: PackPlan, own: range, count: int) -> list[float]:
    """The first source's share of the tokens that rows hold, in stretches of some packs."""
    tokens = of_uses(samples, packs, lambda index: index.array("num_tokens"))
    is_first = samples.array("source_id")[packs.sample_ids] == 0
    ends = packs.pack_offsets[own.start + np.arange(count + 1) * len(own) // count]
    parts = itertools.starmap(slice, itertools.pairwise(ends.tolist()))
    return [tokens[part][is_first[part]].sum() / tokens[part].sum() for part in parts]


SPLIT = {"split": {"train": 0.7, "val": 0.3}}
MIXTURE = {"start": {"a": 0.8, "b": 0.2}, "end": {"a": 0.2, "b": 0.8}}


@pytest.mark.parametrize(
    ("mixture", "shares"), [(None, [0.5]), (MIXTURE, [0.74, 0.62, 0.5, 0.38, 0.26])]
)
def test_shares_are_of_the_tokens_that_rows_hold(
    mixture: Any, shares: list[float], tmp_path: Path
) -> None:
    """Of weights, and of a mixture in each fifth of a split's packs: two sources have two and eight
    questions on each of 600 pictures."""
    rng, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for i in range(6000):
        medium, tokens = 1 + i % 600, int(rng.integers(10, 40))
        row = {"key": f"k{i}", "key_hash": key_hash(0, f"k{i}"), "sample_hash": i + 1}
        row |= dict.fromkeys(("prefix_hash", "prefix_media"), medium) | {"prefix_images": 1}
        row |= {"num_tokens": 60 + tokens, "prefix_tokens": 60, "num_loss_tokens": tokens}
        row |= {"source_id": int(i >= 1200), "num_images": 1, "grid_thw": [1, 2, 2]}
        rows.append(row | {"media_hash": [medium]})
    samples, weight = write_index(tmp_path, rows), {} if mixture else {"weight": 1}
    pack = {"share_prefixes": True, "seq_length": 1024} | ({"mixture": mixture} if mixture else {})
    run = make_run(jsonl(tmp_path, weight, weight), tmp_path, pack=pack, output=SPLIT)
    packs = make_plan(run, samples).packs
    for own in splits_of_plan(packs, run.config.output.split).values():
        found = held_shares(samples, packs, own, len(shares))
        assert found == pytest.approx(shares, abs=0.03 if mixture else 0.02)
    # Trees hold samples of one source, and all of a tree are used equally often.
    assert packs.branches is not None
    uses = np.bincount(packs.sample_ids)[packs.sample_ids]
    kinds = np.stack([samples.array("source_id")[packs.sample_ids], uses])
    is_branch = packs.branches[1:] == 1
    assert (kinds[:, 1:] == kinds[:, :-1])[:, is_branch].all()
    figures = as_values(run_figures(run.config, samples, packs, {}))
    name = run.config.source_names()[0]
    if mixture:
        train = next(iter(splits_of_plan(packs, run.config.output.split).values()))
        held = held_shares(samples, packs, train, min(10, len(train)))
        assert [one[name] for one in figures["mixture"]["rows"]] == pytest.approx(held)
    else:
        whole = held_shares(samples, packs, range(packs.num_packs), 1)[0]
        found = [one["share"] for one in figures["sources"]["rows"]]
        assert found == pytest.approx([whole, 1 - whole])


# The plan's files, figures and refusals.


def test_plan_on_disk_and_its_figures(tmp_path: Path) -> None:
    names = [bitmap(tmp_path / "source" / f"{i}.bmp", shade=i) for i in range(4)]
    records = [question(i, names[i % 4]) for i in range(40)]
    records += [question(100 + i, names[0], before=f"In {i}: ") for i in range(3)]
    run, samples = asked(tmp_path, records)
    made = plan_index(run)
    whole = int(samples.array("num_tokens").sum())
    held = whole - int(samples.array("prefix_tokens")[:40].sum()) // 40 * 36
    loaded = open_plan(run)
    assert np.array_equal(loaded.packs.branches, made.packs.branches)  # type: ignore[arg-type]
    assert loaded.hash.count("-") == 2
    assert loaded.packs.info.num_tokens == held
    summary = " ".join(plan_summary(run).split())
    assert "shared prefixes trees 4 trees of 40 samples" in summary
    assert f"tokens {whole:,} -> {held:,} images and videos 43 -> 7" in summary
    assert "3 of 43 samples show images or videos of other samples" in summary
    each = [f"{43 / count:.1f}" for count in (-(-whole // 512), loaded.packs.num_packs)]
    assert f"samples per pack {' -> '.join(each)}" in summary
    assert f"fill {held / (512 * loaded.packs.num_packs):.2%}" in summary
    report(run)
    assert "Shared prefixes" in (run.workspace.report / "report.html").read_text()
    found = json.loads((run.workspace.report / "report.json").read_text())["figures"]
    assert found["work per pack"]["rows"][0]["max"] <= 512
    # Another number of branches is another plan.
    other, _ = asked(tmp_path, records, pack={"share_prefixes": {"max_branches": 5}})
    assert plan(other, samples).hash != made.hash


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pack": {"context_parallel": 2}}, r"share_prefixes and context_parallel cannot"),
        ({"output": {"layout": "llava_onevision"}}, r"layout='llava_onevision' .*choose energon"),
        ({"pack": {"strategy": "sequential"}}, r"strategy sequential cannot be combined"),
        ({"pack": {"share_prefixes": {"max_branches": 1}}}, r"max_branches"),
        ({"model": {}, "pack": {"seq_length": 600}}, r"depend on the length"),
    ],
)
def test_refused_by_name(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    text = {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    if "model" in sections:
        processor = {"processor": str(tmp_path), "min_pixels": 3136}
        sections = {**sections, "model": {**sections["model"], **processor}}
    pack = {"share_prefixes": True, **sections.get("pack", {})}
    (tmp_path / "source").mkdir()
    with pytest.raises(ConfigError, match=message):
        make_run(tmp_path / "source", tmp_path / "out", **{**sections, "pack": pack})
    del pack["share_prefixes"]
    plain = make_run(tmp_path / "source", tmp_path / "out", **{**sections, "pack": pack})
    assert plain.config.may_share_prefixes == (message == "max_branches")
