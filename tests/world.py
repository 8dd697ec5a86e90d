"""Sources, packed outputs and checkpoints, made once per run of the tests and read by all of them.

    def test_something(world: World, tmp_path: Path) -> None:
        source = world.source("bmr")                            # options, as in a configuration
        run = world.run("bmr", pack={"seq_length": 256})        # a finished output, and its folder:
        packs = PackedFolder(run.workspace.root, task_encoder(run))
        own = copy_of(run, tmp_path / "out")                    # to be changed

The processes of pytest-xdist share one folder: the first that needs something makes it, and others
wait for it. Nobody writes there: the end of the session checks that no file has changed.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_bytes, to_json, wait_for_lock, write_atomically
from offline_packing.verify.verdict import file_stamp
from task_encoders.storage.paths import as_remote, path_of
from tests.helpers import formats
from tests.helpers.datasets import PAIRS, captioning_pairs, image_bytes, make_run, pack_all
from tests.helpers.long_conversations import SIZES, mixed_records
from tests.helpers.outputs import files_of
from tests.helpers.shared_media import shared_media
from tests.helpers.videos import short_dialogues, video_pairs

if TYPE_CHECKING:
    from task_encoders.packed_task_encoder import PackedTaskEncoder

#: The `source` of a configuration: options of one source, or of several.
Source = dict[str, Any] | list[dict[str, Any]]
#: Writes files into a new folder, and returns the source that they are.
MakeSource = Callable[[Path], Source]


def _pairs(task: str, write: Callable[[Path], Path]) -> MakeSource:
    return lambda folder: {"format": "pairs", "path": str(write(folder)), "task": task}


def _format(name: str) -> MakeSource:
    write: formats.Writer = getattr(formats, name)
    return lambda folder: {**write(folder, formats.draw_samples(11)), "task": "bmr"}


def _conversations(folder: Path) -> Source:
    """Questions about pictures among conversations that are longer than a pack."""
    for i, (height, width) in enumerate(SIZES):
        formats.write_file(folder / f"{i}.jpg", image_bytes(width, height))
    formats.write_file(folder / "chat.jsonl", formats.lines(mixed_records()))
    return {"format": "jsonl", "path": str(folder / "chat.jsonl"), "task": "bmr"}


#: Sources with a name. The formats hold the same eleven dialogues each.
SOURCES: Mapping[str, MakeSource] = {
    **{task: _pairs(task, write) for task, write in PAIRS.items()},
    **{name: _format(name) for name in formats.WRITERS if name != "pairs"},
    "few captions": _pairs("captioning", lambda folder: captioning_pairs(folder, 16)),
    "short": _pairs("bmr", lambda folder: short_dialogues(folder, 24)),
    "videos": _pairs("bmr", video_pairs),
    "conversations": _conversations,
    "shared media": lambda folder: shared_media(folder, (24, 4, 3), (5, 1)),
}


class World:
    """Things below `root` that are made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def made(self, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
        """Return the folder `name`, and what `make(folder)` returned in the process that made it
        (anything that JSON holds)."""
        folder, receipt = self.root / name, self.root / f"{name}.made"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(self.root / f"{name}.lock"):
            if not receipt.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a test that failed half-way
                value = make(folder)
                write_atomically(receipt, to_json({"value": value, "files": _stamps(folder)}))
        return folder, json.loads(receipt.read_bytes())["value"]

    def source(self, source: str | MakeSource) -> Source:
        """Return a source of SOURCES, or the one that a function of a test module writes."""
        name, make = source, SOURCES.get(source) if isinstance(source, str) else source
        if not isinstance(source, str):
            name = f"{source.__module__}.{source.__qualname__}"
            assert "<" not in name, f"{name}: two lambdas have the same name; give it one"
        assert make is not None, f"no source {source!r}; choose one of: {', '.join(SOURCES)}"
        folder, found = self.made(f"sources/{name}", make)
        if f"memory://{folder}" in json.dumps(found):  # which each process has of its own
            put_files(files_of(folder), f"memory://{folder}")
        return found  # type: ignore[no-any-return]

    def run(self, source: str | MakeSource, /, **sections: dict[str, Any]) -> Run:
        """Return a finished run over a source; `sections` as of `make_run`."""
        options = self.source(source)
        name = f"{options[0]['format'] if isinstance(options, list) else options['format']}"
        name += f"-{hash_bytes(to_json([options, sections]))[:12]}"

        def pack(folder: Path) -> None:
            pack_all(make_run(options, folder, **sections))

        folder, _ = self.made(f"outputs/{name}", pack)
        return make_run(options, folder, **sections)

    def packed(self, source: str | MakeSource, /, **sections: dict[str, Any]) -> Path:
        """Return the folder of such a run, as trainers are given it."""
        return self.run(source, **sections).workspace.root

    def checkpoint(self, family: str) -> Path:
        """Return the folder of a family's tiny model, whose weights all count, with its tokenizer.
        `family`: with "_moe" after it, a mixture of experts."""
        from tests.helpers.peers import small_checkpoint

        def save(folder: Path) -> None:
            small_checkpoint(family, folder)

        return self.made(f"checkpoints/{family}", save)[0]

    def tokenizer(self, family: str) -> Path:
        """Return a folder, named as the family, with a small tokenizer of it."""
        from tests.helpers.tiny_families import save_tokenizer

        return self.made(f"tokenizers/{family}", lambda folder: save_tokenizer(family, folder))[0]

    def changed(self) -> list[str]:
        """Return the names of files that were changed, removed or added since they were made."""
        found = []
        for receipt in self.root.rglob("*.made"):
            now = _stamps(receipt.with_suffix(""))
            before = json.loads(receipt.read_bytes())["files"]
            differ = {name for name in now | before if now.get(name) != before.get(name)}
            found += [f"{receipt.relative_to(self.root).with_suffix('')}: {n}" for n in differ]
        return sorted(found)


def _stamps(folder: Path) -> dict[str, list[Any]]:
    """Sizes and times of the files of a folder; without locks, and without what Python compiles."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".pyc" and path.name != "lock"]
    stamps = ((str(path.relative_to(folder)), file_stamp(path)) for path in paths)
    return {name: list(stamp) for name, stamp in stamps if stamp is not None}


def at(run: Run, path: Path | str) -> Run:
    """Return the same run over another output."""
    output = run.config.output.model_copy(update={"path": str(path)})
    return replace(run, config=run.config.model_copy(update={"output": output}))


def copy_of(run: Run, path: Path | str) -> Run:
    """Copy a run's output to a new folder or URL, and return the run over the copy."""
    put_files(files_of(run.workspace.root), path)
    return at(run, path)


def put_files(files: Mapping[str, bytes], folder: Path | str) -> None:
    """Write files, by their names relative to a folder or URL."""
    for name, data in files.items():
        path = path_of(str(folder)) / name
        if as_remote(path):
            write_atomically(path, data)
        else:
            formats.write_file(path, data)


def task_encoder(run: Run, **options: Any) -> "PackedTaskEncoder":
    """Return a task encoder with the settings that a run's packs were made with, or other ones."""
    from task_encoders.packed_task_encoder import PackedTaskEncoder
    from task_encoders.settings import PackingSettings

    config, task = run.config, run.config.task
    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    own = {"seq_length": config.pack.seq_length, "model": config.model, "settings": settings}
    return PackedTaskEncoder(**(own | {"trees": bool(config.pack.share_prefixes)} | options))
