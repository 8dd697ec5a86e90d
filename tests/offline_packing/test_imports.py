"""Packing, and importing for it, needs no training library."""

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from offline_packing.cli.commands import cli
from task_encoders.families import FAMILIES
from tests.helpers.datasets import captioning_pairs, config_file, make_config, write_json
from tests.helpers.tiny_families import encoder_options, save_tokenizer
from tests.helpers.videos import make_video

BLOCKED = ("av", "torch", "transformers", "megatron", "ray", "webdataset", "matplotlib")

LAUNCH = Path(__file__).parents[2] / "launch"
#: Families whose vocabulary a package brings.
BUILT_IN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision_1_5")

PROGRAM = f"""
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    blocked = set({BLOCKED})

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{{name}} was imported")

sys.meta_path.insert(0, Refuse())
import offline_packing, task_encoders
"""


#: One after the other, each with fewer packages blocked: help, which is asked for often; packs by
#: number; measuring; schedules; and a video, which needs PyAV.
_EACH = """
compiled, table = {{"numba", "llvmlite", "scipy"}}, {{"pyarrow"}}
read = {{"numpy", "pydantic", "PIL", "yaml", "jinja2"}}
Refuse.blocked |= compiled | table | read
from offline_packing.cli.commands import cli
cli(["--help"], standalone_mode=False)
Refuse.blocked -= read
print(*[pack.key for pack in task_encoders.PackedFolder("{packed}")])
Refuse.blocked -= table
cli(["measure", "{config}"], standalone_mode=False)
Refuse.blocked -= compiled
from offline_packing.online import RankSchedule, PackingPool
try:
    video = ["source.path={videos}", "output.path={videos}_out"]
    cli(["measure", "{config}", *video], standalone_mode=False)
except Exception as error:
    print(error)
"""
#: The demo, training, and calls of `run --deep`, as in an environment in which the packages are not
#: installed; then `run --deep` in one in which transformers is.
_DEEP = """
sys.meta_path.pop(0)
sys.modules.update(dict.fromkeys(Refuse.blocked))
from pathlib import Path
from launch.start import main
from offline_packing.cli.commands import cli
train = ["-m", "launch.train", "{launch}/sft.yaml", "validation.every=0"]
for call in (
    lambda: cli(["demo", "{root}/demo"], standalone_mode=False),
    lambda: main([*train, "data.online={{seq_length: 64, model: {{}}}}"]),
):
    try:
        call()
    except (Exception, SystemExit) as error:
        print("refused:", error)
for place, names in enumerate({names!r}):
    for name in names:
        for extra in ["", "pack.share_prefixes={{}}"]:
            output = Path(f"{root}/{{place}}{{name}}{{len(extra)}}")
            try:
                arguments = ["run", "--deep", f"{root}/{{name}}.json", f"output.path={{output}}"]
                cli([*arguments, *filter(None, [extra])], standalone_mode=False)
                said = "ok"
            except Exception as error:
                is_measured = (output / "_packing" / "index").exists()
                said = f"{{type(error).__name__}} {{is_measured}} {{error}}"
            print("end", place, name, bool(extra), said, sep="|")
    sys.modules.pop("transformers")
"""


def test_packing_without_training_libraries(tmp_path: Path) -> None:
    """Each task imports what it needs. A deep run, each family's and with prefixes shared, ends
    well, or is refused before it measures."""
    data, pack = captioning_pairs(tmp_path / "data", 3), {"seq_length": 8192}
    config = config_file(tmp_path / "a.json", make_config(data, tmp_path / "out", pack=pack))
    packed, videos = tmp_path / "packed", tmp_path / "videos"
    named = ["run", str(config), "output.key_prefix=a_", f"output.path={packed}"]
    assert CliRunner().invoke(cli, named).exit_code == 0
    write_json(videos / "clip.json", {"caption": "a bar"})
    (videos / "clip.mp4").write_bytes(make_video(4))
    source = {"format": "pairs", "path": str(data), "task": "captioning"}
    sections = {"source": source, "pack": {"seq_length": 4096}, "engine": {"workers": 0}}
    models = {f"{name} builtin": {"family": name, "processor": "builtin"} for name in BUILT_IN}
    names = [[*models, "qwen2_vl"], [name for name, one in FAMILIES.items() if not one.since]]
    for name in names[1]:
        save_tokenizer(name, tmp_path / name)
        own = {"family": name, "processor": str(tmp_path / name), **encoder_options(name)}
        models[name] = own
    for name, model in models.items():
        write_json(tmp_path / f"{name}.json", {**sections, "model": model})
    each = _EACH.format(packed=packed, config=config, videos=videos)
    program = PROGRAM + each + _DEEP.format(names=names, root=tmp_path, launch=LAUNCH)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    needed = "videos need the package av; pip install 'av>=18' (in a clone: "
    refused = ("refused: megatron-energon, which reads this, is not installed", "refused: 1\n")
    packing = ("verify", "a_ps_00000000\n", "measured 3 samples", "sample 'clip'", needed)
    for one in (*packing, *refused):
        assert one in result.stdout, result.stderr
    assert "error: No module named 'torch." in result.stderr
    ends = [line.split("|")[1:] for line in result.stdout.splitlines() if line[:4] == "end|"]
    assert len(ends) == 2 * sum(map(len, names)), result.stderr
    refusal = re.compile(r"(Stage|Config)Error False .*(\(in a clone: pip|recurrent)")
    well = set()
    for place, name, shares, said in ends:
        assert refusal.match(said) or (said, shares) == ("ok", "False"), (name, said)
        well |= {f"{place} {name}"} if said == "ok" else set()
    assert {f"0 {name} builtin" for name in BUILT_IN if name != "qwen3_vl"} <= well
    assert ("0 qwen2_vl" in well, "1 qwen2_vl" in well) == (False, True)


def test_names_of_online_packing_are_imported_when_asked_for() -> None:
    import offline_packing.online as online

    for name in online.__all__:
        assert getattr(online, name).__name__ == name
