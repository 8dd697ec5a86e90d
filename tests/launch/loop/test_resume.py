"""A run that was killed, damaged, changed or extended goes on from its newest whole checkpoint, to
the last bit, or says why it does not."""

import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from launch.config import LaunchConfig
from launch.loop.setup import run
from launch.train import cli
from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.runs.training_run import VERSION
from offline_packing.storage.files import hash_file, read_json, seal, to_json
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import Trained, losses, make_config, make_trainer, trained
from tests.helpers.transformers_runs import Case

STEPS, PACKS_PER_STEP, SAVE_EVERY = 6, 3, 2
WEIGHTS = "shard-00001-model-00001-of-00003.safetensors"
Damage = Callable[[Path], object]

pytestmark = pytest.mark.usefixtures("bmr_environment")


def config_of(
    folder: Path, output: Path, num_workers: int = 0, **sections: dict[str, Any]
) -> LaunchConfig:
    sections["train"] = {"iterations": STEPS} | sections.get("train", {})
    sections["checkpoint"] = {"every": SAVE_EVERY} | sections.get("checkpoint", {})
    sections["data"] = {"num_workers": num_workers} | sections.get("data", {})
    return make_config(folder, output, **sections)


@pytest.fixture(scope="module")
def whole(folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run that was never killed."""
    output = tmp_path_factory.mktemp("whole")
    (output / "checkpoints" / "iter_00000099.tmp").mkdir(parents=True)  # left by a kill
    return trained(config_of(folder, output))


def resumed(folder: Path, output: Path, *accept: str, **sections: Any) -> Any:
    trainer = make_trainer(config_of(folder, output, **sections), accept=accept)[0]
    trainer.resume()
    return trainer


@pytest.mark.parametrize(("num_workers", "kills"), [(0, (2, 5)), (2, (3,))])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    num_workers: int, kills: Sequence[int], folder: Path, whole: Trained, tmp_path: Path
) -> None:
    """Killed in the middle of these steps, in turn: before the first checkpoint, too. The whole run
    has no loader processes."""
    assert len(losses(whole.output)) == STEPS
    assert len(whole.keys) == STEPS * PACKS_PER_STEP
    config, done = config_of(folder, tmp_path, num_workers), 0
    for step in kills:
        fail_at = (step - 1 - done) * PACKS_PER_STEP + 1
        killed = trained(config, fail_at=fail_at)
        assert killed.begun == done
        assert killed.keys == whole.keys[done * PACKS_PER_STEP :][:fail_at]
        done = (step - 1) // SAVE_EVERY * SAVE_EVERY
    again = trained(config)
    assert again.begun == done
    assert losses(tmp_path) == losses(whole.output)
    assert again.keys == whole.keys[done * PACKS_PER_STEP :]
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_a_finished_run_keeps_its_newest_checkpoints_and_does_nothing_more(
    folder: Path, whole: Trained, tmp_path: Path
) -> None:
    """Also where its packs were moved."""
    output, moved = whole.output, tmp_path / "moved"
    moved.symlink_to(folder)
    assert trained(config_of(moved, output)).keys == []
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["iter_00000004", "iter_00000006"]
    with pytest.raises(StageError, match="holds another run"):
        run(config_of(folder, output, checkpoint={"resume": False}))
    assert len(losses(output)) == STEPS


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def holding(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)


def changed(**fields: Any) -> Damage:
    """Sealed, as whoever does not know the fields would write it."""
    return lambda path: path.write_bytes(to_json(seal({**read_json(path), **fields})))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: list[tuple[str, Damage, str]] = [
    (WEIGHTS, flip_bit, f"{WEIGHTS} is not what was written"),
    (WEIGHTS, cut, f"{WEIGHTS} is not what was written"),
    ("rank_00000.pt", flip_bit, "rank_00000.pt is not what was written"),
    ("rank_00000.pt", Path.unlink, "rank_00000.pt cannot be read: No such file or directory"),
    ("state.json", Path.unlink, "state.json is missing"),
    ("state.json", flip_bit, "state.json is damaged: "),
    ("state.json", changed(begins=[9]), "state.json is damaged: begins (9,) "),
]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    folder: Path, whole: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it should have held is trained, and saved, again."""
    caplog.set_level(logging.INFO, "launch.loop.checkpoint")
    for number, (name, damage, named) in enumerate(DAMAGES):
        output = Path(shutil.copytree(whole.output, tmp_path / str(number)))
        newest = output / "checkpoints" / "iter_00000006"
        damage(newest / name)
        caplog.clear()
        trainer = resumed(folder, output)
        assert trainer.iteration == 4
        own = [one.getMessage() for one in caplog.records if one.name == "launch.loop.checkpoint"]
        (line,) = own
        assert f"checkpoint {newest} is damaged: {named}" in line
        assert "; training goes on from iter_00000004, and" in line
    assert trainer.run()
    assert losses(output) == losses(whole.output)
    assert resumed(folder, output).iteration == STEPS
    written, expected = (
        load_file(path / "checkpoints" / newest.name / WEIGHTS) for path in (output, whole.output)
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_damaged_checkpoints_do_not_stand_for_whole_ones(
    folder: Path, whole: Trained, tmp_path: Path
) -> None:
    """A damaged one is newer than those that the resumed run saves, which keeps one; and damaged
    ones alone, or one of another version, are refused."""
    finished = Path(shutil.copytree(whole.output, tmp_path / "run"))
    flip_bit(finished / "checkpoints" / "iter_00000006" / WEIGHTS)
    config = config_of(folder, finished, checkpoint={"every": 1, "keep": 1})
    trained(config, fail_at=PACKS_PER_STEP)  # in step 6
    (left,) = (finished / "checkpoints").iterdir()
    assert left.name == "iter_00000005"
    assert resumed(folder, finished).iteration == 5
    changed(version=VERSION - 1)(left / "state.json")
    with pytest.raises(StageError, match=rf"has version {VERSION - 1}, .* the release that wrote"):
        resumed(folder, finished)
    shutil.copytree(left, left.with_name("iter_00000004"))
    for path in (left, left.with_name("iter_00000004")):
        (path / "state.json").unlink()
    with pytest.raises(DamagedError) as refused:
        resumed(folder, finished)
    assert str(refused.value) == (
        f"{left.parent} holds no whole checkpoint: iter_00000005 (state.json is missing), "
        "iter_00000004 (state.json is missing); restore these files, or remove the folder to train "
        "from the beginning"
    )


class _Foreign:
    """Torch loads no such object without running code."""


def bad_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"}" + content[9:])


FOREIGN: list[tuple[str, Damage]] = [
    (WEIGHTS, bad_header),
    (WEIGHTS, holding(b"\xff" * 100)),
    ("rank_00000.pt", holding(b"no zip")),
    ("rank_00000.pt", lambda path: torch.save({"data": _Foreign()}, path)),
    ("rank_00000.pt", lambda path: torch.save({"data": {}, "generators": {}}, path)),
]


def test_foreign_files_are_refused_in_a_line_of_ours(
    folder: Path, whole: Trained, tmp_path: Path
) -> None:
    """Their hashes are right: somebody else wrote them."""
    for number, (name, write) in enumerate(FOREIGN):
        output = Path(shutil.copytree(whole.output, tmp_path / str(number)))
        newest = output / "checkpoints" / "iter_00000006"
        write(newest / name)
        files = read_json(newest / "state.json")["files"] | {name: hash_file(newest / name)}
        changed(files=files)(newest / "state.json")
        with pytest.raises(DamagedError) as refused:
            resumed(folder, output)
        text = str(refused.value)
        assert str(newest) in text
        assert "remove it to go on from the checkpoint before it" in text
        assert "\n" not in text
        assert "weights_only" not in text
    shutil.rmtree(newest)
    assert resumed(folder, output).iteration == 4


OTHERS: dict[str, dict[str, Any]] = {
    "batch": {"global_batch_packs": 6},
    "optimizer": {"weight_decay": 0.3},
    "schedule": {"decay": "linear"},
    "train": {"normalization": "sample"},
}


def test_other_settings_are_refused_unless_they_are_named(folder: Path, whole: Trained) -> None:
    again = partial(resumed, folder, whole.output, **OTHERS)
    names = [f"{section}.{name}" for section, own in OTHERS.items() for name in own]
    for named in (0, len(names) - 1):
        with pytest.raises(StageError) as refused:
            again(*names[:named])
        text = str(refused.value)
        asked = " ".join(f"--accept-mismatch {name}" for name in names[named:])
        assert f"add {asked} if that is meant" in text
        assert f" cannot be used: {names[named]} was " in text
    trainer = again(*names)
    assert trainer.iteration == STEPS
    decays = {group["weight_decay"] for group in trainer.optimizer._adamw.param_groups}
    assert decays == {0.0, 0.3}


def test_an_epoch_has_each_pack_once_in_steps_of_any_size(folder: Path, tmp_path: Path) -> None:
    """Which change twice."""
    keys: list[str] = []
    for packs, kill in (1, 4), (3, 3), (2, None):
        sections = {"batch": {"global_batch_packs": packs}, "checkpoint": {"every": 1}}
        config = config_of(folder, tmp_path, train={"iterations": None}, **sections)
        keys += trained(config, *["batch.global_batch_packs"] * bool(keys), fail_at=kill).keys
    written = [pack.key for pack in PackedFolder(folder)]
    assert keys[: len(written)] == written
    assert len(keys) <= len(written) + 1  # which completes the last step


def test_only_fields_that_may_differ_can_be_accepted(
    folder: Path, whole: Trained, tmp_path: Path
) -> None:
    again = partial(resumed, folder, whole.output, data={"micro_batch_size": 3})
    for name in ("optimizer.beta3", "data.micro_batch_size"):
        with pytest.raises(ConfigError, match=f"--accept-mismatch {name}: .*; valid: "):
            again(name)
    with pytest.raises(StageError, match=r"data\.micro_batch_size was 1, is 3"):
        again()
    # If output.path is misspelt, for example, the run would begin anew.
    with pytest.raises(ConfigError, match=r"holds no checkpoint to resume from; correct output"):
        run(make_config(folder, tmp_path), ["train.iterations"])


def test_a_run_that_is_extended_keeps_the_model_that_it_exported(
    case: Case, tmp_path: Path
) -> None:
    output = tmp_path / "out"

    def train(iterations: int, *accept: str) -> Result:
        sections: dict[str, Any] = {
            "model": {"checkpoint": str(case("qwen2_vl") / "model"), "text": {}, "vision": {}},
            "train": {"iterations": iterations},
            "batch": {"global_batch_packs": 1},
        }
        config = make_config(case("qwen2_vl") / "packed", output, **sections)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return CliRunner().invoke(cli, [str(file), *accept])

    def files(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (output / name).iterdir()}

    assert train(1).exit_code == 0
    exported = files("hf")
    assert train(1).exit_code == 0
    refused = train(2)
    assert refused.exit_code == 1
    assert " cannot be used: train.iterations was 1, is 2; restore them" in refused.stderr
    assert files("hf") == exported
    assert train(2, "--accept-mismatch", "train.iterations").exit_code == 0
    assert files("hf_1") == exported
    assert files("hf")["model.safetensors"] != exported["model.safetensors"]
    assert sorted(path.name for path in output.glob("hf*")) == ["hf", "hf_1"]
    assert len(losses(output)) == 2
    for number, kept in (2, "hf_2"), (1, "hf_2_before"), (2, "hf_1_before"):
        shutil.rmtree(output / "checkpoints")  # to train from the beginning
        before = files("hf")
        assert train(number).exit_code == 0
        assert files(kept) == before
