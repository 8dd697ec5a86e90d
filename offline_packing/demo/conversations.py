"""From depictions to texts: captions and dialogues whose lengths follow a wide law.

All lengths are estimates in tokens: `estimate_num_tokens` for text, one per 28 x 28 pixels for
pictures.
"""

import math
from collections.abc import Sequence
from random import Random

from PIL import Image

from offline_packing.demo.depiction import Depiction, QuestionAnswer
from offline_packing.demo.text_topics import make_text_turn
from offline_packing.demo.words import ORDINALS, Language, estimate_num_tokens, say

Message = dict[str, str]

#: Text and pictures of one sample stay below this, except where it is meant to be overlong.
MAX_NUM_TOKENS = 1800
#: Enough for every sentence there is: the answer is not cut.
UNLIMITED = 1_000_000

_IMAGE_BLOCK = 28
_MIN_IMAGE_TOKENS = 4
_SENTENCES_PER_PARAGRAPH = 4
_SHORT_ANSWER = (
    "\nAnswer the question using a single word or phrase.",
    "\n请用一个词或短语回答。",
)
_MAX_SHORT_ANSWER = 8
_SYSTEM_PROMPTS = (
    ("You are a careful assistant that looks closely.", "你是一个观察仔细的助手。"),
    ("Answer politely and to the point.", "请礼貌而简洁地回答。"),
)


def log_uniform(rng: Random, low: float, high: float) -> int:
    """A whole number whose logarithm is uniform: as many from 10 to 100 as from 100 to 1000."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def estimate_image_tokens(image: Image.Image) -> int:
    """Vision tokens of a picture within the default pixel limits."""
    blocks = round(image.width / _IMAGE_BLOCK) * round(image.height / _IMAGE_BLOCK)
    return max(_MIN_IMAGE_TOKENS, blocks)


def room_for_text(depictions: Sequence[Depiction]) -> int:
    """Text tokens left under MAX_NUM_TOKENS beside the pictures."""
    used = sum(estimate_image_tokens(depiction.image) for depiction in depictions)
    return max(40, MAX_NUM_TOKENS - used)


def write_caption(depiction: Depiction, language: Language, num_tokens: int) -> str:
    """The summary and as many details as fit `num_tokens`, in paragraphs."""
    sentences = [depiction.summary, *_details_within(depiction, num_tokens, depiction.summary)]
    return _paragraphs(sentences, language)


def describe(depiction: Depiction, language: Language, num_tokens: int) -> QuestionAnswer:
    """The request to describe the picture, answered with as many details as fit `num_tokens`."""
    details = _details_within(depiction, num_tokens, depiction.describe_request)
    answer = _paragraphs(details or [depiction.summary], language)
    return QuestionAnswer(depiction.describe_request, answer)


def ask_briefly(turn: QuestionAnswer, language: Language) -> QuestionAnswer:
    """The same question with the wish for a short answer, where the answer is short."""
    if estimate_num_tokens(turn.answer) > _MAX_SHORT_ANSWER:
        return turn
    return QuestionAnswer(turn.question + say(language, *_SHORT_ANSWER), turn.answer)


def image_dialogue(
    rng: Random, depictions: Sequence[Depiction], language: Language, num_tokens: int
) -> list[QuestionAnswer]:
    """One to eight turns about one to three pictures, of about `num_tokens` text tokens at most."""
    labels = [say(language, f"In the {en} picture: ", f"{zh}张图：") for en, zh in ORDINALS]
    candidates = [
        QuestionAnswer((labels[i] if len(depictions) > 1 else "") + turn.question, turn.answer)
        for i, depiction in enumerate(depictions)
        for turn in depiction.questions
    ]
    rng.shuffle(candidates)
    turns = [candidates[0]]
    used = _turn_tokens(turns[0])
    wanted = rng.randint(1, 8)
    for turn in candidates[1:]:
        if len(turns) >= wanted or used + _turn_tokens(turn) > num_tokens:
            break
        turns.append(turn)
        used += _turn_tokens(turn)
    if len(depictions) == 1 and num_tokens - used > 60:
        turns[-1] = describe(depictions[0], language, num_tokens - used)
    return turns


def interleaved_dialogue(rng: Random, depictions: Sequence[Depiction]) -> list[QuestionAnswer]:
    """One turn per picture, each turn with its own `<image>`."""
    turns = [rng.choice(depiction.questions) for depiction in depictions]
    return [QuestionAnswer(f"<image>\n{turn.question}", turn.answer) for turn in turns]


def text_dialogue(
    rng: Random, language: Language, num_tokens: int, num_turns: int
) -> list[QuestionAnswer]:
    """Turns without a picture of together about `num_tokens` tokens."""
    share = num_tokens // num_turns
    return [make_text_turn(rng, language, share) for _ in range(num_turns)]


def to_messages(turns: Sequence[QuestionAnswer], system: str | None = None) -> list[Message]:
    """Turns as chat messages, the system prompt first where there is one."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def add_placeholders(
    rng: Random, turns: Sequence[QuestionAnswer], num_images: int
) -> list[QuestionAnswer]:
    """`<image>` once per picture before the first question; rarely none, which means the same."""
    if rng.random() < 0.06:
        return list(turns)
    first = QuestionAnswer("<image>\n" * num_images + turns[0].question, turns[0].answer)
    return [first, *turns[1:]]


def choose_system(rng: Random, language: Language) -> str | None:
    """A system prompt for one dialogue in six."""
    return say(language, *rng.choice(_SYSTEM_PROMPTS)) if rng.random() < 1 / 6 else None


def _turn_tokens(turn: QuestionAnswer) -> int:
    return estimate_num_tokens(turn.question) + estimate_num_tokens(turn.answer)


def _details_within(depiction: Depiction, num_tokens: int, head: str) -> list[str]:
    """The longest prefix of the details that fits `num_tokens` together with `head`."""
    used, kept = estimate_num_tokens(head), []
    for detail in depiction.details:
        used += estimate_num_tokens(detail)
        if used > num_tokens:
            break
        kept.append(detail)
    return kept


def _paragraphs(sentences: list[str], language: Language) -> str:
    """_SENTENCES_PER_PARAGRAPH sentences each; Chinese has no blank between sentences."""
    starts = range(0, len(sentences), _SENTENCES_PER_PARAGRAPH)
    blank = say(language, " ", "")
    return "\n\n".join(blank.join(sentences[i : i + _SENTENCES_PER_PARAGRAPH]) for i in starts)
