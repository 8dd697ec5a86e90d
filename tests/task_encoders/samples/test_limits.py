"""The bounds on one sample: what they count, and that a text at them is encoded."""

import pytest

from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.samples.limits import MAX_MARKS, MAX_WHITE_SPACE, check_cost
from task_encoders.text.tokenizer import check_runs, load_tokenizer

SAMPLE = SourceSample(
    "a/17",
    "bmr",
    (Turn("12", "345"), Turn("6", "7", before=(("tool", "89"),), thought="0", calls=("12",))),
    images=("a.jpg", "a.jpg"),
    system="3",
    videos=("b.mp4",),
    tools="45",
)
EXACT = {"max_text_length": 15, "max_messages": 5, "max_media": 3}


def test_what_a_sample_holds_is_counted() -> None:
    check_cost(SAMPLE, **EXACT)
    for option, limit in EXACT.items():
        with pytest.raises(
            SampleError, match=rf"too_costly: {limit} .*source\.{option} {limit - 1}"
        ):
            check_cost(SAMPLE, **{**EXACT, option: limit - 1})


@pytest.mark.parametrize(("one", "limit"), [(" ", MAX_WHITE_SPACE), ("\u0301", MAX_MARKS)])
def test_runs_are_found_wherever_they_begin(one: str, limit: int) -> None:
    tokenizer = load_tokenizer("builtin")
    for begin in (0, 1, limit - 1):
        longest = "a" * begin + one * (limit - 1) + "b"
        assert begin or tokenizer.encode(longest * 2)
        with pytest.raises(SampleError, match="too_costly"):
            check_runs(longest * 2 + one * limit)
