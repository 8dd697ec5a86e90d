"""Size of data that are packed while training, estimated from some samples: no manifest tells."""

import logging
from contextlib import suppress

from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError

from launch.config import DataConfig
from launch.data.packed_data import PackedData, read_packed_data
from offline_packing.errors import StageError
from offline_packing.online.energon import MeasuringTaskEncoder, measure_some
from offline_packing.online.pools import PackingPool
from offline_packing.planner.windows import WindowOptions
from offline_packing.storage.files import hash_bytes
from task_encoders.families import change_options
from task_encoders.samples import SampleError
from task_encoders.storage.paths import check_exists, path_of

logger = logging.getLogger(__name__)


def read_data(config: DataConfig) -> PackedData:
    """Describe the data of `config.path`, of one stage; unpacked data by the packs that 1,000
    samples make. Raises StageError, see `read_packed_data`, or if unpacked data are not prepared,
    or no sample can be used."""
    (path,), online = config.paths, config.online
    if online is None:
        return read_packed_data(path)
    check_exists(folder := path_of(path))
    if not folder.is_file() and not (folder / ".nv-meta").is_dir():
        raise StageError(
            f"{path} is neither a folder that Energon prepared nor a metadataset; of tars: energon "
            f"prepare {path} --non-interactive --split-ratio 1,0,0 --sample-type CrudeWebdataset"
        )
    model = change_options(online.model, processor=config.processor)
    encoder = MeasuringTaskEncoder(seq_length=online.seq_length, model=model)
    try:
        measured, num_samples = measure_some(path, encoder)
    except EmptyDatasetError as error:
        raise StageError(f"{path}: {error}; prepare it with another --split-ratio") from error
    except FatalSampleError as error:  # Energon's text repeats the whole sample
        raise StageError(f"{path}: {error.__context__ or error}") from error
    windows = online.model_dump(include={"strategy", "budgets"})
    whole = WindowOptions(online.seq_length, window=len(measured) + 1, **windows)
    pool = PackingPool[int](whole)
    for taken in measured:
        with suppress(SampleError):
            pool.add(taken["tokens"], taken["tokens"], taken)
    packs = pool.finish()
    if not packs:
        raise StageError(f"{path}: none of {num_samples} samples can be used, see above")
    per_pack = sum(map(len, packs)) / len(packs)
    logger.info("about %.2f samples in a pack, by %d of %d", per_pack, len(measured), num_samples)
    return PackedData(
        num_packs=max(1, round(num_samples / per_pack)),
        samples_per_pack=per_pack,
        seq_length=online.seq_length,
        model=online.model,
        content_hash=hash_bytes(repr((num_samples, measured)).encode()),
    )
