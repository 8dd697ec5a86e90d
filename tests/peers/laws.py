"""Laws that every trainer of packs holds. A subclass, in the module of a framework, says how it
trains, what its own packing makes of samples, or how its command builds data."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.settings import PackingSettingsError
from tests.helpers.hf_trainers import Run, check_resuming, several_packs
from tests.helpers.peers import (
    assert_same,
    check_losses,
    check_order,
    open_packs,
    small_checkpoint,
    stored_samples,
)
from tests.helpers.tiny_families import STILL
from tests.peers import Say

#: Families whose tiny models `launch.train` trains, too: its steps are then the same.
OF_LAUNCH = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl3")
#: Values by name, of our row and of that which the framework makes of the same samples.
Rows = tuple[dict[str, Any], dict[str, Any]]


class TrainingLaws:
    """Steps on packs are those of their samples alone, in the order of the packs, and resumed."""

    #: (checkpoint, packed, output, resume=None) -> packs, losses and weights of six steps.
    run: Callable[..., Run]
    #: (packed, checkpoint, output) -> numbers of the packs that this rank trains in an epoch.
    read: Callable[..., list[int]]
    families: ClassVar[Sequence[str]] = ("qwen2_vl",)
    drop_last = False

    def prepare(self, checkpoint: Path) -> Any:
        """Make a tiny checkpoint ready for the framework."""

    def test_steps_are_those_of_the_samples_alone_and_are_resumed(
        self, trained: str, tmp_path: Path, say: Say
    ) -> None:
        """With videos where the family takes them."""
        checkpoint, packed = several_packs(trained, tmp_path, samples=96)
        packs = open_packs(packed)
        stored = [sample for number in (0, 1) for sample, _ in stored_samples(packs[number])]
        assert trained in STILL or any(sample.videos for sample in stored)
        self.prepare(checkpoint)
        _, losses = check_resuming(tmp_path, self.run, checkpoint, packed)
        ours = tmp_path / "ours" if trained in OF_LAUNCH else None
        said = check_losses(packed, checkpoint, losses, ours)
        say(f"{trained}: {said}, 6 steps resumed after 3 to the last bit")

    def test_order(self, case: Any, tmp_path: Path, say: Say) -> None:
        checkpoint, packed = case
        args = (self.read, checkpoint, tmp_path / "out")
        say(check_order(packed, tmp_path, *args, drop_last=self.drop_last))


class PackingLaws:
    """Packs are what the framework's own packing makes of their samples."""

    #: (packs, task, folder for files) -> both rows of every pack.
    rows: Callable[[PackedFolder, str, Path], Iterator[Rows]]

    def test_every_demo_pack_is_what_its_packing_would_give(
        self, task: str, demo: dict[str, Path], tmp_path: Path, say: Say
    ) -> None:
        num_packs = num_samples = 0
        for split in ("train", "val"):
            packs = open_packs(demo[task], split)
            for number, rows in enumerate(self.rows(packs, task, tmp_path)):
                assert_same(*rows, f"{task} {split} {number}")
                num_samples += len(list(stored_samples(packs[number])))
                num_packs += 1
        assert num_samples > num_packs > 5
        say(f"{num_packs} packs of {task} are what its own packing makes of their samples")


class CommandLaws:
    """What packs do not do, or what contradicts them, is refused in a line."""

    #: (checkpoint, packed, output, options) builds the data of the documented command.
    build: Callable[..., Any]
    #: Options, and a part of the message.
    refused: ClassVar[Sequence[tuple[Any, str]]]

    def test_what_packs_do_not_do_is_refused(
        self, option: tuple[Any, str], case: tuple[Path, Path], tmp_path: Path
    ) -> None:
        given, message = option
        with pytest.raises(ValueError, match=message) as caught:
            self.build(*case, tmp_path, given)
        assert "\n" not in str(caught.value)

    def test_packs_that_contradict_model_or_environment_are_refused(
        self, case: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """A model of another family than the packs', and variables that contradict them."""
        other = small_checkpoint("qwen3_vl", tmp_path / "other")
        with pytest.raises(PackingSettingsError, match=r"family 'qwen2_vl', .* has 'qwen3_vl'"):
            self.build(other, case[1], tmp_path, None)
        for variable, value in (("OFFLINE_PACKED_DATA", "0"), ("OFFLINE_PACKING_VQA", "1")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(variable, value)
                with pytest.raises(PackingSettingsError, match=f"{variable}=1"):
                    self.build(*case, tmp_path, None)
