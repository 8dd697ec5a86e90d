"""blend: several outputs as one dataset that Energon's loader reads. status: progress, also of a
run that was stopped. pack: a packed dataset in one call from Python."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import offline_packing
from offline_packing.config.packing import parse_config
from offline_packing.errors import StageError
from offline_packing.index.table import part_name
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_plan
from offline_packing.storage.receipts import Started
from offline_packing.upkeep.blend import blend
from offline_packing.upkeep.status import status
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings, PackingSettingsError
from tests.helpers.command import invoke
from tests.helpers.datasets import captioning_pairs, make_config, make_run, pack_all, packed_run
from tests.helpers.energon_batches import batches_of
from tests.helpers.formats import of_lines
from tests.helpers.outputs import reopen
from tests.world import World


def output(tmp_path: Path, name: str, count: int, **sections: dict[str, object]) -> Path:
    settings = {"output": {"key_prefix": name, "split": {"train": 0.8, "val": 0.2}}, **sections}
    packed_run(captioning_pairs(tmp_path / f"data_{name}", count), tmp_path / name, **settings)
    return tmp_path / name


def read_from(path: Path, **options: Any) -> list[PackedBatch]:
    """Return batches that a trainer reads from a blend."""
    encoder = PackedTaskEncoder(
        seq_length=512, max_pixels=28 * 28 * 64, settings=PackingSettings(packed=True)
    )
    return batches_of(path, encoder, **options)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("blend")
    return [output(root, "a", 60), output(root, "b", 20)]


def test_energon_reads_both(outputs: list[Path], tmp_path: Path) -> None:
    """As written by the command; packs are drawn in proportion to their number."""
    path = tmp_path / "blend.yaml"
    path.write_text(invoke("blend", *outputs).stdout)
    splits = yaml.safe_load(path.read_text())["splits"]
    weights = [entry["weight"] for entry in splits["train"]["blend"]]
    assert weights[0] > weights[1] > 0
    assert [entry["path"] for entry in splits["val"]["blend"]] == [*map(str, outputs)]
    rows = read_from(path, repeat=True, count=4 * sum(weights))
    drawn = Counter(Path(key).name[0] for row in rows for key in row.__key__)
    share = drawn["a"] / sum(drawn.values())
    assert abs(share - weights[0] / sum(weights)) < 0.15


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pack": {"seq_length": 600}}, "seq_length 512, .* 600; a batch"),
        ({"model": {"max_pixels": 28 * 28 * 32}}, "max_pixels 50176, .* 25088"),
        ({"model": {"family": "qwen2_5_vl"}}, r"tokenizer of model.family=qwen2_vl .*=qwen2_5_vl"),
        ({"pack": {"seq_length": 512, "pad_multiple": 8}}, "pad_multiple 1, .* 8"),
        ({"output": {"key_prefix": "c", "layout": "llava_onevision"}}, "layout 'energon', "),
    ],
)
def test_outputs_that_do_not_fit(
    outputs: list[Path], tmp_path: Path, sections: dict[str, dict[str, object]], message: str
) -> None:
    other = output(tmp_path, "c", 6, **sections)
    with pytest.raises(StageError, match=message):
        blend([outputs[0], other])


def test_what_is_no_output_and_no_blend(outputs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"no manifest in .*run write first"):
        blend([outputs[0], tmp_path])
    with pytest.raises(StageError, match="is named twice"):
        blend([outputs[0], outputs[0] / "../a"])
    path, document = tmp_path / "blend.yaml", yaml.safe_load(blend(outputs))
    for weight, repeat, message in (
        (1, False, "write a blend_epochized with repetitions"),
        (0, True, "a weight is above 0"),
    ):
        document["splits"]["train"]["blend"][0]["weight"] = weight
        path.write_text(yaml.safe_dump(document))
        with pytest.raises(PackingSettingsError, match=message):
            read_from(path, repeat=repeat)


def test_a_blend_of_epochs_is_read_once(outputs: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text(blend(outputs, each_once=True))
    splits = yaml.safe_load(path.read_text())["splits"]
    assert [entry["repetitions"] for entry in splits["train"]["blend_epochized"]] == [1, 1]
    keys = [key for row in read_from(path) for key in row.__key__]
    assert len(set(keys)) == len(keys)


def test_outputs_made_with_defaults(tmp_path: Path) -> None:
    """Their keys differ, and are the same for the same data and seed; those of folders that have
    equal ones are told apart by the folder."""
    data = captioning_pairs(tmp_path / "data", 20)
    again = shutil.copytree(data, tmp_path / "elsewhere")
    other = captioning_pairs(tmp_path / "other", 20, seed=1)
    made = {"a": (data, {}), "b": (again, {}), "c": (data, {"seed": 1}), "d": (other, {})}
    keys = {}
    for name, (root, pack) in made.items():
        packed_run(root, tmp_path / name, pack={"seq_length": 512, **pack})
        keys[name] = [pack.key for pack in PackedFolder(tmp_path / name)]
    assert keys["a"] == keys["b"]
    assert len({key for name in "acd" for key in keys[name]}) == sum(len(keys[n]) for n in "acd")
    assert re.fullmatch(r"[0-9a-f]{8}_ps_00000000", keys["a"][0])
    path = tmp_path / "blend.yaml"
    path.write_text(blend([tmp_path / "a", tmp_path / "b"]))
    rows = read_from(path, repeat=True, count=12 * len(keys["a"]))
    drawn = {row.__key__[0] for row in rows}
    assert drawn == {f"{tmp_path}/{name}/{key}" for name in "ab" for key in keys[name]}


def test_outputs_that_share_samples_are_a_warning(
    outputs: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = outputs[0]
    blend(outputs)
    (record,) = caplog.records  # equal pictures are in the same split of both
    assert f"{outputs[1]}: 20 of 20 samples are also in {first}, so" in record.getMessage()
    split = {"split": {"train": 0.8, "val": 0.2}, "split_seed": 1}
    other = output(tmp_path, "c", 20, output={"key_prefix": "c", **split})
    blend([first, other])
    shared = rf"{first}: \d+ of \d+ images and videos in split val are in the train split of "
    assert re.search(shared + str(other), caplog.text)
    caplog.clear()
    split = {"split": {"train": 0.6, "val": 0.2, "test": 0.2}}  # which a manifest sorts
    blend([output(tmp_path, n, 60, output={"key_prefix": n, **split}) for n in ("d", "e")])
    assert "images and videos in split" not in caplog.text


def test_stages_of_one_index_share_what_both_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"{i}?", "answer": "It is.", "score": i} for i in range(9)]
    source = of_lines(tmp_path / "a.jsonl", rows, "vqa", keep="score", text_only=True)
    packed_run(source, tmp_path / "all")
    for name, clause in (("low", ["<", 4]), ("high", [">=", 4]), ("few", [">=", 7])):
        index = {"format": "index", "path": str(tmp_path / "all")}
        packed_run(index, tmp_path / name, pack={"where": [["score", *clause]]})
    blend([tmp_path / "low", tmp_path / "high"])
    assert not caplog.text
    for one, other, count in (("all", "low", 4), ("high", "few", 2)):
        blend([tmp_path / one, tmp_path / other])
        assert f"{other}: {count} of {count} samples are also in {tmp_path / one}" in caplog.text


def test_how_much_is_done(tmp_path: Path) -> None:
    run = make_run(captioning_pairs(tmp_path / "data"), tmp_path / "out")
    assert status(run) == "measure   not begun\nplan      not done\n"
    tokens = f"{measure(run).info.num_tokens:,}"
    assert f"measure   done: 40 samples, {tokens} tokens; set aside: none" in status(run)
    reopen(run)
    for number in (1, 2):
        (run.workspace.index / part_name(number)).unlink()
    started = Started.load(run.workspace.packing, "measure")
    replace(started, total={"parts": 3, "records": 40}).save(run.workspace.packing, "measure")
    assert "measure   16 of 40 (40%) records, 1 of 3 (33%) parts" in status(run)
    manifest = pack_all(run)
    (packs,) = manifest.counts.packs.values()
    shards = len(manifest.shards)
    assert f"{packs} of {packs} (100%) packs, {tokens} tokens in {shards} shards" in status(run)
    reopen(run, "write")
    for path in sorted(run.workspace.write.glob("*-??????.json"))[1:]:
        path.unlink()
    assert " of " in status(run)
    assert "tokens in 1 shards, 0 shards failed" in status(run)


def test_remedy_of_another_plan_does_not_lead_in_a_circle(world: World) -> None:
    """Planning again would refuse to replace the shards."""
    packed = world.run("captioning")
    root, source = packed.workspace.root, world.source("captioning")
    text = status(packed)
    assert "complete: 40 samples in" in text
    assert "not what" not in text
    assert text == status(make_run(source, root, pack={"max_set_aside": 1}))
    other = make_run(source, root, pack={"seed": 1})
    told = r"pack\.seed was 0, is 1; .* run with output\.overwrite"
    assert re.search(rf"\nnot what this configuration asks for:\n  .*{told}", status(other))
    with pytest.raises(StageError, match=told):
        open_plan(other)


def test_a_dict_a_file_and_a_configuration_give_the_same(tmp_path: Path) -> None:
    source = captioning_pairs(tmp_path / "data", 20)
    config = make_config(source, tmp_path / "from_dict")
    content = config.model_dump(mode="json", exclude_unset=True)
    packed = offline_packing.pack(content, deep=True)
    assert packed.path == tmp_path / "from_dict"
    assert packed.manifest.counts.packed == packed.verified.num_samples == 20
    assert packed.report.is_file()
    file = tmp_path / "pack.yaml"
    file.write_text(yaml.safe_dump(content))
    from_file = offline_packing.pack(file, f"output.path={tmp_path / 'from_file'}")
    assert from_file.manifest == packed.manifest
    assert offline_packing.pack(parse_config(content)).manifest == packed.manifest  # as it is
    with pytest.raises(TypeError, match="overrides"):
        offline_packing.pack(content, "pack.seed=1")
