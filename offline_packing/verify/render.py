"""Results of `verify` as text."""

from offline_packing.verify.part import Drawn
from offline_packing.verify.shard import VerifyResult


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
    """Number of problems, and whether `retry` repairs them."""
    left = result.num_problems - result.num_repairable
    if left == 0:
        return f"{result.num_problems:,} problems; retry repairs what is damaged"
    repaired = f"retry repairs {result.num_repairable:,} of them; " if result.num_repairable else ""
    return (
        f"{result.num_problems:,} problems; {repaired}if a problem names no remedy, the shards "
        "are as they were written: pack again with another output.path or output.overwrite=true"
    )
