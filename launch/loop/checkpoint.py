"""Training checkpoints: everything needed to resume as if nothing had happened.

    checkpoints/iter_00000500/
        model_00.pt, …      weights, one file per tensor parallel rank
        rank_00000.pt, …    per rank: slices of the optimizer, state of loader and generators
        state.json          which run this is; written last
    checkpoints/iter_00001000.tmp/      being written, or left behind by a kill: never read

A folder takes its name when all ranks have written and synced their files. They hold tensors,
numbers and text, and are read with torch's weights_only loader, which runs no code.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from megatron.energon.rng import SystemRng
from torch import distributed

from launch.data.loader_state import from_plain, to_plain
from offline_packing.errors import StageError
from offline_packing.storage.files import read_json, to_json, write_atomically

VERSION: Final = 2


class CheckpointFolder:
    """The checkpoints of one run. All ranks make the same calls.

    Args:
        folder: on a file system that all nodes share.
        run: what must be the same for a resumed run to continue exactly, by name.
        keep: how many of the newest checkpoints are kept.
        tensor_rank, writes_model: this rank's place in its tensor parallel group, and whether it is
            the one of its data parallel group that writes the weights.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        *,
        keep: int,
        tensor_rank: int,
        writes_model: bool,
    ) -> None:
        self.folder = folder
        self._run = dict(run)
        self._keep = keep
        self._rank = distributed.get_rank()
        self._model_file = f"model_{tensor_rank:02d}.pt"
        self._rank_file = f"rank_{self._rank:05d}.pt"
        self._writes_model = writes_model

    def save(
        self, iteration: int, model_state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint, and remove the oldest ones. A collective."""
        final = self.folder / f"iter_{iteration:08d}"
        temporary = final.with_name(f"{final.name}.tmp")
        if self._rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        distributed.barrier()
        if self._writes_model:
            _save_tensors(temporary / self._model_file, model_state)
        state = {**rank_state, "generators": _generator_state()}
        _save_tensors(temporary / self._rank_file, state)
        distributed.barrier()
        if self._rank == 0:
            content = {"version": VERSION, "iteration": iteration, "run": self._run}
            write_atomically(temporary / "state.json", to_json(content))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            self._remove_old()
        distributed.barrier()
        return final

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same one on all ranks. A collective."""
        found = [max(self._complete(), default=None) if self._rank == 0 else None]
        distributed.broadcast_object_list(found)
        return found[0]

    def load(self, path: Path) -> tuple[int, Any, Any]:
        """Iteration, model state and rank state of a checkpoint; restores the generators.

        Raises:
            StageError: it was written by another version, or by a run that this one cannot
                continue exactly.
        """
        content = read_json(path / "state.json")
        if content is None or content["version"] != VERSION:
            raise StageError(
                f"checkpoint {path} does not have version {VERSION}; give another output.path"
            )
        for name, value in self._run.items():
            if content["run"].get(name) != value:
                raise StageError(
                    f"checkpoint {path} was written with {name} {content['run'].get(name)!r}, this "
                    f"run has {value!r}; resume with the same, or start a new run in another "
                    "output.path"
                )
        # Weights are copied into the model from the mapped file, a tensor at a time.
        model_state = torch.load(
            path / self._model_file, map_location="cpu", weights_only=True, mmap=True
        )
        rank_state = torch.load(path / self._rank_file, map_location="cpu", weights_only=True)
        _restore_generators(rank_state.pop("generators"))
        return content["iteration"], model_state, rank_state

    def _complete(self) -> list[Path]:
        return [p for p in self.folder.glob("iter_*") if p.suffix == "" and p.is_dir()]

    def _remove_old(self) -> None:
        for path in sorted(self._complete())[: -self._keep]:
            shutil.rmtree(path)
        for path in self.folder.glob("iter_*.tmp"):
            shutil.rmtree(path)


def _save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _generator_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"system": to_plain(SystemRng.save_state()), "cuda": cuda}


def _restore_generators(state: Mapping[str, Any]) -> None:
    SystemRng.restore_state(from_plain(state["system"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
