"""Energon's dataset of encoded samples, which reports the samples that were left out.

Energon prints an unusable sample, and goes on. Here `dropped` of the next row names it too, so that
batches carry it to the trainer, from any worker and over a restart.
"""

import logging
import tarfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.savable import Savable
from megatron.energon.wrappers import MapDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

from task_encoders.energon_samples import PackedRowSample
from task_encoders.packs.manifest import written_again
from task_encoders.packs.pack import PackFormatError
from task_encoders.samples import SampleError
from task_encoders.storage.paths import REMEDY

logger = logging.getLogger(__name__)

Handler = Callable[[Exception, Any, Any], None]


class SetAside(Savable):
    """Samples left out that no row has reported yet, as "key: reason: detail": an error handler for
    Energon's datasets, which raise FatalSampleError after 100 consecutive failures."""

    def __init__(self, otherwise: Handler, opened: Iterable[tuple[Any, str]] = ()) -> None:
        """Take a handler of errors that are not caused by the sample (`otherwise`), and the folders
        that are read with the generation of their packs (`opened`)."""
        self._opened = tuple(opened)
        self.lines: list[str] = []
        self._otherwise = otherwise
        self._folders: list[str] = []

    def __call__(self, error: Exception, sample: Any, sources: Any) -> None:
        if not isinstance(error, SampleError):
            self._check_generation(error)
        if not isinstance(error, SampleError | PackFormatError):
            self._otherwise(error, sample, sources)
        reason = "" if isinstance(error, SampleError) else "bad_record: "
        self.lines.append(f"{_key_of(sample)}: {reason}{error}")
        logger.warning("set aside %s", self.lines[-1])

    def _check_generation(self, error: Exception) -> None:
        """Raise FatalSampleError if reading fails since an output was written again."""
        for folder, generation in self._opened:
            line = written_again(folder, generation)
            if line is not None:
                raise FatalSampleError(line) from error

    def watch(self, dataset: SavableDataset[Any]) -> None:
        """Take the errors of Energon's own stages below, such as a member that is missing."""
        if isinstance(dataset, MapDataset):
            dataset._map_failure_handler.handler = self
        if isinstance(dataset, WebdatasetSampleLoaderDataset):
            readers = dataset.join_readers
            self._folders += (str(getattr(one, "base_path", one)) for one in readers)
        for inner in dataset.datasets if isinstance(dataset, BaseWrapperDataset) else ():
            self.watch(inner)

    def tell(self, rows: Iterable[PackedRowSample]) -> Iterator[PackedRowSample]:
        """Yield the rows, each with all lines noted since the one before it.

        Raises:
            FatalSampleError: a file is damaged, ends early, cannot be read or was written again,
                and so no more rows come.
        """
        try:
            for row in rows:
                row.dropped[:0] = self.lines
                self.lines.clear()
                yield row
        except FatalSampleError:
            raise
        except Exception as error:
            tar = _read_tar(error)
            if tar is None and not isinstance(error, OSError | EOFError | tarfile.TarError):
                raise
            self._check_generation(error)
            raise FatalSampleError(
                f"{tar or ', '.join(self._folders)}: {error}; the tar or its .idx is damaged or "
                f"gone: {REMEDY}; tars of others are to be restored, "
                "and prepared again if they have changed"
            ) from error

    def save_state(self) -> list[str]:
        return list(self.lines)

    def restore_state(self, state: list[str]) -> None:
        self.lines[:] = state


def _read_tar(error: Exception) -> str | None:
    """Return the tar in which Energon met an error, None if it was not reading one. Most of its
    texts do not say."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals["__name__"] == ITarReader.__module__ and "shard_name" in frame.f_locals:
            return f"{frame.f_locals['self'].base_path}/{frame.f_locals['shard_name']}"
    return None


def _key_of(sample: Any) -> str:
    """Return the key of a sample in any stage: as it was read from a tar, crude, or typed."""
    while isinstance(data := getattr(sample, "data", None), tuple):
        sample = data[0]
    return str(sample.get("__key__") if isinstance(sample, dict) else sample.__key__)


class EncodedRows(MapDataset[Any, PackedRowSample]):
    """Energon's MapDataset with rows that report the samples set aside before them."""

    _savable_fields = (*MapDataset._savable_fields, "_set_aside")

    def __init__(
        self,
        dataset: SavableDataset[Any],
        *args: Any,
        worker_config: WorkerConfig,
        opened: Iterable[tuple[Any, str]],
        **options: Any,
    ) -> None:
        """Wrap a dataset; for `opened` see SetAside."""
        self._set_aside = SetAside(worker_config.global_error_handler, opened)
        super().__init__(dataset, *args, worker_config=worker_config, **options)
        self._set_aside.watch(self)

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._set_aside.lines.clear()

    def __iter__(self) -> Iterator[PackedRowSample]:
        yield from self._set_aside.tell(super().__iter__())
