"""Seeded length distributions for the benchmarks, close to those of vision-language data."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

DISTRIBUTIONS = ("captions", "sft", "uniform", "half", "narrow")
MAX_TOKENS = 8192


def _lognormal(
    rng: np.random.Generator, n: int, median: float, sigma: float, low: int, high: int
) -> np.ndarray:
    values = np.exp(np.log(median) + sigma * rng.standard_normal(n))
    return np.clip(values, low, high).astype(np.int32)


def draw_lengths(distribution: str, num_samples: int, seed: int = 1234) -> np.ndarray:
    """Tokens per sample, int32 (num_samples,), all in 1..8192.

    captions: images of all sizes with a caption; sft: text, single images, conversations, long
    ones; uniform: 1..8192; half: 40% above 4096 tokens; narrow: 596 tokens plus a short text.
    Any other is the path of a measured index, from which samples are drawn with replacement:
    a folder of its Parquet parts, or the output folder of a packing run. Its lengths may exceed
    8192. Raises ValueError if there is none.
    """
    rng = np.random.default_rng(seed)
    if distribution == "captions":
        return _lognormal(rng, num_samples, 400, 0.8, 16, MAX_TOKENS)
    if distribution == "uniform":
        return rng.integers(1, MAX_TOKENS + 1, num_samples, dtype=np.int32)
    if distribution == "half":
        long = rng.random(num_samples) < 0.40
        above = rng.integers(MAX_TOKENS // 2 + 1, MAX_TOKENS + 1, num_samples, dtype=np.int32)
        below = rng.integers(64, MAX_TOKENS // 2 + 1, num_samples, dtype=np.int32)
        return np.where(long, above, below)
    if distribution == "sft":
        return draw_sft(num_samples, seed)[0]
    if distribution == "narrow":
        return 596 + _lognormal(rng, num_samples, 60, 0.6, 4, 1500)
    return rng.choice(read_index(Path(distribution)), num_samples).astype(np.int32)


def draw_random(seed: int) -> tuple[int, np.ndarray]:
    """A random distribution of one of ten kinds: seq_length, and int32 (num_samples,) tokens of 100
    to 3,000 samples."""
    rng = np.random.default_rng([39, seed])
    n = int(np.exp(rng.uniform(np.log(100), np.log(3000))))
    most = int(rng.choice([2048, 4096, 8192, 8192, 8192, 16_384, 32_768]))
    kind = seed % 10
    if kind == 0:  # log-normal
        median, sigma = most * rng.uniform(0.01, 0.3), rng.uniform(0.2, 1.3)
        lengths = np.exp(np.log(median) + sigma * rng.standard_normal(n))
    elif kind == 1:  # normal
        mean = most / rng.uniform(1.5, 12)
        lengths = rng.normal(mean, mean * rng.uniform(0.02, 0.4), n)
    elif kind == 2:  # a picture and a text
        base = most / rng.uniform(2.5, 14)
        lengths = base + rng.gamma(rng.uniform(1, 4), base * rng.uniform(0.01, 0.3), n)
    elif kind == 3:  # uniform
        low = most * rng.uniform(0.01, 0.4)
        lengths = rng.uniform(low, low + most * rng.uniform(0.02, 0.6), n)
    elif kind == 4:  # tiles and a text
        lengths = 256 * rng.integers(1, rng.integers(3, 14), n) + rng.integers(20, 300, n)
    elif kind == 5:  # multiples
        unit = int(rng.choice([64, 128, 256, 512]))
        lengths = unit * rng.integers(1, most // unit // int(rng.integers(1, 5)) + 1, n)
    elif kind == 6:  # many around half of a pack
        is_long, share = rng.random(n), rng.uniform(0.2, 0.6)
        above = rng.integers(most // 2 - most // 10, most + 1, n)
        lengths = np.where(is_long < share, above, rng.integers(most // 128 + 1, most // 2 + 1, n))
    elif kind == 7:  # few different lengths
        lengths = rng.choice(rng.integers(most // 20, most // 2, rng.integers(2, 9)), n)
    elif kind == 8:  # a mixture
        parts = [
            rng.normal(most / rng.uniform(1.3, 15), most * rng.uniform(0.005, 0.05), n)
            for _ in range(rng.integers(2, 4))
        ]
        lengths = rng.permutation(np.concatenate(parts))[:n]
    else:  # pictures and a text
        pictures = rng.choice([0, 1, 2, 3], n, p=[0.2, 0.5, 0.2, 0.1])
        lengths = rng.choice([256, 576, 729, 1024]) * pictures + np.exp(rng.normal(4.5, 0.8, n))
    return most, np.clip(lengths, 1, most).astype(np.int32)


def read_index(folder: Path) -> np.ndarray:
    """Tokens of all samples of a measured index: integers (num_samples,)."""
    index = folder / "_packing" / "index"
    parts = sorted((index if index.is_dir() else folder).glob("*.parquet"))
    if not parts:
        raise ValueError(
            f"distribution {str(folder)!r} is unknown; choose one of {', '.join(DISTRIBUTIONS)}, "
            "a folder of index parts (*.parquet), or the output of a packing run"
        )
    return np.concatenate([_num_tokens(path) for path in parts])


def _num_tokens(path: Path) -> np.ndarray:
    return pq.read_table(path, columns=["num_tokens"])["num_tokens"].to_numpy()


def draw_sft(num_samples: int, seed: int = 1234) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and vision patches, int32 (num_samples,) each; four patches make one vision token.

    30% text, 40% one image (60-95% vision tokens), 20% conversations (30-90%), 10% long ones.
    """
    rng = np.random.default_rng(seed)
    kind = rng.random(num_samples)
    text = _lognormal(rng, num_samples, 180, 0.9, 8, 4096)
    image = rng.integers(256, 1501, num_samples, dtype=np.int32)
    talk = rng.integers(1000, 4001, num_samples, dtype=np.int32)
    long = rng.integers(3000, MAX_TOKENS + 1, num_samples, dtype=np.int32)
    tokens = np.select([kind < 0.3, kind < 0.7, kind < 0.9], [text, image, talk], long)
    low = np.select([kind < 0.3, kind < 0.7, kind < 0.9], [0.0, 0.6, 0.3], 0.2)
    high = np.select([kind < 0.3, kind < 0.7, kind < 0.9], [0.0, 0.95, 0.9], 0.95)
    vision_tokens = tokens * rng.uniform(low, high)
    return tokens, np.minimum(4 * vision_tokens.astype(np.int32), 14_000)


#: Samples per image or video, as the data sets' papers count them: mean, and the least.
PER_MEDIUM = {"vqav2": (5.4, 3), "gqa": (13.0, 1), "docvqa": (3.9, 1), "llava_video": (7.5, 1)}
#: Tokens of the shared beginning, and of what a sample adds: median, sigma, least and most.
_TREE_TOKENS = {
    "vqav2": ((380, 0.2, 150, 700), (32, 0.3, 20, 90)),
    "gqa": ((380, 0.2, 150, 700), (36, 0.3, 20, 90)),
    "docvqa": ((2600, 0.4, 600, 5000), (40, 0.4, 20, 200)),
    "llava_video": ((3500, 0.5, 600, 6500), (180, 0.8, 20, 1500)),
}


def draw_trees(data_set: str, num_samples: int, seed: int = 1234) -> np.ndarray:
    """int32 (num_samples, 3), in random order: the number of each sample's medium, tokens of the
    beginning that it shares with others on that medium, and all its tokens."""
    rng = np.random.default_rng(seed)
    mean, least = PER_MEDIUM[data_set]
    num_media = int(num_samples / mean) + 1
    # Counts above the least are geometric, with the standard deviation of such data sets.
    counts = least - 1 + rng.geometric(1 / (mean - least + 1), 2 * num_media + 10)
    media = np.repeat(np.arange(len(counts)), counts)[:num_samples]
    shared, own = _TREE_TOKENS[data_set]
    prefixes = _lognormal(rng, len(counts), *shared)[media]
    tokens = prefixes + _lognormal(rng, num_samples, *own)
    return rng.permutation(np.stack([media, prefixes, tokens], axis=1).astype(np.int32))
