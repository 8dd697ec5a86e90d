"""Packing, and importing for it, needs no training library."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from task_encoders.families import FAMILIES
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_config,
    write_json,
)
from tests.helpers.tiny_families import encoder_options, save_tokenizer
from tests.helpers.videos import make_video

BLOCKED = ("av", "torch", "transformers", "megatron", "ray", "webdataset", "matplotlib")

#: Families whose vocabulary a package brings.
BUILT_IN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision_1_5")

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} was imported")

sys.meta_path.insert(0, Refuse())
import offline_packing, task_encoders
{statements}
"""


def run_blocked(blocked: tuple[str, ...], *commands: list[str]) -> subprocess.CompletedProcess[str]:
    calls = [f"cli({arguments!r}, standalone_mode=False)" for arguments in commands]
    return run_program(blocked, "\n".join(["from offline_packing.cli.commands import cli", *calls]))


def run_program(blocked: tuple[str, ...], statements: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(blocked=blocked, statements=statements)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    data, pack = captioning_pairs(tmp_path / "data", 8), {"seq_length": 8192}
    config = make_config(data, tmp_path / "out", pack=pack)
    return str(config_file(tmp_path / "config.yaml", config))


def test_help_and_measure_compile_nothing(config: str) -> None:
    """Nor do they import what compiles: the planner is for `plan`."""
    blocked = (*BLOCKED, "numba", "llvmlite", "scipy")
    result = run_blocked(blocked, ["--help"], ["measure", config])
    assert result.returncode == 0, result.stderr
    assert "measured 8 samples" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    """Nor what reads data and configurations: help is asked for often."""
    blocked = (*BLOCKED, "numpy", "pyarrow", "pydantic", "PIL", "yaml", "jinja2")
    result = run_blocked(blocked, ["--help"])
    assert result.returncode == 0, result.stderr
    assert "verify" in result.stdout


#: Calls of `run --deep`, as in an environment in which the packages are not installed.
_DEEP = """
sys.meta_path.pop(0)
sys.modules.update(dict.fromkeys({blocked!r}))
from pathlib import Path
from offline_packing.cli.commands import cli
for name in {names!r}:
    for extra in ["", "pack.share_prefixes={{}}"]:
        output = Path(f"{root}/{{name}}{{len(extra)}}")
        try:
            arguments = ["run", "--deep", f"{root}/{{name}}.json", f"output.path={{output}}"]
            cli([*arguments, *filter(None, [extra])], standalone_mode=False)
            said = "ok"
        except Exception as error:
            is_measured = (output / "_packing" / "index").exists()
            said = f"{{type(error).__name__}} {{is_measured}} {{error}}"
        print("end", name, bool(extra), said, sep="|")
"""


@pytest.mark.parametrize("blocked", [BLOCKED, tuple({*BLOCKED} - {"transformers"})])
def test_deep_runs_without_training_libraries(blocked: tuple[str, ...], tmp_path: Path) -> None:
    """Each family's, and with prefixes shared: it ends well, or is refused before it measures."""
    data = captioning_pairs(tmp_path / "data", 3)
    source = {"format": "pairs", "path": str(data), "task": "captioning"}
    sections = {"source": source, "pack": {"seq_length": 4096}, "engine": {"workers": 0}}
    models = {f"{name} builtin": {"family": name, "processor": "builtin"} for name in BUILT_IN}
    for name, family in FAMILIES.items():
        if not family.since and (name == "qwen2_vl" or "transformers" not in blocked):
            save_tokenizer(name, tmp_path / name)
            own = {"family": name, "processor": str(tmp_path / name), **encoder_options(name)}
            models[name] = own
    for name, model in models.items():
        write_json(tmp_path / f"{name}.json", {**sections, "model": model})
    statements = _DEEP.format(blocked=blocked, names=list(models), root=tmp_path)
    result = run_program(blocked, statements)
    ends = [line.split("|")[1:] for line in result.stdout.splitlines() if line[:4] == "end|"]
    found = {name: said for name, shares, said in ends if shares == "False"}
    assert found.keys() == models.keys(), result.stderr
    refusal = re.compile(r"(Stage|Config)Error False .*(\(in a clone: pip|recurrent)")
    for name, shares, said in ends:
        assert refusal.match(said) or (said, shares) == ("ok", "False"), (name, said)
    well = {name for name, said in found.items() if said == "ok"}
    assert {"qwen2_vl builtin", "qwen2_5_vl builtin", "llava_onevision_1_5 builtin"} <= well
    assert ("qwen2_vl" in well) == ("transformers" not in blocked)


def test_packs_are_read_by_number(config: str, tmp_path: Path) -> None:
    """The metadata of a written folder can be understood without Energon."""
    named = ["run", config, "output.key_prefix=a_"]
    assert CliRunner().invoke(cli, named).exit_code == 0
    read = f"print(*[p.key for p in task_encoders.PackedFolder({str(tmp_path / 'out')!r})])"
    result = run_program((*BLOCKED, "numba", "pyarrow"), read)
    assert result.stdout == "a_ps_00000000\n", result.stderr


def test_videos_without_pyav_are_refused_in_one_line(config: str, tmp_path: Path) -> None:
    (tmp_path / "data" / "clip.mp4").write_bytes(make_video(4))
    (tmp_path / "data" / "clip.json").write_text('{"caption": "a bar"}')
    result = run_blocked(("av",), ["measure", config])
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "sample 'clip'" in last
    assert "videos need the package av; pip install 'av>=18' (in a clone: " in last


def test_names_of_online_packing_are_imported_when_asked_for() -> None:
    import offline_packing.online as online

    for name in online.__all__:
        assert getattr(online, name).__name__ == name
    result = run_program(
        (*BLOCKED, "torchdata"), "from offline_packing.online import RankSchedule, PackingPool"
    )
    assert result.returncode == 0, result.stderr
