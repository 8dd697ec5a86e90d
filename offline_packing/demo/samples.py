"""Demo samples: pictures made into captions, questions and dialogues of widely spread lengths."""

import itertools
import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from offline_packing.demo.pictures import LANGUAGES, Language, Picture, draw_picture

#: Text and pictures of one sample stay below this, except where it is meant to be overlong.
_MAX_NUM_TOKENS: Final = 1750
#: In every run of _COPIES_EVERY VQA samples the first _NUM_COPIES ask about one picture.
_COPIES_EVERY, _NUM_COPIES = 25, 3
_TOKEN_LIKE: Final = re.compile(r"[A-Za-zÀ-ÿ]{1,6}|[^\sA-Za-zÀ-ÿ]|\n+| (?=\d)")

Turn = tuple[str, str]  # question and answer
Sample = tuple[str, dict[str, Any], dict[str, Picture]]  # key, JSON, pictures by file name


def make_sample(folder: str, seed: int, index: int, fault: str | None) -> Sample:
    """Sample `index` of a folder, which depends on nothing else. `fault` is the reason for which it
    is to be set aside; it matters here only if it decides what is drawn or said."""
    copy = index % _COPIES_EVERY if folder == "vqa" else 0
    copy = copy if copy < _NUM_COPIES else 0
    rng = Random(f"{seed}/{folder}/{index - copy}")
    say = LANGUAGES[rng.choices(list(LANGUAGES), [6, 3, 1])[0]]
    is_dialogue = folder.startswith("bmr")
    text_only = is_dialogue and rng.random() < 0.37
    key = {
        "captioning": f"cap_{index:06d}",
        "vqa": f"{index - copy:012d}_{copy}".removesuffix("_0"),
        "bmr": f"output_{index:08d}" if text_only else f"dialogue_{index:06d}",
        "bmr_jsonl": f"chat-{index:06d}",
    }[folder]
    count = rng.choice([1, 1, 1, 1, 1, 2, 3]) if is_dialogue and fault != "overlong" else 1
    names = [f"{key}_{letter}" for letter in "abc"[:count]] if count > 1 else [key]
    names = [f"images/{name}" for name in names] if folder == "bmr_jsonl" else names
    drawn: dict[str, Picture] = {}
    for name in [] if text_only else names:
        suffix = "jpg" if fault == "truncated_image" or rng.random() < 0.65 else "png"
        drawn[f"{name}.{suffix}"] = draw_picture(rng, say, overlong=fault == "overlong")
    pictures = list(drawn.values())
    if folder == "captioning":
        text = _description(pictures[0], say, _text_budget(rng, pictures, fault))
        record = {"caption": text} if rng.random() < 0.2 else {"captions": [{"content": text}]}
        return key, record, drawn
    if folder == "vqa":
        turns = [_question(rng, say, pictures[0], copy, fault)]
    else:
        turns = (_picture_turns if pictures else _text_turns)(rng, say, pictures, fault)
    messages = _messages(rng, turns, len(pictures))
    if is_dialogue and rng.random() < 1 / 6:
        messages.insert(0, {"role": "system", "content": rng.choice(say["system"])})
    identity = {"id": key} if folder == "bmr_jsonl" else {}
    return key, {**identity, "messages": messages, "images": list(drawn)}, drawn


def _question(rng: Random, say: Language, picture: Picture, copy: int, fault: str | None) -> Turn:
    """One question; copies of a sample ask another one each."""
    question, answer = rng.sample(picture.questions, _NUM_COPIES)[copy]
    if fault == "overlong" or (copy == 0 and rng.random() < 0.3):
        return picture.request, _description(picture, say, _text_budget(rng, [picture], fault))
    brief = estimate_num_tokens(answer) < 8 and rng.random() < 0.6
    return question + say("short") * brief, answer


def _picture_turns(
    rng: Random, say: Language, pictures: Sequence[Picture], fault: str | None
) -> list[Turn]:
    """One to eight turns; where there are several pictures, now and then one turn for each."""
    if len(pictures) > 1 and rng.random() < 0.4:
        asked = [rng.choice(picture.questions) for picture in pictures]
        return [(f"<image>\n{question}", answer) for question, answer in asked]
    turns = [
        (say("nth", i=i, question=question) if len(pictures) > 1 else question, answer)
        for i, picture in enumerate(pictures, 1)
        for question, answer in picture.questions
    ]
    budget, kept = _text_budget(rng, pictures, fault), list[Turn]()
    for turn in rng.sample(turns, min(rng.randint(1, 8), len(turns))):
        budget -= sum(map(estimate_num_tokens, turn))
        if not kept or budget > 0:
            kept.append(turn)
    if len(pictures) == 1 and budget > 60:
        kept[-1] = (pictures[0].request, _description(pictures[0], say, budget))
    return kept


def _text_turns(rng: Random, say: Language, _: object, fault: str | None) -> list[Turn]:
    """Up to eight small tasks; short dialogues have few."""
    budget = 4000 if fault == "overlong" else _log_uniform(rng, 10, 1500)
    count = rng.randint(1, max(1, min(8, budget // 12)))
    return [_text_turn(rng, say, budget // count) for _ in range(count)]


def _text_turn(rng: Random, say: Language, budget: int) -> Turn:
    """A question and its right answer, together of about `budget` tokens."""
    if budget < 25:
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        return say("ask_sum", a=a, b=b), str(a + b)
    if rng.random() < 0.4:
        numbers = [rng.randint(1, 999) for _ in range(max(3, min(90, budget // 10)))]
        asked, answer = (", ".join(map(str, some)) for some in (numbers, sorted(numbers)))
        return say("ask_sort", numbers=asked), answer
    days: list[str] = []
    while not days or budget > 0:
        parts = {part: rng.choice(say[part]) for part in ("morning", "noon")}
        days.append(say("day", i=len(days) + 1, hour=rng.randint(7, 10), **parts))
        budget -= estimate_num_tokens(days[-1])
    return say("ask_trip", n=len(days)), "\n\n".join(days)


def _text_budget(rng: Random, pictures: Sequence[Picture], fault: str | None) -> int:
    """Tokens for the text beside some pictures. One text in six is as long as possible: drawn
    lengths alone would leave the long tail thin."""
    used = sum(round(p.image.width / 28) * round(p.image.height / 28) + 4 for p in pictures)
    room = max(40, _MAX_NUM_TOKENS - used)
    budget = room if rng.random() < 1 / 6 else _log_uniform(rng, 8, room)
    return 1_000_000 if fault == "overlong" else budget


def _log_uniform(rng: Random, low: float, high: float) -> int:
    """As many from 10 to 100 as from 100 to 1000."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _description(picture: Picture, say: Language, budget: int) -> str:
    """The first detail and as many more as fit, four to a paragraph."""
    used = itertools.accumulate(map(estimate_num_tokens, picture.details[1:]))
    kept = picture.details[: 1 + sum(tokens <= budget for tokens in used)]
    paragraphs = (kept[i : i + 4] for i in range(0, len(kept), 4))
    return "\n\n".join(map(say["space"].join, paragraphs))


def _messages(rng: Random, turns: Sequence[Turn], num_images: int) -> list[dict[str, str]]:
    """Messages with `<image>` once per picture before the first question unless the turns have
    their own; rarely none, which means the same."""
    texts = [text for turn in turns for text in turn]
    if "<image>" not in texts[0] and rng.random() > 0.06:
        texts[0] = "<image>\n" * num_images + texts[0]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def estimate_num_tokens(text: str) -> int:
    """About as many tokens as a Qwen tokenizer makes of a text, without loading one."""
    return len(_TOKEN_LIKE.findall(text))
