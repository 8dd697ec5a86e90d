"""Training checkpoints: everything needed to resume as if nothing had happened.

    checkpoints/iter_00000500/
        shard-00001-model-00001-of-00003.safetensors, …     per rank: its shards of weights, and of
                            both moments, by torch.distributed.checkpoint
        rank_00000.pt, …    per rank: state of loader and generators
                            (tensor parallel ranks are next to each other, then context parallel)
        state.json          which run this is, and the hash of every other file; written last
    checkpoints/iter_00001000.tmp/      being written, or left by a kill: never read

A folder takes its name when all ranks have written and synced their files. It holds no frozen
weights: a run reads them again where it read them before. The files hold tensors, numbers and text,
and are read as safetensors and with torch's weights_only loader, which run no code. A checkpoint
with a missing or changed file is not used: the newest whole one is.

A resumed run must share its settings with the run that wrote the checkpoint. Every field of the
configuration is compared except those in `_FREE`, so that a new field is guarded until someone
decides otherwise. Fields in `_FIXED` decide which weights there are, and those in `_OF_LOADER` the
loader's place, so no other value can continue; any other field may differ if it is named. Stages of
data.path that have not begun may change. With other packs, if that is named, the present stage ends
where it is, and the first of the new stages begins.
"""

import io
import logging
import pickle
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.energon.rng import SystemRng
from torch import distributed
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.api import CheckpointException

from launch.config import LaunchConfig
from launch.data.loader_state import load_state
from launch.data.micro_batches import MicroBatches
from launch.data.packed_data import PackedData
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import on_all_ranks
from launch.loop.plan import Progress, TrainPlan
from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.runs.training_run import (
    STATE,
    VERSION,
    RunRecord,
    TrainingState,
    list_checkpoints,
    read_state,
)
from offline_packing.storage.files import (
    hash_file,
    seal,
    sync_folder,
    to_json,
    translate_disk_full,
    write_atomically,
)
from offline_packing.storage.receipts import changed_fields, check_inputs

logger = logging.getLogger(__name__)

#: File with the state of a rank's loader and generators.
_OF_RANK: Final = "rank_{:05d}.pt"


class CheckpointFolder:
    """The checkpoints of one run, on a file system that all nodes share. All ranks make the same
    calls. `accept`: fields of the record that may differ, see `run_record`."""

    def __init__(
        self,
        config: LaunchConfig,
        data: Sequence[PackedData],
        plan: TrainPlan,
        accept: Collection[str] = (),
    ) -> None:
        self.folder = config.output.path / "checkpoints"
        self._record = run_record(config, data, plan)
        #: data parallel ranks among which packs are dealt, and ranks that share each pack
        self._deal = parallel_state.get_data_parallel_world_size(), config.parallel.context
        self._accept, self._keep = accept, config.checkpoint.keep
        self._is_online = config.data.online is not None
        self._rank = distributed.get_rank()
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        #: the newest whole checkpoint, once it is known: it is not read twice
        self._whole: Path | None = None
        #: newer checkpoints that are damaged; they are removed when the next one is saved
        self._damaged: set[Path] = set()

    def save(self, progress: Progress, optimizer: ShardedAdamW, data: MicroBatches) -> Path:
        """Write a checkpoint, with `data` of the present stage, and remove the oldest and damaged
        ones. A collective. Raises DiskFullError."""
        final = self.folder / f"iter_{progress.iteration:08d}"
        temporary = final.with_name(f"{final.name}.tmp")
        if self._rank == 0:
            for left in self.folder.glob("iter_*.tmp"):
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
        distributed.barrier()
        tensors, files_of = self._named(optimizer)
        writer = sharded.HuggingFaceStorageWriter(str(temporary), files_of, save_distributed=True)
        with translate_disk_full(temporary), _unwrapped():
            sharded.save(tensors, storage_writer=writer)
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        generators = {"system": SystemRng.save_state(), "cuda": cuda}
        buffer = io.BytesIO()
        torch.save({"data": data.state(), "generators": generators}, buffer)
        own = temporary / _OF_RANK.format(self._rank)
        write_atomically(own, buffer.getvalue())
        written = [own, *temporary.glob(f"shard-{self._rank + 1:05d}-*")]
        # Each rank hashes its own files: their content is still in memory, and on a network file
        # system other ranks may see them late.
        hashes = on_all_ranks({path.name: hash_file(path) for path in written})
        if self._rank == 0:
            files = {name: found for of_rank in hashes for name, found in of_rank.items()}
            content = {"version": VERSION, "run": self._record, "files": files}
            content |= progress._asdict()
            content |= zip(("data_parallel", "context_parallel"), self._deal, strict=True)
            state = TrainingState.model_validate(content).model_dump(mode="json", by_alias=True)
            write_atomically(temporary / STATE, to_json(seal(state)))
            if final.exists():  # it was damaged
                shutil.rmtree(final)
            temporary.rename(final)
            sync_folder(self.folder)
            damaged = self._damaged - {final}
            complete = [path for path in list_checkpoints(self.folder) if path not in damaged]
            for path in [*complete[self._keep :], *damaged]:
                shutil.rmtree(path)
            self._damaged = set()
        self._whole = final
        distributed.barrier()
        return final

    def newest(self) -> Path | None:
        """Find the newest whole checkpoint, the same one on all ranks; warn of newer ones that are
        damaged, and log the accepted fields that differ. A collective.

        Raises:
            DamagedError: there are checkpoints, and none is whole.
            StageError: another version wrote the newest, or a run with other settings than rank
                0's, or, of data that are packed while training, with other ranks.
        """
        if self._whole is not None:
            return self._whole
        reasons: dict[Path, str] = {}
        for path in on_all_ranks(list_checkpoints(self.folder) if self._rank == 0 else [])[0]:
            if not (damage := self._find_damage(path)):
                break
            reasons[path] = "; ".join(damage)
        else:
            if not reasons:
                return None
            listed = ", ".join(f"{path.name} ({why})" for path, why in reasons.items())
            raise DamagedError(
                f"{self.folder} holds no whole checkpoint: {listed}; restore these files, or "
                "remove the folder to train from the beginning"
            )
        for damaged, why in reasons.items() if self._rank == 0 else ():
            logger.warning(
                "checkpoint %s is damaged: %s; training goes on from %s, and the damaged one is "
                "removed when the next one is saved",
                damaged,
                why,
                path.name,
            )
        saved, now = read_state(path), on_all_ranks(self._record)[0]  # nodes may differ in paths
        for line in check_same_run(saved, now, self._accept, path):
            logger.info("accepted: %s", line)
        then = saved.data_parallel, saved.context_parallel
        if self._is_online and then != self._deal:
            raise StageError(
                "data.online: the checkpoint is of {} × {} data × context parallel ranks, but "
                "{} × {} are running; resume with the same numbers".format(*then, *self._deal)
            )
        self._whole, self._damaged = path, set(reasons)
        return path

    def _find_damage(self, path: Path) -> list[str]:
        """List the damaged files of a checkpoint, each with its fault. Each rank reads some of the
        files. A collective. Raises StageError, see `read_state`."""
        own = []
        try:
            files = read_state(path).files
            for name in sorted(files)[self._rank :: distributed.get_world_size()]:
                try:
                    if hash_file(path / name) != files[name]:
                        own.append(f"{name} is not what was written")
                except OSError as error:
                    own.append(f"{name} cannot be read: {error.strerror}")
        except DamagedError as error:
            own.append(str(error))
        return sorted({line for lines in on_all_ranks(own) for line in lines})

    def load(
        self, path: Path, optimizer: ShardedAdamW, stages: Sequence[MicroBatches]
    ) -> tuple[Progress, int]:
        """Restore a checkpoint that `newest` found, and the present stage's place in its packs; if
        other packs begin, those of the first stage begin. Generators are restored if packs are
        dealt as before. Returns how far the run came, and how many packs of the present stage it
        trained. A collective. Raises DamagedError if its files are not those of such a run."""
        saved, packs = read_state(path), 0
        then = saved.data_parallel, saved.context_parallel
        iteration, begins, trained = saved.iteration, saved.begins, saved.trained
        tensors, _ = self._named(optimizer)
        with _loading(path):
            sharded.load(tensors, storage_reader=sharded.HuggingFaceStorageReader(str(path)))
            optimizer.publish(iteration)
            number = self._rank if then == self._deal else self._tensor_rank
            state = load_state(path / _OF_RANK.format(number))
            data, generators = state["data"], state["generators"]
            if _has_other_packs(saved, self._record):
                begins = (iteration,)
            else:
                stages[len(begins) - 1].restore(data)
                packs = (iteration - begins[-1]) * saved.run.packs_per_step[len(begins) - 1]
                if trained:  # steps may have changed more than once
                    present, trained = trained[-1], trained[:-1]
                    packs = present.micro_batch_size * present.loader.num_rows
            if then == self._deal:
                SystemRng.restore_state(generators["system"])
                if generators["cuda"] is not None and torch.cuda.is_available():
                    torch.cuda.set_rng_state(generators["cuda"])
        if then != self._deal:
            ranks = (
                "packs were dealt among %d × %d data × context parallel ranks, now among %d × %d"
            )
            logger.info(ranks, *then, *self._deal)
        return Progress(iteration, begins, trained), packs

    def _named(self, optimizer: ShardedAdamW) -> tuple[dict[str, Any], dict[str, int]]:
        """Name the optimizer's tensors, so that tensor parallel ranks share no name, and number the
        file of each name: one file per kind of tensors, which is in memory while it is written."""
        tensors: dict[str, Any] = {}
        files: dict[str, int] = {}
        for number, (kind, named) in enumerate(optimizer.state.items(), 1):
            for rank in range(self._tensor_size):
                prefix = f"{kind}.{rank:02d}."
                files |= {prefix + name: number for name in named}
                if rank == self._tensor_rank:
                    tensors |= {prefix + name: tensor for name, tensor in named.items()}
        return tensors, files


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Raise DamagedError for content that this module did not write. The library's own error is
    hidden: torch's recommends to run code from the file."""
    try:
        with _unwrapped():
            yield
    except (RuntimeError, ValueError, OSError, MemoryError):  # they say what to do, or whose fault
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(error, pickle.UnpicklingError):
            why = "a file holds more than tensors, numbers and text, or is damaged"
        raise DamagedError(
            f"{path} cannot be loaded: {why}; remove it to go on from the checkpoint before it"
        ) from error


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the first rank's own error instead of torch's CheckpointException, which is not an
    Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


#: Fields, or whole sections, that do not change training. The content of the packs is compared
#: instead of their paths.
_FREE: Final = (
    "checkpoint",
    "data.encode_threads",
    "data.num_workers",
    "data.path",
    "data.processor",
    "metrics",
    "model.attention",
    "model.fusions",
    "model.recompute",
    "output",
    "parallel.context",
    "validation",
)
_FIXED: Final = (
    "data.online",
    "model.built_by",
    "model.dtype",
    "model.family",
    "model.fsdp",
    "model.freeze",
    "model.lora",
    "model.preset",
    "model.text",
    "model.tie_word_embeddings",
    "model.vision",
    "parallel.tensor",
    "train.seed",
)
#: Fixed as well, unless other packs begin.
_OF_LOADER: Final = ("data.micro_batch_size", "data.order", "data.repeat")
#: The packs of each stage.
_PACKS: Final = "data.packs"
#: Packs of a step, of each stage, which follow from packs, batch size and the number of ranks.
_STEP: Final = "packs_per_step"


def run_record(config: LaunchConfig, data: Sequence[PackedData], plan: TrainPlan) -> RunRecord:
    """Collect the settings that a checkpoint keeps of its run: plain values by dotted name."""
    compared = {
        name: value
        for name, value in config.settings.items()
        if name not in _FREE and name.partition(".")[0] not in _FREE
    }
    compared |= {
        "model.built_by": type(config.model).__name__,
        _PACKS: [
            {"path": path, "content_hash": own.content_hash}
            for path, own in zip(config.data.paths, data, strict=True)
        ],
        _STEP: [stage.packs_per_step for stage in plan.stages],
    }
    return RunRecord.model_validate(compared)


def check_same_run(
    saved: TrainingState, now: RunRecord, accept: Collection[str], checkpoint: object
) -> list[str]:
    """Compare the record in a checkpoint's state with that of the run that resumes from it. Return
    a line for each accepted field that differs. Raises StageError if other fields differ, and
    ConfigError if an accepted name is not a field, or must be the same."""
    was, is_now = (record.model_dump(by_alias=True) for record in (saved.run, now))
    if not _has_other_packs(saved, now):
        is_now[_PACKS] = was[_PACKS]
    last = slice(len(saved.begins) - 1, len(saved.begins))
    others = changed_fields(was, is_now)
    follows = _PACKS in others or any(name.startswith("batch.") for name in others)
    if follows or was[_STEP][last] == is_now[_STEP][last]:
        is_now[_STEP] = was[_STEP]
    lines = {
        name: f"{name} was {_shown(name, was.get(name))}, is {_shown(name, is_now.get(name))}"
        for name in changed_fields(was, is_now)
    }
    fixed = _FIXED if _PACKS in lines else (*_FIXED, *_OF_LOADER)
    for name in sorted({*accept}.intersection(fixed)):
        valid = ", ".join(sorted({*was, *is_now}.difference(fixed)))
        raise ConfigError(f"--accept-mismatch {name}: must be the same; valid: {valid}")
    if unlike := [name for name in lines if name in fixed]:
        remedy = f"{', '.join(unlike)} must be the same to resume: restore it"
    else:
        options = " ".join(f"--accept-mismatch {name}" for name in lines if name not in accept)
        remedy = f"restore them, add {options} if that is meant"
    check_inputs(
        was,
        is_now,
        artifact=f"checkpoint {checkpoint}",
        remedy=f"{remedy}, or start a new run in another output.path",
        accept=accept,
        explain=lines.get,
    )
    return list(lines.values())


def _has_other_packs(saved: TrainingState, now: RunRecord) -> bool:
    """Tell whether the stages that have begun have other packs; later ones may change."""
    was, is_now = (
        [stage["content_hash"] for stage in run.packs[: len(saved.begins)]]
        for run in (saved.run, now)
    )
    return was != is_now


def _shown(name: str, value: Any) -> str:
    if name == _PACKS:
        each = [f"{stage['path']} ({stage['content_hash'][:8]})" for stage in value]
        return f"those of {', '.join(each)}"
    return repr(value)
