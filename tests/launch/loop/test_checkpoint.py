"""A damaged checkpoint is named and not used: the run goes on from the newest whole one."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offline_packing.errors import DamagedError, StageError
from offline_packing.runs.training_run import VERSION
from offline_packing.storage.files import hash_file, read_json, seal, to_json
from tests.helpers.packed_runs import (
    KilledError,
    losses,
    make_config,
    make_trainer,
)

STEPS = 4
WEIGHTS = "shard-00001-model-00001-of-00003.safetensors"
Damage = Callable[[Path], object]

pytestmark = pytest.mark.usefixtures("bmr_environment")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def holding(text: str) -> Damage:
    return lambda path: path.write_text(text)


def changed(**fields: Any) -> Damage:
    """Sealed, as whoever does not know the fields would write it."""
    return lambda path: path.write_bytes(to_json(seal({**read_json(path), **fields})))


def without(field: str) -> Damage:
    def damage(path: Path) -> None:
        content = read_json(path)
        del content[field]
        path.write_bytes(to_json(seal(content)))

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def trainer_of(folder: Path, output: Path, every: int = 2, keep: int = 2, **options: Any) -> Any:
    config = make_config(
        folder, output, train={"iterations": STEPS}, checkpoint={"every": every, "keep": keep}
    )
    return make_trainer(config, **options)[0]


@pytest.fixture(scope="module")
def whole(folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with checkpoints after steps 2 and 4."""
    output = tmp_path_factory.mktemp("whole")
    assert trainer_of(folder, output).run()
    return output


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        (WEIGHTS, flip_bit, f"{WEIGHTS} is not what was written"),
        (WEIGHTS, cut, f"{WEIGHTS} is not what was written"),
        ("rank_00000.pt", flip_bit, "rank_00000.pt is not what was written"),
        ("rank_00000.pt", Path.unlink, "rank_00000.pt cannot be read: No such file or directory"),
        ("state.json", Path.unlink, "state.json is missing"),
        ("state.json", cut, "state.json is damaged: "),
        ("state.json", flip_bit, "state.json is damaged: "),
        ("state.json", into_folder, "state.json is damaged: [Errno 21] Is a directory"),
        ("state.json", holding("{}"), "state.json is damaged: version: Field required"),
        ("state.json", holding('{"version": 7}'), "state.json is damaged: run: Field required"),
        ("state.json", without("run"), "state.json is damaged: run: Field required"),
        ("state.json", changed(files=[]), "state.json is damaged: files: "),
        ("state.json", changed(run={}), "state.json is damaged: run.data.packs: "),
        ("state.json", changed(begins=[9]), "state.json is damaged: begins (9,) "),
        ("state.json", changed(version="7"), "state.json is damaged: version: "),
    ],
)
def test_the_newest_whole_checkpoint_is_used(
    name: str,
    damage: Damage,
    named: str,
    folder: Path,
    whole: Path,
    run: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest = run / "checkpoints" / "iter_00000004"
    damage(newest / name)
    trainer = trainer_of(folder, run)
    with caplog.at_level(logging.INFO, "launch"):
        trainer.resume()
    assert trainer.iteration == 2
    own = [record for record in caplog.records if record.name == "launch.loop.checkpoint"]
    (line,) = [record.getMessage() for record in own]
    assert f"checkpoint {newest} is damaged: {named}" in line
    assert "; training goes on from iter_00000002, and" in line
    assert trainer.run()
    assert losses(run) == losses(whole)
    again = trainer_of(folder, run)  # what was damaged has been written again
    again.resume()
    assert again.iteration == STEPS
    written, expected = (
        load_file(path / "checkpoints" / newest.name / WEIGHTS) for path in (run, whole)
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_damaged_checkpoints_alone_are_refused(folder: Path, run: Path) -> None:
    flip_bit(run / "checkpoints" / "iter_00000002" / WEIGHTS)
    (run / "checkpoints" / "iter_00000004" / "state.json").unlink()
    with pytest.raises(DamagedError) as refused:
        trainer_of(folder, run).resume()
    assert str(refused.value) == (
        f"{run / 'checkpoints'} holds no whole checkpoint: iter_00000004 (state.json is missing), "
        f"iter_00000002 ({WEIGHTS} is not what was written); restore these files, or remove the "
        "folder to train from the beginning"
    )


def test_a_damaged_checkpoint_does_not_stand_for_a_whole_one(folder: Path, run: Path) -> None:
    """It is newer than those that the resumed run saves, which keeps one."""
    flip_bit(run / "checkpoints" / "iter_00000004" / WEIGHTS)
    trainer = trainer_of(folder, run, every=1, keep=1, fail_at=3)  # in step 4
    trainer.resume()
    with pytest.raises(KilledError):
        trainer.run()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iter_00000003"]
    again = trainer_of(folder, run)
    again.resume()
    assert again.iteration == 3


def test_a_checkpoint_of_another_version_is_not_damaged(folder: Path, run: Path) -> None:
    state = run / "checkpoints" / "iter_00000004" / "state.json"
    state.write_bytes(to_json(seal({**read_json(state), "version": VERSION - 1})))
    with pytest.raises(StageError, match=rf"has version {VERSION - 1}, .* the release that wrote"):
        trainer_of(folder, run).resume()


class _Foreign:
    """Torch loads no such object without running code."""


def bad_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"}" + content[9:])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (WEIGHTS, bad_header),
        (WEIGHTS, lambda path: path.write_bytes(b"")),
        (WEIGHTS, lambda path: path.write_bytes(b"\xff" * 100)),
        ("rank_00000.pt", lambda path: path.write_bytes(b"no zip")),
        ("rank_00000.pt", lambda path: torch.save({"data": _Foreign()}, path)),
        ("rank_00000.pt", lambda path: torch.save({"generators": {}}, path)),
        ("rank_00000.pt", lambda path: torch.save({"data": {}, "generators": {}}, path)),
    ],
)
def test_foreign_files_are_refused_in_a_line_of_ours(
    name: str, write: Damage, folder: Path, run: Path
) -> None:
    """Their hashes are right: somebody else wrote them."""
    newest = run / "checkpoints" / "iter_00000004"
    write(newest / name)
    files = read_json(newest / "state.json")["files"] | {name: hash_file(newest / name)}
    changed(files=files)(newest / "state.json")
    with pytest.raises(DamagedError) as refused:
        trainer_of(folder, run).resume()
    text = str(refused.value)
    assert str(newest) in text
    assert "remove it to go on from the checkpoint before it" in text
    assert "\n" not in text
    assert "weights_only" not in text
    shutil.rmtree(newest)
    again = trainer_of(folder, run)
    again.resume()
    assert again.iteration == 2
