"""Fill, lost samples, time and memory of other projects' packers on one data set.

    python tools/benchmarks/fills_of_packers.py SOURCES [--captions]

SOURCES holds their repositories, each under the name in `packer_sources.PACKERS`; missing ones are
left out. AutoModel's packer needs `datasets`, ms-swift's `binpacking`; LLaVA-OneVision-2's is
quadratic without `sortedcontainers`. Each runs in a process of its own.

The samples are drawn after the totals given by FineVision's authors: 24 million samples, 17 million
images, 90 million turns, 10 billion answer tokens. Texts are excerpts of Python's own reference
(`pydoc_data.topics`), so that characters and tokens are in a real proportion; a third of the images
are scanned pages (1,754 by 1,240 pixels), the others COCO's 480 by 640.
"""

import contextlib
import os
import tempfile
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
from length_distributions import draw_lengths
from packer_sources import LIMITS, PACKERS, SEQ_LENGTH, Rows, Samples

from task_encoders.families import build_sample_encoder
from task_encoders.samples import SourceSample, Turn

#: Per sample: images, turns and answer tokens.
IMAGE_COUNTS = [0.36, 0.59, 0.03, 0.02]
TURNS, ANSWER_TOKENS = 90 / 24, 10_000 / 24
#: of the log-normal answers
SPREAD = 1.2
CHARACTERS_PER_TOKEN = 3.9
PAGE, PHOTO = (1754, 1240), (480, 640)


def draw_captions(count: int) -> Samples:
    """Images of 576 tokens, and the captions of the distribution "narrow"."""
    tokens = draw_lengths("narrow", count)
    text = tokens - 576
    images, sizes = np.ones(count, np.int64), np.full((count, 3, 2), 672)
    return Samples(tokens, text, (text * CHARACTERS_PER_TOKEN).astype(np.int64), images, sizes)


def draw_mixture(count: int, seed: int = 0) -> Samples:
    """Samples after FineVision's totals, measured."""
    encoder = build_sample_encoder("qwen2_vl", **LIMITS)
    text = "\n".join(topics[name] for name in sorted(topics))
    rng = np.random.default_rng(seed)
    sizes = np.where(rng.random((count, 3, 1)) < 1 / 3, PAGE, PHOTO)
    images = rng.choice(len(IMAGE_COUNTS), count, p=IMAGE_COUNTS)
    tokens, text_tokens, characters = [], [], []

    def excerpt(length: float) -> str:
        start = int(rng.integers(0, len(text) // 2))
        return text[start : start + max(1, int(length))]

    for i in range(count):
        turns = int(rng.geometric(1 / TURNS))
        mean = np.log(ANSWER_TOKENS) - SPREAD**2 / 2
        shares = rng.dirichlet(np.ones(turns)) * np.exp(rng.normal(mean, SPREAD))
        asked = "<image>" * int(images[i])
        made = tuple(
            Turn(
                (asked if n == 0 else "") + "Q " + excerpt(60),
                "A " + excerpt(CHARACTERS_PER_TOKEN * share),
            )
            for n, share in enumerate(shares)
        )
        names = tuple(f"{n}.jpg" for n in range(images[i]))
        length = encoder.measure(
            SourceSample(f"s{i}", "bmr", made, names), [tuple(s) for s in sizes[i, : images[i]]]
        )
        tokens.append(length.num_tokens)
        text_tokens.append(length.num_tokens - length.num_vision_patches // 4)
        characters.append(sum(len(t.prompt) + len(t.answer) for t in made) - len(asked))
    return Samples(np.array(tokens), np.array(text_tokens), np.array(characters), images, sizes)


def run_packer(name: str, sources: Path, samples: Samples) -> dict[str, Any]:
    """One line of the table: after a warm-up on a few samples, once for time and once for memory
    (without ms-swift's own process)."""
    _pack(name, sources, Samples(*(column[:300] for column in samples)))
    others = set(active_children())
    started = os.times()
    rows = _pack(name, sources, samples)
    for child in set(active_children()) - others:
        child.join()  # its time counts from then on
    ended = os.times()
    tracemalloc.start()
    _pack(name, sources, samples)
    peak = tracemalloc.get_traced_memory()[1]
    packed = np.array([i for row in rows for i in row])
    assert len(np.unique(packed)) == len(packed)
    # AutoModel shifts each sample before it packs: a token less.
    assert max(samples.tokens[row].sum() - len(row) for row in rows) <= SEQ_LENGTH
    fits = samples.tokens <= SEQ_LENGTH
    lost = np.setdiff1d(np.flatnonzero(fits), packed)
    return {
        "packer": name,
        "rows": len(rows),
        "fill": samples.tokens[packed].sum() / (len(rows) * SEQ_LENGTH),
        "lost": len(lost),
        "lost_tokens": samples.tokens[lost].sum() / samples.tokens[fits].sum(),
        "seconds": sum(ended[:4]) - sum(started[:4]),
        "mib": peak / 2**20,
    }


def _pack(name: str, sources: Path, samples: Samples) -> Rows:
    """Run a packer in a folder of its own, with its output suppressed."""
    packer = PACKERS[name]
    source = (sources / packer.folder).resolve()
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.chdir(scratch),
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        return packer.run(source, samples, Path(scratch))


@click.command()
@click.argument("sources", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--samples", "count", default=20_000, show_default=True)
@click.option("--captions", is_flag=True, help="Captions of images of one size instead.")
@click.option("--only", multiple=True, type=click.Choice(list(PACKERS)), help="Not all of them.")
def main(sources: Path, count: int, captions: bool, only: tuple[str, ...]) -> None:
    """Print the table for the packers in SOURCES."""
    samples = draw_captions(count) if captions else draw_mixture(count)
    bound = -(-int(samples.tokens[samples.that_fit()].sum()) // SEQ_LENGTH)
    characters = samples.characters.sum() / samples.text_tokens.sum()
    click.echo(
        f"{count:,} samples, {samples.images.sum():,} images, {samples.tokens.mean():,.0f} tokens "
        f"each (half below {np.median(samples.tokens):,.0f}), {characters:.2f} characters per "
        f"text token; {count - len(samples.that_fit())} longer than {SEQ_LENGTH:,}; at least "
        f"{bound:,} rows\n\n"
        "| packer | rows | fill | lost samples | lost tokens | CPU s | MiB |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name in only or PACKERS:
        if not (sources / PACKERS[name].folder).is_dir():
            click.echo(f"{name}: no {sources / PACKERS[name].folder}", err=True)
            continue
        # Unlike a Pool's, its processes may have children: ms-swift's packer.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(run_packer, name, sources, samples).result()
        click.echo(
            f"| {name} | {found['rows']:,} | {found['fill']:.2%} | {found['lost']:,} | "
            f"{found['lost_tokens']:.1%} | {found['seconds']:.2f} | {found['mib']:,.1f} |"
        )


if __name__ == "__main__":
    main()
