"""Marks of media in the texts that a model is shown: prompts, and messages before them; of captions
and documents, their text.

    <img>a.jpg</img>   ![a cat](a.jpg)   ![](data:image/png;base64,...)     pictures in their places
    <image_1>   <|image_1|>   (<image>./</image>)   <start_of_image>        marks of other projects
    <image>     of a record that names videos alone                         LLaVA-Video's mark
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from task_encoders.packs.pack_format import is_image_name
from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Turn, count_placeholders

#: Pictures of Qwen-VL's records and of Markdown.
PICTURE: Final = re.compile(r"<img>([^<>\n]+)</img>|!\[[^\[\]\n]*\]\(([^()\s]+)\)")
#: Marks in the place of our <image>; some count the pictures.
MARKS: Final = re.compile(
    r"<\|?image[_ ]?(\d{1,4})\|?>|\(<image>\./</image>\)|<img><IMG_CONTEXT></img>|<IMAGE>|\[IMG\]"
    r"|<\|vision_start\|><\|image_pad\|><\|vision_end\|>|<start_of_image>|<ImageHere>"
)


def shown_text(turns: Iterable[Turn], task: str) -> str:
    """Return the texts of turns in which marks stand for media, as one."""
    if task == "captioning":
        return "\n".join([turn.answer for turn in turns])
    texts = [turn.prompt for turn in turns]
    return "\n".join(texts + [text for turn in turns if turn.before for _, text in turn.before])


def _edit(turns: Iterable[Turn], task: str, edit: Callable[[str], str]) -> list[Turn]:
    """Return turns with these texts edited, in their order."""
    if task == "captioning":
        return [replace(turn, answer=edit(turn.answer)) for turn in turns]
    return [
        replace(
            turn, before=tuple([(r, edit(t)) for r, t in turn.before]), prompt=edit(turn.prompt)
        )
        for turn in turns
    ]


def place_pictures(
    turns: list[Turn], task: str, is_file: Callable[[str], bool]
) -> tuple[list[Turn], list[str]]:
    """Return turns with <image> in the place of each picture that is a data: URI or a file, and the
    names of these. Anything else stays text."""
    names = list[str]()

    def place(match: re.Match[str]) -> str:
        name: str = match[1] or match[2]
        if not (name.startswith("data:image/") or (is_image_name(name) and is_file(name))):
            return match[0]
        names.append(name)
        return IMAGE_PLACEHOLDER

    return _edit(turns, task, lambda text: PICTURE.sub(place, text)), names


def place_images(turns: list[Turn], task: str, num_images: int) -> list[Turn]:
    """Return turns with <image> in the place of other marks, if there is one mark per image and
    numbered marks are in order."""
    numbers = list[str | None]()
    if not MARKS.search(shown_text(turns, task)):
        return turns

    def place(match: re.Match[str]) -> str:
        numbers.append(match[1])
        return IMAGE_PLACEHOLDER

    edited = _edit(turns, task, lambda text: MARKS.sub(place, text))
    counted = [int(number) for number in numbers if number]
    first = min(counted, default=0)
    in_order = first < 2 and counted in ([], list(range(first, first + num_images)))
    agree = len(numbers) == num_images == count_placeholders(edited, IMAGE_PLACEHOLDER, task)
    return edited if agree and in_order else turns


def place_videos(turns: list[Turn], task: str, num_videos: int) -> list[Turn]:
    """Return turns with <video> in the place of <image>, if there is one <image> per video."""
    marks = [count_placeholders(turns, one, task) for one in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER)]
    if marks != [num_videos, 0]:
        return turns
    return _edit(turns, task, lambda text: text.replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER))
