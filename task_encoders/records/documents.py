"""Documents: text with pictures in it, in the forms that datasets have it besides a "text" with
`<image>` where each picture stands.

    {"texts": [str | null, ...], "images": [str | null, ...]}        OBELICS: one of the two in turn
    {"text_list": [str, ...], "image_info": [{"image_name": str, "matched_text_index": int}, ...]}
                                                                MMC4: each before its sentence
    {"messages": [{"role": "assistant", "content": str | [...]}]}       ms-swift, for pretraining

OBELICS's texts that follow one another are joined by a blank line. MMC4's sentences are joined by a
blank, as in OpenFlamingo (https://github.com/mlfoundations/open_flamingo, `train/data.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

from task_encoders.records.messages import Dialogue, media_name
from task_encoders.samples import IMAGE_PLACEHOLDER, SampleError, Turn

#: Fields of MMC4's documents.
SENTENCES, PICTURES = "text_list", "image_info"
_IN_TURN: Final = "texts"


def is_in_turn(content: Mapping[str, Any]) -> bool:
    """Whether a record has the form of OBELICS; the same field holds turns of other datasets."""
    texts = content.get(_IN_TURN)
    are_texts = isinstance(texts, list) and all(isinstance(one, str | None) for one in texts)
    return are_texts and bool(texts)


def is_document(content: Mapping[str, Any]) -> bool:
    """Whether a record can be nothing but a document, by its fields."""
    if is_in_turn(content) or content.get(SENTENCES) is not None:
        return True
    messages = content.get("messages") or content.get("conversations")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], Mapping):
        return False
    return messages[0].get("role", messages[0].get("from")) in ("assistant", "gpt")


def read_document(content: Mapping[str, Any]) -> Dialogue | None:
    """The text and pictures of a record in the form of OBELICS or MMC4; None: it has another.
    Raises SampleError: bad_record."""
    if is_in_turn(content):
        return _read_in_turn(content[_IN_TURN], content.get("images"))
    if content.get(SENTENCES) is not None:
        return _read_sentences(content[SENTENCES], content.get(PICTURES))
    return None


def _read_in_turn(texts: list[str | None], images: Any) -> Dialogue:
    if not isinstance(images, list) or len(images) != len(texts):
        count = len(images) if isinstance(images, list) else "no"
        raise SampleError("bad_record", f"{len(texts)} entries of 'texts' and {count} of 'images'")
    found, is_text, names = "", False, []
    for text, image in zip(texts, images, strict=True):
        if name := media_name(image):  # tables have "" for null
            names.append(name)
            found += IMAGE_PLACEHOLDER
            is_text = False
        if text:
            found += f"\n\n{text}" if is_text else text
            is_text = True
    return Dialogue(turns=[Turn("", found)], images=names)


def _read_sentences(sentences: Any, pictures: Any) -> Dialogue:
    if not isinstance(sentences, list) or not all(isinstance(one, str) for one in sentences):
        raise SampleError("bad_record", f"{SENTENCES!r} is not a list of texts")
    before: list[list[str]] = [[] for _ in sentences]
    for picture in pictures if isinstance(pictures, list) else [pictures] * bool(pictures):
        place = picture.get("matched_text_index") if isinstance(picture, Mapping) else None
        if not isinstance(place, int) or not 0 <= place < len(sentences):
            raise SampleError("bad_record", f"{PICTURES!r} names no sentence: {picture!r}"[:200])
        before[place].append(picture.get("image_name") or picture.get("raw_url"))
    text = " ".join(
        IMAGE_PLACEHOLDER * len(names) + sentence
        for names, sentence in zip(before, sentences, strict=True)
    )
    return Dialogue(turns=[Turn("", text)], images=[name for names in before for name in names])
