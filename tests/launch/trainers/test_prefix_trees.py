"""Packs whose samples share prefixes, in transformers' Trainer: losses and gradients of the samples
alone, branches that see their own trunk and no other branch, and models that are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainingArguments

from launch.model.segments import has_tree_attention
from launch.trainers.shared import open_as_measured
from launch.trainers.transformers_trainer import PackedTrainer
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.hf_trainers import QUIET, check_branches, losses_of, packed_trainer, row_of_trees
from tests.helpers.peers import open_packs, samples_alone
from tests.helpers.shared_media import few_trees
from tests.helpers.tiny_checkpoints import gradients_of
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
def case(request: pytest.FixtureRequest, world: World) -> Case:
    return Case(*few_trees(world, getattr(request, "param", "qwen2_vl")))


@pytest.mark.parametrize(
    "case",
    [
        "qwen2_vl",
        "qwen3_5",
        pytest.param("internvl3", marks=pytest.mark.exhaustive),
        pytest.param("gemma4", marks=pytest.mark.exhaustive),
    ],
    indirect=True,
)
def test_losses_and_gradients_are_those_of_the_samples_alone(case: Case, tmp_path: Path) -> None:
    """M-RoPE, positions that count tokens, and images that see themselves."""
    model, packs = case.model(), case.packs()
    samples = [one for number in range(len(packs)) for one in samples_alone(packs, number)]
    alone = torch.cat([losses_of(model, sample) for sample in samples])
    alone.mean().backward()
    gradients = gradients_of(model)
    assert len(gradients) > 10
    assert len(samples) == 17
    # Where samples begin elsewhere in a recurrence's chunks, sums have another order.
    is_recurrent = model.config.model_type == "qwen3_5"
    check_branches(packed_trainer(tmp_path, model, packs), packs, alone, rtol=1e-5 * is_recurrent)
    found = gradients_of(model)
    assert found.keys() == gradients.keys()
    scale = 4 if is_recurrent else 1
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= scale * 5e-5 * gradient.norm() + 1e-8, name
    ours, expected = (torch.cat([g.flatten() for g in one.values()]) for one in (found, gradients))
    assert (ours - expected).norm() <= scale * 1e-5 * expected.norm()


@torch.no_grad()
def test_a_changed_branch_changes_no_other(case: Case, tmp_path: Path) -> None:
    packs = case.packs()
    run, collated = packed_trainer(tmp_path, case.model(), packs), row_of_trees(packs)
    batch = collated["batch"]
    inputs = run._prepare_inputs(collated)
    ends, parents = batch.cu_lengths[0].tolist(), batch.parents[0].tolist()
    before = run.model.eval()(**inputs).logits[0]
    for branch in [i for i, parent in enumerate(parents) if parent >= 0][::3]:
        own = slice(ends[branch], ends[branch + 1])
        changed = inputs["input_ids"].clone()
        changed[:, own] = changed[:, own].flip(1)
        differs = (run.model(**{**inputs, "input_ids": changed}).logits[0] != before).any(1)
        assert differs[own].any()
        differs[own] = False
        assert not differs.any()


def of_neighbours(parents: list[int]) -> list[int]:
    """Branches of every tree but the first at the trunk before theirs."""
    trunks = sorted({*parents} - {-1})
    before = dict(zip(trunks[1:], trunks, strict=False))
    return [before.get(parent, parent) for parent in parents]


MISTAKES: dict[str, Callable[[list[int]], list[int]]] = {
    "dropped": lambda parents: [],
    "shifted": lambda parents: [-1, *parents[:-1]],
    "of neighbours": of_neighbours,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_other_parents_are_noticed(mistake: str, case: Case, tmp_path: Path) -> None:
    packs = case.packs()
    run, collated = packed_trainer(tmp_path, case.model().eval(), packs), row_of_trees(packs)
    batch: PackedBatch = collated["batch"]
    right = losses_of(run.model, run._prepare_inputs(collated))
    parents = MISTAKES[mistake](batch.parents[0].tolist())
    collated["batch"] = replace(batch, parents=torch.tensor([parents], dtype=torch.int32))
    if mistake == "shifted":
        with pytest.raises(ValueError, match="are not trunks that stand before branches"):
            run._prepare_inputs(collated)
        return
    wrong = losses_of(run.model, run._prepare_inputs(collated))
    assert (wrong - right).abs().max() > 0.5


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


class Own(torch.nn.Module):
    """A model of nobody's library, around one of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config


def test_models_that_cannot_branch_are_refused(case: Case, tmp_path: Path) -> None:
    packs = case.packs()
    longer, dynamic = case.model(), {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    longer.config.text_config.max_position_embeddings = 64
    longer.config.text_config.rope_parameters = dynamic
    with pytest.raises(ValueError, match="angles of all others with its prefix"):
        packed_trainer(tmp_path, longer, packs)
    with pytest.raises(ValueError, match="Own is not one of transformers' own models"):
        packed_trainer(tmp_path, Own(case.model()), packs)


def test_rows_of_trees_need_the_attention(case: Case, tmp_path: Path) -> None:
    """As in an evaluation on other packs than the trainer was made with."""
    run = packed_trainer(tmp_path, case.model(), open_packs(case.plain))
    with pytest.raises(ValueError, match="needs `use_tree_attention"):
        run._prepare_inputs(row_of_trees(case.packs()))
