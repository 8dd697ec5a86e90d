"""The figures of a plan as text that can be shared."""

import itertools
import math
from collections.abc import Iterator

from offline_packing.runs.figures import Figures

_BAR_WIDTH = 40


def render_summary(found: Figures) -> str:
    """The figures as text, one per line: from `run_figures`, or from `sample_figures` and
    `plan_figures` alone."""
    aside = sorted((entry["reason"], entry["samples"]) for entry in found["set_aside"])
    rows = [
        *([("task", found["task"])] if "task" in found else []),
        ("samples", f"{found['samples']['found']:,}"),
        ("set aside", f"{found['samples']['set_aside']:,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in aside),
        *_plan_rows(found),
    ]
    if "task" in found:
        rows += [*_content_rows(found), *_rank_rows(found)]
        if found["resize"]:
            theirs = "transformers 5 takes torch where torchvision is installed, and for videos"
            shown = f"{found['resize']}; {theirs} always (lengths are the same)"
            rows.append(("model", shown))
        rows += [("warning", line) for line in found["warnings"]]
    lines = [f"{name:<24}{value}" for name, value in rows]
    table = ["", *_source_table(found)] if "sources" in found else []
    return "\n".join([*lines, *table, "", "samples by tokens", *_bars(found), ""])


def _plan_rows(found: Figures) -> Iterator[tuple[str, str]]:
    plan, saving, seq_length = found["plan"], found["saving"], found["seq_length"]
    tokens, num_samples = saving["tokens"], plan["samples"]
    yield "packed samples", f"{num_samples:,}"
    yield "tokens", f"{tokens:,} (mean {tokens / num_samples:,.1f} per sample)"
    yield "packs", f"{plan['packs']:,} of {seq_length:,} tokens, strategy {plan['strategy']}"
    yield "lower bound", f"{plan['lower_bound']:,} (gap {plan['gap']:.3%})"
    yield "fill", f"{plan['fill']:.2%}"
    yield "packing factor", f"{plan['packing_factor']:.2f} samples per pack"
    padding = "{padding_before:.1%} -> {padding_after:.1%} of tokens in a batch (before: "
    padding += "{padded_batch_size} samples padded to the longest)"
    yield "padding", padding.format_map(saving)
    steps = "{iterations_before:,} -> {iterations_after:,} per epoch at global batch size "
    steps += "{global_batch_size:,} (global batch size {equal_batch_size:,} keeps the samples per "
    steps += "step)"
    yield "iterations", steps.format_map(saving)


def _content_rows(found: Figures) -> Iterator[tuple[str, str]]:
    """Tokens with loss; '200 images, 3 videos in 150 of 1,000 packed samples; 64 patches each'."""
    loss, media, plan = found["loss"], found["media"], found["plan"]
    if found["split_turns"]:
        yield "too long", found["split_turns"]
    yield "tokens with loss", f"{loss['loss_tokens']:,} ({loss['share']:.1%})"
    each = media["vision_patches"] / max(media["images"] + media["videos"], 1)
    yield (
        "images and videos",
        f"{media['images']:,} images, {media['videos']:,} videos in {media['samples']:,} of "
        f"{plan['samples']:,} packed samples; {each:,.0f} patches each",
    )
    if plan["repeated"]:
        yield "repeated media", plan["repeated"]
    if plan["sharing"]:
        yield from _sharing_rows(plan["sharing"])
    if plan["mixture"]:
        yield "mixture", _mixture_line(plan["mixture"])
    if plan["splits"]:
        form = "{split} {samples:,} samples ({share:.1%}) in {packs:,} packs"
        yield "splits", "; ".join(map(form.format_map, plan["splits"]))


def _mixture_line(stretches: list[list[Figures]]) -> str:
    """'captions 69.1% -> 20.9%, docs 30.9% -> 79.1% of the tokens; at most 0.05 points …'"""
    ends = zip(stretches[0], stretches[-1], strict=True)
    shown = ", ".join(f"{a['source']} {a['share']:.1%} -> {b['share']:.1%}" for a, b in ends)
    most = max(abs(one["share"] - one["asked"]) for row in stretches for one in row)
    return f"{shown} of the tokens; at most {100 * most:.2f} points from what was asked"


def _sharing_rows(sharing: Figures) -> Iterator[tuple[str, str]]:
    """Figures of the packed samples, each stored whole -> their prefixes stored once."""
    trees = "{trees:,} trees of {samples:,} samples; each sample whole -> as packed:"
    yield "shared prefixes", trees.format_map(sharing)
    titles = {"media": "images and videos"}
    for name in ("tokens", "media", "vision_patches", "samples_per_pack", "iterations"):
        whole, shared = sharing[name]
        form = ",.1f" if name == "samples_per_pack" else ",d"
        title = titles.get(name, name.replace("_", " "))
        yield f"  {title}", f"{whole:{form}} -> {shared:{form}}"


def _rank_rows(found: Figures) -> Iterator[tuple[str, str]]:
    """Ranks that share a pack, and shares of time that ranks wait for others, where the packs were
    made for some."""
    plan = found["plan"]
    waiting = plan["waiting"]
    if waiting and waiting["ordered"] and waiting["share"] is None:
        fewer = "{packs:,} packs are not one for each of {num_ranks:,} ranks"
        yield "order", fewer.format_map(waiting)
    elif waiting and waiting["ordered"]:
        idle = "{share:.2%}, waiting after the tower too {two_phase_share:.2%}"
        yield f"idle of {waiting['num_ranks']} ranks", idle.format_map(waiting)
        mixed, done = "{mixed_steps:,} of {steps:,}".format_map(waiting), waiting["uniform"]
        if done:
            mixed += "; {halved:,} packs halved, {repeated:,} repeated".format_map(done)
        yield "mixed steps", mixed
    if plan["ranks_of_a_pack"] > 1:
        padded = f"samples padded to multiples of {found['pad_multiple']}"
        yield "ranks of a pack", f"{plan['ranks_of_a_pack']}, {padded}"


def _source_table(found: Figures) -> list[str]:
    """One line per source: distinct samples, mean uses per sample, and over all uses the tokens,
    their share of all sources' tokens, and the bytes of records and media."""
    width = max(24, *(len(source["name"]) + 2 for source in found["sources"]))
    head = f"{'samples':>12} {'times used':>11} {'tokens':>16} {'share':>7} {'bytes':>18}"
    form = "{used:>12,} {times_used:>11.2f} {tokens:>16,} {share_of_tokens:>7.1%} {bytes:>18,}"
    lines = (f"{one['name']:<{width}}{form.format_map(one)}" for one in found["sources"])
    return [f"{'source':<{width}}{head}", *lines]


def _bars(found: Figures) -> list[str]:
    """Packed samples per bin of equal width from 1 to seq_length."""
    edges, counts = found["packed_lengths"]["edges"], found["packed_lengths"]["counts"]
    return [
        f"{math.floor(low) + 1:>9,} – {math.floor(high):<9,}"
        f"{'█' * math.ceil(_BAR_WIDTH * count / max(counts)):<{_BAR_WIDTH}} {count:,}"
        for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True)
    ]
