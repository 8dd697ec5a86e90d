"""Bring a stage to completion: the one place that decides what is complete, what is refused, what
is dropped, and what is made again.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from offline_packing.errors import DamagedError, DiskFullError, ShareDoneError, StageError
from offline_packing.runs.repair import accept, is_repairing, refused, set_apart
from offline_packing.runs.run import Run
from offline_packing.runs.source_files import describe_change
from offline_packing.storage.files import remove_folder, remove_path, remove_temporaries
from offline_packing.storage.receipts import (
    Fingerprint,
    Receipt,
    Started,
    restore_receipt,
    started_path,
)

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """A part of a stage that one worker makes; it is done when all its files are there."""

    #: by their names relative to the output
    files: tuple[str, ...]
    #: what the stage needs to make it
    work: Any


class Stage:
    """A stage: its inputs, its tasks, and the files that complete it."""

    name: ClassVar[str]

    def __init__(self, run: Run) -> None:
        self.run = run

    def inputs(self) -> Fingerprint:
        """Return the settings that its files depend on."""
        raise NotImplementedError

    def cut(self) -> Fingerprint:
        """Return the settings that its tasks depend on, and its complete files do not."""
        return {}

    def check(self, found: Fingerprint, *, repairs: bool, complete: bool) -> None:
        """Raise StageError if `found` are not the inputs. Where an output `repairs` files, the
        source need not be as it was, as recorded hashes decide."""
        raise NotImplementedError

    def is_replaceable(self) -> bool:
        """Tell whether other inputs replace what was made before, without being refused."""
        return False

    def tasks(self) -> Sequence[Task]:
        """Return all tasks."""
        raise NotImplementedError

    def total(self) -> Mapping[str, int | None]:
        """Return how much there is to make, for `status`."""
        return {}

    def unreadable(self, finished: Sequence[Task]) -> Iterable[Path]:
        """Return files of finished tasks, of a stage that is not complete, to be made again."""
        return ()

    def make(self, tasks: Sequence[Task], folder: Path) -> None:
        """Make tasks, or this rank's share of them, below a folder in place of the output. There
        is at least one, and the folders of its files are there."""
        raise NotImplementedError

    def finish(self, folder: Path) -> None:
        """Write the files that belong to no task, below a folder in place of the output. The files
        of all tasks are in the output."""

    def record(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the hashes of all files by name, and the facts of the receipt."""
        raise NotImplementedError

    def agrees(self, files: Mapping[str, str]) -> bool | None:
        """Tell whether a later stage was made from these files; None: there is none."""
        return None

    def describe_change(self) -> str:
        """Describe why files come out otherwise than they were recorded."""
        return describe_change(self.run)


def bring(run: Run, stage: Stage) -> Receipt:
    """Make a stage, or what is missing of it, or find it complete.

    Raises:
        StageError: it was made with other inputs and may not be replaced; or files of it are lost,
            and come out otherwise than recorded, so that the old ones are back.
        ShareDoneError: ranks share its tasks, and some are left to others.
    """
    at = run.workspace
    receipt = restore_receipt(at.packing, stage.name)
    if receipt and run.engine.IS_SHARED and (lost := missing(at.root, receipt.files)):
        first = at.root / lost[0]
        raise StageError(f"{first} is missing; run {stage.name} with engine.name=local")
    try:
        if receipt is not None:
            return _keep(run, stage, receipt)
        if (started := Started.load(at.packing, stage.name)) is not None:
            stage.check(started.inputs, repairs=False, complete=False)
    except DiskFullError:
        raise
    except StageError:
        overwrites = run.config.output.overwrite
        if not (overwrites or stage.is_replaceable()):
            raise
        if overwrites:
            logger.warning("%s: overwriting what was made with other settings", stage.name)
        run.drop(stage.name)
    return _make(run, stage)


def is_complete(run: Run, stage: Stage) -> Receipt | None:
    """Return the receipt that `bring` would keep, and change nothing; None: it would make the
    stage. Raises StageError where `bring` would refuse."""
    packing = run.workspace.packing
    try:
        receipt = restore_receipt(packing, stage.name, writes=False)
        started = None if receipt else Started.load(packing, stage.name)
        if found := receipt or started:
            stage.check(found.inputs, repairs=False, complete=receipt is not None)
    except StageError:
        if not (run.config.output.overwrite or stage.is_replaceable()):
            raise
        return None
    return receipt


def _keep(run: Run, stage: Stage, receipt: Receipt) -> Receipt:
    """Return the receipt of a complete stage, whose lost files are made again."""
    at = run.workspace
    hashes = {name: receipt.files[name] for name in missing(at.root, receipt.files)}
    stage.check(receipt.inputs, repairs=bool(hashes) or is_repairing(at), complete=True)
    if not hashes:
        logger.info("%s: complete, nothing to do", stage.name)
        return receipt
    logger.info("%s: %d files are made again, such as %s", stage.name, len(hashes), min(hashes))
    why: object = None
    try:
        accept(at, hashes)  # what a killed repair made
        tasks = [task for task in stage.tasks() if not hashes.keys().isdisjoint(task.files)]
        _make_tasks(stage, tasks, at.again)
        accept(at, hashes)
        if hashes.keys() - {name for task in tasks for name in task.files}:
            with suppress(FileNotFoundError):  # of a task, which could not make it again
                stage.finish(at.again)
            accept(at, hashes)
    except (DamagedError, DiskFullError):  # another file is damaged, and its remedy is known
        raise
    except StageError as error:
        why = error
        accept(at, hashes)
    if hashes:
        raise refused(at, hashes, why or stage.describe_change())
    remove_folder(at.again)
    return receipt


def _make(run: Run, stage: Stage) -> Receipt:
    """Make all of a stage that is not made yet."""
    at, inputs = run.workspace, dict(stage.inputs())
    tasks = stage.tasks()
    finished = done(at.root, tasks)
    unknown: list[str] = []  # nothing says with which inputs they were made
    if finished and Started.load(at.packing, stage.name) is None:
        is_used = stage.agrees({}) is not None  # by a later stage, which recorded the files
        try:
            if is_used and len(finished) == len(tasks):
                stage.finish(at.root)
                files, facts = stage.record()
                if stage.agrees(files):
                    return Receipt(inputs, files, facts).save(at.packing, stage.name)
        except (OSError, ValueError, StageError) as error:
            logger.warning("%s: %s; all of it is made again", stage.name, error)
        unknown = [name for task in finished for name in task.files]
        set_apart(at, unknown)
    Started({**inputs, **stage.cut()}, dict(stage.total())).save(at.packing, stage.name)
    if not run.engine.IS_SHARED:
        for path in stage.unreadable(done(at.root, tasks)):
            logger.warning("%s: %s cannot be read; its part is made again", stage.name, path)
            remove_path(path)
    finished = done(at.root, tasks)
    if 0 < len(finished) < len(tasks):
        logger.info("%s: %d of %d tasks are done already", stage.name, len(finished), len(tasks))
    is_done = {task.files for task in finished}
    _make_tasks(stage, [task for task in tasks if task.files not in is_done], at.root)
    if run.engine.IS_SHARED:
        left = len(tasks) - len(done(at.root, tasks))
        raise ShareDoneError(
            f"this rank's share of {stage.name} is done, {left} of {len(tasks)} tasks are left to "
            f"other ranks; after them, run {stage.name} with engine.name=local to complete it"
        )
    at.remove_temporaries()  # of this and earlier runs, and of workers that died
    stage.finish(at.root)
    files, facts = stage.record()
    if stage.agrees(files) is False and not run.config.output.overwrite:
        for path in (started_path(at.packing, stage.name), *(at.root / name for name in unknown)):
            remove_path(path)
        raise refused(at, unknown or files, stage.describe_change())
    return Receipt(inputs, files, facts).save(at.packing, stage.name)


def _make_tasks(stage: Stage, tasks: Sequence[Task], folder: Path) -> None:
    """Make tasks, if there are any, below a folder, without what killed runs left there."""
    for name in {name.rpartition("/")[0] for task in tasks for name in task.files}:
        at = folder / name if name else folder
        at.mkdir(parents=True, exist_ok=True)
        remove_temporaries(at)
    if tasks:
        stage.make(tasks, folder)


def missing(root: Path, names: Iterable[str]) -> list[str]:
    """Return the files, by their names relative to an output, that are not there. Folders are
    listed: a question for each file would take hours on object storage."""
    names, there = list(names), set[str]()
    for folder in {name.rpartition("/")[0] for name in names}:
        at = root / folder if folder else root
        if at.is_dir():
            there.update(f"{folder}/{path.name}".lstrip("/") for path in at.iterdir())
    return [name for name in names if name not in there]


def done(root: Path, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that are done, in order."""
    lost = {*missing(root, (name for task in tasks for name in task.files))}
    return [task for task in tasks if lost.isdisjoint(task.files)]
