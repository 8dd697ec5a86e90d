"""`examples/megatron_lm/pretrain_packed_vlm.py` in Megatron-LM's own `pretrain()`, on a CPU that
answers CUDA's calls (`megatron_cpu_shim.py`), against `launch.train` in .venv.

MEGATRON_LM names a checkout, as for `test_megatron_lm.py`.
"""
# ruff: noqa: E402  the checkout's folder comes first

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

if not os.environ.get("MEGATRON_LM"):
    pytest.skip("MEGATRON_LM=DIR names no checkout of Megatron-LM", allow_module_level=True)
CHECKOUT = Path(os.environ["MEGATRON_LM"]).resolve()
sys.path.insert(0, str(CHECKOUT))

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args
from safetensors.torch import load_file

from tests.helpers.packed_runs import make_config, step_lines
from tests.helpers.peers import pack_dialogues
from tests.helpers.videos import short_dialogues
from tests.peers import Say

ROOT = Path(__file__).parents[2]
VERSION = "Megatron-LM's pretrain()"
SCRIPT = ROOT / "examples/megatron_lm/pretrain_packed_vlm.py"
SHIM = ROOT / "tests/peers/megatron_cpu_shim.py"
STEP = re.compile(r"iteration +(\d)/.*lm loss: (\S+) .*grad norm: (\S+)")
COMMAND = (
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 "
    "--use-distributed-optimizer --eval-interval 10 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --distributed-backend gloo --no-gradient-accumulation-fusion"
).split()  # the last is a kernel of Apex
#: With DeepStack, and norms of queries and keys, whose gradients are sums over ranks.
FAMILY = "qwen3_vl"
#: Loss and norm of the gradients of a step, by its number.
Steps = dict[int, tuple[float, float]]


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """Of a process with modules of these folders and nothing of this one's."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    found.pop("NUMBA_CACHE_LOCATOR_CLASSES", None)  # of our `tests`: the checkout has others
    return found | {"GLOO_SOCKET_IFNAME": "lo", **more}


def pretrain(case: tuple[Path, Path], calls: Path, ranks: int, *arguments: str) -> Steps:
    """Steps of the script on the shim."""
    checkpoint, packed = case
    compiled = {"TORCHDYNAMO_DISABLE": "1", "PYTORCH_JIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    data = ["--hf-checkpoint", str(checkpoint), "--data-path", str(packed)]
    result = subprocess.run(
        [
            *torchrun,
            f"--nproc-per-node={ranks}",
            str(SHIM),
            str(SCRIPT),
            *data,
            *COMMAND,
            *arguments,
        ],
        env=environment(CHECKOUT, ROOT, SHIM_CALLS=str(calls), **compiled),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-8000:]
    logged = {
        int(step): (float(loss), float(norm)) for step, loss, norm in STEP.findall(result.stdout)
    }
    if 2 in logged:  # the first step's loss is logged and kept: the second line has the mean of two
        first, second = logged[1][0], logged[2][0]
        logged[2] = 2 * second - first, logged[2][1]
    return logged


def launch(case: tuple[Path, Path], family: str, output: Path, dtype: str = "float32") -> Steps:
    """Steps of `launch.train` with .venv's megatron-core."""
    checkpoint, packed = case
    config = make_config(
        packed,
        output,
        model={
            "checkpoint": str(checkpoint),
            "family": family,
            "dtype": dtype,
            "text": {},
            "vision": {},
        },
        batch={"global_batch_packs": 2},
        train={"iterations": 3},
        schedule={"learning_rate": 1e-3, "warmup": 0, "decay": "constant"},
        optimizer={"weight_decay": 0.0},
    )
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [ROOT / ".venv/bin/python", "-m", "launch.train", file]
    subprocess.run(command, env=environment(ROOT), cwd=ROOT, check=True)
    return {line["iteration"]: (line["loss"], line["grad_norm"]) for line in step_lines(output)}


@pytest.fixture(scope="module")
def expected(
    case: tuple[Path, Path], family: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Steps, Path]:
    """Steps of `launch.train`, and the checkpoint that it writes at the end."""
    output = tmp_path_factory.mktemp("launch") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLINE_PACKED_DATA", "1")
        patch.setenv("OFFLINE_PACKING_BMR", "1")
        return launch(case, family, output), output / "hf"


def assert_close(found: Steps, wanted: Steps) -> None:
    """Losses to 1e-4, norms to the four digits that are logged."""
    assert found.keys() == wanted.keys()
    for step, (loss, norm) in wanted.items():
        assert found[step] == (pytest.approx(loss, abs=1e-4), pytest.approx(norm, abs=1e-3)), step


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_saved_and_resumed_are_those_of_launch(
    ranks: int, case: tuple[Path, Path], expected: tuple[Steps, Path], tmp_path: Path, say: Say
) -> None:
    tensor, saved = ["--tensor-model-parallel-size", str(ranks)], str(tmp_path / "saved")
    steps = pretrain(case, tmp_path / "1", ranks, *tensor, "--save", saved, "--save-interval", "2")
    assert_close(steps, expected[0])
    exported = tmp_path / "hf"
    more = ["--load", saved, "--ckpt-step", "2", "--save-hf", str(exported)]
    resumed = pretrain(case, tmp_path / "2", ranks, *tensor, *more)
    assert resumed == {3: steps[3]}
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (expected[1], exported))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():  # three steps move a weight by 3e-3
        assert float((theirs[name] - weight).abs().max()) < 1e-3, name
    lines = [line for part in "12" for line in (tmp_path / part).read_text().splitlines()]
    assert listed() == {line.split("\t")[0] for line in lines}
    count = sum(int(line.split("\t")[-1]) for line in lines)
    losses = [round(loss, 6) for loss, _ in steps.values()]
    say(
        f"TP {ranks}: losses {losses}, as launch.train; resumed to the "
        f"same; {count} calls of CUDA answered"
    )


def listed() -> set[str]:
    """Answered calls that docs/dev/peers.md lists."""
    page = (ROOT / "docs/dev/peers.md").read_text()
    table = page.split("| answered | where, and how often |")[1].split("\n\n")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def test_context_parallel_ranks_have_the_losses_of_launch(
    case: tuple[Path, Path], family: str, tmp_path: Path, say: Say
) -> None:
    pairs, room = short_dialogues(tmp_path / "source", 48), {"context_parallel": 2}
    padded = case[0], pack_dialogues(pairs, family, case[0], tmp_path, **room)
    steps = pretrain(padded, tmp_path / "calls", 2, "--context-parallel-size", "2")
    assert_close(steps, launch(padded, family, tmp_path / "out"))
    say("CP 2: losses as launch.train on one rank")


def test_the_first_loss_in_bfloat16_is_that_of_launch(
    case: tuple[Path, Path], family: str, tmp_path: Path, say: Say
) -> None:
    """The tower's rotary frequencies stay float32; rounded, they move it by 1e-3."""
    arguments = "--bf16 --recompute-granularity full --exit-interval 1".split()
    steps = pretrain(case, tmp_path / "calls", 1, *arguments)
    wanted = launch(case, family, tmp_path / "out", "bfloat16")
    assert steps[1][0] == pytest.approx(wanted[1][0], abs=1e-4)
    say(f"bfloat16: {steps[1][0]}, launch.train {wanted[1][0]:.6f}")


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    spec = spec_from_file_location("pretrain_packed_vlm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size 2 is not for packs"),
        ("--mtp-num-layers 1", "mtp_num_layers 1 is not for packs here: it would predict"),
        ("--sequence-parallel", "sequence_parallel True"),
        ("--recompute-granularity selective", "recompute_granularity selective"),
        ("--overlap-grad-reduce", "overlap_grad_reduce True"),
        ("--data-path a b", "--data-path takes one packed folder"),
    ],
)
def test_what_it_cannot_train_is_refused_by_name(
    arguments: str,
    message: str,
    script: Any,
    case: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--hf-checkpoint", str(case[0]), "--data-path", str(case[1]), *arguments.split()]
    monkeypatch.setattr(sys, "argv", ["pretrain_packed_vlm.py", *given])
    with pytest.raises(SystemExit):
        parse_args(script.add_packed_vlm_args)
    assert message in capsys.readouterr().err


def test_arguments_of_another_model_are_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0}
    of_checkpoint = TransformerConfig(**sizes, attention_dropout=0.0)
    dropout = dataclasses.replace(of_checkpoint, hidden_dropout=0.1)
    monkeypatch.setattr(script, "get_args", lambda: None)
    monkeypatch.setattr(script, "core_transformer_config_from_args", lambda args: dropout)
    with pytest.raises(ValueError, match=r"hidden_dropout 0.1: the checkpoint has 0.0"):
        script.layers_config(of_checkpoint)
