"""The memory that a step needs, as estimated before weights are read, against what autograd saves
in the whole model."""

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.config import LaunchConfig, ParallelConfig
from launch.data.packed_data import read_packed_data
from launch.loop import memory, setup
from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.prefix_trees import segment_params
from launch.train_transformers import TransformersConfig
from offline_packing.errors import StageError
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import normalise_pixels
from tests.helpers.packed_runs import bmr_folder

CPU = torch.device("cpu")
WORDS = 151_936

pytestmark = pytest.mark.usefixtures("bmr_environment")

#: Cases of families that only transformers has here.
CASES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5 of experts",
    "llava_1_5",
    "glm4v",
    "glm46v",
    "gemma4",
    "gemma4_unified",
    "mistral3",
    "internvl3",
]
#: Layers of both parts, width of the language model, of its feed-forward layers, of the tower.
SIZES = [(2, 64, 128, 32), (4, 128, 384, 64), (6, 256, 512, 96)]


def config_of(folder: Path, kind: Any = LaunchConfig, **model: Any) -> Any:
    return kind.model_validate(
        {
            "data": {"path": str(folder), "num_workers": 0},
            "batch": {"global_batch_packs": 1},
            "output": {"path": str(folder / "trained")},
            "model": model,
        }
    )


def sizes_of(layers: int, width: int, ffn: int, tower: int) -> dict[str, Any]:
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 32}
    text = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": ffn, **heads}
    vision = {"depth": layers, "embed_dim": tower, "hidden_size": width}
    return {"text": text | {"vocab_size": WORDS}, "vision": vision}


def prepared(config: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Data, task encoder and the model's options of a run."""
    initialize_parallel(1)
    data = read_packed_data(config.data.path)
    encoder = setup.build_task_encoder(config.data, data, config.model.family)
    return data, encoder, setup.model_options_of(config, data, encoder, CPU)


def kept_bytes(model: Any, row: PackedBatch) -> int:
    """Bytes that autograd keeps for the backward pass of a row whose last tokens have labels."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # which does not hold its graph
        if tensor.shape[-1:] != (WORDS,) or tensor.dtype != torch.float32:  # logits
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that none has its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = model(
            row.tokens,
            row.position_ids,
            segment_params(row),
            row.imgs,
            row.image_grid_thw,
            shift_labels(row.labels).index_fill(1, torch.arange(row.tokens.shape[1] - 8), -100),
            row.pixel_values_videos,
            row.video_grid_thw,
        )
    assert losses.requires_grad
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in weights)


def compare(config: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Estimated and kept bytes of the longest pack of several samples with pictures."""
    data, task_encoder, options = prepared(config)
    packs = PackedFolder(config.data.path, task_encoder)
    rows = [normalise_pixels(packs.batch([number])) for number in range(min(8, len(packs)))]
    several = [row for row in rows if len(row.sub_sample_keys) > 1 and len(row.image_grid_thw)]
    row = max(several, key=lambda one: one.tokens.shape[1])
    size = row.tokens.shape[1], float(row.image_grid_thw.prod(1).sum())
    monkeypatch.setattr(memory, "longest_row", lambda *_: size)
    needed = memory.estimate(config, data, task_encoder.encoder, options)
    found, _ = needed[config.model.recompute]
    model = setup.build_run_model(config.model, options).train()
    kept = kept_bytes(model, row)
    if config.model.recompute == "full" and kind is LaunchConfig:
        # torch's checkpoint holds what is passed by name, as core's layers are, without autograd
        text = model.hf_config.text_config
        kept += 2 * text.num_hidden_layers * text.hidden_size * row.tokens.shape[1]
    return found["language"] + found["vision"] + found["rest"], kept


@pytest.mark.parametrize("kind", [LaunchConfig, TransformersConfig])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sizes", SIZES)
def test_layers_keep_what_was_estimated(
    sizes: tuple[int, ...], recompute: str, kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"recompute": recompute, "dtype": "bfloat16", **sizes_of(*sizes)}
    estimated, kept = compare(config_of(folder, kind, **model), kind, monkeypatch)
    assert estimated == pytest.approx(kept, rel=0.03)


def test_nothing_of_the_model_stays(folder: Path) -> None:
    config = config_of(folder, **sizes_of(*SIZES[0]))
    _, task_encoder, options = prepared(config)
    model, _ = memory.shallow_model(config, options)
    row = memory.row_of([memory.probe_sample(task_encoder.encoder, has_media=True)], CPU)
    assert memory.saved_bytes(model, row).kept["language"]
    weight = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_of_any_family(
    name: str, case: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, family = case(name), name.partition(" of ")[0]
    model = {"family": family, "checkpoint": folder / "model", "recompute": "none"}
    for dtype in ("bfloat16", "float32"):
        config = config_of(folder / "packed", TransformersConfig, **model, dtype=dtype)
        estimated, kept = compare(config, TransformersConfig, monkeypatch)
        assert estimated == pytest.approx(kept, rel=0.03)


@pytest.fixture(scope="module")
def long_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of up to 8,192 tokens."""
    return bmr_folder(tmp_path_factory.mktemp("long"), seq_length=8192)


def on_gpus(monkeypatch: pytest.MonkeyPatch, gib: float, ranks: int) -> None:
    """Devices of some size, among some ranks; a model whose weights are read fails the test."""
    monkeypatch.setattr(memory, "device_bytes", lambda device: int(gib * 2**30))
    sizes = {"get_data_parallel_world_size": lambda **_: ranks}
    monkeypatch.setattr(memory, "parallel_state", SimpleNamespace(**sizes))
    monkeypatch.setattr(setup, "build_run_model", lambda config, options: pytest.fail(str(config)))


@pytest.mark.parametrize(
    ("kind", "model", "ranks", "says"),
    [
        (LaunchConfig, {"recompute": "none"}, 64, "set model.recompute=auto"),
        (TransformersConfig, {}, 4, "set model.fsdp=true on several ranks, or model.lora.rank=16"),
        pytest.param(LaunchConfig, {}, 1, "set parallel.tensor=2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_that_cannot_fit_stops_before_weights_are_read(
    kind: Any,
    model: dict[str, Any],
    ranks: int,
    says: str,
    long_packs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpus(monkeypatch, 79.2, ranks)
    config = config_of(long_packs, kind, **{"preset": "7b", "dtype": "bfloat16", **model})
    text = rf"8,192 tokens needs .* of 79.2 GiB with .*; {says}"
    with pytest.raises(StageError, match=text):
        setup.build_trainer(config, initialize_parallel(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gib", "chosen"), [(79.2, "full"), (192.0, "none")])
def test_auto_recomputes_where_steps_would_not_fit(
    gib: float,
    chosen: str,
    long_packs: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_gpus(monkeypatch, gib, ranks=64)
    caplog.set_level(logging.INFO, "launch")
    config = config_of(long_packs, preset="7b", dtype="bfloat16")
    with pytest.raises(pytest.fail.Exception, match=f"recompute='{chosen}'"):
        setup.build_trainer(config, initialize_parallel(1))
    assert f"of {gib} GiB with model.recompute={chosen}: " in caplog.text


def test_a_cpu_is_not_asked(folder: Path) -> None:
    """Its memory is shared; only what the configuration says is done."""
    for asked, chosen in (("auto", "none"), ("full", "full")):
        config = config_of(folder, recompute=asked)
        data, encoder, options = prepared(config)
        settled = memory.settle_recompute(config, data, encoder.encoder, options)
        assert settled.model.recompute == chosen


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (TransformersConfig, {"lora": {"rank": 16}}),
        (LaunchConfig, {"freeze": ["vision", "language"]}),
    ],
)
def test_frozen_weights_have_no_gradients(kind: Any, model: dict[str, Any], folder: Path) -> None:
    """Not those outside of the layers either, such as the embeddings."""
    found = []
    for own in ({}, model):
        config = config_of(folder, kind, dtype="bfloat16", **sizes_of(*SIZES[0]), **own)
        data, task_encoder, options = prepared(config)
        before, after = memory.estimate(config, data, task_encoder.encoder, options)["none"]
        found.append((before["logits"], after["gradients"], after["optimizer"]))
    whole, frozen = found
    head = WORDS * SIZES[0][1]
    assert whole[0] - frozen[0] == head * (4 + 2)
    assert frozen[1] < 0.1 * whole[1]
    assert frozen[2] < 0.1 * whole[2]


def test_tensor_parallel_ranks_divide_the_language_model(folder: Path) -> None:
    outlines = []
    for ranks in (1, 2):
        config = config_of(folder, **sizes_of(*SIZES[0]))
        config = config.model_copy(update={"parallel": ParallelConfig(tensor=ranks)})
        _, _, options = prepared(config)
        outlines.append(memory.shallow_model(config, options)[1])
    one, two = outlines
    language = 2 * (one.num_weights - two.num_weights)
    head = WORDS * SIZES[0][1]
    assert language > head  # which is tied
    assert one.num_trained_head == 2 * two.num_trained_head == head
    assert two.num_largest == one.num_largest // 2
    inside = one.num_weights - one.num_outside
    assert two.num_weights - two.num_outside == inside // 2
    assert one.num_outside - two.num_outside == (language - inside) // 2
