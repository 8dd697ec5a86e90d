"""Training checkpoints: everything needed to resume as if nothing had happened.

    checkpoints/iter_00000500/
        model_00.pt, …      weights, one file per tensor parallel rank
        rank_00000.pt, …    per rank: slices of the optimizer, state of loader and generators
                            (tensor parallel ranks stand together, then context parallel ones)
        state.json          which run this is; written last
    checkpoints/iter_00001000.tmp/      being written, or left by a kill: never read

A folder takes its name when all ranks have written and synced their files. They hold tensors,
numbers and text, and are read with torch's weights_only loader, which runs no code.
"""

import logging
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from megatron.energon.rng import SystemRng
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from launch.data.loader_state import from_plain, to_plain
from launch.data.micro_batches import MicroBatches
from launch.loop.adamw import RankAdamW
from launch.loop.run_record import check_same_run
from offline_packing.errors import StageError
from offline_packing.storage.files import read_json, to_json, write_atomically

logger = logging.getLogger(__name__)

VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class Deal:
    """Among whom the packs are dealt."""

    data_parallel: int
    #: loader processes per data parallel rank
    num_workers: int
    #: ranks that share each pack
    context_parallel: int = 1


class CheckpointFolder:
    """The checkpoints of one run. All ranks make the same calls.

    Args:
        folder: on a file system that all nodes share.
        record: see `run_record`.
        deal: of the present run; if the earlier one dealt packs otherwise, they are dealt again.
        accept: fields of the record that may differ.
        keep: how many of the newest checkpoints are kept.
        tensor_rank, tensor_size: this rank's place in its tensor parallel group.
    """

    def __init__(
        self,
        folder: Path,
        record: Mapping[str, Any],
        deal: Deal,
        *,
        accept: Collection[str] = (),
        keep: int,
        tensor_rank: int,
        tensor_size: int,
    ) -> None:
        self.folder = folder
        self._record = dict(record)
        self._deal = deal
        self._accept = accept
        self._keep = keep
        self._rank = distributed.get_rank()
        self._tensor_rank, self._tensor_size = tensor_rank, tensor_size
        self._model_file = f"model_{tensor_rank:02d}.pt"

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
        if self._rank < self._tensor_size:  # the first data parallel rank
            whole = {n: t for n, t in model_state.items() if not isinstance(t, DTensor)}
            _save_tensors(temporary / self._model_file, whole)
        state = {**rank_state, "generators": _generator_state()}
        _save_tensors(temporary / _rank_file(self._rank), state)
        distributed.barrier()
        if self._rank == 0:
            content = {"version": VERSION, "iteration": iteration, "run": self._record}
            content |= asdict(self._deal)
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

    def check(self, path: Path) -> list[str]:
        """Check that this run can resume from a checkpoint. A collective.

        Returns:
            A line for each accepted field that differs.

        Raises:
            StageError: it was written by another version, or by a run with other settings than
                those of rank 0.
        """
        content = _read_state(path)
        shared = [self._record]  # paths may differ between nodes
        distributed.broadcast_object_list(shared)
        return check_same_run(content["run"], shared[0], self._accept, path)

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: RankAdamW,
        data: MicroBatches,
    ) -> int:
        """Restore a checkpoint, with the generators if packs are dealt as then; its iteration. A
        collective. Raises StageError, see `check`."""
        for line in self.check(path):
            logger.info("accepted: %s", line)
        content = _read_state(path)
        then = Deal(**{one.name: content[one.name] for one in fields(Deal) if one.name in content})
        # Weights are copied into the model from the mapped file, a tensor at a time. Those that are
        # sharded come with the optimizer.
        whole = _load_tensors(path / self._model_file, mmap=True)
        is_sharded = any(isinstance(weight, DTensor) for weight in model.parameters())
        model.load_state_dict(whole, strict=not is_sharded)
        if then == self._deal:
            own = _load_tensors(path / _rank_file(self._rank), mmap=False)
            optimizer.load_state_dict(own["optimizer"])
            data.restore(own["data"])
            _restore_generators(own["generators"])
        else:
            logger.info("packs were dealt among %s, and are dealt anew among %s", then, self._deal)
            size = self._tensor_size
            shards = then.data_parallel * then.context_parallel
            numbers = range(self._tensor_rank, shards * size, size)
            ranks = [_load_tensors(path / _rank_file(number), mmap=True) for number in numbers]
            optimizer.load_state_dicts([rank["optimizer"] for rank in ranks])
            data.deal_anew([rank["data"] for rank in ranks[:: then.context_parallel]])
        return int(content["iteration"])

    def _complete(self) -> list[Path]:
        return [p for p in self.folder.glob("iter_*") if p.suffix == "" and p.is_dir()]

    def _remove_old(self) -> None:
        for path in sorted(self._complete())[: -self._keep]:
            shutil.rmtree(path)
        for path in self.folder.glob("iter_*.tmp"):
            shutil.rmtree(path)


def _read_state(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] | None = read_json(path / "state.json")
    if content is None or content["version"] != VERSION:
        raise StageError(
            f"checkpoint {path} does not have version {VERSION}; give another output.path"
        )
    return content


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _load_tensors(path: Path, *, mmap: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _generator_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"system": to_plain(SystemRng.save_state()), "cuda": cuda}


def _restore_generators(state: Mapping[str, Any]) -> None:
    SystemRng.restore_state(from_plain(state["system"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
