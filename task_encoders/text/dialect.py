"""Spelling of control tokens and media in chat templates, and where answers begin and end."""

import re
from collections.abc import Mapping
from typing import Any, Final

from task_encoders.samples import SampleError
from task_encoders.text.pieces import Answer, Control, Fixed, Image, Piece, Text, Video


class Dialect:
    """How the templates of a vocabulary write control tokens, answers and media.

    Args:
        controls: a regular expression of control tokens.
        answers: one of answers; its only group is an answer's own part, with its end token.
        media: spelling of the place of an image and, where there are any, of a video.
        endings: text after the very last answer where templates leave it open, without calls and
            with calls.
    """

    def __init__(
        self,
        controls: str,
        answers: str,
        media: Mapping[str, Image | Video],
        endings: tuple[str, str] = ("", ""),
    ) -> None:
        self.controls: Final = re.compile(controls)
        self.answers: Final = re.compile(answers, re.DOTALL)
        self.media: Final = media
        self.endings: Final = endings
        spelled = "|".join(map(re.escape, sorted(media, key=len, reverse=True)))
        self.cut: Final = re.compile(f"({spelled}|{controls})").split

    def spell(self, piece: Piece) -> str:
        """A piece as templates write it."""
        match piece:
            case Control(token=token):
                return token
            case Answer(header=header, text=text):
                return header + text
            case Text(text=text):
                return text
            case Fixed(pieces=pieces):
                return "".join(map(self.spell, pieces))
        return next(text for text, medium in self.media.items() if type(medium) is type(piece))


#: Qwen's vocabularies.
CHATML: Final = Dialect(
    r"<\|\w+\|>",
    r"<\|im_start\|>assistant\n((?:(?!<\|im_start\|>).)*?<\|im_end\|>)",
    {
        "<|vision_start|><|image_pad|><|vision_end|>": Image(),
        "<|vision_start|><|video_pad|><|vision_end|>": Video(),
    },
)

# Noncharacters (chat_templates uses others) that stand for the first characters of control tokens.
_HIDDEN: Final = str.maketrans("<[", "\ufdd2\ufdd3")
#: Undoes `hide` in what a template wrote.
SHOWN: Final = str.maketrans("\ufdd2\ufdd3", "<[")
_RESERVED: Final = re.compile("[\ufdd0-\ufdd5]")


def hide(value: Any) -> Any:
    """Tools or a call, with nothing in their texts that could be taken for a control token.

    Raises:
        SampleError: they contain noncharacters.
    """
    if isinstance(value, str):
        if _RESERVED.search(value):
            raise SampleError("bad_record", "tools or calls contain noncharacters")
        return value.translate(_HIDDEN)
    if isinstance(value, Mapping):
        return {hide(name): hide(one) for name, one in value.items()}
    return [hide(one) for one in value] if isinstance(value, list) else value
