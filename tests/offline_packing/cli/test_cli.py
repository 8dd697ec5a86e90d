"""The command line as a user sees it: output, one-line errors, exit status."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from task_encoders.storage.paths import REMEDY
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import captioning_pairs, config_file, make_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    data, output = captioning_pairs(tmp_path / "data", 20), {"packs_per_shard": 1000}
    return config_file(tmp_path / "pack.yaml", make_config(data, tmp_path / "out", output=output))


def test_verbs_in_turn(config: Path, tmp_path: Path) -> None:
    assert "measured 20 samples" in invoke("measure", config).stdout
    assert "packing factor" in invoke("plan", config, "pack.seed=1").stdout
    assert "packing factor" in invoke("plan", config).stdout
    assert "wrote 20 samples" in invoke("write", config).stdout
    assert "20 packed, 0 set aside" in invoke("verify", config).stdout
    assert (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out/_packing/report").exists()
    again = invoke("run", config)
    assert "verify: complete on " in again.stdout
    assert "20 samples = 20 packed + 0 set aside" in again.stdout
    page = tmp_path / "out/_packing/report/report.html"
    assert f"report: {page}\n" in again.stdout
    assert f"report    {page}\n" in invoke("status", config).stdout


def test_preview(config: Path, tmp_path: Path) -> None:
    invoke("run", config, "output.key_prefix=''")
    config.write_text(config.read_text().replace('"output":{', '"output":{"key_prefix":"",'))
    drawn = invoke("preview", config, "--packs", "2", "--seed", "5").stdout
    assert drawn == invoke("preview", config, "--packs", "2", "--seed", "5").stdout
    assert drawn.count("cu_lengths [0, ") == 2
    assert "\x1b" not in drawn  # no terminal
    named = invoke("preview", config, "--pack", "1", "--pack", "ps_00000000").stdout
    assert named.index("ps_00000001") < named.index("ps_00000000")
    assert named.count("cu_lengths [0, ") == 2
    page = tmp_path / "preview.html"
    assert invoke("preview", config, "--html", page).stdout == f"preview: {page}\n"
    assert page.read_text().count("<h2>ps_") == 3


@pytest.mark.parametrize("name", ["preview", "set-aside", "status"])
def test_verbs_that_only_look_offer_nothing_that_writes(name: str) -> None:
    shown = invoke(name, "--help").stdout
    assert "--dry-run" not in shown
    assert "--accept-mismatch" not in shown
    assert "--accept-mismatch" in invoke("plan", "--help").stdout


def test_dry_run_writes_nothing(config: Path, tmp_path: Path) -> None:
    result = invoke("run", config, "--dry-run")
    assert "would measure 20 records" in result.stdout
    told = r"20 records take about \d+ s with 1 workers, and ([\d,]+) bytes .*the first 20 do"
    estimated = int(re.findall(told, result.stdout)[0].replace(",", ""))
    assert not (tmp_path / "out").exists()
    invoke("measure", config)
    assert "packing factor" in invoke("plan", config, "--dry-run").stdout
    assert not (tmp_path / "out/_packing/plan").exists()
    invoke("plan", config)
    assert "would write 20 samples in" in invoke("write", config, "--dry-run").stdout
    assert not list((tmp_path / "out").glob("*.tar"))
    invoke("write", config)
    assert "would check 20 samples" in invoke("verify", config, "--dry-run").stdout
    shards = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    assert estimated == pytest.approx(shards, rel=0.5)


def test_a_complete_output_of_two_epochs(config: Path, tmp_path: Path) -> None:
    """Quietly; a dry run of it has nothing to do but with another seed."""
    command = ["run", config, "output.layout=references", "pack.epochs=2"]
    first = invoke(*command, "--quiet")
    verdict, page = first.stdout.splitlines()
    assert verdict.startswith("20 samples = 20 packed, 40 times in all + 0 set aside; ")
    assert page.startswith("report: ")
    assert first.stderr == ""
    before = sorted(tmp_path.rglob("*"))
    dry = invoke(*command, "--dry-run").stdout
    assert "would measure" not in dry
    assert "would write 40 samples" not in dry
    measured, planned, written, *_ = dry.splitlines()
    assert measured == "measure: complete (20 samples), nothing to do"
    assert re.fullmatch(r"plan: complete \(\d+ packs\), nothing to do", planned)
    assert written == "write: complete (1 shards), nothing to do"
    assert "packing factor" in invoke("plan", *command[1:], "pack.seed=1", "--dry-run").stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("run nowhere.yaml", 2, "error: config 'nowhere.yaml' does not exist; write"),
        ("run CONFIG model.processor=/etc", 2, "'/etc' is a folder without a tokenizer"),
        ("run CONFIG pack.seqlen=1", 2, "pack.seqlen is not a known field; valid: seq_length"),
        ("run CONFIG source.path=nowhere", 1, "error: source path 'nowhere' does not exist"),
        ("run CONFIG output.path=DATA/out", 2, "lies inside source.path"),
        ("plan CONFIG", 1, "error: no complete index in"),
        (
            "run CONFIG pack.seq_length=20",
            1,
            "tokens > seq_length 20; raise pack.seq_length or lower model.max_pixels\n",
        ),
        ("pack CONFIG", 2, "No such command 'pack'"),
        ("run", 2, "Missing argument 'CONFIG'"),
        ("index nowhere", 2, "'nowhere' does not exist"),
        ("index DATA", 1, "holds no *.tar"),
    ],
)
def test_errors(
    config: Path, tmp_path: Path, command: Command, arguments: str, status: int, message: str
) -> None:
    given = arguments.replace("CONFIG", str(config)).replace("DATA", str(tmp_path / "data"))
    code, _, error = command(*given.split())
    assert code == status
    assert message in error
    assert "Traceback" not in error


def test_failed_check(config: Path, tmp_path: Path, command: Command) -> None:
    invoke("run", config)
    (tmp_path / "out/train-000000.tar.idx").unlink()
    code, _, error = command("verify", config)
    assert code == 1
    assert error.endswith(f"has 1 problems; 1 of damaged files: {REMEDY}\n")


@pytest.mark.parametrize("verb", ["verify", "status", "report", "preview"])
def test_looking_makes_no_output(config: Path, tmp_path: Path, command: Command, verb: str) -> None:
    """An output that was never made is named as such, and no folder is made for it."""
    code, out, error = command(verb, config)
    if verb == "status":
        assert "not begun" in out
    else:
        assert (code, error.count("\n")) == (1, 1)
        assert re.search(rf"no .* in {tmp_path}/out; run (measure|write) first", error)
    assert not (tmp_path / "out").exists()


def test_unexpected_errors_are_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def explode(config: object) -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("offline_packing.runs.run.build_engine", explode)
    code, _, error = command("run", config)
    assert code == 1
    assert error == "error: ZeroDivisionError: first line second line (--debug shows where)\n"
    with pytest.raises(ZeroDivisionError):
        command("run", config, "--debug")


@pytest.mark.parametrize("width", [60, 100])
def test_help_is_whole(width: int) -> None:
    """No sentence is cut, however narrow the terminal."""
    text = CliRunner().invoke(cli, ["--help"], terminal_width=width).stdout
    listed = "".join(text.partition("Commands:\n")[2].split())
    assert "..." not in listed
    for name, command in cli.commands.items():
        sentence = (command.help or "").split("\n\n")[0]
        assert "".join(f"{name} {sentence}".split()) in listed


def test_a_shell_completes_verbs_and_options() -> None:
    """The script that README tells to install, and what it asks for."""
    command = Path(sys.executable).with_name("offline-packing")

    def ask(instruction: str, **words: str) -> str:
        environment = {**os.environ, "_OFFLINE_PACKING_COMPLETE": f"bash_{instruction}", **words}
        done = subprocess.run(
            [command], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    assert "_OFFLINE_PACKING_COMPLETE" in ask("source")
    assert "verify" in ask("complete", COMP_WORDS="offline-packing ver", COMP_CWORD="1")
    options = ask("complete", COMP_WORDS="offline-packing run pack.yaml --d", COMP_CWORD="3")
    assert {"--deep", "--dry-run"} <= {one.partition(",")[2] for one in options.split()}


def heed_signals() -> None:
    """A shell that runs these tests in the background ignores one, nohup the other."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("when", "signals"),
    [
        ("workers start", [(signal.SIGINT, True)]),
        pytest.param(
            "workers are at work",
            [(signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGHUP, True)],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_signals_end_a_run_in_one_line(
    config: Path, tmp_path: Path, when: str, signals: list[tuple[signal.Signals, bool]]
) -> None:
    """`signals`: to the command alone, or to its workers too. The same run is ended by each."""
    index = tmp_path / "out/_packing/index"
    captioning_pairs(tmp_path / "many", 120)
    config.write_text(config.read_text().replace(f"{tmp_path}/data", f"{tmp_path}/many"))
    command = ["measure", str(config), "--quiet", "engine.workers=2", "engine.samples_per_part=1"]
    for number, to_workers in signals:
        before = work_in(index, when)
        run = subprocess.Popen(
            [sys.executable, "-m", "offline_packing", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_signals,
        )
        while work_in(index, when) == before:
            assert run.poll() is None
            time.sleep(0.01)
        if when == "workers start":
            time.sleep(0.1)  # in the middle of their imports
        (os.killpg if to_workers else os.kill)(run.pid, number)
        _, stderr = run.communicate(timeout=300)  # until the workers are gone, too
        message = {signal.SIGINT: "interrupted; ", signal.SIGKILL: ""}
        expected = message.get(number, f"ended by {number.name}; ")
        assert stderr == (expected and f"{expected}run the same command again to continue\n")
        assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "measured 120 samples" in invoke("measure", config, "engine.samples_per_part=1").stdout


def work_in(index: Path, when: str) -> list[tuple[str, int]]:
    """Files that change when workers start, or are at work."""
    names = "_started.json" if when == "workers start" else "part-*.parquet"
    return sorted((path.name, path.stat().st_mtime_ns) for path in index.glob(names))


def test_remarks_of_libraries_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    """botocore tells where it found credentials, once per process."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    command("status", "no such.yaml")
    for name in ("botocore.credentials", "offline_packing.write.write"):
        logging.getLogger(name).info("remark of %s", name)
        logging.getLogger(name).warning("warning of %s", name)
    assert capsys.readouterr().err.splitlines() == [
        "warning of botocore.credentials",
        "remark of offline_packing.write.write",
        "warning of offline_packing.write.write",
    ]


@pytest.mark.parametrize(
    "when",
    [
        "sys.meta_path.insert(0, Finder())",  # in an import
        "Callback()\ntime.sleep(20)",  # where Python drops exceptions
        "try:\n    end()\nfinally:\n    end()\n    end()",  # again, while cleaning up
        "atexit.register(end)\nend()",  # and while the process ends
    ],
)
def test_signals_at_odd_moments(when: str) -> None:
    program = (
        "import atexit, os, signal, sys, time, types\n"
        "from offline_packing.cli import main as command\n"
        "def end():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "class Callback:\n    def __del__(self):\n        end()\n"
        "class Finder:\n    def find_spec(self, name, *_):\n        end()\n"
        "def run(*_, **__):\n" + "".join(f"    {line}\n" for line in when.splitlines()) + ""
        "    import wave\n"  # any module that is not imported yet
        "fake = types.SimpleNamespace(cli=types.SimpleNamespace(main=run))\n"
        "sys.modules['offline_packing.cli.commands'] = fake\n"
        "command.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stderr == "ended by SIGTERM; run the same command again to continue\n"
    assert ended.returncode == 128 + signal.SIGTERM


def test_signals_are_handled_before_anything_else_is_imported() -> None:
    program = (
        "import sys, offline_packing.cli.main as m; print({'click', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


FOLDER = Path(__file__).parents[3] / "launch"


def test_scripts_are_listed() -> None:
    """With what each is for; the part that they share is not a script."""
    lines = invoke("launch").output.splitlines()
    assert [line.split()[0] for line in lines] == [
        "pack", "pack_slurm", "pretrain_qwen2_vl", "sft_qwen2_vl"
    ]  # fmt: skip
    assert "Fine-tune Qwen2-VL" in lines[-1]


@pytest.mark.parametrize("name", ["sft_qwen2_vl", "sft_qwen2_vl.sh", "slurm_sft.sbatch"])
def test_paths_are_printed(name: str) -> None:
    path = Path(invoke("launch", "--print", name).output.strip())
    assert path.parent == FOLDER
    assert path.name.startswith(name)
    assert path.is_file()


def test_a_script_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all arguments, options of its own among them, and this Python before others."""
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execvp", lambda file, arguments: called.append((file, arguments)))
    monkeypatch.setenv("PATH", "/elsewhere")
    invoke("launch", "sft_qwen2_vl", "data.path=x", "--accept-mismatch", "train.epochs")
    script = str(FOLDER / "sft_qwen2_vl.sh")
    assert called == [
        ("bash", ["bash", script, "data.path=x", "--accept-mismatch", "train.epochs"])
    ]
    assert os.environ["PATH"].endswith(":/elsewhere")


@pytest.mark.parametrize("name", ["sft.yaml", "slurm_sft.sbatch"])
def test_what_is_not_for_bash_is_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("run"))
    result = CliRunner().invoke(cli, ["launch", name])
    assert result.exit_code == 1
    assert f"{name} is not run with bash; --print says where it is" in result.output
