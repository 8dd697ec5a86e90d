"""Packs whose samples share prefixes, in transformers' Trainer: steps and evaluations of samples
whole, and models that are refused."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForImageTextToText, TrainingArguments

from launch.model.segments import has_tree_attention
from launch.trainers.shared import open_as_measured
from launch.trainers.transformers_trainer import PackedTrainer
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.hf_trainers import QUIET, packed_trainer, row_of_trees
from tests.helpers.peers import open_packs
from tests.helpers.shared_media import few_trees
from tests.world import World

pytestmark = pytest.mark.usefixtures("bmr_environment")


class Case(NamedTuple):
    """A tiny checkpoint, and packs measured with it: as trees, and of the samples whole."""

    checkpoint: Path
    trees: Path
    plain: Path

    def model(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.checkpoint)

    def packs(self) -> PackedFolder:
        return open_packs(self.trees, trees=True, pixel_transport="uint8")


@pytest.fixture(scope="module")
def case(world: World) -> Case:
    return Case(*few_trees(world, "qwen2_vl"))


def test_a_step_and_an_evaluation_are_those_of_whole_samples(case: Case, tmp_path: Path) -> None:
    """Also with a model made for the run, with activations computed again; and what is saved is
    loaded with an attention of transformers' own."""
    logs = []
    for path in case[1:]:
        packs, own = open_as_measured(path, "PackedTrainer", pixel_transport="uint8", trees=True)
        assert own.trees == (path == case.trees)
        options = {"max_steps": 1, "max_grad_norm": 1.0, "gradient_checkpointing": True}
        args = TrainingArguments(
            output_dir=str(tmp_path / path.name),
            **{**QUIET, **options, "per_device_train_batch_size": len(packs)},
            per_device_eval_batch_size=len(packs),
            prediction_loss_only=True,
        )
        run = PackedTrainer(
            args=args, model_init=case.model, train_dataset=packs, eval_dataset=packs
        )
        run.train()
        assert has_tree_attention(run.model.config) == (path == case.trees)
        run.save_model()
        step = run.state.log_history[0]
        logs.append((step["loss"], step["grad_norm"], run.evaluate()["eval_loss"]))
    assert logs[0] == pytest.approx(logs[1], abs=2e-4)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / case.trees.name)
    assert not has_tree_attention(saved.config)


def test_models_that_cannot_branch_are_refused(case: Case, tmp_path: Path) -> None:
    packs = case.packs()
    longer, dynamic = case.model(), {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    longer.config.text_config.max_position_embeddings = 64
    longer.config.text_config.rope_parameters = dynamic
    with pytest.raises(ValueError, match="angles of all others with its prefix"):
        packed_trainer(tmp_path, longer, packs)
    own = type("Own", (type(longer),), {})(case.model().config)
    with pytest.raises(ValueError, match="Own is not one of transformers' own models"):
        packed_trainer(tmp_path, own, packs)
    run = packed_trainer(tmp_path, case.model(), open_packs(case.plain))
    with pytest.raises(ValueError, match="needs `use_tree_attention"):
        run._prepare_inputs(row_of_trees(packs))  # as in an evaluation on other packs
