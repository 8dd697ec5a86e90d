"""What a sample has that some layout cannot hold: one number per sample, in the index.

Measuring records it, since only then is the sample's text at hand; a layout names what it cannot
hold in `Layout.find_unfit`, and planning sets such samples aside.
"""

import re
from collections.abc import Sequence
from enum import IntFlag
from typing import Final

from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample
from task_encoders.text.chat_templates import DEFAULT_SYSTEM
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

_SPECIAL: Final = re.compile("|".join(map(re.escape, QWEN_SPECIAL_TOKENS)))
#: Image sides that array code takes for a number of channels.
_LIKE_CHANNELS: Final = (1, 3)


class Trait(IntFlag):
    """Flags of the index column `traits`. Stored: a flag's value never changes its meaning."""

    #: a conversation's system message is not the chat template's default one
    OWN_SYSTEM = 1
    #: rendered to one string, its text would be read as control tokens or as a further image
    CONTROL_TEXT = 2
    #: an image is 1 or 3 pixels high or wide
    THIN_IMAGE = 4


def sample_traits(sample: SourceSample, image_sizes: Sequence[tuple[int, int]]) -> Trait:
    """The traits of a checked sample whose images have these (height, width)."""
    traits = Trait(0)
    if sample.task == "captioning":  # nothing but the caption is encoded
        texts, misread = [sample.turns[0].answer], ""
    else:
        misread = "".join(turn.answer for turn in sample.turns)
        texts = [misread, *(turn.prompt for turn in sample.turns)]
        if sample.system not in (None, DEFAULT_SYSTEM):
            traits |= Trait.OWN_SYSTEM
    if IMAGE_PLACEHOLDER in misread or any(map(_spells_special, texts)):
        traits |= Trait.CONTROL_TEXT
    if any(side in _LIKE_CHANNELS for size in image_sizes for side in size):
        traits |= Trait.THIN_IMAGE
    return traits


def _spells_special(text: str) -> bool:
    return "<|" in text and _SPECIAL.search(text) is not None
