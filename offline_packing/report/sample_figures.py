"""Figures of the samples: one pass over the parts of the index, columns only."""

from typing import Any, Final

import numpy as np

from offline_packing.index.rows import sample_bytes
from offline_packing.planner.request import OVER_SEQ_LENGTH
from offline_packing.report.complete_stages import CompleteStages
from offline_packing.report.distributions import log_histogram, spread

#: Summed up per source.
SOURCE_SUMS: Final = {
    "tokens": "num_tokens",
    "loss_tokens": "num_loss_tokens",
    "images": "num_images",
    "vision_patches": "num_vision_patches",
    "turns": "num_turns",
}
#: How much longer sequences would have to be, as tried for samples that are too long.
_LONGER: Final = (2, 4)


def length_figures(stages: CompleteStages) -> dict[str, Any] | None:
    """Lengths in tokens of all measured samples; None without any."""
    lengths = stages.columns["num_tokens"]
    if not len(lengths):
        return None
    return {**spread(lengths), **log_histogram(lengths, stages.run.config.pack.seq_length)}


def source_sums(stages: CompleteStages) -> dict[str, list[int]]:
    """Per source: `rows` of the index, `used` ones, `packed` uses of them, and the sums of what all
    uses hold (without a plan: what all rows hold)."""
    num_sources = len(stages.run.config.source)
    sums = {
        name: np.zeros(num_sources, np.int64)
        for name in ("rows", "used", "packed", "bytes", *SOURCE_SUMS)
    }
    first = 0
    parts = stages.samples.parts("source_id", *SOURCE_SUMS.values())
    for number, part in enumerate(parts):
        uses = stages.num_uses[first : first + len(part)].astype(np.int64)
        first += len(part)
        source_ids = part["source_id"].to_numpy()
        sums["rows"] += np.bincount(source_ids, minlength=num_sources)
        sums["used"] += np.bincount(source_ids[uses > 0], minlength=num_sources)
        sums["packed"] += np.bincount(source_ids, uses, num_sources).astype(np.int64)
        columns = {name: part[column].to_numpy() for name, column in SOURCE_SUMS.items()}
        columns["bytes"] = sample_bytes(stages.samples.path(number))
        for name, values in columns.items():
            # Sums of a part are far below 2**53, where doubles are exact.
            sums[name] += np.bincount(source_ids, values * uses, num_sources).astype(np.int64)
    return {name: array.tolist() for name, array in sums.items()}


def overlong_figures(stages: CompleteStages) -> dict[str, Any]:
    """Samples with more tokens than a pack holds, and what longer sequences would save."""
    pack, lengths = stages.run.config.pack, _overlong_lengths(stages)
    longer = []
    for factor in _LONGER:
        saved = lengths[lengths <= _longest(factor * pack.seq_length, pack.pad_multiple)]
        longer.append(
            {
                "seq_length": factor * pack.seq_length,
                "samples": len(saved),
                "tokens": int(saved.sum(dtype=np.int64)),
            }
        )
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "longest": int(lengths.max(initial=0)),
        "saved_by": longer,
    }


def _overlong_lengths(stages: CompleteStages) -> np.ndarray:
    lengths = stages.columns["num_tokens"]
    plan = stages.plan
    if plan is None:
        pack = stages.run.config.pack
        return lengths[lengths > _longest(pack.seq_length, pack.pad_multiple)]
    if OVER_SEQ_LENGTH not in plan.info.reason_names:
        return lengths[:0]
    reason = plan.info.reason_names.index(OVER_SEQ_LENGTH)
    return lengths[plan.set_aside_ids[plan.set_aside_reasons == reason]]


def _longest(seq_length: int, pad_multiple: int) -> int:
    """Longest sample that a sequence holds when it is padded to the multiple."""
    return seq_length // pad_multiple * pad_multiple
