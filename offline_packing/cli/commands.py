"""Commands that take no configuration. With them the command line, `cli`, is complete."""

import importlib.resources
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offline_packing.cli import verbs  # noqa: F401 - they register themselves
from offline_packing.cli.verb import FILE, FOLDER, OUTPUT_OPTIONS, cli, echo
from task_encoders.samples import TASKS
from task_encoders.storage.paths import is_url
from task_encoders.text.qwen_vocabulary import BUILTIN

if TYPE_CHECKING:
    from offline_packing.config.sections import EngineConfig


def _check_local(context: click.Context, argument: click.Parameter, path: Any) -> Any:
    if is_url(path):
        raise click.BadParameter(
            f"{str(path)!r} is remote, and {context.command.name} needs local files; for init a "
            "copy of some records is enough: then set source.path to the remote ones"
        )
    if argument.required and not Path(path).exists():
        raise click.BadParameter(f"{path!r} does not exist")
    return path


@cli.command()
@click.argument("path", callback=_check_local)
@click.option("--to", type=FILE, default="pack.yaml")
@click.option("--task", type=click.Choice(TASKS), help="Default: guessed from the records.")
@click.option("--output", help="Its output.path; default: out/packed, or a folder next to PATH.")
@click.option("--processor", default=BUILTIN, help="The checkpoint you train; sets model.family.")
@click.option("--force", is_flag=True, help="Overwrite an existing configuration.")
def init(
    path: str, to: Path, task: str | None, output: str | None, processor: str, force: bool
) -> None:
    """Look at a folder or file PATH, show how it would be read, write a pack.yaml for it, and
    measure ten records with that."""
    import yaml

    from offline_packing.cli.starter import (
        measure_some,
        output_beside,
        render_config,
        render_examples,
    )
    from offline_packing.config.packing import parse_config
    from offline_packing.sources.recognise import recognise
    from offline_packing.storage.files import write_atomically

    if to.exists() and not force:
        raise click.ClickException(
            f"{to} exists; pass --force to overwrite it, or --to another file"
        )
    found = recognise(path, task=task)
    try:
        config = render_config(found, output or output_beside(path), processor)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    echo(render_examples(found))
    checked = parse_config(yaml.safe_load(config))
    write_atomically(to, config.encode())
    echo(f"wrote {to}")
    num_usable, refused = measure_some(checked)
    for line in refused:
        echo(line)
    next_command = f"offline-packing run --deep {to}"
    if not num_usable:
        raise click.ClickException(
            f"none of the first records can be packed; correct {to} (docs/records.md says how "
            f"records are read), then: {next_command}"
        )
    echo(f"measured {num_usable} of the first records; next: {next_command}")


@cli.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--task", type=click.Choice(TASKS), help="What packs that do not say so are trained as."
)
def index(folder: Path, task: str | None) -> None:
    """Give a FOLDER of tars with packs, written by others, the metadata that Energon needs."""
    from offline_packing.layouts.energon_metadata import index_pack_folder

    echo(f"indexed {index_pack_folder(folder, task):,} packs in {folder}")


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=FOLDER)
@click.option(
    "--epochs",
    "each_once",
    is_flag=True,
    help="Each pack exactly once per epoch, not on average: what data.repeat=false needs.",
)
def blend(folders: tuple[Path, ...], each_once: bool) -> None:
    """Print the YAML with which Energon reads several outputs as one dataset."""
    from offline_packing.upkeep import blend as blending

    echo(blending.blend(folders, each_once=each_once), nl=False)


def _engine_options(
    context: click.Context, argument: click.Parameter, overrides: tuple[str, ...]
) -> "EngineConfig":
    from offline_packing.config.sections import EngineConfig
    from offline_packing.storage.yaml_file import apply_override, validate

    content: dict[str, Any] = {"engine": {}}
    for override in overrides:
        if not override.startswith("engine."):
            raise click.BadParameter(f"{override!r} is not of the form engine.KEY=VALUE")
        apply_override(content, override)
    return validate(EngineConfig, content["engine"], "engine")


@cli.command()
@click.argument("output", metavar="OUT", type=FOLDER)
@click.argument("folder", metavar="OTHER", type=FOLDER)
@click.argument("engine", nargs=-1, metavar="[engine.KEY=VALUE]...", callback=_engine_options)
@click.option(
    "--to",
    type=click.Choice(["raw", "nemo"]),
    default="raw",
    show_default=True,
    help="raw: single files, raw_packing_data; nemo: token ids, packed_seq_dataset.bin and .idx.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
@click.pass_obj
def export(
    quiet: bool, output: Path, folder: Path, engine: "EngineConfig", to: str, dry_run: bool
) -> None:
    """Write the packs of a finished output OUT in another form into a folder or URL OTHER.

    Called again, it continues where it was killed. If OTHER is complete, it compares every file
    with its hash. `prompts` of single files hold what `prompt` does: converters to tars read
    either.
    """
    from offline_packing.export.export import export as run_export
    from offline_packing.export.export import preview_export
    from offline_packing.runs.run import build_engine

    if dry_run:
        echo(preview_export(output, folder, to))
        return
    with build_engine(engine) as started:
        done = run_export(output, folder, to, started, progress=not quiet)
    verb = "checked" if done.was_complete else "exported"
    echo(f"{verb} {done.num_packs:,} packs in {done.num_files:,} files: {folder}")


@cli.command()
@click.argument("folder", type=FOLDER, default="demo_output", callback=_check_local)
@click.option("--num-samples", default=2000, help="How many samples to draw.")
@click.option("--seed", default=0, help="Decides everything that is drawn.")
def demo(folder: Path, num_samples: int, seed: int) -> None:
    """Draw a dataset into FOLDER, pack it, and train a tiny model on the packs."""
    from offline_packing.demo.run import main as run_demo

    run_demo(folder, num_samples=num_samples, seed=seed)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[KEY.SUB=VALUE]...")
@click.option("--print", "only_path", is_flag=True, help="Print where SCRIPT is instead.")
def launch(script: str | None, arguments: tuple[str, ...], only_path: bool) -> None:
    """Run a training SCRIPT of the installed package with bash; without one, list them."""
    folder = Path(str(importlib.resources.files("launch")))
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    shell = (path for path in files.values() if path.suffix == ".sh")
    scripts = {path.stem: path for path in shell if path.read_text().startswith("#!")}
    if script is None:
        for name, found in scripts.items():
            echo(f"{name:<20} {found.read_text().splitlines()[1].removeprefix('# ')}")
        return
    path = scripts.get(script) or files.get(script)
    if path is None:
        raise click.ClickException(f"no script {script!r}; there are {', '.join(scripts)}")
    if only_path:
        echo(path)
        return
    if path not in scripts.values():
        raise click.ClickException(f"{path.name} is not a bash script; --print shows its path")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.execvp("bash", ["bash", str(path), *arguments])


for _command in cli.commands.values():
    _command.params.extend(OUTPUT_OPTIONS)
