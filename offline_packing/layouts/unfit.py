"""Properties of samples that readers of other trainers would encode differently from what was
measured. A layout lists those that its reader has, as rules."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SourceSample
from task_encoders.text.qwen_templates import DEFAULT_SYSTEM
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

#: (height, width) of a sample's images.
Sizes = Sequence[tuple[int, int]]
#: (t, h, w) of a sample's media, in patches.
Grids = Sequence[tuple[int, int, int]]
#: The model's part of the fingerprint.
Model = Mapping[str, Any]
#: What a layout does not hold, and whether a sample has it.
Rule = tuple[str, Callable[[SourceSample, Sizes], bool]]

#: Line breaks at the start of an answer, which tokenizers merge with the header's.
_BREAK: Final = re.compile(r"\s*[\r\n]")
_SPECIAL: Final = re.compile("|".join(map(re.escape, QWEN_SPECIAL_TOKENS)))
#: Image sides that array code takes for a number of channels.
_LIKE_CHANNELS: Final = frozenset((1, 3))
#: Pixels to which some trainers stretch a shorter side before they resize an image.
_LEAST_SIDE: Final = 28


def first_broken(rules: Iterable[Rule], sample: SourceSample, sizes: Sizes) -> str | None:
    """Return what the first rule that a sample breaks names; None if it keeps all."""
    if sample.options:
        return "options of single images or videos"
    return next((what for what, breaks in rules if breaks(sample, sizes)), None)


def has_own_system(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether a conversation's system message is not the chat template's default one."""
    return sample.task != "captioning" and sample.system not in (None, DEFAULT_SYSTEM)


def has_empty_system(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether a conversation has a system message, which is empty."""
    return sample.task != "captioning" and sample.system == ""


def has_control_text(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether a sample's text, rendered to one string, would be read as control tokens or as a
    further image; or whether it is a document, with images in its text."""
    # Nothing but the caption of a captioning sample is encoded.
    turns = sample.turns[:1] if sample.task == "captioning" else sample.turns
    answers = [turn.answer for turn in turns]
    if any(IMAGE_PLACEHOLDER in answer for answer in answers):
        return True
    prompts = [] if sample.task == "captioning" else [turn.prompt for turn in turns]
    return any("<|" in text and _SPECIAL.search(text) for text in (*answers, *prompts))


def has_control_elsewhere(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether a conversation has such text in its system message, tools, calls, thoughts or
    messages before a prompt; or <video> that means no video."""
    if sample.task == "captioning":
        return False
    before = [text for turn in sample.turns for _, text in turn.before]
    as_text = [turn.answer for turn in sample.turns]
    if not sample.videos:
        as_text += [*before, *(turn.prompt for turn in sample.turns)]
    if any(VIDEO_PLACEHOLDER in text for text in as_text):
        return True
    others = [sample.system or "", sample.tools, *before]
    for turn in sample.turns:
        others += [turn.thought or "", *turn.calls]
    return any(map(_SPECIAL.search, others))


def is_not_plain(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether a sample has tools, thoughts, other roles than a user and an assistant, or
    answers without loss."""
    return not sample.is_plain


def is_untrained_or_has_roles(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether an answer carries no loss or is truncated, or a system or developer message is
    not the first."""
    roles = {role for turn in sample.turns for role, _ in (*turn.before, (turn.role, ""))}
    return bool(roles & {"system", "developer"}) or any(
        turn.weight != 1 or turn.truncated for turn in sample.turns
    )


def begins_with_break(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether an answer begins with a line break."""
    return any(_BREAK.match(turn.answer) for turn in sample.turns)


def has_thin_image(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether an image is 1 or 3 pixels high or wide."""
    return not _LIKE_CHANNELS.isdisjoint(itertools.chain(*sizes))


def has_small_image(sample: SourceSample, sizes: Sizes) -> bool:
    """Tell whether an image is less than 28 pixels high or wide."""
    return min(itertools.chain(*sizes), default=_LEAST_SIDE) < _LEAST_SIDE
