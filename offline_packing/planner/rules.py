"""Which settings of a plan go together: what needs no samples to be known, and little to import."""

from collections.abc import Collection


def check_combination(
    *,
    strategy: str,
    assignment: Collection[str],
    budgets: Collection[str],
    has_order: bool,
    homogeneous: bool,
    min_samples: int,
    max_samples: int | None,
) -> None:
    """Raise ValueError for settings that contradict each other.

    Args:
        budgets: names of the limits per pack beside seq_length, "samples" for max_samples.
        has_order: whether packs are ordered for the ranks of a loader.
    """
    windowed = sorted({"locality", "mix"}.intersection(assignment))
    if windowed and has_order:
        raise ValueError(
            f"order puts packs of similar cost side by side, assignment {windowed[0]} packs of the "
            "same stretch of the source; choose one of them"
        )
    if (windowed or budgets) and strategy != "auto":
        asked = f"assignment {windowed[0]}" if windowed else f"budget {min(budgets)!r}"
        raise ValueError(f"{asked} needs strategy 'auto', not {strategy!r}")
    exchanging = {"locality", "mix", "balance"}.intersection(assignment)
    if budgets and exchanging:
        raise ValueError(
            f"assignment {min(exchanging)} exchanges samples of equal length, which may break a "
            "budget; leave out one of the two"
        )
    if homogeneous and "mix" in assignment:
        raise ValueError(
            "homogeneous groups samples by their media, assignment mix by their source; leave out "
            "one of the two"
        )
    if max_samples is not None and min_samples > max_samples:
        raise ValueError(
            f"min_samples is {min_samples} > max_samples {max_samples}; no pack can be both"
        )
