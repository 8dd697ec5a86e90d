"""README, the pages of the documentation and the notebook, as their readers use them: links lead
somewhere, programs run, every name in them exists."""

import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient

from launch.config import load_config
from launch.data.packed_data import read_packed_data
from launch.train import cli as train
from offline_packing import plan_packs
from offline_packing.cli.commands import cli
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.runs.manifest import require_manifest
from task_encoders.families import FAMILIES
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.packs.manifest import html_table
from tests.helpers.command import invoke
from tests.helpers.datasets import captioning_pairs, write_json
from tests.helpers.formats import write_file
from tests.helpers.pages import Block, anchors, blocks

ROOT = Path(__file__).parent.parent


def test_links_lead_somewhere() -> None:
    roots = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")]
    roots += (ROOT / "examples").rglob("*.md")
    for page in (*roots, *(ROOT / "docs").rglob("*.md")):
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text()):
            if link.startswith("http"):
                continue
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor[1:] in anchors(target), f"{page.name}: {link}{anchor}"


@pytest.mark.parametrize("package", ["offline_packing", "task_encoders"])
def test_the_reference_has_every_public_name(package: str) -> None:
    _, sections = (ROOT / "docs/api.md").read_text().split(f".. currentmodule:: {package}\n")
    named = re.findall(r"(?m)^\.\. auto(?:class|function):: (\w+)", sections.split("```")[0])
    assert sorted(named) == sorted(importlib.import_module(package).__all__)


def test_tables_of_options_and_reasons_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tables = importlib.import_module("reference_tables")
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "<!-- table: " in path.read_text()]
    assert pages
    for path in pages:
        page = path.read_text("utf-8")
        assert tables.filled(page) == page, f"{path.name}: run tools/reference_tables.py"
        assert page.count("<!-- table: ") == page.count("<!-- end -->")


def test_from_python_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its blocks are one program."""
    page = (ROOT / "docs/from_python.md").read_text()
    program = [block.text for block in blocks(page) if block.language == "python"]
    assert len(program) == 9
    (tmp_path / "program.py").write_text("\n".join(program))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert "PackPlan(5 packs" in printed
    assert "packed=60" in printed


NOTEBOOK = ROOT / "examples/first_packs.ipynb"


def outputs(notebook: Any) -> list[set[str]]:
    """The kinds of output of each code cell: printed, HTML, a picture. Warnings do not count."""
    code = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    shown = ([one for one in own if one.get("name") != "stderr"] for own in code)
    return [{kind for one in own for kind in one.get("data", [one.get("name")])} for own in shown]


def test_outputs_of_the_notebook_are_stored() -> None:
    stored = nbformat.read(NOTEBOOK, 4)
    assert all(outputs(stored))
    assert not re.search(r"/tmp|/home|/root|site-packages", NOTEBOOK.read_text())


@pytest.mark.exhaustive
def test_the_notebook_runs() -> None:
    """Every line of it, with one batch each that it compares or trains."""
    notebook = nbformat.read(NOTEBOOK, 4)
    stored = outputs(notebook)
    for cell in notebook.cells:
        cell.source = re.sub(r"islice\(batches\(\), \d+\)", "islice(batches(), 1)", cell.source)
    at = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=500, resources=at).execute()
    assert outputs(notebook) == stored
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    packed, control = map(float, re.findall(r"largest difference, .*: +(\S+)", printed))
    assert packed < 1e-4 < 1e-1 < control


def test_objects_show_themselves_and_escape_what_data_hold() -> None:
    shown = plan_packs([3, 4, 9], seq_length=8)._repr_html_()
    assert "1 of 8 tokens" in shown
    assert "set aside: over_seq_length" in shown
    escaped = html_table("", {"<b>": "<b>"})
    assert ("&lt;b&gt;" in escaped, "<b>" in escaped) == (True, False)


README = (ROOT / "README.md").read_text()
#: These run for minutes, or fetch packages; see `test_ci_runs_what_takes_long`.
APART = ("make demo", "make test", "pip install")
PATH = re.compile(r"[\w*]+(/|\.\w+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a reader's data: what README's blocks name, at the places they name."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "launch").symlink_to(ROOT / "launch")
    captioning_pairs(root / "data/pairs", 180)  # two packs, one for each worker of a loader
    for path in (root / "data/pairs/part0").glob("000002.*"):
        path.rename(path.with_stem("cat"))
    write_json(root / "data/pairs/part0/cat.json", {"caption": "A cat."})
    write_checkpoint(root / "checkpoints/Qwen2-VL-2B-Instruct")
    (root / "Qwen").symlink_to(root / "checkpoints")
    return root


def write_checkpoint(folder: Path) -> None:
    """A checkpoint with random weights: the real vocabulary and template, a tiny model."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tiny = FAMILIES["qwen2_vl"].tiny
    parts = {"text_config": dict(tiny.text), "vision_config": dict(tiny.vision)}
    Qwen2VLForConditionalGeneration(Qwen2VLConfig(**parts, **tiny.whole)).save_pretrained(folder)
    builtin_processor(min_pixels=3136, max_pixels=4014080).save_pretrained(folder)


def blocks_in_order() -> list[Block]:
    """The blocks that are run, in the order in which a reader meets them."""
    found = list(blocks(README))
    assert {block.language for block in found} == {"bash", "yaml", "python"}
    assert "\n    " not in re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S), "indented block"
    run = [block for block in found if block.language != "text"]
    run = [block for block in run if not block.text.startswith(APART)]
    assert len(run) >= 4
    return run


def run_here(block: Block) -> None:
    """Run a block in this folder and process; a script's training as far as its configuration."""
    if block.language == "yaml":  # a configuration, whose first line names the file
        name = block.text.partition("\n")[0].removeprefix("# ")
        assert name.endswith(".yaml"), name
        Path(name).write_text(block.text)
    elif block.language == "python":
        exec(compile(block.text, f"README.md:{block.line}", "exec"), {})
    for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
        command, *arguments = shlex.split(line, comments=True)
        if command == "offline-packing":
            invoke(*arguments, "engine.workers=0")
            continue
        script, *overrides = arguments
        assert (command, Path(script).is_file()) == ("bash", True)
        config = load_config("launch/pretrain_stage1.yaml", overrides)
        assert read_packed_data(Path(config.data.path)).tasks == ("captioning",)
        assert Path(config.model.checkpoint or "").is_dir()


def test_blocks_in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training by the script, which tests/launch starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "0")  # a block sets it; gone after the test
    for block in blocks_in_order():
        run_here(block)
    assert Path("out/packed/_packing/report/report.html").is_file()


def test_ci_runs_what_takes_long() -> None:
    ci = (ROOT / ".ci/run").read_text().splitlines()
    apart = [block.text for block in blocks(README) if block.text.startswith(APART)]
    made = {line for text in apart for line in text.splitlines() if line.startswith("make")}
    assert {"make demo", "make test"} == made <= set(ci)


def test_commands_and_families_are_all_named() -> None:
    table = (ROOT / "docs/command.md").read_text()
    named = set(re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert set(cli.commands) <= named
    section = README.partition("### Models")[2].partition("###")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(FAMILIES)


def test_readme_is_short_and_its_first_program_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file, no configuration."""
    monkeypatch.chdir(tmp_path)
    assert len(README.split()) <= 1100
    first = next(block for block in blocks(README) if block.language == "python")
    assert len(first.text.strip().splitlines()) <= 12
    assert blocks_in_order()[0] == first
    run_here(first)
    assert not list(tmp_path.iterdir())


def test_pages_are_read_once() -> None:
    """User pages but the reference have at most 1,500 words, and the glossary 30 terms."""
    pages = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    lengths = {name: len(text.split()) for name, text in pages.items() if name != "configuration"}
    assert {name: length for name, length in lengths.items() if length > 1500} == {}
    assert len(re.findall(r"^\| (?!term |--)", pages["glossary"], re.MULTILINE)) <= 30


def tree_paths() -> list[str]:
    """Paths that the source tree names; what is indented lies in the folder above."""
    text = (ROOT / "docs/dev/architecture.md").read_text().partition("## Source tree")[2]
    tree = next(block for block in blocks(text) if block.language == "text").text
    found: list[str] = []
    parents: list[tuple[int, str]] = [(-1, "")]
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent > 20:  # a description that goes on
            continue
        while parents[-1][0] >= indent:
            parents.pop()
        for name in itertools.takewhile(PATH.fullmatch, line.split()):
            found.append(parents[-1][1] + name)
        if found[-1].endswith("/"):
            parents.append((indent, found[-1]))
    return found


def test_the_tree_is_the_tree() -> None:
    named = tree_paths()
    assert len(named) > 30
    for name in named:
        assert list(ROOT.glob(name)), f"the source tree names {name}, which is not there"
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in ("task_encoders", "offline_packing", "launch")
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert packages <= set(named), packages - set(named)


#: Stands for a command that a block of bash calls: notes its words, and the variables that it has.
NOTED = """#!{python} -S
import json, os, sys
own = {{name: value for name, value in os.environ.items() if name.startswith("OFFLINE_")}}
with open({calls!r}, "a") as calls:
    print(json.dumps([own, os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=calls)
"""


def run_bash(text: str, folder: Path) -> str:
    """Run a block, in this process what it calls: packing, and training of one rank; returns what
    that said."""
    calls, said = folder / "calls", ""
    for name in ("offline-packing", "torchrun"):
        write_file(folder / name, NOTED.format(python=sys.executable, calls=str(calls)).encode())
        (folder / name).chmod(0o755)
    calls.write_text("")
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", text], env={**os.environ, "PATH": path}, check=True)
    for own, name, *words in map(json.loads, calls.read_text().splitlines()):
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in own.items():
                patch.setenv(variable, value)
            if name == "offline-packing":
                said += invoke(*words, "engine.workers=0").output
                continue
            assert words[:4] == ["--nproc-per-node", "1", "-m", "launch.train"]
            result = CliRunner().invoke(train, words[4:], catch_exceptions=False)
            assert result.exit_code == 0, result.output
    return said


@pytest.mark.exhaustive
def test_the_page_of_mixtures_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files and commands, one after the other, on the demo's data."""
    monkeypatch.chdir(tmp_path)
    generate_demo_dataset(tmp_path / "demo_output/data", num_samples=160, progress=False)
    said = []
    for block in blocks((ROOT / "docs/mixtures.md").read_text()):
        if block.language == "bash":
            said.append(run_bash(block.text, tmp_path / "bin"))
        else:
            run_here(block)
    assert "mixture" in said[1]
    first, second = (require_manifest(tmp_path / "out" / name) for name in ("first", "second"))
    assert first.counts.set_aside["not_chosen"] > 0
    assert second.counts.set_aside["trained"] > 0
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert {row["trained"] for row in rows} > {0, 1}
