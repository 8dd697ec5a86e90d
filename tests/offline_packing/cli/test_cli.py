"""The command line as a user sees it: output, one-line errors, exit status. init: every format is
recognised by its files, and what is written can be run."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from offline_packing.config.packing import load_config
from offline_packing.sources.recognise import recognise
from tests.helpers import formats
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import captioning_pairs, config_file, dialogue, make_config, write_json
from tests.helpers.formats import lines, tar_bytes, write_file
from tests.world import World


@pytest.fixture
def config(tmp_path: Path) -> Path:
    data, output = captioning_pairs(tmp_path / "data", 20), {"packs_per_shard": 1000}
    return config_file(tmp_path / "pack.yaml", make_config(data, tmp_path / "out", output=output))


def test_verbs_in_turn(config: Path, tmp_path: Path) -> None:
    """Each says what it did; and in a dry run what it would do, without writing anything."""
    out = tmp_path / "out"
    dry = invoke("run", config, "--dry-run").stdout
    assert "would measure 20 records" in dry
    told = r"20 records take about \d+ s with 1 workers, and ([\d,]+) bytes .*the first 20 do"
    estimated = int(re.findall(told, dry)[0].replace(",", ""))
    assert not out.exists()
    assert "measured 20 samples" in invoke("measure", config).stdout
    assert "packing factor" in invoke("plan", config, "--dry-run").stdout
    assert not (out / "_packing/plan").exists()
    assert "packing factor" in invoke("plan", config, "pack.seed=1").stdout
    assert "packing factor" in invoke("plan", config).stdout
    assert "would write 20 samples in" in invoke("write", config, "--dry-run").stdout
    assert not list(out.glob("*.tar"))
    assert "wrote 20 samples" in invoke("write", config).stdout
    shards = sum(path.stat().st_size for path in out.glob("*.tar"))
    assert estimated == pytest.approx(shards, rel=0.5)
    assert "would check 20 samples" in invoke("verify", config, "--dry-run").stdout
    assert "20 packed, 0 set aside" in invoke("verify", config).stdout
    assert (out / "manifest.json").exists()
    assert not (out / "_packing/report").exists()
    again = invoke("run", config)
    assert "verify: complete on " in again.stdout
    assert "packing factor" not in again.stdout  # only a plan that is made is shown
    assert "20 samples = 20 packed + 0 set aside" in again.stdout
    page = out / "_packing/report/report.html"
    assert f"report: {page}\n" in again.stdout
    assert f"report    {page}\n" in invoke("status", config).stdout
    other = ("pack.seed=1", "output.overwrite=true")
    assert "packing factor" in invoke("run", config, *other).stdout


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


def test_verbs_that_only_look_offer_nothing_that_writes() -> None:
    for name in ("preview", "set-aside", "status", "plan"):
        shown = invoke(name, "--help").stdout
        assert ("--dry-run" in shown, "--accept-mismatch" in shown) == (name == "plan",) * 2
    assert "hash_bucket: phases" in shown  # options of strategies


def test_a_complete_output_of_copies(config: Path, tmp_path: Path) -> None:
    """Quietly; a dry run of it has nothing to do but with another seed."""
    command = ["run", config, "source.repeat=2"]
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


ERRORS = (
    ("run nowhere.yaml", 2, "error: config 'nowhere.yaml' does not exist; write"),
    ("run CONFIG model.processor=/etc", 2, "'/etc' is a folder without a tokenizer"),
    ("run CONFIG source.path=nowhere", 1, "error: source path 'nowhere' does not exist"),
    ("run CONFIG output.path=DATA/out", 2, "is inside source.path"),
    ("plan CONFIG", 1, "error: no complete index in"),
    ("run CONFIG pack.seq_length=20", 1, "; raise pack.seq_length or lower model.max_pixels\n"),
    ("pack CONFIG", 2, "No such command 'pack'"),
    ("run", 2, "Missing argument 'CONFIG'"),
    ("index nowhere", 2, "'nowhere' does not exist"),
    ("index DATA", 1, "holds no *.tar"),
)


def test_errors(config: Path, tmp_path: Path, command: Command) -> None:
    for arguments, status, message in ERRORS:
        given = arguments.replace("CONFIG", str(config)).replace("DATA", str(tmp_path / "data"))
        code, _, error = command(*given.split())
        assert code == status, arguments
        assert message in error
        assert "Traceback" not in error


def test_looking_makes_no_output(config: Path, tmp_path: Path, command: Command) -> None:
    """An output that was never made is named as such, and no folder is made for it."""
    assert "not begun" in command("status", config)[1]
    for verb in ("verify", "report", "preview"):
        code, _, error = command(verb, config)
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


def test_help_is_whole() -> None:
    """No sentence is cut, however narrow the terminal."""
    for width in (60, 100):
        text = CliRunner().invoke(cli, ["--help"], terminal_width=width).stdout
        listed = "".join(text.partition("Commands:\n")[2].split())
        assert "..." not in listed
        for name, command in cli.commands.items():
            sentence = (command.help or "").split("\n\n")[0]
            assert "".join(f"{name} {sentence}".split()) in listed


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
    """`signals`: to the command alone, or to its worker too. The same run is ended by each."""
    index = tmp_path / "out/_packing/index"
    if when == "workers are at work":
        captioning_pairs(tmp_path / "data", 120, first=20)
    command = ["measure", str(config), "--quiet", "engine.workers=1", "engine.samples_per_part=1"]
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
    measured = invoke("measure", config, "engine.samples_per_part=1").stdout
    assert re.search(r"measured (20|120) samples", measured)


def work_in(index: Path, when: str) -> list[tuple[str, int]]:
    """Files that change when workers start, or are at work."""
    names = "measure.started.json" if when == "workers start" else "index/part-*.parquet"
    return sorted((path.name, path.stat().st_mtime_ns) for path in index.parent.glob(names))


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

    for name in ("sft_qwen2_vl", "sft_qwen2_vl.sh", "slurm_sft.sbatch"):
        path = Path(invoke("launch", "--print", name).output.strip())
        assert (path.parent, path.is_file()) == (FOLDER, True)
        assert path.name.startswith(name)


def test_a_script_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all arguments, options of its own among them, and this Python before others. A file that
    is not for bash is not run."""
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execvp", lambda file, arguments: called.append((file, arguments)))
    monkeypatch.setenv("PATH", "/elsewhere")
    given = ["data.path=x", "--accept-mismatch", "train.epochs"]
    invoke("launch", "sft_qwen2_vl", *given)
    for name in ("sft.yaml", "slurm_sft.sbatch"):
        result = CliRunner().invoke(cli, ["launch", name])
        assert result.exit_code == 1
        assert f"{name} is not a bash script; --print shows its path" in result.output
    assert called == [("bash", ["bash", str(FOLDER / "sft_qwen2_vl.sh"), *given])]
    assert os.environ["PATH"].endswith(":/elsewhere")


SAMPLES = formats.draw_samples(4)


@pytest.mark.parametrize("name", formats.WRITERS)
def test_formats_are_recognised(name: str, tmp_path: Path) -> None:
    source = formats.WRITERS[name](tmp_path / "data", SAMPLES)
    found = recognise(str(source["path"]), task="bmr")
    expected = {**source, "task": "bmr"}
    assert {key: found.options[key] for key in expected} == expected
    assert found.others == ()
    assert [example.problem for example in found.examples] == ["", "", ""]
    assert all(example.sample and not example.missing for example in found.examples)


def test_the_task_is_told_from_the_records(tmp_path: Path) -> None:
    for task, record in (
        ("bmr", {"messages": dialogue("a", "b")}),
        ("vqa", {"question": "a", "answer": "b"}),
        ("captioning", {"caption": "b"}),
    ):
        write_file(tmp_path / task / "a.jsonl", lines([record] * 4))
        options = recognise(str(tmp_path / task)).options
        assert (options["task"], options.get("text_only", False)) == (task, task != "bmr")
    write_file(tmp_path / "text" / "a.txt", b"One line.\nTwo lines.\n")
    assert recognise(str(tmp_path / "text")).options["task"] == "captioning"


def test_what_is_not_found_or_not_read_is_shown(tmp_path: Path) -> None:
    write_file(tmp_path / "data/images/a.jpg", SAMPLES[0][2][0])
    rows = [{"caption": "A.", "image": f"{name}.jpg", "hue": "red"} for name in "ba"]
    write_file(tmp_path / "data/text/a.jsonl", lines(rows))
    to = tmp_path / "pack.yaml"
    shown = invoke("init", tmp_path / "data/text", "--to", to).output
    assert all(one in shown for one in ("not read: hue", "a.jpg (found)", "b.jpg (NOT FOUND)"))
    assert "image_root" in to.read_text()


def test_pictures_that_no_sample_uses_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """init, run: as somebody would who has not read the guide."""
    monkeypatch.chdir(tmp_path)
    names = [f"p/{i}.jpg" for i in range(4)]
    rows = [{"image_path": name, "question": "What?", "answer": "This."} for name in names]
    for name in names:
        write_file(Path("data", name), SAMPLES[0][2][0])
    write_file(Path("data/a.jsonl"), lines(rows))
    shown = invoke("init", "data").output
    line = "field 'image_path' holds media that no sample uses; name it in source.fields"
    assert f"warning: {line}" in shown
    overrides = ("engine.workers=0", "source.task=bmr", "output.path=bmr")
    status, _, said = command("run", "pack.yaml", *overrides)
    assert status == 1
    assert "none of the 4 samples of 'data' has an image or a video under task bmr" in said
    assert "source.fields, such as {images: FIELD}" in said
    summary = Path("bmr/_packing/plan/summary.txt").read_text()
    assert "warnings\n  field 'image_path' holds media" in summary
    named = invoke("run", "pack.yaml", "engine.workers=0", "source.fields={images: image_path}")
    assert "tokens with loss      " in named.output
    assert "4 images, 0 videos in 4 of 4 samples; " in named.output
    invoke("run", "pack.yaml", *overrides, "source.text_only=true")


def test_the_file_that_is_written_is_never_overwritten(tmp_path: Path) -> None:
    data, to = captioning_pairs(tmp_path / "data", 6), tmp_path / "pack.yaml"
    assert "measured 6 of the first" in invoke("init", data, "--to", to, "--output", "o").output
    config = load_config(to)
    assert (config.source[0].format, config.task, config.output.path) == (
        "pairs",
        "captioning",
        "o",
    )
    to.write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(data), "--to", str(to)])
    assert result.exit_code != 0
    assert to.read_text() == "mine"
    invoke("init", data, "--to", to, "--force")
    assert "format: pairs" in to.read_text()


EDGES = {"size": {"shortest_edge": 784, "longest_edge": 99_840}}


def pixels(least: int, most: int) -> dict[str, int]:
    return {"min_pixels": least, "max_pixels": most}


@pytest.mark.parametrize(
    ("family", "files", "limits"),
    [
        # Qwen3.6 and 3.8 are Qwen3_5ForConditionalGeneration, too.
        ("qwen3_5", {"config": {"model_type": "qwen3_5"}}, {"min_pixels": 65_536}),
        ("qwen3_5", {"config": {"model_type": "qwen3_5_moe"}}, {"min_pixels": 65_536}),
        ("llava_1_5", {"config": {"model_type": "llava"}}, {}),
        ("qwen2_vl", {"preprocessor_config": pixels(784, 50_176)}, pixels(784, 50_176)),
        (
            "qwen2_vl",
            {"preprocessor_config": {"size": {"longest_edge": 99_840}}},
            pixels(3136, 99_840),
        ),
        ("qwen2_vl", {"processor_config": {"image_processor": EDGES}}, pixels(784, 99_840)),
    ],
)
def test_a_checkpoint_names_its_family_and_how_many_pixels(
    family: str, files: dict[str, Any], limits: dict[str, int], world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.tokenizer(family), tmp_path / "model")
    for name, content in ({"config": {"model_type": family}} | files).items():
        write_json(tmp_path / f"model/{name}.json", content)
    data, to = captioning_pairs(tmp_path / "data", 3), tmp_path / "pack.yaml"
    invoke("init", data, "--to", to, "--processor", tmp_path / "model")
    model = load_config(to).model
    assert (model.family, model.processor) == (family, str(tmp_path / "model"))
    assert limits.items() <= model.model_dump().items()
    assert ("pixels:" in to.read_text()) == bool(limits)


@pytest.mark.parametrize("form", ["ms-swift", "LLaMA-Factory"])
def test_files_with_absolute_paths_run_as_they_are(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init, run, from the folder of the data: ms-swift's lines, whose pictures are in two folders
    elsewhere."""
    data, rows = tmp_path / "data", []
    for i in range(20):
        name = tmp_path / "coco" / ("train", "val")[i % 2] / f"{i % 5}.jpg"
        write_file(name, SAMPLES[0][2][0])
        said = dialogue("<image>What is it?", f"It is {i}.")
        rows.append({"messages": said, "images": [str(name)]})
    write_file(data / "a.jsonl", lines(rows))
    if form == "LLaMA-Factory":
        tags = {"role_tag": "role", "content_tag": "content"}
        tags |= {"user_tag": "user", "assistant_tag": "assistant"}
        columns = {"messages": "messages", "images": "images"}
        entry = {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
        write_json(data / "dataset_info.json", {"own": entry})
    monkeypatch.chdir(data)
    shown = invoke("init", ".").output
    assert f"image_root: {tmp_path / 'coco'}  #" in Path("pack.yaml").read_text()
    assert "split" not in Path("pack.yaml").read_text().replace("# no val split", "")
    assert "REFUSED" not in shown
    assert "measured 10 of the first records; next: offline-packing run --deep pack.yaml" in shown
    said = invoke("run", "--deep", "pack.yaml", "engine.workers=0").output
    assert "found                 20\n  set aside             0\n" in said
    assert (tmp_path / "data_packed" / "manifest.json").is_file()


def test_what_cannot_run_is_not_next(tmp_path: Path) -> None:
    """And no output inside the source, and no val split of few samples."""
    rows = [{"caption": "A.", "image": f"/nowhere/{i}.jpg"} for i in range(1200)]
    write_file(tmp_path / "data" / "a.jsonl", lines(rows))
    to = tmp_path / "pack.yaml"
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "data"), "--to", str(to)])
    assert result.exit_code == 1
    aside = "would be set aside: 10 of 10 records, path_outside_root: '/nowhere/0.jpg'"
    assert "; set source.image_root to a folder above the images\n" in result.output
    assert aside in result.output
    assert "next:" not in result.output
    assert f"none of the first records can be packed; correct {to}" in result.output
    assert "split: {train: 0.99, val: 0.01}" in to.read_text()
    inside = ["init", str(tmp_path / "data"), "--to", str(tmp_path / "b.yaml"), "--output"]
    result = CliRunner().invoke(cli, [*inside, str(tmp_path / "data" / "out")])
    assert "is inside source.path" in str(result.exception)
    assert not (tmp_path / "b.yaml").exists()


def test_a_picture_without_a_name_is_no_path(tmp_path: Path) -> None:
    write_file(tmp_path / "a.jsonl", lines([{"caption": "A.", "images": [""]}]))
    found = recognise(str(tmp_path))
    assert "image_root" not in found.options
    assert len(found.examples[0].missing) == 1


def test_a_folder_of_img2dataset_is_tars(tmp_path: Path) -> None:
    """Beside each lie a table and a summary."""
    picture = SAMPLES[0][2][0]
    for shard in ("00000", "00001"):
        members = [(f"{shard}0001.jpg", picture), (f"{shard}0001.txt", b"A red square.")]
        record = json.dumps({"caption": "A red square.", "status": "success"}).encode()
        write_file(tmp_path / f"{shard}.tar", tar_bytes([*members, (f"{shard}0001.json", record)]))
        pq.write_table(pa.table({"caption": ["A red square."]}), tmp_path / f"{shard}.parquet")
        write_file(tmp_path / f"{shard}_stats.json", b'{"count": 1}')
    found = recognise(str(tmp_path))
    given = (found.options["format"], found.options["task"], found.others)
    assert given == ("webdataset", "captioning", ())


@pytest.mark.parametrize(("splits", "split"), [(("train", "test"), "train"), (("test",), "test")])
def test_the_split_that_has_tars_is_read(
    splits: tuple[str, ...], split: str, tmp_path: Path
) -> None:
    formats.energon(tmp_path, SAMPLES)
    parts = {name: ["shard-000.tar"] if name in splits else [] for name in ("train", "val", "test")}
    (tmp_path / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts}))
    assert recognise(str(tmp_path)).options["split"] == split


def test_what_is_refused_and_named(tmp_path: Path) -> None:
    """Nothing is written: no data, folders of several forms, a checkpoint of no family, …"""
    write_file(tmp_path / "none" / "a.pdf", b"%PDF")
    write_file(tmp_path / "model" / "config.json", b'{"model_type": "bert"}')
    data = captioning_pairs(tmp_path / "several" / "a", 3)
    formats.webdataset(tmp_path / "several" / "b", SAMPLES)
    write_json(tmp_path / "meta.json", {"own": {"root": "coco/", "annotation": "own.jsonl"}})
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    captioning_pairs(latin, 3)
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "none"], "is of no known format; the formats are pairs, captions"),
        ([tmp_path / "several"], "several forms: a is pairs, b is webdataset; call init with each"),
        ([tmp_path / "meta.json"], "InternVL's list of datasets: own (annotation own.jsonl, root"),
        ([latin], "is not UTF-8"),
        (["s3://bucket/data"], "'s3://bucket/data' is remote"),
        ([tmp_path / "no"], f"'{tmp_path}/no' does not exist"),
        ([data, "--processor", tmp_path / "model"], "is a 'bert'; the families are qwen2_vl"),
        ([data, "--processor", data], "no config"),
    ]
    for arguments, why in cases:
        given = ["init", *map(os.fspath, arguments), "--to", f"{tmp_path}/a.yaml"]
        result = CliRunner().invoke(cli, given)
        assert result.exit_code != 0
        assert why in f"{result.exception} {result.output}", why
        assert not (tmp_path / "a.yaml").exists()
