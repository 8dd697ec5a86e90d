"""Steps, batch sizes and learning rates from manifests; checks made before a model is built."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen2VLConfig

from launch.config import DataConfig, LaunchConfig, ScheduleConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.packed_data import (
    PackedData,
    largest_of,
    read_packed_data,
    settle_validation,
    warn_of_trained,
)
from launch.loop import setup
from launch.loop.plan import DECAYS, TrainPlan, plan_training
from launch.loop.setup import check_ends, check_token_ids
from launch.model.config import ModelConfig
from launch.train_transformers import TransformersConfig
from offline_packing.errors import StageError
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import SEQ_LENGTH
from tests.helpers.prepared_folders import blend_of
from tests.helpers.transformers_runs import Case
from tests.world import World

MINIMAL: dict[str, Any] = {
    "data": {"path": "-"},
    "batch": {"global_batch_packs": 1},
    "output": {"path": "x"},
}


def plan_of(packed: PackedData, data_parallel: int = 1, /, **sections: Any) -> Any:
    kind = TransformersConfig if "fsdp" in sections.get("model", {}) else LaunchConfig
    content = MINIMAL | {"batch": {"global_batch_size": 256}} | sections
    return plan_training(kind.model_validate(content), [packed], data_parallel)


def data_of(num_packs: int, num_samples: int) -> PackedData:
    return PackedData(num_packs, num_samples / num_packs, 8192, {}, "0")


def with_manifest(of: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """A folder of these packs, whose manifest is changed."""
    manifest = json.loads((of / "manifest.json").read_bytes())
    change(manifest)
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in (of / ".nv-meta", *of.glob("*.tar*")):
        (folder / path.name).symlink_to(path)
    return folder


def test_the_task_encoder_is_of_the_family_that_is_trained(
    case: Case, world: World, bmr_environment: None
) -> None:
    """With one tokenizer packs fit both; positions of videos are the model's own."""
    folder, tokenizer = case("qwen2_vl"), world.tokenizer("qwen2_vl")
    config = DataConfig(path=str(folder / "packed"), processor=str(tokenizer))
    data = read_packed_data(folder / "packed")
    encoders = [build_task_encoder(config, data, family).encoder for family in (None, "qwen2_5_vl")]
    assert [encoder.options.family for encoder in encoders] == ["qwen2_vl", "qwen2_5_vl"]
    assert encoders[0].fingerprint == encoders[1].fingerprint


def test_a_blend_is_weighed_as_it_is_drawn(captions: Path, folder: Path, tmp_path: Path) -> None:
    def blended(weight: int) -> PackedData:
        parts = [f"path: {captions}, weight: {weight}", folder]
        return read_packed_data(blend_of(tmp_path / "my_blend.yaml", parts))

    first, second, data = read_packed_data(captions), read_packed_data(folder), blended(3)
    assert data.num_packs == first.num_packs + second.num_packs
    expected = 0.75 * first.samples_per_pack + 0.25 * second.samples_per_pack
    assert data.samples_per_pack == pytest.approx(expected)
    assert data.content_hash not in (first.content_hash, second.content_hash)
    shares = {one.name: share for one, _, share in data.blended}
    assert shares == {captions.name: 0.75, folder.name: 0.25}
    assert blended(2).content_hash != data.content_hash
    parts = [f"path: {captions}, repetitions: 3", f"path: {folder}, repetitions: 0.5"]
    blend = blend_of(tmp_path / "epochs.yaml", parts)
    assert read_packed_data(blend).num_packs == len(PackedFolder(blend)) > data.num_packs
    with pytest.raises(StageError, match="has no packs in its train split"):
        read_packed_data(blend_of(blend, [f"path: {captions}, repetitions: 0"]))


def test_data_that_cannot_be_read_are_named(captions: Path, tmp_path: Path) -> None:
    """Not only the path that a blend leads to."""
    path = tmp_path / "my_blend.yaml"

    def refused(message: str) -> None:
        with pytest.raises(StageError, match=message):
            read_packed_data(path)

    def shrink(manifest: Any) -> None:
        manifest["config"]["model"]["max_pixels"] = 12_544

    refused("neither a packed folder nor")
    path.write_text("")
    refused(r"my_blend.yaml, .*Energon cannot read it \(AttributeError")
    blend_of(path, ["path: a, weight: 1"])
    refused("my_blend.yaml, .*FileNotFoundError: .*; a path in it is a folder with .nv-meta")
    blend_of(path, [captions, with_manifest(captions, tmp_path / "b", shrink)])
    refused(r"max_pixels 50176, .* with 12544")


DATA, SMALL = data_of(1_000, 10_000), data_of(100, 1_000)
PACKS = "batch: {global_batch_packs: 10}, data: {path: a, micro_batch_size: 2}"
THREES = "batch: {global_batch_packs: 3}, data: {path: a, micro_batch_size: 3}"


@pytest.mark.parametrize(
    ("num_samples", "ranks", "sections", "expected"),
    [
        # 1,000 packs of 8 samples: 256 samples are 32 packs; 31 whole steps, and 8 packs
        (8_000, 4, "", (32, 1_000, 32, 8)),
        # 25.6 packs
        (10_000, 1, "", (39, 1_000, 26, 26)),
        (10_000, 8, "", (42, 1_000, 24, 3)),
        (10_000, 16, "", (32, 1_000, 32, 2)),
        (10_000, 64, "", (16, 1_000, 64, 1)),
        (8_000, 1, "train: {epochs: 2}", (63, 2_000, 32, 32)),
        (8_000, 1, "train: {epochs: 0.5}", (16, 500, 32, 32)),
        (8_000, 1, "train: {iterations: 7}", (7, 224, 32, 32)),
        # The last row of each epoch has one pack.
        (8_000, 1, f"train: {{epochs: 2}}, {THREES}", (668, 2_004, 3, 1)),
        (8_000, 4, PACKS, "not a multiple of 8 = 4"),
    ],
)
def test_the_batch_keeps_the_samples_of_the_recipe(
    num_samples: int, ranks: int, sections: str, expected: Any
) -> None:
    """In packs that divide evenly among the ranks. Expected are the steps, the packs to train, the
    packs of a step, and its micro batches."""
    data, given = data_of(1_000, num_samples), yaml.safe_load(f"{{{sections}}}")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            plan_of(data, ranks, **given)
    else:
        plan = plan_of(data, ranks, **given)
        (stage,) = plan.stages
        assert (plan.iterations, *astuple(stage)) == expected


MIXED = replace(DATA, has_mixture=True)
BLENDED = replace(SMALL, blended=((Path("a"), 90, 0.25), (Path("b"), 10, 0.75)))
FOR_3, FOR_4 = (replace(DATA, ordered_for=ranks) for ranks in (3, 4))
TWO, RATE = "batch: {global_batch_packs: 2}", "schedule: {learning_rate: 1e-3}"
DECAYED = f"train: {{iterations: 100}}, optimizer: {{weight_decay: 100}}, {RATE}"
SHARES = "80 steps, 1.60 times all packs|75.00% of them from b: 12.00 times its 10 packs"


@pytest.mark.parametrize(
    ("data", "ranks", "sections", "said"),
    [
        (DATA, 8, "", ""),
        (DATA, 1, f"train: {{iterations: 1000}}, optimizer: {{weight_decay: 1}}, {RATE}", ""),
        (DATA, 1, DECAYED, "weight_decay 100 alone leaves 0.674% of the matrices' weights"),
        (DATA, 64, "batch: {global_batch_size: 64}", "size 64 becomes about 640 samples"),
        (DATA, 1, "train: {epochs: 3}, data: {path: a, repeat: false}", "the run after 39 of"),
        (FOR_4, 2, TWO, ""),  # every second rank
        (FOR_3, 2, TWO, "for 3 data parallel ranks (pack.order), but 2 are running"),
        (SMALL, 1, "batch: {global_batch_packs: 101}", "takes 101 packs, but there are only 100"),
        (MIXED, 1, "", ""),
        (MIXED, 1, "data: {path: a, order: balanced}", "the packs of a follow a mixture"),
        (DATA, 2, "model: {fsdp: true}", ""),
        (DATA, 1, "model: {fsdp: true}", "model.fsdp=true shards nothing on one rank"),
        (BLENDED, 2, f"{TWO}, train: {{iterations: 80}}", SHARES),
    ],
)
def test_what_a_recipe_does_not_get_is_said(
    data: PackedData, ranks: int, sections: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plan_of(data, ranks, **yaml.safe_load(f"{{{sections}}}"))
    warned = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == (said != "" and "|" not in said)
    assert all(text in caplog.text for text in said.split("|"))


def test_what_manifests_say(captions: Path, world: World, tmp_path: Path) -> None:
    manifest = json.loads((captions / "manifest.json").read_bytes())
    data = read_packed_data(captions)
    assert data.num_packs == manifest["counts"]["packs"]["train"]
    assert manifest["counts"]["packs"]["val"] > 0
    train = [shard for shard in manifest["shards"] if shard["split"] == "train"]
    assert data.samples_per_pack == sum(shard["samples"] for shard in train) / data.num_packs
    assert (data.seq_length, data.ordered_for, data.has_media) == (SEQ_LENGTH, None, True)

    def change(manifest: Any) -> None:
        manifest["config"]["pack"]["order"] = {"num_ranks": 4, "num_workers": 1}
        for shard in manifest["shards"]:
            shard["media"] = "0" * shard["packs"]

    data = read_packed_data(with_manifest(captions, tmp_path / "changed", change))
    assert data.ordered_for == 4
    with pytest.raises(ValueError, match=r"freeze=\['language'\]: no pack of .* has images"):
        plan_of(data, model={"freeze": ["language"]})
    plan_of(data, model={"freeze": ["vision"]})
    with pytest.raises(StageError, match=r"has no manifest\.json"):
        read_packed_data(tmp_path)
    for layout in ("llava_onevision", "llava_onevision2"):
        with pytest.raises(StageError, match=rf"layout={layout}, which other trainers read"):
            read_packed_data(world.packed("vqa", output={"layout": layout}))


def test_the_largest_of_all_stages() -> None:
    """By which the model is built; stages must be measured alike."""
    model = model_options(family="qwen2_vl")
    data = [replace(SMALL, model=model, seq_length=n, has_media=n > 2) for n in (2, 3, 1)]
    largest = largest_of("abc", data)
    assert (largest.seq_length, largest.has_media) == (3, True)
    assert largest_of("a", data[:1]) == data[0]
    other = replace(data[1], model=model.model_copy(update={"max_pixels": 12_544}))
    with pytest.raises(StageError, match=r"data.path: a .* with max_pixels .*, c with 12544"):
        largest_of("abc", [*data[:2], other])


LORA = {"model": {"lora": {}}, "schedule": {"learning_rate": 1e-5}}
SLOW = "schedule.learning_rate=1e-05 times model.lora.alpha / rank 2 hardly moves adapters"


@pytest.mark.parametrize(
    ("kind", "sections", "said"),
    [
        (LaunchConfig, {"validation": {"limit": 3}}, "validation.limit=3 without validation.every"),
        (LaunchConfig, {}, "random weights, in the sizes of model.preset=tiny"),
        (LaunchConfig, {"model": {"family": "qwen3_vl"}}, "hf/ will contain no tokenizer"),
        (TransformersConfig, LORA, SLOW),  # the default rate with the default alpha / rank
    ],
)
def test_what_a_run_lacks_is_said(
    kind: Any, sections: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_ends(kind.model_validate({**MINIMAL, **sections}))
    assert said in caplog.text
    caplog.clear()
    enough = {"schedule": {"learning_rate": 1e-4}, "model": {"checkpoint": "a"}}
    check_ends(LaunchConfig.model_validate({**MINIMAL, **enough}))
    enough["model"] |= {"lora": {}}
    check_ends(TransformersConfig.model_validate({**MINIMAL, **enough}))
    assert not caplog.records


def test_validation_needs_data_of_its_own(
    captions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a dataset that is blended twice is a warning."""

    def check(path: Any) -> None:
        asked = {"data": {"path": str(path)}, "validation": {"every": 1}}
        config = LaunchConfig.model_validate({**MINIMAL, **asked})
        assert settle_validation(config, ["validation.every=1"]) is config
        warn_of_trained(path)

    check(captions)
    blend = blend_of(tmp_path / "blend.yaml", [captions, f"path: {captions}, weight: 3"])
    content = blend.read_text()
    with pytest.raises(StageError, match=r"no packs in its val split; .* set validation\.every=0"):
        check(blend)
    for part in ("", ", split_part: train"):
        assert not caplog.records
        blend.write_text(f"{content}  val: {{path: {captions}{part}}}\n")
        check(blend)
    assert "packs are in both the train and the val split" in caplog.text
    assert len(PackedFolder(blend, split="val")) == read_packed_data(captions).num_packs


CONTENT = "the content of data.path"


def test_ranks_started_differently_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LaunchConfig.model_validate(MINIMAL)
    others: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        ({"train.seed": "4"}, "train.seed is '0' on rank 0 and '4' on rank 1; start"),
        ({CONTENT: "1"}, f"{CONTENT} is '0' on rank 0 and '1' on rank 1; .* and data"),
    ]
    for other, said in others:
        monkeypatch.setattr(setup, "on_all_ranks", lambda own, other=other: [own, own | other])
        with pytest.raises(StageError, match=said) if said else nullcontext():
            setup.check_alike(config, [SMALL])


def rates(decay: str, warmup: int = 4, upto: int = 20) -> list[float]:
    plan, options = TrainPlan((), (0, 20)), {}
    if decay != "constant":
        options = {"min_learning_rate": 0.01}
    schedule = ScheduleConfig(learning_rate=0.1, decay=decay, warmup=warmup / 20, **options)
    return [10 * plan.learning_rate(i, schedule) for i in range(upto)]


@pytest.mark.parametrize("decay", DECAYS)
def test_rises_over_the_warmup_and_never_leaves_its_bounds(decay: str) -> None:
    values = rates(decay)
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert max(values) == 1.0
    assert values[4:] == sorted(values[4:], reverse=True)
    ends = {"linear": (0.1, 0.2), "cosine": (0.1, 0.12), "constant": (0.99, 1.01)}
    least, most = ends[decay]
    assert least < values[-1] < most
    assert rates(decay, warmup=0)[0] == 1.0
    after = 1.0 if decay == "constant" else 0.1
    assert rates(decay, warmup=0, upto=100)[99] == pytest.approx(after)  # beyond the last step


def test_models_with_other_tokens_than_the_packs(tmp_path: Path) -> None:
    own = build_sample_encoder("qwen2_vl").media_token_ids

    def checkpoint(**fields: Any) -> ModelConfig:
        folder = tmp_path / "-".join(fields)
        Qwen2VLConfig(**{**own, **fields}).save_pretrained(folder)
        return ModelConfig(checkpoint=folder)

    for name in own:
        message = f"config.json has {name} 5, the packs .* {own[name]};"
        with pytest.raises(StageError, match=message):
            check_token_ids(checkpoint(**{name: 5}), own)
    check_token_ids(checkpoint(), own)
    few = {"vocab_size": 1000}
    for model in (checkpoint(text_config=few), ModelConfig(text=few)):
        with pytest.raises(StageError, match=r"has vocab_size 1,000, and the packs hold"):
            check_token_ids(model, own)
