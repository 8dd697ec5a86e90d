"""The report: its figures against an independent count, its bytes, its page, every state."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.report.report import report, report_status
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.upkeep.status import status
from task_encoders.families.qwen2_vl import QWEN2_VL
from task_encoders.samples import REASONS
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    index_rows,
    make_run,
    mixed_pairs,
    packed_run,
    plan_index,
    plan_summary,
    write_json,
    write_planned,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.pages import HOSTILE, Elements
from tests.scenarios import two
from tests.world import Source, World, copy_of


def with_faults(folder: Path) -> Source:
    """Write dialogues: two that cannot be parsed, one too long for 512 tokens, one for 1,024."""
    mixed_pairs(folder)
    (folder / "broken.json").write_text("{")
    (folder / "worse.json").write_text("[1")
    write_json(folder / "output_00000900.json", {"messages": dialogue("Write.", "word " * 600)})
    write_json(folder / "output_00000901.json", {"messages": dialogue("Write.", "word " * 1500)})
    return {"format": "pairs", "path": str(folder), "task": "bmr"}


OUTPUT = {"split": {"train": 0.8, "val": 0.2}, "split_seed": 5, "key_prefix": "a_"}


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = world.run(with_faults, output=OUTPUT, report={"padded_batch_size": 4})
    return copy_of(made, tmp_path_factory.mktemp("report") / "out")


def read_document(run: Run) -> dict[str, Any]:
    report(run)
    return json.loads((run.workspace.report / "report.json").read_text())  # type: ignore[no-any-return]


def read_report(run: Run) -> dict[str, Any]:
    """Return the figures of a new report by section."""
    return read_document(run)["figures"]  # type: ignore[no-any-return]


def read_page(run: Run) -> str:
    return (run.workspace.report / "report.html").read_text("utf-8")


def packs_of(run: Run) -> list[list[dict[str, Any]]]:
    """The rows of the index that each pack holds."""
    rows, packs = index_rows(run), PackPlan.load(run.workspace.plan)
    return [[rows[i] for i in packs.pack(number)] for number in range(packs.num_packs)]


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def test_counts_agree_with_the_manifest(run: Run) -> None:
    found = read_report(run)
    manifest = json.loads(run.workspace.manifest.read_text())
    counts, packs = manifest["counts"], found["packs"]
    assert found["samples"]["found"] == counts["samples"]
    assert packs["packed samples"] == counts["packed"] > 0
    assert (packs["packs"], packs["tokens"]) == (sum(counts["packs"].values()), counts["tokens"])
    assert found["samples"]["set aside"] == sum(counts["set_aside"].values()) > 0
    rows = found["set aside"].pop("rows")
    assert found["set aside"] == counts["set_aside"]
    assert {row["reason"] for row in rows} == counts["set_aside"].keys()
    assert all(REASONS[reason] in read_page(run) for reason in counts["set_aside"])
    assert len(found["shards"]["rows"]) == 2
    for line in found["shards"]["rows"]:
        own = [shard for shard in manifest["shards"] if shard["split"] == line["split"]]
        assert line["packs"] == counts["packs"][line["split"]]
        assert line["bytes"] == sum(shard["bytes"] for shard in own)
        assert line["fewest packs"] == min(shard["packs"] for shard in own)
        assert line["most bytes"] == max(shard["bytes"] for shard in own)
    padded, *_, packed = found["saving"]["rows"]
    assert re.search(rf"fill +{packs['fill']:.2%}\n", plan_summary(run))
    assert padded["an epoch of"].endswith(" padded to their longest")
    assert packed["empty"] == pytest.approx(1 - packs["fill"])
    most = packs["fill"] * packs["packs"] / (packs["packs"] - 1)  # a split may take a pack more
    for size in ("100", "1,000"):
        assert 0.3 < found["saving"][f"fill by buffers of {size}"] <= most + 1e-9


def test_packs_are_summed_up(run: Run) -> None:
    found, packs = read_report(run), packs_of(run)
    per_pack = {
        "tokens": [sum(row["num_tokens"] for row in pack) for pack in packs],
        "sum of": [sum(row["num_tokens"] ** 2 for row in pack) for pack in packs],
        "vision": [sum(row["num_vision_patches"] for row in pack) for pack in packs],
        "images": [sum(row["num_images"] for row in pack) for pack in packs],
        "samples": [len(pack) for pack in packs],
        "10⁹": [sum(cost_of(row) for row in pack) / 1e9 for pack in packs],
    }
    rows = found["work per pack"]["rows"]
    for (name, values), spread in zip(per_pack.items(), rows, strict=True):
        assert spread["a pack has"].startswith(name)
        assert spread["mean"] == pytest.approx(sum(values) / len(values)), name
        for point, share in {"min": 0, "p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1}.items():
            assert spread[point] == pytest.approx(nearest_rank(values, share)), (name, point)
    check_bars(found["packs by tokens"], per_pack["tokens"])
    assert found["packs by tokens"]["edges"][-2:] == [511, 512]
    one, two = found["ranks"]["idle"]
    assert 0 <= one <= two < 1


def check_bars(bars: dict[str, Any], values: list[Any]) -> None:
    """Check the counts of a histogram, which leaves out no value."""
    edges = bars["edges"]
    for count, low, high in zip(bars["counts"], edges, edges[1:], strict=False):
        assert count == sum(low < value <= high for value in values)
    assert sum(bars["counts"]) == len(values)


def cost_of(row: dict[str, Any]) -> float:
    pictures = np.array(row["grid_thw"]).reshape(-1, 3).prod(1)  # images, of one step in time
    cost = QWEN2_VL.cost
    return float(cost.language_flops(row["num_tokens"]) + cost.tower_flops(pictures).sum())


def test_lengths_loss_and_overlong(run: Run) -> None:
    found, lengths = read_report(run), [row["num_tokens"] for row in index_rows(run)]
    histogram = found["samples by tokens"]
    check_bars(histogram, lengths)
    assert histogram["spread"]["p50"] == nearest_rank(lengths, 0.5)
    assert histogram["spread"]["max"] == max(lengths)
    loss = sum(row["num_loss_tokens"] for pack in packs_of(run) for row in pack)
    assert found["contents"]["tokens with loss"] == loss
    overlong = [length for length in lengths if length > 512]
    saved = found["too long for a sequence"]
    assert saved["samples"] == len(overlong)
    kept = {row.pop("with seq_length"): row for row in saved["rows"]}
    assert {length: row["samples kept"] for length, row in kept.items()} == {1024: 1, 2048: 2}
    share = min(overlong) / sum(overlong)
    assert kept[1024] == {"samples kept": 1, "tokens": min(overlong), "of what is lost": share}


def test_examples_and_drawn_packs(run: Run) -> None:
    found, packs = read_document(run), packs_of(run)
    broken = [row for row in found["figures"]["set aside"]["rows"] if row["reason"] == "bad_json"]
    assert {row["for example"] for row in broken} == {"broken", "worse"}
    assert all(row["detail"] for row in broken)
    assert len(found["drawn"]) == min(24, len(packs))
    for pack in found["drawn"]:
        rows = packs[int(pack["key"].removeprefix("a_ps_"))]
        assert pack["keys"] == [row["key"] for row in rows]
        assert pack["tokens"] == [row["num_tokens"] for row in rows]


def half_drawn(folder: Path) -> Source:
    """Write two sources, of which the name of one begins with that of the other."""
    first, second = two(folder)
    return [{**first, "name": "x", "repeat": 2}, {**second, "name": "x/y", "repeat": 0.5}]


def test_several_sources(world: World, tmp_path: Path) -> None:
    run = copy_of(world.run(half_drawn), tmp_path / "out")
    figures, rows = read_report(run), index_rows(run)
    found = figures["sources"]["rows"]
    uses = [rows[i] for i in PackPlan.load(run.workspace.plan).sample_ids.tolist()]
    for i, one in enumerate(found):
        own = [row for row in uses if row["source_id"] == i]
        different = len({row["key"] for row in own})
        assert one["tokens"] == sum(row["num_tokens"] for row in own)
        assert one["images"] == sum(row["num_images"] for row in own)
        places = [place for row in own for place in (row["json"], *row["media"])]
        assert one["bytes"] == sum(place["size"] for place in places)
        assert (one["samples"], one["times used"]) == (different, len(own) / different)
    assert [one["times used"] for one in found] == [2, 1]
    assert [row["samples"] for row in figures["set aside by source"]["rows"]] == [4]
    assert sum(one["share"] for one in found) == pytest.approx(1)


def test_text_of_a_dataset_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "data/a.jsonl"
    records = [{"id": f"{HOSTILE}{i}", "caption": HOSTILE} for i in range(9)]
    records += [{"id": f"{HOSTILE}\x1b[2J$title", "caption": " "}]
    write_file(path, lines(records))
    source = {"format": "jsonl", "path": str(path), "task": "captioning", "name": HOSTILE}
    run = packed_run(source, tmp_path / "out")
    report(run)
    page = read_page(run)
    elements = Elements(page)
    assert elements.names["script"] == elements.names["img"] == elements.names["link"] == 0
    assert elements.names["rect"] > 10
    assert HOSTILE in elements.text
    assert "$title" in elements.text
    assert "\x1b" not in page
    for name, value in elements.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href"), value
    assert not re.search(r"url\(|@import", page)


def test_every_state(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 20)
    (root / "broken.json").write_text("{")
    run = make_run(root, tmp_path / "out")
    with pytest.raises(StageError, match=r"no complete index in .*; run measure first"):
        report(run)
    assert report_status(run, None) is None
    measure(run)
    line = report(run)
    assert line == "21 samples = 20 measured + 1 set aside; no packs yet: run plan"
    found = read_report(run)
    assert found.keys().isdisjoint(("packs", "saving", "shards", "work per pack"))
    assert found["samples"] == {"task": "captioning", "model": "pil", "found": 21, "set aside": 1}
    assert found["sources"]["rows"][0]["tokens"] == open_index(run).info.num_tokens
    assert "Samples by tokens" in read_page(run)
    plan_index(run)
    assert "out of date: run report again" in status(run)
    assert "not written yet: run write" in report(run)
    assert "out of date" not in status(run)
    assert "Work per pack" in read_page(run)
    assert "Shards" not in read_page(run)
    write_planned(run)
    assert "out of date" in status(run)
    line = report(run)
    assert "run write" not in line
    assert "Shards" in read_page(run)
    page = run.workspace.report / "report.html"
    other = make_run(root, tmp_path / "out", report={"global_batch_size": 9})
    content = page.read_bytes()
    for damaged, now in ((page, run), (page.with_name("report.json"), run), (None, other)):
        if damaged is not None:
            damaged.write_bytes(damaged.read_bytes()[:-9])
        before = page.stat().st_mtime_ns
        assert report(now, again=False) == line
        after = page.stat().st_mtime_ns
        assert report(now, again=False) == line
        assert before < after == page.stat().st_mtime_ns
    assert report(run) == line
    assert page.read_bytes() == content
    changed = make_run(root, tmp_path / "out", pack={"seed": 1})
    with pytest.raises(StageError, match=r"the plan in .* cannot be used: pack\.seed"):
        report(changed)


def test_nothing_to_pack(tmp_path: Path) -> None:
    for i in range(7):
        write_file(tmp_path / f"data/{i}.json", b"{")
    run = make_run(tmp_path / "data", tmp_path / "out")
    measure(run)
    assert report(run).startswith("7 samples = 0 measured + 7 set aside")
    found = read_report(run)
    assert "samples by tokens" not in found
    assert len(found["set aside"].pop("rows")) == 5
    assert found["set aside"] == {"bad_json": 7}
