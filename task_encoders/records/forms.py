"""One table of the forms of records: their fields, the names of each, and how they are read.

    obelics     {"texts": [str | null, ...], "images": [str | null, ...]}    one of the two in turn
    mmc4        {"text_list": [str, ...],                          each picture before its sentence
                 "image_info": [{"image_name": str, "matched_text_index": int}, ...]}
    document    {"messages": [{"role": "assistant", "content": str | [...]}]}    ms-swift, pretrains
    messages    {"messages" | "conversations" | "texts": [...]}                     see messages.py
    question    {"question" | "prompt": str, "answer" | "answers": str}
    alpaca      {"instruction": str, "input": str, "output": str}                "input" may lack
    ms-swift    {"query": str, "response": str, "history": [[str, str], ...]}   so may "history"
    context     {"context": str, "answers": str}                                           Energon
    caption     {"captions": [{"content": str}]}, {"captions": [str]}, {"caption": str}
                {"text": str}     or plain text without an image; a document, with `<image>` in it

A record has the first form whose first field it has. Prompts and answers may be two lists of equal
length, one entry per turn. Names of images ("images" or "image"), videos ("videos" or "video"), a
`system` message and `tools` (or `functions`) go with every form.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import orjson

from task_encoders.records.messages import Draft, first_field, kind_of, media_name, read_dialogue
from task_encoders.samples import IMAGE_PLACEHOLDER, SampleError, Turn
from task_encoders.samples.limits import parse_json

Content = Mapping[str, Any]
#: Name that a record has for each field of its form; None: it lacks the field.
Names = Mapping[str, str | None]

DIALOGUES: Final = ("messages", "conversations", "texts")
REPLIES: Final = ("answer", "answers")
CAPTIONS: Final = ("captions", "caption")
_OUTPUTS: Final = ("output", "response")
#: Names of answers to a prompt, and of what is trained as a caption.
ANSWERS: Final = (*REPLIES, *CAPTIONS, *_OUTPUTS)
_AS_CAPTION: Final = (*CAPTIONS, *REPLIES, "text", *_OUTPUTS)
#: Fields that go with every form, and their other names.
COMMON: Final = {"images": "image", "videos": "video", "system": "system", "tools": "functions"}
#: Options of a record's videos that `source.fields` may name.
CLIP_FIELDS: Final = ("video_start", "video_end", "fps")
MEDIA_FIELDS: Final = frozenset(("images", "image", "videos", "video"))


class Form(NamedTuple):
    """A form of records: those that have one of the names of its first field, with a value that is
    `like` the form's."""

    #: what its records are trained for, unless the configuration says otherwise
    task: str
    read: Callable[[Content, Names, str], Draft]
    #: the names that each of its own fields may have, in the order of preference
    fields: Mapping[str, Sequence[str]]
    like: Callable[[Any], bool] = lambda value: True

    def names(self, content: Content, task: str) -> dict[str, str | None]:
        """Return the names that a record has for the form's own fields."""
        names = {field: first_field(content, known) for field, known in self.fields.items()}
        if task == "captioning" and "answer" in names:
            names["answer"] = first_field(content, _AS_CAPTION)
        return names

    def has_system(self, task: str) -> bool:
        """Tell whether a system message besides the form's own fields is read."""
        return task != "captioning" or "messages" in self.fields

    def used(self, content: Content, task: str) -> set[str | None]:
        """Return all fields that a record is read from."""
        common = {chosen_name(content, field) for field in COMMON}
        return {*self.names(content, task).values(), *common} - {
            None if self.has_system(task) else "system"
        }


def form_of(content: Content) -> Form:
    """Return the form of a record; caption if it has none of the fields."""
    for name, form in _FIRST:
        if content.get(name) is not None and form.like(content[name]):
            return form
    return FORMS["caption"]


def read_cells(content: Content) -> dict[str, Any]:
    """Return a row of a table with the lists in it that are written as JSON. Raises SampleError:
    too_costly."""
    found = dict(content)
    for name in LISTS & content.keys():
        text = content[name]
        if isinstance(text, str) and text.startswith(("[", "{")):
            with suppress(orjson.JSONDecodeError):  # a file's name or a text that begins so
                found[name] = parse_json(text.encode())
    return found


def has_answer(content: Content) -> bool:
    """Return whether a record holds an answer to learn besides a "text"."""
    return first_field(content, (*DIALOGUES, *ANSWERS)) is not None


def chosen_name(content: Content, field: str) -> str:
    """Return the name of a field that goes with every form: the other name if only that has
    content."""
    other = COMMON[field]
    return field if content.get(field) or content.get(other) is None else other


def named_media(content: Content, field: str) -> list[Any] | None:
    """Return the unchecked names of a record's media, "images" or "videos"; None if it names none,
    [] if it says that there are no images."""
    named = content.get(chosen_name(content, field))
    if named is None or (field == "videos" and not named):
        return None
    names = [media_name(one) for one in (named if isinstance(named, list) else [named])]
    return [one for one in names if one] if is_in_turn(content.get("texts")) else names


def best_answer(answers: Any, weights: Any) -> Any:
    """Return the answer of a VQA sample with the largest weight; without weights the first."""
    if not isinstance(answers, list) or not answers:
        return answers
    is_weighed = isinstance(weights, list) and all(isinstance(one, int | float) for one in weights)
    if not is_weighed or len(weights) != len(answers):
        return answers[0]
    return answers[weights.index(max(weights))]


def is_in_turn(texts: Any) -> bool:
    """Return whether "texts" are OBELICS's; the same field holds turns of other datasets."""
    return isinstance(texts, list) and texts != [] and {str, type(None)} >= set(map(type, texts))


def _is_answer(messages: Any) -> bool:
    """Return whether messages are an assistant's alone."""
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], Mapping):
        return False
    return messages[0].get("role", messages[0].get("from")) in ("assistant", "gpt")


def _read_in_turn(content: Content, names: Names, task: str) -> Draft:
    """Read a document of OBELICS; texts that follow one another are joined by a blank line."""
    texts, images = content["texts"], content.get("images")
    if not isinstance(images, list) or len(images) != len(texts):
        count = len(images) if isinstance(images, list) else "no"
        raise SampleError("bad_record", f"{len(texts)} entries of 'texts' and {count} of 'images'")
    found, is_text = "", False
    for text, image in zip(texts, images, strict=True):
        if media_name(image):  # tables have "" for null
            found += IMAGE_PLACEHOLDER
            is_text = False
        if text:
            found += f"\n\n{text}" if is_text else text
            is_text = True
    return Draft(turns=[Turn("", found)], is_document=True)


def _read_sentences(content: Content, names: Names, task: str) -> Draft:
    """Read a document of MMC4; sentences are joined by a blank, as in OpenFlamingo
    (https://github.com/mlfoundations/open_flamingo, `train/data.py`)."""
    sentences: Any = content["text_list"]
    pictures: Any = content.get("image_info")
    if not isinstance(sentences, list) or not all(isinstance(one, str) for one in sentences):
        raise SampleError("bad_record", "'text_list' is not a list of texts")
    before: list[list[str]] = [[] for _ in sentences]
    for picture in pictures if isinstance(pictures, list) else [pictures] * bool(pictures):
        place = picture.get("matched_text_index") if isinstance(picture, Mapping) else None
        if not isinstance(place, int) or not 0 <= place < len(sentences):
            raise SampleError("bad_record", f"'image_info' names no sentence: {picture!r}"[:200])
        before[place].append(picture.get("image_name") or picture.get("raw_url"))
    text = " ".join(
        IMAGE_PLACEHOLDER * len(images) + sentence
        for images, sentence in zip(before, sentences, strict=True)
    )
    return Draft(turns=[Turn("", text)], images=list(chain(*before)), is_document=True)


def _read_questions(content: Content, names: Names, task: str) -> Draft:
    """Read prompts and answers; to an instruction belong its input, and the turns before it."""
    answers = _texts(content, names["answer"])
    if answers is None:
        known = _AS_CAPTION if task == "captioning" else ANSWERS
        raise SampleError("bad_record", f"none of {quoted((*DIALOGUES, *known))}")
    prompts = _texts(content, names.get("prompt"))
    if prompts is None:
        if task != "captioning":
            raise SampleError(
                "bad_record", f"no prompt: none of {quoted(PROMPTS)}; is it a caption?"
            )
        prompts = [""] * len(answers)
    if len(prompts) == 1 and names["answer"] == "answers":
        answers = answers[:1]  # of several to one prompt the first; lost_fields.py reports it
    if len(prompts) != len(answers):
        raise SampleError("bad_record", f"{len(prompts)} prompts for {len(answers)} answers")
    about, history = content.get(names.get("input") or ""), names.get("history")
    if about and (not isinstance(about, str) or len(prompts) > 1):
        raise SampleError("bad_record", f"'input' is {kind_of(about)} for {len(prompts)} turns")
    if about:
        prompts = [with_input(prompts[0], about)]
    earlier = read_history(content[history]) if history else ()
    turns = [*earlier, *zip(prompts, answers, strict=True)]
    return Draft(turns=[Turn(prompt, answer) for prompt, answer in turns])


def _asking(*prompts: str, **about: Sequence[str]) -> Form:
    """Return a form with these names of its prompt."""
    return Form("vqa", _read_questions, {"prompt": prompts, "answer": ANSWERS, **about})


def read_history(history: Any) -> list[list[str]]:
    """Return the earlier turns of Alpaca's records and ms-swift's, a list of [prompt, answer] or
    nothing. Raises SampleError: bad_record."""
    turns = history or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and list(map(type, turn)) == [str, str] for turn in turns
    ):
        raise SampleError("bad_record", f"'history' is {history!r:.50}, not a list of text pairs")
    return turns


def with_input(instruction: str, given: str) -> str:
    """Return Alpaca's `instruction` and, on the next line, the `input` that it is about, if any."""
    return f"{instruction}\n{given}" if instruction and given else instruction or given


def _texts(content: Content, name: str | None) -> list[str] | None:
    """Return a field as a list: 'x', ['x'] and [{"content": 'x'}]; a number, true and false as
    their JSON."""
    if name is None:
        return None
    values = content[name]
    if isinstance(values, str):
        return [values]
    values = values if isinstance(values, list) else [values]
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    texts = [orjson.dumps(text).decode() if is_scalar(text) else text for text in texts]
    if any(not isinstance(text, str) for text in texts):
        raise SampleError(
            "bad_record", f"{name!r} holds something other than text{_remedy(name, content[name])}"
        )
    return cast(list[str], texts)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number, true or false."""
    return isinstance(value, int | float)


def _remedy(name: str, value: Any) -> str:
    """Return the option that takes a text out of an object, where a field holds objects."""
    first = value[0] if isinstance(value, list) and value else value
    own = first.items() if isinstance(first, dict) else ()
    inside = next((field for field, text in own if isinstance(text, str)), None)
    if inside is None:
        return ""
    field = "question" if name in PROMPTS else "caption" if name in CAPTIONS else "answer"
    place = f"{name}[0]" if isinstance(value, list) else name
    return f'; if its text is {inside!r}: source.fields={{{field}: "{place}.{inside}"}}'


def quoted(names: Sequence[str]) -> str:
    """Write names as a message lists them: 'a', 'b'."""
    return ", ".join(map(repr, names))


#: Each record has the first form that fits.
FORMS: Final = {
    "obelics": Form("captioning", _read_in_turn, {"messages": ("texts",)}, is_in_turn),
    "mmc4": Form(
        "captioning", _read_sentences, {"sentences": ("text_list",), "pictures": ("image_info",)}
    ),
    "document": Form("captioning", read_dialogue, {"messages": DIALOGUES}, _is_answer),
    "messages": Form("bmr", read_dialogue, {"messages": DIALOGUES}),
    "question": _asking("question", "prompt"),
    "alpaca": _asking("instruction", input=("input",), history=("history",)),
    "ms-swift": _asking("query", history=("history",)),
    "context": _asking("context"),
    "caption": Form("captioning", _read_questions, {"answer": ANSWERS}),
}
PROMPTS: Final = tuple(name for form in FORMS.values() for name in form.fields.get("prompt", ()))
_FIRST: Final = [(name, one) for one in FORMS.values() for name in next(iter(one.fields.values()))]
_OWN: Final = [names for form in FORMS.values() for names in form.fields.values()]
#: Every field that a record is read from, and its "id".
RECORD_FIELDS: Final = frozenset(chain(("id",), _AS_CAPTION, *COMMON.items(), *_OWN))
#: Names in `source.fields`, and the fields that do not count where these are given.
RENAMED: Final[Mapping[str, Sequence[str]]] = {
    "id": ("id",),
    **dict(zip(COMMON, COMMON.items(), strict=True)),
    **dict.fromkeys(("messages", "conversations"), DIALOGUES),
    "question": (*DIALOGUES, *PROMPTS),
    "answer": (*DIALOGUES, *_AS_CAPTION),
    "caption": (*DIALOGUES, *PROMPTS, *_AS_CAPTION),
    "group": (),
    **{name: (name,) for name in CLIP_FIELDS},
}
#: Fields that hold lists, or their JSON in the cells of a table.
LISTS: Final = {
    *(*DIALOGUES, *MEDIA_FIELDS, "tools", "functions", "captions", "answers"),
    *("history", "text_list", "image_info"),
}
