"""Recipes of LLaMA-Factory: that of docs/integrations.md, and what is wrong in others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.hparams import parser
from transformers import AutoModelForImageTextToText, TrainerCallback

from launch.trainers.llama_factory import tuner
from task_encoders.model_inputs import to_transformers_kwargs
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.hf_videos import with_processor
from tests.helpers.llama_factory import recipe, train
from tests.helpers.peers import check_contradictions, open_packs
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_families import encoder_options

#: Options of the documented recipe that the other tests leave out.
AS_WRITTEN: Mapping[str, Any] = {"freeze_vision_tower": None, "freeze_multi_modal_projector": None}


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen2_vl"


@pytest.fixture(scope="module")
def case(case: tuple[Path, Path]) -> tuple[Path, Path]:
    return with_processor(case[0]), case[1]


@pytest.fixture(scope="module")
def split_packs(case: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs with a val split."""
    root = tmp_path_factory.mktemp("split")
    model = {"family": "qwen2_vl", "processor": str(case[0]), **encoder_options("qwen2_vl")}
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source", 40)), "task": "bmr"}
    output = {"split": {"train": 0.8, "val": 0.2}}
    run = make_run(source, root / "packed", model=model, pack={"seq_length": 512}, output=output)
    pack_all(run)
    return root / "packed"


class _Losses(TrainerCallback):
    """What a run validates to, and what it trains on."""

    def __init__(self) -> None:
        self.validation: list[float] = []
        self.samples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.samples = len(kwargs["train_dataloader"].dataset)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.validation.append(kwargs["metrics"]["eval_loss"])


def test_the_documented_recipe_validates_on_its_val_split(
    case: tuple[Path, Path], split_packs: Path, tmp_path: Path
) -> None:
    losses = _Losses()
    validation = {"eval_dataset": str(split_packs), "eval_strategy": "steps", "eval_steps": 2}
    given = recipe(case[0], split_packs, tmp_path, max_steps=2, **AS_WRITTEN, **validation)
    tuner.run_exp(given, [losses])
    packs = open_packs(split_packs, "val")
    assert losses.samples == len(open_packs(split_packs)) > len(packs) > 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        rows = [to_transformers_kwargs(packs.batch([number])) for number in range(len(packs))]
        expected = sum(float(model(**row).loss) for row in rows) / len(packs)
    assert losses.validation[0] == pytest.approx(expected, abs=1e-4)


def frozen_run(
    checkpoint: Path, packed: Path, output: Path, options: Mapping[str, Any]
) -> tuple[list[int], list[float]]:
    run = train(checkpoint, packed, output, max_steps=2, save_strategy="no", **options)
    return run.numbers, run.losses


@pytest.mark.parametrize("options", [{}, {"finetuning_type": "lora"}])
def test_two_ranks_train_as_documented(
    options: dict[str, Any], case: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the vision tower frozen, which is LLaMA-Factory's default."""
    folders = (*case, tmp_path / "out")
    ranks = run_ranks(2, tmp_path / "ranks", frozen_run, *folders, {**AS_WRITTEN, **options})
    assert [numbers for numbers, _ in ranks] == [[0, 2], [1, 3]]
    assert len(ranks[0][1]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True}, "leave out packing"),
        ({"neat_packing": True}, "leave out packing, neat_packing"),
        ({"max_samples": 10, "mask_history": True}, "leave out max_samples, mask_history"),
        ({"dataset": "{packed},other"}, "give one dataset"),
        ({"eval_dataset": "other"}, "give packs as both"),
        ({"eval_dataset": "{packed}"}, "no packs in its val split"),
        ({"do_train": False}, "set do_train: true"),
        ({"pure_bf16": True}, "set bf16: true"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    options: dict[str, Any],
    message: str,
    case: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parser, "is_torch_bf16_gpu_available", lambda: True)
    for name, value in options.items():
        if isinstance(value, str):
            options = {**options, name: value.format(packed=case[1])}
    with pytest.raises(ValueError, match=message) as caught:
        train(*case, tmp_path, max_steps=1, **options)
    assert "\n" not in str(caught.value)


def test_packs_that_contradict_model_or_environment_are_refused(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    check_contradictions(
        lambda model, packs: train(with_processor(model), packs, tmp_path, max_steps=1),
        case,
        tmp_path / "other",
    )


def test_other_data_go_llama_factorys_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"}}))
    records = [{"instruction": "Say", "input": text, "output": text} for text in "ab"]
    (tmp_path / "mine.json").write_text(json.dumps(records))
    losses = _Losses()
    options = {"dataset": "mine", "dataset_dir": str(tmp_path), "max_steps": 1}
    tuner.run_exp(recipe(*case, tmp_path / "out", **options), [losses])
    assert losses.samples == 2
