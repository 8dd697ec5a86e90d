"""Training through transformers as a command: any family, all that packs can be, adapters, stopped
and resumed, on several ranks; where it can go wrong, and what it refuses."""

import json
import runpy
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from launch.loop.setup import run
from launch.model.config import LoraOptions, TransformersModelConfig, transformers_class
from launch.model.transformers_model import build_transformers_model
from launch.train import cli
from launch.train_transformers import load_config, main
from tests.helpers.packed_runs import losses
from tests.helpers.peers import check_losses, open_packs, pack_dialogues, token_losses_alone
from tests.helpers.rank_processes import run_ranks
from tests.helpers.transformers_runs import (
    FAMILIES,
    Case,
    assert_equal_runs,
    command,
    run_here,
    stop,
    stop_here,
    train,
    weights,
)
from tests.helpers.varlen import CpuVarlen
from tests.helpers.videos import short_dialogues
from tests.world import World

EXAMPLE = Path(__file__).parents[2] / "examples/transformers_trainer.py"

pytestmark = pytest.mark.usefixtures("bmr_environment")


#: Families and kinds of packs, with the parts that are frozen, and a part of the names of those
#: that are trained.
CHECKPOINTS = [("glm46v of videos", "", ""), ("llava_1_5", "vision,language", "projector")]
FURTHER = [(name, "", "") for name in ("qwen3_5 of experts", "gemma4")]


@pytest.mark.parametrize(
    ("name", "frozen", "trained"),
    CHECKPOINTS + [pytest.param(*one, marks=pytest.mark.exhaustive) for one in FURTHER],
)
def test_a_checkpoint_of_any_family(
    name: str, frozen: str, trained: str, case: Case, tmp_path: Path
) -> None:
    folder, output, family = case(name), tmp_path / "run", name.partition(" of ")[0]
    options = [f"model.freeze=[{frozen}]", "model.recompute=full", "train.iterations=2"]
    train(command(folder, output, *options, family=family))
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path)
        for path in (folder / "model", output / "hf")
    )
    assert type(after) is type(before)
    assert len(AutoTokenizer.from_pretrained(output / "hf")) > 600
    weights = dict(after.named_parameters())
    changed = [n for n, weight in before.named_parameters() if not torch.equal(weight, weights[n])]
    assert len(changed) > (1 if frozen else 30)
    assert all(trained in name for name in changed)


def test_random_weights_are_those_of_the_seed(case: Case, tmp_path: Path) -> None:
    """Token ids and size of images are those of the packs. The step hardly changes a weight."""
    options = ["model.checkpoint=null", "train.iterations=1", "train.seed=3"]
    options.append("schedule.learning_rate=1e-8")
    train(command(case("llava_1_5"), tmp_path / "run", *options, family="llava_1_5"))
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "hf")
    assert trained.config.vision_config.image_size == 56
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")) > 600
    torch.manual_seed(3)
    seeded = type(trained)._from_config(trained.config).state_dict()
    assert largest_difference(trained.state_dict(), seeded) < 1e-6


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_model_is_moved_to_its_device_unless_sharding_does_it(fsdp: bool) -> None:
    config = TransformersModelConfig(family="qwen2_vl", fsdp=fsdp)
    model = build_transformers_model(config, device=torch.device("meta"))
    assert {weight.is_meta for weight in model.parameters()} == {not fsdp}


def test_steps_are_those_of_the_samples_alone(
    varlen: CpuVarlen, world: World, tmp_path: Path
) -> None:
    """Train packs of several samples, with images and videos, by both attentions of a CPU."""
    checkpoint = world.checkpoint("qwen3_vl")
    pairs = short_dialogues(tmp_path / "source", 24, videos=True)
    packed = pack_dialogues(pairs, "qwen3_vl", checkpoint, tmp_path, seq_length=1024)
    options = [f"model.checkpoint={checkpoint}", "train.iterations=2"]
    options += ["schedule.decay=constant", "schedule.warmup=0", "optimizer.weight_decay=0"]
    options += ["batch.global_batch_packs=1", "checkpoint={every: 0, export: false}"]
    found = []
    for attention in ("auto", "torch_varlen"):
        own = [*options, f"model.attention={attention}"]
        train(command(tmp_path, tmp_path / attention, *own, family="qwen3_vl"))
        assert bool(varlen.calls) == (attention == "torch_varlen")
        found.append(losses(tmp_path / attention))
    check_losses(packed, checkpoint, found[0])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_a_run_that_is_stopped_again_and_again_ends_as_if_nothing_had_happened(
    case: Case, tmp_path: Path
) -> None:
    """A full disk keeps the checkpoint before."""
    options = ["train.iterations=8", "batch.global_batch_packs=1", "validation.every=4"]
    train(command(case("qwen2_vl"), tmp_path / "whole", *options))
    output = tmp_path / "stopped"
    arguments, checkpoints = command(case("qwen2_vl"), output, *options), output / "checkpoints"
    said = stop(arguments, "full disk", 2, "_save")
    full = checkpoints / "iter_00000004.tmp"
    reason = "File too large; free some space and run again"
    assert said.endswith(f"error: {full} cannot be written: {reason}\n")
    assert {path.name for path in checkpoints.glob("iter_*")} == {"iter_00000002", full.name}
    assert len(losses(output)) == 4
    # each from the last checkpoint: steps 3 to 5, and 6 and 7
    for how, where, at, done in (("SIGINT", "_validate", 1, 5), ("SIGKILL", "_step", 3, 7)):
        stop(arguments, how, at, where)
        assert len(losses(output)) == done, how
    train(arguments)
    assert_equal_runs(tmp_path / "whole", output, steps=8)
    assert not list(checkpoints.glob("*.tmp"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("family", "fsdp"),
    [
        ("qwen2_vl", "true"),
        *(pytest.param(one, "false", marks=pytest.mark.exhaustive) for one in FAMILIES),
    ],
)
def test_ranks_change_no_loss(family: str, fsdp: str, case: Case, tmp_path: Path) -> None:
    """They train alike although some ranks lack images in a step, and validate fewer rows."""
    options = ["validation.every=2", "train.iterations=4", "schedule.learning_rate=1e-4"]
    options.append("batch.global_batch_packs=4")
    arguments = partial(command, case(family), family=family)
    train(arguments(tmp_path / "one", *options))
    several = arguments(tmp_path / "several", *options, f"model.fsdp={fsdp}")
    assert run_ranks(2, tmp_path / "ranks", run_here, several) == [0, 0]
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "several")) < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "own"), [("qwen2_vl", []), ("qwen3_5", ["model.lora={}"])])
def test_a_sharded_run_is_resumed(family: str, own: list[str], case: Case, tmp_path: Path) -> None:
    """It trains as one rank; stopped and resumed, as if nothing had happened; and on other ranks to
    rounding."""
    arguments = partial(command, case(family), family=family)
    options = [*own, "schedule={learning_rate: 1e-4, decay: constant, warmup: 0}"]
    options.append("batch.global_batch_packs=4")
    sharded = [*options, "model.fsdp=true"]
    train(arguments(tmp_path / "one", *options))
    run_ranks(2, tmp_path / "a", run_here, arguments(tmp_path / "two", *sharded))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert largest_difference(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-4
    stopped = arguments(tmp_path / "stopped", *sharded)
    assert run_ranks(2, tmp_path / "b", stop_here, stopped) == [143, 143]
    run_ranks(2, tmp_path / "c", run_here, stopped)
    assert_equal_runs(tmp_path / "two", tmp_path / "stopped")
    moved = arguments(tmp_path / "moved", *sharded)
    run_ranks(4, tmp_path / "d", run_here, [*moved, "train.iterations=4"])
    run_ranks(2, tmp_path / "e", _run_accepting, moved)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "two"), abs=1e-4)


def _run_accepting(arguments: list[str]) -> int:
    return run(load_config(arguments[0], arguments[1:]), ["train.iterations"])


def largest_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def run_example(folder: Path, output: Path, *options: str) -> None:
    """Run examples/transformers_trainer.py on a case."""
    with pytest.MonkeyPatch.context() as patch:
        names = [folder / "packed", folder / "model", output]
        own = ["--use_cpu", "--report_to", "none", "--max_steps", "1", *options]
        patch.setattr("sys.argv", ["transformers_trainer.py", *map(str, names), *own])
        patch.setenv("MASTER_ADDR", "localhost")
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_trains_and_saves(case: Case, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run_example(case("qwen2_vl"), output, "--learning_rate", "1e-3")
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (case("qwen2_vl") / "model", output)
    )
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 10


def test_the_example_chooses_attention_for_the_dtype_that_is_computed_with(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, which is only pretended: weights in float32, and autocast in bfloat16."""
    asked: dict[str, object] = {}

    def load(_: object, **options: object) -> None:
        asked.update(options)
        raise RuntimeError("the model would be loaded here")

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="the model would be loaded here"):
        run_example(case("qwen2_vl"), tmp_path / "run")
    assert asked == {"dtype": torch.float32, "attn_implementation": "flash_attention_2"}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.family=llava_onevision_1_5"], "llava_onevision_1_5 has no model in transformers"),
        (["model.family=qwen3_vl"], "set model.family=qwen2_vl"),
        (["parallel.tensor=2"], "only launch.train has it"),
        (["model.attention=torch_varlen"], "'torch_varlen' cannot be used for"),
        (["model.attention=flash_attn"], "model.attention"),
        (["model.lora={}", "model.freeze=[vision]"], "lora freezes all other weights already"),
        (["model.lora.targets=[nothing]"], "name no matrix of the language model"),
        (["model.lora.targets=[q_proj, vproj]"], "['vproj'] name no matrix of the language model;"),
        (["model.lora.dropout=0.95"], "model.lora.dropout=0.95: input should be less than or"),
        (["model.lora.rank=9999"], "rank 9999 > the smaller side of every matrix (the widest: "),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    overrides: list[str], line: str, case: Case, tmp_path: Path
) -> None:
    arguments = command(case("qwen2_vl"), tmp_path / "run", *overrides)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (1, 2)
    assert line in result.output
    assert "Traceback" not in result.output
    if "lora" in overrides[0]:  # which launch.train lacks
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 2
        assert "model.lora" in result.output


def test_a_long_sample_must_not_change_the_others(case: Case, tmp_path: Path) -> None:
    """In rows of transformers' dynamic angles, as InternVL3 has them, it would."""
    folder = tmp_path / "case"
    shutil.copytree(case("internvl3"), folder)
    path = folder / "model/config.json"
    config = json.loads(path.read_text())
    angles = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    config["text_config"] |= {"rope_parameters": angles, "max_position_embeddings": 64}
    path.write_text(json.dumps(config))
    output = train(command(folder, tmp_path / "run", family="internvl3"), 1)
    assert "> max_position_embeddings 64 of a model with rope_type 'dynamic': a" in output


@pytest.mark.exhaustive
def test_tied_embeddings_are_one_matrix(case: Case, tmp_path: Path) -> None:
    options = ["model.checkpoint=null", "model.tie_word_embeddings=true", "checkpoint.every=0"]
    options += ["train.iterations=2", "model.fsdp=true"]
    arguments = command(case("qwen2_5_vl"), tmp_path / "run", *options, family="qwen2_5_vl")
    train([*arguments, "model.fsdp=false", f"output.path={tmp_path / 'one'}"])
    assert run_ranks(2, tmp_path / "ranks", run_here, arguments) == [0, 0]
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "one")) < 1e-4
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "hf")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in weights(tmp_path / "run")
    assert isinstance(model, transformers_class("qwen2_5_vl"))


def adapters(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "lora" / "adapter_model.safetensors")


def test_adapters_learn_as_on_the_samples_alone(case: Case, tmp_path: Path) -> None:
    """The same steps of the same samples through transformers, peft and torch's AdamW."""
    folder, output = case("qwen2_5_vl"), tmp_path / "run"
    options = ["model.lora.rank=4", "train.iterations=3", "batch.global_batch_packs=2"]
    options += ["schedule.decay=constant", "schedule.warmup=0", "optimizer.weight_decay=0"]
    train(command(folder, output, *options, "--lora", family="qwen2_5_vl"))
    trained = adapters(output)
    expected, merged = _adapters_of_samples(folder, num_steps=3, packs_per_step=2)
    assert trained.keys() == expected.keys()
    assert len(trained) == 2 * 7 * 2  # of two layers
    assert largest_difference(trained, expected) < 1e-5
    assert sum(float(expected[name].abs().sum()) for name in expected if "lora_B" in name) > 0.1
    exported = AutoModelForImageTextToText.from_pretrained(output / "hf").state_dict()
    assert largest_difference(exported, merged) < 1e-5


def _adapters_of_samples(
    folder: Path, num_steps: int, packs_per_step: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Adapters, and all weights with these merged, after steps on samples one by one."""
    from peft import get_peft_model_state_dict

    config = TransformersModelConfig(
        family="qwen2_5_vl", checkpoint=folder / "model", lora=LoraOptions(rank=4)
    )
    model = build_transformers_model(config, device=torch.device("cpu")).model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    packs = open_packs(folder / "packed")
    for step in range(num_steps):
        first = step * packs_per_step
        numbers = range(first, first + packs_per_step)
        torch.cat([token_losses_alone(model, packs, n) for n in numbers]).mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        adamw.zero_grad()
    return get_peft_model_state_dict(model), model.merge_and_unload().state_dict()


def test_a_stopped_run_of_adapters_goes_on(case: Case, tmp_path: Path) -> None:
    """With the dropout of an undisturbed run; other adapters are refused."""
    make = partial(command, case("qwen2_vl"))
    options = ["--lora", "model.lora.dropout=0.2", "train.iterations=3"]
    options.append("batch.global_batch_packs=1")
    train(make(tmp_path / "whole", *options))
    stopped = make(tmp_path / "stopped", *options)
    stop(stopped, "SIGTERM", 2)
    for other in (["model.lora.rank=8"], ["model.lora.alpha=16"], None):
        asked = [*stopped, *other] if other else make(tmp_path / "stopped")
        assert "model.lora must be the same to resume" in train(asked, 1)
    asked = [*stopped, "model.fsdp=true"]
    assert "model.fsdp must be the same to resume: restore it" in train(asked, 1)
    train(stopped)
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped", steps=3)
    ours, theirs = adapters(tmp_path / "whole"), adapters(tmp_path / "stopped")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
