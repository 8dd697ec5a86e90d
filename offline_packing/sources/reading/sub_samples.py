"""Sub-samples of packs as records: they have no bytes of their own in the pack's JSON."""

import orjson

from offline_packing.errors import StageError
from task_encoders.pack_format import PackFormatError, restore_pack
from task_encoders.samples import SourceSample


def to_json(sample: SourceSample) -> bytes:
    """A restored sub-sample as a record."""
    messages = [{"role": "system", "content": sample.system}] if sample.system is not None else []
    for turn in sample.turns:
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.answer})
    record = {"messages": messages, "images": sample.images}
    return orjson.dumps(record | {"videos": sample.videos} if sample.videos else record)


def sub_sample_json(pack: bytes, task: str, number: int, size: int) -> bytes:
    """The record of one sub-sample, from the JSON of its pack.

    Raises:
        StageError: it is not the one that was measured.
    """
    try:
        sub = restore_pack(pack, "pack", task).sub_samples[number]
        record = to_json(sub) if isinstance(sub, SourceSample) else b""
    except (PackFormatError, IndexError):
        record = b""
    if len(record) != size:
        raise StageError(
            f"sub-sample {number} of a pack changed since it was measured; restore the pack, or "
            "measure again with output.overwrite=true"
        )
    return record
