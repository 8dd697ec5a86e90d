"""One demo sample at a time, in memory: its pictures and its JSON record in the folder's form.

Sample i of a folder depends on the seed, the folder, i and the fault planted in it alone.
`fault` is the reason for which the sample is to be set aside, or None; here it matters only where
it decides what is drawn or said, the rest is done to the files when they are written.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from offline_packing.demo import conversations
from offline_packing.demo.charts import depict_chart
from offline_packing.demo.depiction import Depiction
from offline_packing.demo.documents import depict_document, depict_sign
from offline_packing.demo.scenes import depict_scene
from offline_packing.demo.words import Language

#: In every run of _COPIES_EVERY VQA samples the first _NUM_COPIES ask about one picture.
_COPIES_EVERY, _NUM_COPIES = 25, 3
#: A scene of this size and number of shapes takes far more than 2,048 tokens to describe in full,
#: whatever max_pixels makes of the picture itself.
_OVERLONG_SIZE, _OVERLONG_OBJECTS, _OVERLONG_TEXT_TOKENS = (700, 520), 96, 4000
_MEDIAN_SIDE, _MIN_SIDE, _MAX_SIZE = 280, 60, (900, 700)


@dataclass
class DemoSample:
    """A sample before it is written; `record` is its JSON."""

    key: str
    record: dict[str, Any]
    #: File name -> picture.
    pictures: dict[str, Depiction] = field(default_factory=dict)


def make_captioning_sample(seed: int, index: int, fault: str | None) -> DemoSample:
    """A picture and one caption, as `captions` or (one in five) as `caption`."""
    rng = Random(f"{seed}/captioning/{index}")
    overlong = fault == "overlong"
    language = _choose_language(rng)
    key = f"cap_{index:06d}"
    truncated = fault == "truncated_image"  # a JPEG with enough content to lose some
    picture = _usual_scene(rng, language) if truncated else _draw(rng, language, overlong)
    suffix = "jpg" if truncated else _choose_suffix(rng)
    room = conversations.room_for_text([picture])
    # One caption in six says all it can: drawn lengths alone would leave the long tail thin.
    complete = rng.random() < 1 / 6
    num_tokens = room if complete else conversations.log_uniform(rng, 8, room)
    caption = conversations.write_caption(
        picture, language, conversations.UNLIMITED if overlong else num_tokens
    )
    record = {"caption": caption} if rng.random() < 0.2 else {"captions": [{"content": caption}]}
    return DemoSample(key, record, {f"{key}.{suffix}": picture})


def make_vqa_sample(seed: int, index: int, fault: str | None) -> DemoSample:
    """A picture and one question; numbered copies `KEY_1`, `KEY_2` ask more about that of `KEY`."""
    place = index % _COPIES_EVERY
    copy = place if place < _NUM_COPIES else 0
    rng = Random(f"{seed}/vqa/{index - copy}")
    language = _choose_language(rng)
    picture = _draw(rng, language, fault == "overlong")
    suffix = _choose_suffix(rng)
    room = conversations.room_for_text([picture])
    if fault == "overlong":
        turn = conversations.describe(picture, language, conversations.UNLIMITED)
    elif copy == 0 and rng.random() < 0.3:
        turn = conversations.describe(
            picture, language, conversations.log_uniform(rng, 30, max(31, room))
        )
    else:
        turn = picture.questions[copy % len(picture.questions)]
        turn = conversations.ask_briefly(turn, language) if rng.random() < 0.6 else turn
    key = f"{index - copy:012d}" + (f"_{copy}" if copy else "")
    name = f"{key}.{suffix}"
    messages = conversations.to_messages(conversations.add_placeholders(rng, [turn], 1))
    return DemoSample(key, {"messages": messages, "images": [name]}, {name: picture})


def make_bmr_sample(seed: int, index: int, fault: str | None) -> DemoSample:
    """A dialogue about no picture (`output_…`), one, or several, as a JSON file of its own."""
    rng = Random(f"{seed}/bmr/{index}")
    overlong = fault == "overlong"
    if rng.random() < 0.4:
        record = _text_record(rng, overlong)
        return DemoSample(f"output_{index:08d}", {**record, "images": []})
    key = f"dialogue_{index:06d}"
    messages, pictures = _picture_dialogue(rng, key, overlong)
    return DemoSample(key, {"messages": messages, "images": list(pictures)}, pictures)


def make_jsonl_sample(seed: int, index: int, fault: str | None) -> DemoSample:
    """The same kinds as one line of a JSONL file, pictures under `images/`."""
    rng = Random(f"{seed}/bmr_jsonl/{index}")
    overlong = fault == "overlong"
    key = f"chat-{index:06d}"
    if rng.random() < 0.3:
        record = _text_record(rng, overlong)
        return DemoSample(key, {"id": key, **record, "images": []})
    messages, pictures = _picture_dialogue(rng, f"images/{key}", overlong)
    return DemoSample(key, {"id": key, "messages": messages, "images": list(pictures)}, pictures)


def _text_record(rng: Random, overlong: bool) -> dict[str, Any]:
    language = _choose_language(rng)
    num_tokens = conversations.log_uniform(rng, 10, 1500)
    # Long dialogues have more turns, short ones few: a turn of five tokens is not a turn.
    num_turns = rng.randint(1, max(1, min(8, num_tokens // 12)))
    if overlong:
        num_tokens = _OVERLONG_TEXT_TOKENS
    turns = conversations.text_dialogue(rng, language, num_tokens, num_turns)
    system = conversations.choose_system(rng, language)
    return {"messages": conversations.to_messages(turns, system)}


def _picture_dialogue(
    rng: Random, stem: str, overlong: bool
) -> tuple[list[conversations.Message], dict[str, Depiction]]:
    language = _choose_language(rng)
    several = not overlong and rng.random() < 0.3
    if not several:
        picture = _draw(rng, language, overlong)
        pictures = {f"{stem}.{_choose_suffix(rng)}": picture}
    else:
        pictures = {
            f"{stem}_{letter}.{_choose_suffix(rng)}": _draw(rng, language, overlong=False)
            for letter in "abc"[: rng.randint(2, 3)]
        }
    depictions = list(pictures.values())
    if overlong:
        turns = [conversations.describe(depictions[0], language, conversations.UNLIMITED)]
        turns = conversations.add_placeholders(rng, turns, 1)
    elif several and rng.random() < 0.4:
        turns = conversations.interleaved_dialogue(rng, depictions)
    else:
        num_tokens = conversations.log_uniform(rng, 20, conversations.room_for_text(depictions))
        turns = conversations.image_dialogue(rng, depictions, language, num_tokens)
        turns = conversations.add_placeholders(rng, turns, len(depictions))
    system = conversations.choose_system(rng, language)
    return conversations.to_messages(turns, system), pictures


def _draw(rng: Random, language: Language, overlong: bool) -> Depiction:
    """A picture of a random kind and size; a crowded scene where the sample is to be overlong."""
    if overlong:
        return depict_scene(rng, _OVERLONG_SIZE, language, _OVERLONG_OBJECTS)
    return rng.choices(list(_PICTURES), weights=list(_PICTURES.values()))[0](rng, language)


def _usual_size(rng: Random) -> tuple[int, int]:
    """Width and height in pixels, log-normal and independent, so that all aspects occur."""
    width, height = (
        max(_MIN_SIDE, min(limit, round(rng.lognormvariate(math.log(_MEDIAN_SIDE), 0.5))))
        for limit in _MAX_SIZE
    )
    return width, height


def _usual_scene(rng: Random, language: Language) -> Depiction:
    return depict_scene(rng, _usual_size(rng), language)


def _tiny_scene(rng: Random, language: Language) -> Depiction:
    return depict_scene(rng, (rng.randint(28, 70), rng.randint(28, 70)), language)


def _crowded_scene(rng: Random, language: Language) -> Depiction:
    size = (rng.randint(400, _MAX_SIZE[0]), rng.randint(300, _MAX_SIZE[1]))
    return depict_scene(rng, size, language, rng.randint(18, 40))


def _narrow_scene(rng: Random, language: Language) -> Depiction:
    """A strip of about 1 : 12, upright or lying."""
    short, long = rng.randint(40, 60), rng.randint(480, 640)
    return depict_scene(rng, (short, long) if rng.random() < 0.5 else (long, short), language)


def _usual_chart(rng: Random, language: Language) -> Depiction:
    return depict_chart(rng, _usual_size(rng), language)


def _usual_document(rng: Random, language: Language) -> Depiction:
    return depict_document(rng, _usual_size(rng), language)


def _sign(rng: Random, language: Language) -> Depiction:
    return depict_sign(rng, rng.randint(320, 720), language)


def _choose_language(rng: Random) -> Language:
    return "zh" if rng.random() < 0.3 else "en"


def _choose_suffix(rng: Random) -> str:
    return "jpg" if rng.random() < 0.65 else "png"


#: Kind of picture -> its weight.
_PICTURES: dict[Callable[[Random, Language], Depiction], float] = {
    _usual_scene: 0.38,
    _crowded_scene: 0.04,
    _tiny_scene: 0.05,
    _narrow_scene: 0.03,
    _usual_chart: 0.25,
    _usual_document: 0.22,
    _sign: 0.03,
}
