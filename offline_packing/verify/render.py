"""Results of `verify` as text."""

from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verify import Drawn
from task_encoders.storage.paths import REMEDY


def render_result(
    result: VerifyResult, *, deep: bool, hash_only: bool = False, drawn: Drawn | None = None
) -> str:
    """The result as a table, problems below."""
    compared = "bytes compared with their hash" if drawn is None else "not compared as a whole"
    read = ", not opened" if hash_only else f", drawn with seed {drawn.seed}" if drawn else ""
    deep_lines = [
        f"{'images':<16}{result.num_images:,}, bytes compared with the source",
        *([f"{'videos':<16}{result.num_videos:,}, likewise"] if result.num_videos else []),
        f"{'tokens':<16}{result.num_tokens:,}, encoded again",
    ]
    lines = [
        f"{'shards':<16}{result.num_shards:,}, {compared}",
        f"{'packs':<16}{result.num_packs:,}{read}",
        f"{'samples':<16}{result.num_samples:,} packed, {result.num_set_aside:,} set aside",
        *(
            ["{:<16}{:,} = {:,} in packs + {:,} set aside".format("records", *result.records)]
            if result.records
            else []
        ),
        *([f"{'splits':<16}{result.apart}"] if result.apart else []),
        *([f"{'steps':<16}{result.num_steps:,}, each of one kind"] if result.num_steps else []),
        *(deep_lines if deep else []),
        f"{'problems':<16}{result.num_problems:,}",
        *(f"  {problem}" for problem in result.problems),
    ]
    return "\n".join(lines) + "\n"


def render_verdict(result: VerifyResult) -> str:
    """Number of problems, and what helps."""
    others = result.num_problems - result.num_repairable - result.num_in_source
    again = "pack again with another output.path or output.overwrite=true"
    remedies = [
        (result.num_repairable, f"of damaged files: {REMEDY}"),
        (
            result.num_in_source,
            f"of media that are damaged in the source: repair or remove them there, and {again}",
        ),
        (others, f"of shards that are as they were written: {again}, if a problem names no remedy"),
    ]
    return "; ".join(
        [f"{result.num_problems:,} problems", *(f"{n:,} {text}" for n, text in remedies if n)]
    )
