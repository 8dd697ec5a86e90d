"""Recipes of NeMo AutoModel: that of docs/integrations.md, and what is wrong in others."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemo_automodel.cli.utils import resolve_recipe_name
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.components.datasets.vlm.loader import VlmCollatorConfig
from nemo_automodel.components.models.common.packing import configure_packing_for_models
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from nemo_automodel.recipes._typed_config import RecipeConfig
from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM, _is_recipe_target
from transformers import AutoModelForImageTextToText

from task_encoders.families.builtin_processor import builtin_processor
from tests.helpers.markdown import blocks
from tests.helpers.peers import assert_same, check_contradictions

PAGE = Path(__file__).parents[2] / "docs/integrations.md"
SEQ_LENGTH = 512


def _processor(**_: Any) -> Any:
    return builtin_processor()


def parse(file: Path, checkpoint: Path, packed: Path, *overrides: str) -> RecipeConfig:
    """The recipe of the documentation, for this model and these packs, as the command parses it."""
    (text,) = [block.text for block in blocks(PAGE.read_text()) if "PacksConfig" in block.text]
    file.write_text(text)
    values = {
        "model.pretrained_model_name_or_path": checkpoint,
        "dataset.path": packed,
        "validation_dataset.path": packed,
        "validation_dataset.split": "train",  # these packs have no other
        "packed_sequence.pack_size": SEQ_LENGTH,
    }
    arguments = [f"--{name}={value}" for name, value in values.items()]
    return RecipeConfig(parse_args_and_load_config(str(file), argv=[*arguments, *overrides]))


def build(recipe: RecipeConfig, section: str = "vlm_dataloader", **options: Any) -> Any:
    """A loader as the recipe's class builds it."""
    config = getattr(recipe, section)
    config.processor_config = config.processor_config.__class__(_processor)
    return config.build(
        pretrained_model_name_or_path=recipe.model.pretrained_model_name_or_path,
        dp_rank=0,
        dp_world_size=1,
        batch_size=recipe.get("step_scheduler.local_batch_size"),
        **options,
    ).dataloader


def test_the_documented_recipe_is_parsed_whole(case: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case)
    target = resolve_recipe_name(recipe.recipe)
    assert target == f"{FinetuneRecipeForVLM.__module__}.FinetuneRecipeForVLM"
    assert _is_recipe_target(recipe.model.get("_target_"))
    assert recipe.step_scheduler.global_batch_size == 64
    assert recipe.optimizer.kwargs["lr"] == 1e-5
    assert recipe.checkpoint.checkpoint_dir == "out/trained"
    recipe.loss_fn.build()
    parse_distributed_section(recipe.distributed.to_dict())


def test_training_and_validation_read_the_same_rows(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    """With several packs a step, each is a row of its own, padded."""
    recipe = parse(tmp_path / "recipe.yaml", *case, "--dataloader.num_workers=0")
    model = AutoModelForImageTextToText.from_pretrained(case[0], attn_implementation="sdpa")
    contract = configure_packing_for_models([model])
    rows = list(build(recipe, packing_contract=contract))
    validation = list(build(recipe, "vlm_validation_dataloader", packing_contract=contract))
    assert len(rows) == len(validation) > 3
    for number, (row, other) in enumerate(zip(rows, validation, strict=True)):
        assert row.keys() == other.keys()
        assert_same(row, other, f"pack {number}")
    recipe = parse(
        tmp_path / "two.yaml",
        *case,
        "--dataloader.num_workers=0",
        "--step_scheduler.local_batch_size=2",
    )
    pair = next(iter(build(recipe, packing_contract=contract)))
    for place, row in enumerate(rows[:2]):
        length = row["input_ids"].shape[1]
        for name in ("input_ids", "labels", "mm_token_type_ids"):
            assert torch.equal(pair[name][place, :length], row[name][0])
        assert (pair["labels"][place, length:] == -100).all()
        assert torch.equal(pair["position_ids"][:, place, :length], row["position_ids"][:, 0])
        assert torch.equal(
            pair["attention_mask"][place, :, :length, :length], row["attention_mask"][0]
        )
    images = [row["pixel_values"] for row in rows[:2] if "pixel_values" in row]
    assert torch.equal(pair["pixel_values"], torch.cat(images))


@pytest.mark.parametrize(
    ("override", "options", "message"),
    [
        ("--dataloader.shuffle=true", {}, r"set dataloader: \{shuffle: false\}"),
        ("--packed_sequence.pack_size=8192", {}, r"set packed_sequence: \{pack_size: 512\}"),
        ("--packed_sequence.pack_size=0", {}, r"set packed_sequence: \{pack_size: 512\}"),
        ("--packed_sequence.max_packs=9", {}, "and no max_packs"),
        ("--packed_sequence.packing_format=thd", {"cp_size": 2}, "set packing_format: neat"),
        ("--dataset.split=val", {}, "no packs in its val split"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    override: str, options: dict[str, Any], message: str, case: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case, override)
    with pytest.raises(ValueError, match=message) as caught:
        build(recipe, **options)
    assert "\n" not in str(caught.value)
    assert str(case[1]) in str(caught.value)


def test_packs_that_contradict_model_or_environment_are_refused(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    check_contradictions(
        lambda model, packs: build(parse(tmp_path / "recipe.yaml", model, packs)),
        case,
        tmp_path / "other",
    )


def test_other_datasets_go_automodels_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case, "--packed_sequence.pack_size=0")
    config = recipe.vlm_dataloader
    config.dataset_config = SimpleNamespace(build=lambda: ["a", "b", "c"])
    config.collator = VlmCollatorConfig(lambda examples, processor: examples)
    config.shuffle, config.num_workers = True, 0
    assert sorted(itertools.chain.from_iterable(build(recipe))) == ["a", "b", "c"]
