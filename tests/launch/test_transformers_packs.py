"""All that packs can be, trained through transformers; and where such a run can go wrong."""

import json
import logging
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from launch.loop import setup
from launch.loop.setup import run
from launch.loop.trainer import Trainer
from launch.model.config import transformers_classes
from launch.train_transformers import load_config
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.packed_runs import losses, step_lines
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_families import encoder_options
from tests.helpers.transformers_runs import (
    Case,
    assert_equal_runs,
    command,
    pack_dialogues,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture
def store(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of the folder of a case in a store of multi-storage-client."""
    provider = {"type": "file", "options": {"base_path": str(case("qwen2_vl"))}}
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {"packs": {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    return "msc://packs"


@pytest.mark.parametrize("form", ["references", "indexed", "remote", "remote, written"])
def test_the_same_packs_in_another_form(form: str, case: Case, store: str, tmp_path: Path) -> None:
    """Give the same losses, in training and validation."""
    folder = case("qwen2_vl")
    options = ["train.iterations=2", "validation.every=2", "checkpoint.export=false"]
    packed: Any = tmp_path / "packed"
    if form.startswith("remote"):
        packed = f"{store}/packed"
        options += ["data.order=written"] * form.endswith("written")
    else:
        pack_dialogues("qwen2_vl", folder, packed, output={"layout": form})
    train(command(folder, tmp_path / "tars", *options))
    train(command(folder, tmp_path / "other", *options, f"data.path={packed}"))
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("tars", "other")]
    assert losses(tmp_path / "other") == losses(tmp_path / "tars")
    validated = [line.partition('"validation_loss"')[2] for line in lines]
    assert validated[0] == validated[1] != ""


def test_a_blend_of_tasks(
    case: Case,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Captions twice, and dialogues that lie elsewhere once."""
    monkeypatch.delenv("OFFLINE_PACKING_BMR")
    folder, captions = case("qwen2_vl"), tmp_path / "captions"
    source = {"format": "pairs", "path": str(captioning_pairs(tmp_path / "source", 30))}
    model: dict[str, Any] = {"processor": str(folder / "model"), "max_pixels": None}
    model |= encoder_options("qwen2_vl")
    pack_all(make_run({**source, "task": "captioning"}, captions, model=model))
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    blend_epochized:\n      - {{path: {captions}, repetitions: 2}}\n"
        f"      - {{path: '{store}/packed', repetitions: 1}}\n"
    )
    caplog.set_level(logging.INFO)
    options = [f"data.path={blend}", "train.iterations=2", "checkpoint.export=false"]
    train(command(folder, tmp_path / "run", *options))
    assert [line["packs"] for line in step_lines(tmp_path / "run")] == [4, 4]
    assert "of them from msc://packs/packed: " in caplog.text


def test_packs_of_several_epochs(case: Case, tmp_path: Path) -> None:
    """Two passes train each sample twice, in other packs."""
    folder, packed = case("qwen2_vl"), tmp_path / "packed"
    output = {"layout": "references", "split": {"train": 1.0}}
    made = pack_dialogues("qwen2_vl", folder, packed, pack={"epochs": 2}, output=output)
    options = [f"data.path={packed}", "train.iterations=null", "train.epochs=2"]
    options += ["data.repeat=false", "checkpoint={every: 0, export: false}"]
    train(command(folder, tmp_path / "run", *options))
    lines = step_lines(tmp_path / "run")
    assert sum(line["sub_samples"] for line in lines) == 2 * made.of_an_epoch("samples")


@pytest.mark.parametrize("family", ["qwen2_vl", "llava_1_5"])
def test_frozen_parts_stay_with_recomputation(family: str, case: Case, tmp_path: Path) -> None:
    folder, output = case(family), tmp_path / "run"
    options = ["model.freeze=[vision,language]", "model.recompute=full", "train.iterations=2"]
    train(command(folder, output, *options, family=family))
    before = AutoModelForImageTextToText.from_pretrained(folder / "model").state_dict()
    after = AutoModelForImageTextToText.from_pretrained(output / "hf").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("merger" in name or "projector" in name for name in changed)


TIED = ["model.checkpoint=null", "model.tie_word_embeddings=true", "checkpoint.every=0"]


def _run_here(arguments: list[str]) -> int:
    return run(load_config(arguments[0], arguments[1:]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fsdp", [False, True])
def test_tied_embeddings_are_one_matrix(fsdp: bool, case: Case, tmp_path: Path) -> None:
    arguments = command(case("qwen2_5_vl"), tmp_path / "run", *TIED, family="qwen2_5_vl")
    arguments += ["train.iterations=2", f"model.fsdp={str(fsdp).lower()}"]
    if fsdp:
        train([*arguments, "model.fsdp=false", f"output.path={tmp_path / 'one'}"])
        assert run_ranks(2, tmp_path / "ranks", _run_here, arguments) == [0, 0]
        ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "one")
        assert max(float((ours[n] - theirs[n]).abs().max()) for n in theirs) < 1e-4
    else:
        train(arguments)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "hf")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in weights(tmp_path / "run")
    assert isinstance(model, transformers_classes("qwen2_5_vl").model)


@pytest.mark.parametrize(
    "where", ["_validate", pytest.param("_save", marks=pytest.mark.exhaustive)]
)
def test_a_signal_between_steps(
    where: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In validation or in saving; the run goes on as if nothing had happened."""
    make = partial(command, case("qwen2_vl"))
    options = ["validation.every=2"]
    train(make(tmp_path / "whole", *options))
    stopped = make(tmp_path / "stopped", *options)
    method = getattr(Trainer, where)

    def signalled(trainer: Trainer) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return method(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, where, signalled)
        train(stopped, 143)
    assert len(losses(tmp_path / "stopped")) == 3
    train(stopped)
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


def test_ctrl_c_before_the_first_step(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # others may ignore it
    monkeypatch.setattr(setup, "build_trainer", lambda *_: signal.raise_signal(signal.SIGINT))
    arguments = command(case("qwen2_vl"), tmp_path / "run")
    try:
        assert "stopped by SIGINT; run again to continue" in train(arguments, 130)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_full_disk_keeps_the_checkpoint_before(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(command, case("qwen2_vl"))
    train(make(tmp_path / "whole"))
    arguments = make(tmp_path / "stopped")
    save, limits = Trainer._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer: Trainer) -> int:
        if trainer.iteration == 4:  # files end in the middle of the weights
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        return save(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", limited)
        try:
            said = train(arguments, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    full = tmp_path / "stopped" / "checkpoints" / "iter_00000004.tmp" / "model_00.pt"
    reason = "File too large; free some space and run again"
    assert said.endswith(f"error: {full} cannot be written: {reason}\n")
    found = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert found == ["iter_00000002", "iter_00000004.tmp"]
    train(arguments)
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")
    assert not list((tmp_path / "stopped" / "checkpoints").glob("*.tmp"))
