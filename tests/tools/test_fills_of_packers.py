"""The benchmark of other projects' packers: lines that are known, and losses that are found."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.tools import benchmark

#: In place of LLaMA-Factory's: one sample to a row, and it forgets the shortest.
SOURCE = "def greedy_knapsack(lengths, capacity):\n    return [[n] for n in sorted(lengths)[1:]]\n"


def test_a_line_of_a_packer(tmp_path: Path) -> None:
    fills = benchmark("fills_of_packers")
    samples = fills.draw_captions(400)
    own = fills.run_packer("this project, auto", tmp_path, samples)
    assert own["rows"] == -(-samples.tokens.sum() // fills.SEQ_LENGTH)
    assert own["fill"] == pytest.approx(samples.tokens.sum() / (own["rows"] * fills.SEQ_LENGTH))
    assert own["lost"] == own["lost_tokens"] == 0
    file = tmp_path / "llama-factory/src/llamafactory/data/processor/processor_utils.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    other = fills.run_packer("LLaMA-Factory, batches of 1,000", tmp_path, samples)
    assert (other["rows"], other["lost"]) == (399, 1)
    assert other["lost_tokens"] == pytest.approx(samples.tokens.min() / samples.tokens.sum())
    assert other["mib"] > 0


def test_samples_have_the_published_means() -> None:
    fills = benchmark("fills_of_packers")
    samples = fills.draw_mixture(600)
    assert samples.images.mean() == pytest.approx(17 / 24, abs=0.1)
    assert 3.5 < samples.characters.sum() / samples.text_tokens.sum() < 4.2
    alone = samples.images == 0
    np.testing.assert_array_equal(samples.tokens[alone], samples.text_tokens[alone])
    # A photo of 480 by 640 has 17 by 23 tokens, a page 42 by 30.
    with_one = samples.images == 1
    of_images = (samples.tokens - samples.text_tokens)[with_one]
    assert {*of_images.tolist()} == {391, 1260}
