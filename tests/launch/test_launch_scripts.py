"""The scripts, and what they start: variables and arguments, signals, what is left on disk, and
mistakes in one line."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.loop.metrics import read_metrics
from launch.start import lonely_nodes, main
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.formats import write_file
from tests.helpers.rank_processes import free_port
from tests.helpers.transformers_runs import Case

LAUNCH = Path(__file__).parents[2] / "launch"
SFT = str(LAUNCH / "sft.yaml")
STEPS = 12
PACKED, VQA, BMR = ("OFFLINE_PACKED_DATA", "OFFLINE_PACKING_VQA", "OFFLINE_PACKING_BMR")

pytestmark = pytest.mark.usefixtures("bmr_environment")


def environment(**own: str) -> dict[str, str]:
    """No variables but those that a user would have, and the given ones."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("OFFLINE_", "CUDA_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**inherited, "PATH": path, "OMP_NUM_THREADS": "1", **own}


OTHERS = {"CONFIG": "my.yaml", "MODULE": "launch.train_transformers", "NPROC_PER_NODE": "2"}
OTHERS_WORDS = ["--nproc-per-node 2 ", "-m launch.train_transformers my.yaml a.b=c"]
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "n0", "SHUTDOWN_TIMEOUT": "300"}
NODES_WORDS = ["--nnodes 2 --node-rank 1 ", "--master-addr n0 ", "--shutdown-timeout 300 "]


@pytest.mark.parametrize(
    ("script", "given", "task", "words"),
    [
        ("sft_qwen2_vl.sh", {}, "101", ["-m launch.train", "launch/sft.yaml data.path=", "/bmr a"]),
        ("sft_qwen2_vl.sh", {"BLEND": "1"}, "100", []),
        ("sft_qwen2_vl.sh", {PACKED: "0"}, "000", []),
        ("pretrain_qwen2_vl.sh", {}, "100", ["pretrain_stage1.yaml", "/captioning a.b=c"]),
        ("pretrain_qwen2_vl.sh", {"STAGE": "1.5"}, "110", ["pretrain_stage1_5.yaml", "/vqa a.b"]),
        ("pretrain_qwen2_vl.sh", {VQA: "1"}, "110", []),
        ("pretrain_qwen2_vl.sh", {"STAGE": "1.5", BMR: "1"}, "101", []),
        ("sft_qwen2_vl.sh", {"CUDA_VISIBLE_DEVICES": "0,3"}, "101", ["--nproc-per-node 2 "]),
        ("sft_qwen2_vl.sh", OTHERS, "101", OTHERS_WORDS),
        ("sft_qwen2_vl.sh", NODES, "101", NODES_WORDS),
        ("pack.sh", {"CONFIG": "my.yaml"}, None, ["offline-packing run my.yaml a.b=c"]),
        ("pack.sh", {}, None, ["offline-packing run demo_output/bmr.yaml a.b=c"]),
    ],
)
def test_scripts_set_variables_and_arguments(
    script: str, given: dict[str, str], task: str | None, words: list[str]
) -> None:
    """Variables of the caller stay; the order of kernels, which FSDP must not have, is left to the
    command."""
    shown = 'exec() { echo "$@"; env; }; source "$0"'
    ran = subprocess.run(
        ["bash", "-c", shown, str(LAUNCH / script), "a.b=c"],
        env=environment(**given),
        capture_output=True,
        text=True,
        check=True,
    )
    command, *variables = ran.stdout.splitlines()
    found = dict(line.partition("=")[::2] for line in variables)
    for one in words:
        assert one in command
    if task is not None:
        assert "".join(found[name] for name in (PACKED, VQA, BMR)) == task
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found


def test_an_unknown_stage_is_refused() -> None:
    options: Any = {"env": environment(STAGE="3"), "capture_output": True, "text": True}
    script = ["bash", str(LAUNCH / "pretrain_qwen2_vl.sh")]
    ran = subprocess.run(script, check=False, **options)
    assert (ran.returncode, ran.stderr) == (2, "STAGE=3 is not known; set it to 1 or 1.5\n")


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def test_a_run_stopped_by_slurm_saves_its_place(case: Case, tmp_path: Path) -> None:
    """By SIGTERM to torchrun; all paths are relative to a folder in which another package has this
    one's name."""
    packed, output = case("qwen2_vl") / "packed", tmp_path / "out"
    (tmp_path / "packs").symlink_to(packed)
    (tmp_path / "my.yaml").write_text(Path(SFT).read_text())
    write_file(tmp_path / "launch" / "__init__.py", b"raise SystemExit('not this one')\n")
    options = ["data.path=packs", "output.path=out", f"train.iterations={STEPS}"]
    options += [f"model.checkpoint={case('qwen2_vl') / 'model'}", "data.num_workers=1"]
    options += ["batch.global_batch_packs=4", "validation.every=0"]
    process = subprocess.Popen(
        ["bash", str(LAUNCH / "sft_qwen2_vl.sh"), *options, "checkpoint.every=2"],
        env=environment(MASTER_PORT=str(free_port()), NPROC_PER_NODE="1", CONFIG="my.yaml"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    deadline = time.monotonic() + 400
    while not steps_done(output):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step in 400 s"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=400)
    assert "stopped by SIGTERM after" in text, text
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in text
    done = steps_done(output)
    assert 1 <= done < STEPS
    assert (output / "checkpoints" / f"iter_{done:08d}" / "state.json").is_file()


@pytest.mark.exhaustive
def test_stage_1_trains_the_projector_on_two_processes(captions: Path, tmp_path: Path) -> None:
    """The real vocabulary, in a model of a few units."""
    options = [f"data.path={captions}", f"output.path={tmp_path}", "train.iterations=2"]
    options += ["model.text={hidden_size: 16, num_attention_heads: 1, num_key_value_heads: 1}"]
    options += ["model.vision={hidden_size: 16, depth: 1}", "data.num_workers=1"]
    options += ["batch.global_batch_size=null", "batch.global_batch_packs=2", "validation.every=0"]
    ran = subprocess.run(
        ["bash", str(LAUNCH / "pretrain_qwen2_vl.sh"), *options],
        env=environment(MASTER_PORT=str(free_port()), NPROC_PER_NODE="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout
    assert "a step takes 2 packs" in ran.stdout
    assert ran.stdout.count("training begins with random weights") == 1
    assert steps_done(tmp_path) == 2
    assert (tmp_path / "hf" / "config.json").is_file()


def test_a_killed_rank_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun tells of it."""
    killed = ProcessFailure(local_rank=0, pid=17, exitcode=-signal.SIGKILL, error_file="")

    def wait(arguments: list[str]) -> None:
        raise ChildFailedError("launch.train", {0: killed})

    monkeypatch.setattr(torchrun, "main", wait)
    status = main(["-m", "launch.train", SFT, f"data.path={folder}"])
    assert status == 128 + signal.SIGKILL
    assert capsys.readouterr().err == "error: Signal 9 (SIGKILL) received by PID 17\n"


def test_a_port_in_use_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = ["--master-addr", "127.0.0.1", "--master-port", port]
        assert main([*address, "-m", "launch.train", SFT, f"data.path={folder}"]) == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "[W" not in line[:2])
    assert line.startswith("error: ranks cannot meet: The server socket has failed to listen")
    assert f"port: {port}," in line
    assert line.endswith(
        "; set MASTER_PORT to a free port, and MASTER_ADDR to the first node's name"
    )


TRAIN, GIVE = ["-m", "launch.train", SFT], "give -m launch.train or -m launch.train_transformers"
WRONG_TASK = {VQA: "1", BMR: "0"}


@pytest.mark.parametrize(
    ("variables", "arguments", "status", "said"),
    [
        ({}, [*TRAIN, "data.pth=out/packed"], 2, "data.pth"),
        ({}, [*TRAIN, "data.path=nowhere"], 1, "nowhere is neither a packed"),
        (WRONG_TASK, [*TRAIN, "data.path={folder}"], 1, f"{PACKED}=1 {BMR}=1"),
        ({BMR: "0"}, [*TRAIN, "data.path=[{folder}, {folder}]"], 1, f"{PACKED}=1 {BMR}=1"),
        ({}, [], 2, GIVE),
        ({}, ["-m"], 2, GIVE),
        ({}, ["--nproc-per-node", "2", "-m", "launch.data"], 2, GIVE),
    ],
)
def test_a_mistake_is_one_line_before_a_rank_starts(
    variables: dict[str, str],
    arguments: list[str],
    status: int,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(torchrun, "main")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        found = main([one.format(folder=folder) for one in arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_nodes_that_cannot_meet_are_a_warning() -> None:
    options = ["--nnodes", "2", "--node-rank", "0", "--master-addr"]
    assert lonely_nodes([*options, "127.0.0.1"]).startswith("NNODES=2 with MASTER_ADDR=127.0.0.1")
    assert lonely_nodes([*options, "node0"]) == ""
    assert lonely_nodes(["--nnodes", "1", "--master-addr", "127.0.0.1"]) == ""


def test_packs_without_a_val_split(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Validation that the file asks for is off; what the command asks for is refused before a rank
    starts."""
    monkeypatch.setenv(BMR, "0")
    packed = tmp_path / "packed"
    pack_all(make_run(captioning_pairs(tmp_path / "data", 8), packed))
    arguments = ["-m", "launch.train", SFT, f"data.path={packed}"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "validation.every=500"])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "has no packs in its val split; pack with a share of val in output.split, or " in said
    assert "a metadataset; or set validation.every=0" in said
    started: list[str] = []
    monkeypatch.setattr(torchrun, "main", started.extend)
    assert main(arguments) == 0
    assert f"validation is off: {packed} has no packs in its val" in caplog.text
    assert "validation={}" in started
