"""Training through transformers as a command: any family, stopped and resumed, on several ranks,
in bfloat16; and what it refuses."""

import json
import os
import runpy
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from launch.loop.setup import run
from launch.loop.trainer import Trainer
from launch.train import cli
from launch.train_transformers import load_config, main
from tests.helpers.hf_trainers import several_packs
from tests.helpers.packed_runs import losses
from tests.helpers.parity import check_losses
from tests.helpers.rank_processes import run_ranks
from tests.helpers.transformers_runs import (
    FAMILIES,
    STOPS,
    Case,
    Interrupted,
    assert_equal_runs,
    command,
    stop,
    train,
    weights,
)

EXAMPLE = Path(__file__).parents[2] / "examples/transformers_trainer.py"

pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture(scope="module")
def undisturbed(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Output of a family's training with some options in one process; each is trained once."""

    @cache
    def trained(family: str, *options: str) -> Path:
        output = tmp_path_factory.mktemp("undisturbed")
        train(command(case(family), output, *options, family=family))
        return output

    return trained


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        "qwen3_5 of experts",
        "llava_1_5",
        "glm46v of videos",
        "gemma4",
        "mistral3",
        "internvl3",
    ],
)
def test_a_checkpoint_of_any_family(name: str, case: Case, tmp_path: Path) -> None:
    folder, output = case(name), tmp_path / "run"
    family = name.partition(" of ")[0]
    train(command(folder, output, "train.iterations=1", "model.recompute=full", family=family))
    before = AutoModelForImageTextToText.from_pretrained(folder / "model")
    trained = AutoModelForImageTextToText.from_pretrained(output / "hf")
    assert type(trained) is type(before)
    assert len(AutoTokenizer.from_pretrained(output / "hf")) > 600
    after = dict(trained.named_parameters())
    changed = [n for n, weight in before.named_parameters() if not torch.equal(weight, after[n])]
    assert len(changed) > 30


def test_random_weights_are_the_same_for_one_seed(case: Case, tmp_path: Path) -> None:
    """Token ids and size of images are those of the packs."""
    folder = case("llava_1_5")
    options = ["model.checkpoint=null", "train.iterations=1"]
    for name, seed in (("first", 3), ("second", 3), ("third", 4)):
        seeded = [*options, f"train.seed={seed}"]
        train(command(folder, tmp_path / name, *seeded, family="llava_1_5"))
    first, second, third = (weights(tmp_path / name) for name in ("first", "second", "third"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)
    config = AutoModelForImageTextToText.from_pretrained(tmp_path / "first" / "hf").config
    assert config.vision_config.image_size == 56
    assert len(AutoTokenizer.from_pretrained(tmp_path / "first" / "hf")) > 600


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_vl of videos", "internvl3"),
        *(
            pytest.param(f"{family}{kind}", marks=pytest.mark.exhaustive)
            for family in ("qwen2_vl", "qwen2_5_vl")
            for kind in ("", " of videos")
        ),
        pytest.param("qwen3_vl", marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_packs_as_in_launch_train(name: str, case: Case, tmp_path: Path) -> None:
    """From one checkpoint, with texts, pictures, several of them, and videos."""
    family = name.partition(" of ")[0]
    ten_steps = partial(command, case(name), family=family)
    options = ["train.iterations=10", "data.order=interleaved", "schedule.learning_rate=1e-4"]
    result = CliRunner().invoke(cli, ten_steps(tmp_path / "megatron", *options))
    assert result.exit_code == 0, result.output
    train(ten_steps(tmp_path / "transformers", *options))
    ours, theirs = losses(tmp_path / "transformers"), losses(tmp_path / "megatron")
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(ours) == 10


def test_steps_are_those_of_the_samples_alone(tmp_path: Path) -> None:
    """And those of `launch.train`: packs of several samples, with images and videos."""
    checkpoint, packed = several_packs("qwen3_vl", tmp_path)
    options = [f"model.checkpoint={checkpoint}", "train.iterations=2", "data.order=written"]
    options += ["schedule.decay=constant", "schedule.warmup=0", "optimizer.weight_decay=0"]
    options += ["batch.global_batch_packs=1", "checkpoint={every: 0, export: false}"]
    train(command(tmp_path, tmp_path / "run", *options, family="qwen3_vl"))
    check_losses(packed, checkpoint, losses(tmp_path / "run"), tmp_path / "megatron")


@pytest.mark.parametrize(
    ("family", "how", "at"),
    [
        ("qwen2_vl", "SIGTERM", 3),
        ("qwen2_vl", "SIGKILL", 10),
        # Each family with each way to stop, and with each step.
        *(
            pytest.param(family, how, (1, 5, 10)[(i + j) % 3], marks=pytest.mark.exhaustive)
            for i, family in enumerate(FAMILIES)
            for j, how in enumerate(STOPS)
        ),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    family: str,
    how: str,
    at: int,
    case: Case,
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order holds in the second epoch, too."""
    whole = undisturbed(family, "train.iterations=12")
    arguments = command(case(family), tmp_path, "train.iterations=12", family=family)
    stop(arguments, how, at, monkeypatch)
    train(arguments)
    assert_equal_runs(whole, tmp_path, steps=12)


def _run_here(arguments: list[str]) -> int:
    return run(load_config(arguments[0], arguments[1:]))


@pytest.mark.parametrize(
    ("family", "ranks", "fsdp"),
    [
        ("qwen2_vl", 2, True),
        *(
            pytest.param(family, ranks, fsdp, marks=pytest.mark.exhaustive)
            for family in FAMILIES
            for ranks, fsdp in [(2, False), (4, False), (2, True), (4, True)]
        ),
    ],
)
def test_ranks_change_no_loss(
    family: str,
    ranks: int,
    fsdp: bool,
    case: Case,
    undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """They train alike although some ranks lack images in a step, and validate fewer rows."""
    options = ["validation.every=3", "train.iterations=10", "schedule.learning_rate=1e-4"]
    one = undisturbed(family, *options)
    options.append(f"model.fsdp={str(fsdp).lower()}")
    arguments = command(case(family), tmp_path / "several", *options, family=family)
    assert run_ranks(ranks, tmp_path / "ranks", _run_here, arguments) == [0] * ranks
    assert losses(tmp_path / "several") == pytest.approx(losses(one), abs=1e-5)
    ours, theirs = weights(one), weights(tmp_path / "several")
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-4


def _stop(arguments: list[str]) -> int:
    step = Interrupted(3, partial(os.kill, os.getpid(), signal.SIGTERM))
    Trainer._step = step  # type: ignore[method-assign,assignment]
    return _run_here(arguments)


@pytest.mark.exhaustive
def test_a_sharded_run_is_resumed(case: Case, tmp_path: Path) -> None:
    """A resumed run is equal to the last bit; on other ranks, to rounding."""
    arguments = partial(command, case("qwen2_vl"))
    sharded = ["model.fsdp=true", "schedule.decay=constant", "schedule.warmup=0"]
    run_ranks(2, tmp_path / "a", _run_here, arguments(tmp_path / "whole", *sharded))
    stopped = arguments(tmp_path / "stopped", *sharded)
    assert run_ranks(2, tmp_path / "b", _stop, stopped) == [143, 143]
    run_ranks(2, tmp_path / "c", _run_here, stopped)
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")
    moved = arguments(tmp_path / "moved", *sharded)
    run_ranks(4, tmp_path / "d", _run_here, [*moved, "train.iterations=4"])
    run_ranks(2, tmp_path / "e", _run_accepting, moved)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def _run_accepting(arguments: list[str]) -> int:
    return run(load_config(arguments[0], arguments[1:]), ["train.iterations"])


def _changed(masters: torch.Tensor, before: torch.Tensor) -> float:
    return float((masters != before).float().mean())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "llava_1_5"])
def test_a_bfloat16_checkpoint_learns_as_in_float32(
    family: str, case: Case, tmp_path: Path
) -> None:
    """After 20 steps, the loss is within 1e-3. Before, it is up to 6e-3 behind: weights that begin
    as values of bfloat16 have to move half the way to the next before computing sees it."""
    folder = tmp_path / "case"
    shutil.copytree(case(family), folder, ignore=shutil.ignore_patterns("source"))
    # Weights near .02, as in models that people have: computing rounds those near 1 more.
    config = AutoConfig.from_pretrained(folder / "model")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    changed, found = {}, {}
    for dtype in ("bfloat16", "float32"):
        options = [f"model.dtype={dtype}", "train.iterations=20", "schedule.learning_rate=1e-5"]
        still = [*options, "train.iterations=1", "schedule.learning_rate=1e-30"]
        output = tmp_path / dtype
        train(command(folder, output, *options, family=family))
        train(command(folder, tmp_path / f"still_{dtype}", *still, family=family))
        after, before = _masters(output, 20), _masters(tmp_path / f"still_{dtype}", 1)
        changed[dtype] = _changed(after, before)
        found[dtype] = losses(output)
    assert changed["float32"] > 0.5
    assert changed["bfloat16"] == pytest.approx(changed["float32"], abs=0.01)
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=6e-3)
    assert found["bfloat16"][-1] == pytest.approx(found["float32"][-1], abs=1e-3)


def _masters(output: Path, step: int) -> torch.Tensor:
    """All float32 weights of a run's checkpoint."""
    path = output / "checkpoints" / f"iter_{step:08d}" / "rank_00000.pt"
    state = torch.load(path, weights_only=True)
    return torch.cat([master.flatten() for master in state["optimizer"]["masters"]])


def run_example(folder: Path, output: Path, *options: str) -> None:
    """Run examples/transformers_trainer.py on a case."""
    with pytest.MonkeyPatch.context() as patch:
        names = [folder / "packed", folder / "model", output]
        own = ["--use_cpu", "--report_to", "none", "--max_steps", "2", *options]
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
        (["model.attention=torch_varlen"], "model.attention"),
        (["model.lora={}", "model.freeze=[vision]"], "lora freezes all weights but its own"),
        (["model.lora.targets=[nothing]"], "name no matrix of the language model"),
        (["model.lora.targets=[q_proj, vproj]"], "['vproj'] name no matrix of the language model;"),
        (
            ["model.lora.dropout=0.95"],
            "model.lora.dropout=0.95: input should be less than or equal",
        ),
        (
            ["model.lora.rank=9999"],
            "rank 9999 > the smaller side of every matrix (the widest: model.",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    overrides: list[str], line: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(case("qwen2_vl"), tmp_path / "run", *overrides)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (1, 2)
    assert line in result.output
    assert "Traceback" not in result.output


def test_a_long_sample_must_not_change_the_others(case: Case, tmp_path: Path) -> None:
    """In rows of transformers' dynamic angles, as InternVL3 has them, it would."""
    folder = tmp_path / "case"
    shutil.copytree(case("internvl3"), folder)
    path = folder / "model/config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        "max_position_embeddings": 64,
    }
    path.write_text(json.dumps(config))
    output = train(command(folder, tmp_path / "run", family="internvl3"), 1)
    assert "> max_position_embeddings 64 of a model with rope_type 'dynamic': a" in output
    config["text_config"]["max_position_embeddings"] = 32768
    path.write_text(json.dumps(config))
    train(command(folder, tmp_path / "run", "train.iterations=1", family="internvl3"))


def test_launch_train_refuses_what_it_lacks(case: Case, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, command(case("qwen2_vl"), tmp_path / "run", "model.lora={}"))
    assert result.exit_code == 2
    assert "model.lora" in result.output
