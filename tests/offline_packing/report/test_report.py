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
    write_json,
    write_planned,
)
from tests.helpers.elements import HOSTILE, Elements
from tests.helpers.formats import lines, write_file
from tests.scenarios import two
from tests.world import MakeSource, Source, World, copy_of


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


def read_report(run: Run) -> dict[str, Any]:
    report(run)
    return json.loads((run.workspace.report / "report.json").read_text())  # type: ignore[no-any-return]


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
    counts = manifest["counts"]
    assert found["samples"]["found"] == counts["samples"]
    assert found["plan"]["samples"] == counts["packed"] > 0
    assert found["samples"]["set_aside"] == sum(counts["set_aside"].values()) > 0
    assert {e["reason"]: e["samples"] for e in found["set_aside"]} == counts["set_aside"]
    assert {e["explanation"] for e in found["set_aside"]} <= set(REASONS.values())
    assert found["plan"]["packs"] == sum(counts["packs"].values())
    assert found["saving"]["tokens"] == counts["tokens"]
    for line in found["shards"]:
        own = [shard for shard in manifest["shards"] if shard["split"] == line["split"]]
        assert line["packs"] == counts["packs"][line["split"]]
        assert line["bytes"] == sum(shard["bytes"] for shard in own)
        assert line["min_packs"] == min(shard["packs"] for shard in own)
        assert line["max_bytes"] == max(shard["bytes"] for shard in own)
    assert len(found["shards"]) == 2


def test_figures_agree_with_the_plan_s_summary(run: Run) -> None:
    found = read_report(run)
    plan, saving = found["plan"], found["saving"]
    summary = (run.workspace.plan / "summary.txt").read_text()
    figures = {line[:24].strip(): line[24:] for line in summary.splitlines()}
    assert figures["fill"] == f"{plan['fill']:.2%}"
    assert figures["lower bound"] == f"{plan['lower_bound']:,} (gap {plan['gap']:.3%})"
    assert f"{plan['packing_factor']:.2f} samples per pack" in summary
    padding = f"{saving['padding_before']:.1%} -> {saving['padding_after']:.1%}"
    assert figures["padding"].startswith(padding)
    steps = f"{saving['iterations_before']:,} -> {saving['iterations_after']:,} per epoch"
    assert figures["iterations"].startswith(steps)
    assert f"(global batch size {saving['equal_batch_size']:,} keeps" in summary
    assert figures["model"].startswith("qwen2_vl, resize pil; transformers 5 takes torch where")
    most = plan["fill"] * plan["packs"] / (plan["packs"] - 1)  # a split may take a pack more
    for online in found["online"]:
        assert 0.3 < online["fill"] <= most + 1e-9


def test_packs_are_summed_up(run: Run) -> None:
    document = read_report(run)
    found, waiting = document["packs"], document["plan"]["waiting"]
    packs = packs_of(run)
    per_pack = {
        "tokens": [sum(row["num_tokens"] for row in pack) for pack in packs],
        "attention": [sum(row["num_tokens"] ** 2 for row in pack) for pack in packs],
        "vision_patches": [sum(row["num_vision_patches"] for row in pack) for pack in packs],
        "images": [sum(row["num_images"] for row in pack) for pack in packs],
        "samples": [len(pack) for pack in packs],
        "operations": [sum(cost_of(row) for row in pack) for pack in packs],
    }
    assert found["spread"].keys() == per_pack.keys()
    for name, values in per_pack.items():
        spread = found["spread"][name]
        assert spread["mean"] == pytest.approx(sum(values) / len(values)), name
        assert spread["min"] == pytest.approx(min(values))
        assert spread["max"] == pytest.approx(max(values))
        for point, share in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
            assert spread[point] == pytest.approx(nearest_rank(values, share)), (name, point)
    bands = found["fill_bands"]
    assert sum(band["packs"] for band in bands) == len(packs)
    assert bands[0]["packs"] == sum(tokens == 512 for tokens in per_pack["tokens"])
    half = sum(band["packs"] for band in bands if band["at_least"] >= 0.5)
    assert half == sum(tokens >= 256 for tokens in per_pack["tokens"])
    histogram = found["samples_per_pack"]
    for count, low, high in zip(
        histogram["counts"], histogram["edges"], histogram["edges"][1:], strict=False
    ):
        assert count == sum(low <= number < high for number in per_pack["samples"])
    if waiting["packs"] < waiting["num_ranks"]:
        assert waiting["share"] is None
        assert f"<p>{waiting['packs']} packs are not one for each of 8 ranks.</p>" in read_page(run)
    else:
        assert 0 <= waiting["share"] <= waiting["two_phase_share"] < 1


def cost_of(row: dict[str, Any]) -> float:
    pictures = np.array(row["grid_thw"]).reshape(-1, 3).prod(1)  # images, of one step in time
    cost = QWEN2_VL.cost
    return float(cost.language_flops(row["num_tokens"]) + cost.tower_flops(pictures).sum())


def test_lengths_loss_and_overlong(run: Run) -> None:
    found = read_report(run)
    rows = index_rows(run)
    packed = [row for pack in packs_of(run) for row in pack]
    lengths = [row["num_tokens"] for row in rows]
    histogram = found["lengths"]
    assert sum(histogram["counts"]) == len(rows)
    for count, low, high in zip(
        histogram["counts"], histogram["edges"], histogram["edges"][1:], strict=False
    ):
        assert count == sum(low < length <= high for length in lengths)
    assert histogram["p50"] == nearest_rank(lengths, 0.5)
    assert histogram["max"] == max(lengths)
    loss = sum(row["num_loss_tokens"] for row in packed)
    assert found["loss"]["loss_tokens"] == loss
    assert found["loss"]["share"] == pytest.approx(loss / sum(r["num_tokens"] for r in packed))
    overlong = [length for length in lengths if length > 512]
    assert found["overlong"]["samples"] == len(overlong)
    assert found["overlong"]["tokens"] == sum(overlong)
    for longer, limit in zip(found["overlong"]["saved_by"], (1024, 2048), strict=True):
        assert longer["seq_length"] == limit
        assert longer["samples"] == sum(length <= limit for length in overlong)
    assert [longer["samples"] for longer in found["overlong"]["saved_by"]] == [1, 2]


def test_examples_and_drawn_packs(run: Run) -> None:
    found = read_report(run)
    broken = next(e for e in found["set_aside"] if e["reason"] == "bad_json")
    assert {example["key"] for example in broken["examples"]} <= {"broken", "worse"}
    assert all(example["detail"] for example in broken["examples"])
    packs = packs_of(run)
    drawn = found["drawn"]["packs"]
    assert len(drawn) == min(24, len(packs))
    for pack in drawn:
        rows = packs[int(pack["key"].removeprefix("a_ps_"))]
        assert pack["keys"] == [row["key"] for row in rows]
        assert pack["tokens"] == [row["num_tokens"] for row in rows]
    for length, width in found["drawn"]["padded"]:
        assert 0 < length <= width <= 512


def used_twice(folder: Path) -> Source:
    """Write two sources, of which the name of one begins with that of the other."""
    first, second = two(folder, repeat=2)
    return [{**first, "name": "x"}, {**second, "name": "x/y"}]


def half_drawn(folder: Path) -> Source:
    first, second = two(folder, repeat=0.5)
    return [{**first, "name": "x"}, {**second, "name": "x/y"}]


@pytest.mark.parametrize(("source", "repeat", "aside"), [(used_twice, 2, 0), (half_drawn, 0.5, 4)])
def test_several_sources(
    source: MakeSource, repeat: float, aside: int, world: World, tmp_path: Path
) -> None:
    run = copy_of(world.run(source), tmp_path / "out")
    found = read_report(run)["sources"]
    rows = index_rows(run)
    uses = [rows[i] for i in PackPlan.load(run.workspace.plan).sample_ids.tolist()]
    for i, one in enumerate(found):
        own = [row for row in uses if row["source_id"] == i]
        different = len({row["key"] for row in own})
        assert one["packed"] == len(own)
        assert one["tokens"] == sum(row["num_tokens"] for row in own)
        assert one["images"] == sum(row["num_images"] for row in own)
        places = [place for row in own for place in (row["json"], *row["media"])]
        assert one["bytes"] == sum(place["size"] for place in places)
        assert one["used"] == different
        assert one["times_used"] == len(own) / different
    assert [one["repeat"] for one in found] == [1, repeat]
    assert [one["set_aside"] for one in found] == [0, aside]
    assert sum(one["share_of_tokens"] for one in found) == pytest.approx(1)


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
    assert report_status(run.workspace) is None
    measure(run)
    line = report(run)
    assert line == "21 samples = 20 measured + 1 set aside; no packs yet: run plan"
    found = read_report(run)
    assert found["stages"] == {"measure": True, "plan": False, "write": False}
    assert found["plan"] is found["packs"] is found["saving"] is found["shards"] is None
    assert found["samples"] == {"found": 21, "set_aside": 1}
    assert found["sources"][0]["tokens"] == open_index(run).info.num_tokens
    assert "Samples by tokens" in read_page(run)
    assert "Work per pack" not in read_page(run)
    plan_index(run)
    assert "out of date: run report again" in status(run)
    assert "not written yet: run write" in report(run)
    assert "out of date" not in status(run)
    assert "Work per pack" in read_page(run)
    assert "Shards" not in read_page(run)
    write_planned(run)
    assert "out of date" in status(run)
    assert "run write" not in report(run)
    assert "Shards" in read_page(run)
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
    assert found["lengths"] is None
    (entry,) = found["set_aside"]
    assert (entry["reason"], entry["samples"]) == ("bad_json", 7)
    assert len(entry["examples"]) == 5
    assert "and 2 more" in read_page(run)
