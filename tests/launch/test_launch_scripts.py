"""The scripts as a user runs them: bash, torchrun, signals, and what is left on disk."""

import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.config import load_config
from launch.loop.metrics import read_metrics
from launch.loop.setup import run
from launch.start import lonely_nodes, main
from launch.train import cli
from launch.train_transformers import load_config as load_transformers_config
from offline_packing.upkeep.blend import blend
from task_encoders.packs.pack import restore_pack
from task_encoders.samples import SourceSample
from tests.helpers.command import invoke
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    make_run,
    mixed_pairs,
    pack_all,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import members_of
from tests.helpers.packed_runs import BMR_ENVIRONMENT, losses
from tests.helpers.ports import free_port
from tests.helpers.transformers_runs import Case
from tests.helpers.unpacked_folders import crude_folder

ROOT = Path(__file__).parents[2]
STEPS = 8
#: Warnings of torch and megatron-core 0.19 about what a CPU lacks.
WARNING = re.compile(r"^W\d{4} |Warning: |^  warnings\.warn\(")
#: Overrides that make a step small; the vocabulary is the real one.
SMALL = (
    "model.text={hidden_size: 16, num_attention_heads: 1, num_key_value_heads: 1}",
    "model.vision={hidden_size: 16, depth: 1}",
    "data.num_workers=1",
    "batch.global_batch_size=null",
    "batch.global_batch_packs=2",
    "validation.every=0",
)


def start(
    script: str, *overrides: str, cwd: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Start a script with no variables but those a user would have, and the given ones."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("OFFLINE_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "1"}
    return subprocess.Popen(
        ["bash", str(ROOT / "launch" / script), *overrides],
        env={**inherited, **own, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 400) -> str:
    output, _ = process.communicate(timeout=timeout)
    return output


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], output: Path, count: int) -> None:
    deadline = time.monotonic() + 400
    while steps_done(output) < count:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "no step in 400 s"
        time.sleep(0.02)


def rank_of(torchrun: subprocess.Popen[str]) -> int:
    """Process id of the rank that torchrun started."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return int(children[0])


def check_stop(process: subprocess.Popen[str], output: Path, name: str) -> int:
    """Wait for the end of a run that was sent a signal, after a step; return its steps."""
    text = finish(process)
    assert f"stopped by {name} after" in text, text
    assert process.returncode == 128 + signal.Signals[name]
    assert "Traceback" not in text
    done = steps_done(output)
    assert 1 <= done < STEPS
    assert (output / "checkpoints" / f"iter_{done:08d}" / "state.json").is_file()
    return done


#: The module that a script starts, and what reads its configuration.
MODULES: dict[str, Any] = {
    "launch.train": load_config,
    "launch.train_transformers": load_transformers_config,
}
each_module = pytest.mark.parametrize(
    "module",
    ["launch.train", pytest.param("launch.train_transformers", marks=pytest.mark.exhaustive)],
    scope="module",
)


@pytest.fixture(scope="module")
def stoppable(case: Case) -> tuple[str, ...]:
    """Overrides of a run on a tiny checkpoint, whose steps are long enough to be stopped in."""
    steps = (f"train.iterations={STEPS}", "batch.global_batch_packs=8")
    others = [one for one in SMALL if not one.startswith(("model.", "batch.global_batch_packs"))]
    return (f"model.checkpoint={case('qwen2_vl') / 'model'}", *others, *steps)


@pytest.fixture(scope="module")
def sft_run(
    module: str, case: Case, stoppable: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that was stopped by SIGTERM, and then left to finish; all its paths are relative to a
    folder in which another package has this one's name."""
    cwd = tmp_path_factory.mktemp("sft")
    output = cwd / "out"
    (cwd / "packs").symlink_to(case("qwen2_vl") / "packed")
    (cwd / "my.yaml").write_text((ROOT / "launch" / "sft.yaml").read_text())
    (cwd / "launch").mkdir()
    (cwd / "launch" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    options = (*stoppable, "checkpoint.every=2")
    own = {"CONFIG": "my.yaml", "MODULE": module}
    paths = ("data.path=packs", "output.path=out")
    stopped = start("sft_qwen2_vl.sh", *paths, *options, cwd=cwd, **own)
    wait_for_steps(stopped, output, 1)
    stopped.send_signal(signal.SIGTERM)  # to torchrun, as slurm does
    check_stop(stopped, output, "SIGTERM")
    paths = (f"data.path={cwd}/packs", f"output.path={output}")
    assert run_here(*paths, *options, module=module)
    return output


def run_here(*overrides: str, module: str = "launch.train") -> bool:
    """sft_qwen2_vl.sh in this process; whether it came to its end."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in BMR_ENVIRONMENT.items():
            environment.setenv(name, value)
        torch.set_num_threads(1)
        return run(MODULES[module](ROOT / "launch" / "sft.yaml", overrides)) == 0


@pytest.fixture(scope="module")
def whole_run(
    module: str, case: Case, stoppable: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Losses of the run that nothing stopped."""
    output = tmp_path_factory.mktemp("whole")
    paths = (f"data.path={case('qwen2_vl') / 'packed'}", f"output.path={output}")
    options = (*stoppable, "checkpoint={every: 0, export: false}")
    assert run_here(*paths, *options, module=module)
    return losses(output)


@each_module
def test_a_stopped_run_is_the_run_that_was_not(sft_run: Path, whole_run: list[float]) -> None:
    assert losses(sft_run) == whole_run
    assert len(whole_run) == STEPS


@pytest.mark.exhaustive
@each_module
def test_a_killed_run_is_the_run_that_was_not(
    module: str, case: Case, stoppable: tuple[str, ...], whole_run: list[float], tmp_path: Path
) -> None:
    paths = (f"data.path={case('qwen2_vl') / 'packed'}", f"output.path={tmp_path}")
    arguments = (*paths, *stoppable, "checkpoint.every=2")
    killed = start("sft_qwen2_vl.sh", *arguments, MODULE=module)
    wait_for_steps(killed, tmp_path, 3)
    victim = rank_of(killed)
    os.kill(victim, signal.SIGKILL)
    assert [line for line in finish(killed).splitlines() if "error" in line] == [
        f"error: Signal 9 (SIGKILL) received by PID {victim}"
    ]
    assert killed.returncode == 128 + signal.SIGKILL
    assert run_here(*arguments, module=module)
    assert losses(tmp_path) == whole_run


def test_a_killed_rank_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun tells of it."""
    killed = ProcessFailure(local_rank=0, pid=17, exitcode=-signal.SIGKILL, error_file="")

    def wait(arguments: list[str]) -> None:
        raise ChildFailedError("launch.train", {0: killed})

    monkeypatch.setattr(torchrun, "main", wait)
    for name, value in BMR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yaml_file = str(ROOT / "launch" / "sft.yaml")
    status = main(["-m", "launch.train", yaml_file, f"data.path={folder}"])
    assert status == 128 + signal.SIGKILL
    assert capsys.readouterr().err == "error: Signal 9 (SIGKILL) received by PID 17\n"


def test_a_port_in_use_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in BMR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run_of = [str(ROOT / "launch" / "sft.yaml"), f"data.path={folder}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = ["--master-addr", "127.0.0.1", "--master-port", port]
        assert main([*address, "-m", "launch.train", *run_of]) == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "[W" not in line[:2])
    assert line.startswith("error: ranks cannot meet: The server socket has failed to listen")
    assert f"port: {port}," in line
    assert line.endswith(
        "; set MASTER_PORT to a free port, and MASTER_ADDR to the first node's name"
    )


@each_module
def test_the_checkpoint_of_the_script_loads_in_transformers(sft_run: Path) -> None:
    from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(sft_run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(sft_run / "hf")
    tokens = tokenizer("A red circle", return_tensors="pt").input_ids
    logits = model(input_ids=tokens).logits
    assert logits.shape == (1, tokens.shape[1], 1024)
    assert logits.isfinite().all()


@pytest.mark.exhaustive
@each_module
def test_ctrl_c_stops_torchrun_and_its_ranks(module: str, folder: Path, tmp_path: Path) -> None:
    paths = (f"data.path={folder}", f"output.path={tmp_path}", f"train.iterations={STEPS}")
    process = start("sft_qwen2_vl.sh", *paths, *SMALL, MODULE=module)
    wait_for_steps(process, tmp_path, 1)
    os.killpg(process.pid, signal.SIGINT)  # to all, as a terminal does
    check_stop(process, tmp_path, "SIGINT")


@pytest.mark.exhaustive
def test_stage_1_trains_the_projector_on_two_processes(captions: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={captions}", f"output.path={tmp_path}", "train.iterations=2", *SMALL)
    process = start("pretrain_qwen2_vl.sh", *arguments, NPROC_PER_NODE="2")
    text = finish(process)
    assert process.returncode == 0, text
    assert "a step takes 2 packs" in text
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "hf" / "config.json").is_file()


@pytest.mark.exhaustive
def test_from_init_to_a_trained_model(tmp_path: Path) -> None:
    """The three commands that the README shows, with sft.yaml's validation."""
    data = mixed_pairs(tmp_path / "data", 30)
    config = tmp_path / "pack.yaml"
    packed = tmp_path / "packed"
    invoke("init", data, "--task", "bmr", "--to", config, "--output", packed)
    split = "output.split={train: 0.7, val: 0.3}"  # of 30 samples, some for validation
    small = ("pack.seq_length=256", "model.max_pixels=50176", "engine.workers=0")
    invoke("run", config, *small, split)
    overrides = [one for one in SMALL if not one.startswith("validation")]
    arguments = (f"data.path={packed}", f"output.path={tmp_path / 'out'}", *overrides)
    process = start("sft_qwen2_vl.sh", *arguments, "train.iterations=1")
    text = finish(process)
    assert process.returncode == 0, text
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert any("validation_loss" in line for line in lines)
    assert (tmp_path / "out" / "hf" / "tokenizer.json").is_file()
    arguments = (*arguments, "train.iterations=2", "schedule.warmup=0.5")
    yaml_file = str(ROOT / "launch" / "sft.yaml")
    refused = CliRunner().invoke(cli, [yaml_file, *arguments], env=BMR_ENVIRONMENT)
    assert refused.exit_code == 1
    assert [line for line in refused.stderr.splitlines() if line.startswith("  ")] == [
        "  schedule.warmup was 0.03, is 0.5",
        "  train.iterations was 1, is 2",
    ]
    names = ("--accept-mismatch", "train.iterations", "--accept-mismatch", "schedule.warmup")
    extended = CliRunner().invoke(cli, [yaml_file, *arguments, *names], env=BMR_ENVIRONMENT)
    assert extended.exit_code == 0, extended.output
    assert len(losses(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "hf_1").is_dir()


def test_packs_without_a_val_split(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Validation that the file asks for is off; what the command asks for is refused before a rank
    starts."""
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    source = {"format": "pairs", "path": str(captioning_pairs(tmp_path / "data", 8))}
    pack_all(make_run({**source, "task": "captioning"}, tmp_path / "packed"))
    arguments = [
        "-m",
        "launch.train",
        str(ROOT / "launch" / "sft.yaml"),
        f"data.path={tmp_path / 'packed'}",
    ]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "validation.every=500"])
    assert end.value.code == 1
    assert "has no packs in its val split; set validation.every=0" in capsys.readouterr().err
    started: list[str] = []
    monkeypatch.setattr(torchrun, "main", started.extend)
    assert main(arguments) == 0
    given = started[started.index("launch.train") + 1 :]
    assert f"validation is off: {tmp_path / 'packed'} has no packs in its val" in caplog.text
    caplog.clear()
    result = CliRunner().invoke(cli, [*given, f"output.path={tmp_path / 'out'}", *SMALL[:-1]])
    assert result.exit_code == 0, result.output
    assert "validation" not in caplog.text
    again = CliRunner().invoke(cli, [*arguments[2:], f"output.path={tmp_path / 'b'}", *SMALL[:-1]])
    assert again.exit_code == 0, again.output
    assert caplog.text.count("validation is off") == 1


def test_a_family_without_a_built_in_processor_is_trained_and_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "data", 12)), "task": "bmr"}
    model = {"family": "qwen3_vl", "processor": "builtin", "max_pixels": 65536}
    pack_all(make_run(source, tmp_path / "packed", model=model, pack={"seq_length": 256}))
    small = [one for one in SMALL if not one.startswith("model")]
    arguments = [f"data.path={tmp_path / 'packed'}", f"output.path={tmp_path / 'out'}", *small]
    caplog.set_level(logging.INFO)
    assert run_here(*arguments, "model.family=qwen3_vl", "train.iterations=1")
    told, step = (caplog.text.index(text) for text in ("hf/ will have no tokenizer", "step 1/1"))
    assert told < step
    trained = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out" / "hf")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())


def test_stage_1_5_refuses_packs_of_another_task(folder: Path, tmp_path: Path) -> None:
    arguments = (f"data.path={folder}", f"output.path={tmp_path}", *SMALL)
    process = start("pretrain_qwen2_vl.sh", *arguments, STAGE="1.5")
    text = finish(process)
    assert process.returncode != 0
    (line,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert "OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_BMR=1" in line
    assert line.endswith("; or start bash launch/sft_qwen2_vl.sh")


def three_outputs(root: Path) -> list[Path]:
    """Captions, questions and dialogues packed apart, with a val split each, over the same
    pictures; some dialogues show two of them."""
    for i in range(24):
        write_file(root / "data" / f"{i}.jpg", image_bytes(56 + 28 * (i % 3), 84, shade=i))
    records: dict[str, list[Any]] = {"captioning": [], "vqa": [], "bmr": []}
    for i in range(24):
        image = f"{i}.jpg"
        records["captioning"].append({"image": image, "caption": f"Picture {i}. " * 20})
        records["vqa"] += [
            {"image": image, "question": f"What is {k}?", "answer": "It is. " * 20}
            for k in range(3)
        ]
        records["bmr"].append({"image": image, "messages": dialogue("A?", "b " * 60, "C?", "d")})
    records["bmr"] += [
        {"images": [f"{i}.jpg", f"{i + 1}.jpg"], "messages": dialogue("A?", f"b {i}" * 40)}
        for i in range(0, 24, 6)
    ]
    outputs = []
    for task, own in records.items():
        write_file(root / "data" / task / "a.jsonl", lines(own))
        source = {"format": "jsonl", "path": str(root / "data" / task), "task": task}
        source["image_root"] = str(root / "data")
        outputs.append(root / task)
        pack_all(
            make_run(
                source,
                root / task,
                model={"max_pixels": 50176},
                output={"key_prefix": task, "split": {"train": 0.6, "val": 0.4}},
            )
        )
    return outputs


def media_of_split(output: Path, split: str, *, least: int = 1) -> set[bytes]:
    """Pictures of a split's samples that have `least` pictures or more."""
    found = set()
    for tar in output.glob(f"{split}-*.tar"):
        members = members_of(output, tar.name)
        for name in [name for name in members if name.endswith(".json")]:
            for sub in restore_pack(members[name], name.removesuffix(".json")).sub_samples:
                assert isinstance(sub, SourceSample)
                if len(sub.media) >= least:
                    key = name.removesuffix(".json")
                    found |= {members[f"{key}.{one}"] for one in sub.media}
    return found


def test_three_outputs_over_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No picture of a val split stands in any train split, but for those that some sample shows
    beside another, which `blend` counts; and the blend is trained."""
    outputs = three_outputs(tmp_path)
    (tmp_path / "blend.yaml").write_text(blend(outputs))
    warned = [one.getMessage() for one in caplog.records if "stand in the train split" in one.msg]
    train, val = ({one: media_of_split(one, name) for one in outputs} for name in ("train", "val"))
    together = set().union(*(media_of_split(outputs[2], one, least=2) for one in ("train", "val")))
    expected = []
    for one, other in itertools.permutations(outputs, 2):
        both = val[one] & train[other]
        assert val[one] - together
        assert both <= together
        if both:
            found = (
                f"{one}: {len(both)} of {len(val[one])} images and videos in split val stand in "
            )
            expected.append(
                f"{found}the train split of {other}; they belong to samples of several; pack {one} "
                "with output.split={train: 1.0}, and validate on others, or give one configuration "
                "all sources"
            )
    assert warned == expected
    assert expected
    for name, value in (("PACKED_DATA", "1"), ("PACKING_VQA", "0"), ("PACKING_BMR", "0")):
        monkeypatch.setenv(f"OFFLINE_{name}", value)
    torch.set_num_threads(1)
    paths = (f"data.path={tmp_path / 'blend.yaml'}", f"output.path={tmp_path / 'out'}")
    small = [one for one in SMALL if not one.startswith("validation")]
    options = ("train.iterations=2", "validation={every: 1, limit: 1}", "checkpoint.every=0")
    assert run(load_config(ROOT / "launch" / "sft.yaml", (*paths, *small, *options))) == 0
    assert len(losses(tmp_path / "out")) == 2


def test_variables_of_the_caller_stay(folder: Path, tmp_path: Path) -> None:
    """The remedy of the error above, as it is printed: the script does not undo it."""
    arguments = (f"data.path={folder}", f"output.path={tmp_path}", *SMALL, "train.iterations=1")
    text = finish(start("pretrain_qwen2_vl.sh", *arguments, OFFLINE_PACKING_VQA="1"))
    assert "the environment says vqa" in text
    process = start("pretrain_qwen2_vl.sh", *arguments, STAGE="1.5", OFFLINE_PACKING_BMR="1")
    text = finish(process)
    assert process.returncode == 0, text
    assert len(losses(tmp_path)) == 1


@pytest.mark.exhaustive
def test_data_that_are_not_packed(tmp_path: Path) -> None:
    folder = crude_folder(tmp_path / "crude", 20)
    online = "data.online={seq_length: 512, model: {max_pixels: 50176}}"
    arguments = (f"data.path={folder}", online, f"output.path={tmp_path}", *SMALL)
    process = start("sft_qwen2_vl.sh", *arguments, "train.iterations=1", OFFLINE_PACKED_DATA="0")
    text = finish(process)
    assert process.returncode == 0, text
    assert len(losses(tmp_path)) == 1
    process = start("sft_qwen2_vl.sh", *arguments)
    text = finish(process)
    assert process.returncode == 1, text
    (line,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {folder}: OFFLINE_PACKED_DATA=1, but sample ")


@pytest.mark.parametrize(
    ("override", "names", "status"),
    [
        ("data.pth=out/packed", "data.pth", 2),
        ("data.path=nowhere", "nowhere is neither a packed folder nor a metadataset", 1),
    ],
)
def test_a_mistake_is_one_line(override: str, names: str, status: int, tmp_path: Path) -> None:
    process = start("sft_qwen2_vl.sh", override, cwd=tmp_path, NPROC_PER_NODE="2")
    text = finish(process)
    assert process.returncode == status, text
    (line,) = [line for line in text.splitlines() if not WARNING.search(line)]
    assert line.startswith("error: ")
    assert names in line


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    process = start("pretrain_qwen2_vl.sh", STAGE="3")
    assert finish(process) == "STAGE=3 is not known; set it to 1 or 1.5\n"
    assert process.returncode == 2


def test_pack_script_runs_a_configuration(tmp_path: Path) -> None:
    source = captioning_pairs(tmp_path / "source", 12)
    config = tmp_path / "pack.yaml"
    content = {
        "source": {"format": "pairs", "path": source.name, "task": "captioning"},
        "output": {"path": "packed"},
        "engine": {"workers": 0},
    }
    config.write_text(yaml.safe_dump(content))
    process = start("pack.sh", "pack.seq_length=512", cwd=tmp_path, CONFIG=config.name)
    text = finish(process)
    assert process.returncode == 0, text
    assert (tmp_path / "packed" / "manifest.json").is_file()


def test_a_module_that_is_not_a_trainer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["-m"], ["--nproc-per-node", "2", "-m", "launch.data"]):
        assert main(arguments) == 2
        assert "give -m launch.train or -m launch.train_transformers" in capsys.readouterr().err


def test_nodes_that_cannot_meet_are_a_warning() -> None:
    options = ["--nnodes", "2", "--node-rank", "0", "--master-addr"]
    assert lonely_nodes([*options, "127.0.0.1"]).startswith("NNODES=2 with MASTER_ADDR=127.0.0.1")
    assert lonely_nodes([*options, "node0"]) == ""
    assert lonely_nodes(["--nnodes", "1", "--master-addr", "127.0.0.1"]) == ""
