"""Training checkpoints: everything needed to resume as if nothing had happened.

    checkpoints/iter_00000500/
        model_00.pt, …      weights, one file per tensor parallel rank
        rank_00000.pt, …    per rank: slices of the optimizer, state of loader and generators
                            (tensor parallel ranks stand together, then context parallel ones)
        state.json          which run this is, and the hash of every other file; written last
    checkpoints/iter_00001000.tmp/      being written, or left by a kill: never read

A folder takes its name when all ranks have written and synced their files. They hold tensors,
numbers and text, and are read with torch's weights_only loader, which runs no code. A checkpoint
with a file that is gone, or not what was written, is not used: the newest whole one is.
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
from offline_packing.errors import DamagedError, StageError
from offline_packing.storage.files import (
    hash_file,
    read_json,
    seal,
    sync_folder,
    to_json,
    translate_disk_full,
    write_atomically,
)

logger = logging.getLogger(__name__)

VERSION: Final = 4
#: The file of a checkpoint that is written last.
_STATE: Final = "state.json"


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
        #: the newest whole one, once it is known: it is not read twice
        self._whole: Path | None = None
        #: others that were found damaged, newer ones; they go when the next one is saved
        self._damaged: set[Path] = set()

    def save(
        self, iteration: int, model_state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint, and remove the oldest ones and those found damaged. A collective.
        Raises DiskFullError."""
        final = self.folder / f"iter_{iteration:08d}"
        temporary = final.with_name(f"{final.name}.tmp")
        if self._rank == 0:
            for left in self.folder.glob("iter_*.tmp"):
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
        distributed.barrier()
        written = []
        if self._rank < self._tensor_size:  # the first data parallel rank
            whole = {n: t for n, t in model_state.items() if not isinstance(t, DTensor)}
            written.append(_save_tensors(temporary / self._model_file, whole))
        state = {**rank_state, "generators": _generator_state()}
        written.append(_save_tensors(temporary / _rank_file(self._rank), state))
        # Each rank hashes what it wrote: it has it in memory still, and elsewhere on a network file
        # system files can be seen late.
        hashes = _gather({path.name: hash_file(path) for path in written})
        if self._rank == 0:
            files = {name: found for of_rank in hashes for name, found in of_rank.items()}
            content = {"version": VERSION, "iteration": iteration, "run": self._record}
            content |= {"files": files, **asdict(self._deal)}
            write_atomically(temporary / _STATE, to_json(seal(content)))
            if final.exists():  # it was damaged
                shutil.rmtree(final)
            temporary.rename(final)
            sync_folder(self.folder)
            self._remove_old(final)
        self._whole = final
        distributed.barrier()
        return final

    def newest(self) -> Path | None:
        """The newest whole checkpoint, the same one on all ranks; newer ones that are damaged are
        named in the log. A collective.

        Raises:
            DamagedError: there are checkpoints, and none is whole.
            StageError: the newest was written by another version.
        """
        if self._whole is not None:
            return self._whole
        found = [sorted(self._complete(), reverse=True) if self._rank == 0 else []]
        distributed.broadcast_object_list(found)
        reasons: dict[Path, str] = {}
        for path in found[0]:
            damage = self._find_damage(path)
            if not damage:
                self._whole, self._damaged = path, set(reasons)
                break
            reasons[path] = "; ".join(damage)
        else:
            if reasons:
                listed = ", ".join(f"{path.name} ({why})" for path, why in reasons.items())
                raise DamagedError(
                    f"{self.folder} holds no whole checkpoint: {listed}; restore these files, or "
                    "remove the folder to train from the beginning"
                )
        if self._whole is not None and self._rank == 0:
            for path, why in reasons.items():
                logger.warning(
                    "checkpoint %s is damaged: %s; training goes on from %s, and the damaged one "
                    "is removed when the next one is saved",
                    path,
                    why,
                    self._whole.name,
                )
        return self._whole

    def _find_damage(self, path: Path) -> list[str]:
        """The files of a checkpoint that are not what was written, and in which way; each rank
        reads some of them. A collective. Raises StageError, see `_read_state`."""
        own = []
        try:
            files = _read_state(path)["files"]
            for name in sorted(files)[self._rank :: distributed.get_world_size()]:
                try:
                    if hash_file(path / name) != files[name]:
                        own.append(f"{name} is not what was written")
                except OSError as error:
                    own.append(f"{name} cannot be read: {error.strerror}")
        except DamagedError as error:
            own.append(str(error))
        return sorted({line for lines in _gather(own) for line in lines})

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

    def _remove_old(self, saved: Path) -> None:
        damaged = self._damaged - {saved}
        whole = sorted(set(self._complete()) - damaged)
        for path in [*whole[: -self._keep], *damaged]:
            shutil.rmtree(path)
        self._damaged = set()


def _gather(own: Any) -> list[Any]:
    """The objects of all ranks, in order. A collective."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    return everyone


def _read_state(path: Path) -> Mapping[str, Any]:
    """The record of a checkpoint. Raises DamagedError, without a remedy; and StageError: it is of
    another version."""
    try:
        content: Mapping[str, Any] | None = read_json(path / _STATE)
    except DamagedError as error:
        raise DamagedError(f"{_STATE} is damaged: {error.__cause__}") from error
    if content is None:
        raise DamagedError(f"{_STATE} is missing")
    if (version := content.get("version")) != VERSION:
        raise StageError(
            f"checkpoint {path} has version {version}, and {VERSION} is read here: go "
            "on with the release that wrote it, or give another output.path"
        )
    return content


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _save_tensors(path: Path, state: Mapping[str, Any]) -> Path:
    with translate_disk_full(path), open(path, "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            # torch's "unexpected pos", when it closes the file after a write that failed
            raise (error.__context__ or error) from None
        file.flush()
        os.fsync(file.fileno())
    return path


def _load_tensors(path: Path, *, mmap: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _generator_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"system": to_plain(SystemRng.save_state()), "cuda": cuda}


def _restore_generators(state: Mapping[str, Any]) -> None:
    SystemRng.restore_state(from_plain(state["system"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
