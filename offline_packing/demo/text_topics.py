"""Demo turns without a picture: small tasks whose answers are right, of any wanted length."""

from collections.abc import Callable
from random import Random

from offline_packing.demo.depiction import QuestionAnswer
from offline_packing.demo.words import Language, estimate_num_tokens, say

_WORDS = ("window", "garden", "river", "planet", "bottle", "mirror", "lantern", "harbor", "pillow")
_MORNING = (
    ("walk along the river to the old mill", "沿着河边走到老磨坊"),
    ("visit the small museum near the station", "参观车站附近的小博物馆"),
    ("climb the hill behind the village", "爬上村子后面的小山"),
    ("rent bicycles and ride to the lake", "租自行车骑到湖边"),
    ("watch the boats leave the harbor", "看船只驶出港口"),
)
_AFTERNOON = (
    ("read in the shade of the park", "在公园的树荫下看书"),
    ("look for postcards in the market", "在集市上挑选明信片"),
    ("take the tram to the other end of the line", "坐电车到线路的另一端"),
    ("draw the church from the square", "在广场上画教堂"),
    ("swim until the sun is low", "游泳直到太阳西斜"),
)
_EVENING = (
    ("cook soup at the hostel", "在旅舍煮汤"),
    ("play cards with the other guests", "和其他客人打牌"),
    ("write the diary before going to bed early", "写完日记早点睡觉"),
    ("listen to the band in the cafe", "在咖啡馆听乐队演奏"),
)


def make_text_turn(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    """A question and its true answer, together about `num_tokens` tokens long."""
    topics = _SHORT_TOPICS if num_tokens < 25 else _LONG_TOPICS
    return rng.choice(topics)(rng, language, num_tokens)


def _spell(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    del num_tokens  # always short
    word = rng.choice(_WORDS)
    question = say(language, f"How many letters are in the word {word}?", f"单词{word}有几个字母？")
    return QuestionAnswer(question, str(len(word)))


def _one_sum(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    del num_tokens  # always short
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    question = say(language, f"What is {a} + {b}?", f"{a}加{b}等于多少？")
    return QuestionAnswer(question, str(a + b))


def _many_products(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    """Multiplication split into tens and ones, one line each."""
    question = say(
        language,
        "Show me how to multiply in the head, with examples.",
        "请举例说明怎样心算乘法。",
    )

    def item(index: int) -> str:
        a, b = rng.randint(11, 99), rng.randint(3, 9)
        tens, ones = a // 10 * 10, a % 10
        return say(
            language,
            f"{index}. {a} x {b}: take {tens} x {b} = {tens * b} and {ones} x {b} = {ones * b}, "
            f"together {a * b}.",
            f"{index}. {a}乘以{b}：{tens}乘{b}得{tens * b}，{ones}乘{b}得{ones * b}，"
            f"合起来是{a * b}。",
        )

    return QuestionAnswer(question, "\n".join(_fill(item, num_tokens)))


def _sort_numbers(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    # Twice in the text, about three digits and a comma each.
    numbers = [rng.randint(1, 999) for _ in range(max(3, min(90, num_tokens // 8)))]
    listed, ordered = (", ".join(map(str, values)) for values in (numbers, sorted(numbers)))
    question = say(
        language, f"Sort from small to large: {listed}", f"请把下列数字从小到大排列：{listed}"
    )
    return QuestionAnswer(question, ordered)


def _travel_plan(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    """Prose: one paragraph for each day."""

    def item(index: int) -> str:
        morning, afternoon, evening = map(rng.choice, (_MORNING, _AFTERNOON, _EVENING))
        start = rng.randint(7, 10)
        return say(
            language,
            f"Day {index}: get up at {start} and {morning[0]}. After lunch, {afternoon[0]}. "
            f"In the evening, {evening[0]}.",
            f"第{index}天：早上{start}点起床，{morning[1]}。午饭后{afternoon[1]}。"
            f"晚上{evening[1]}。",
        )

    days = _fill(item, num_tokens)
    question = say(
        language,
        f"Plan a quiet holiday of {len(days)} days for me.",
        f"请帮我安排一个{len(days)}天的悠闲假期。",
    )
    return QuestionAnswer(question, "\n\n".join(days))


def _conversions(rng: Random, language: Language, num_tokens: int) -> QuestionAnswer:
    question = say(
        language,
        "Give me a list that turns hours into minutes and seconds.",
        "请列出小时换算成分钟和秒的对照表。",
    )

    def item(index: int) -> str:
        hours = index * step
        return say(
            language,
            f"{hours} h = {hours * 60} min = {hours * 3600} s",
            f"{hours}小时 = {hours * 60}分钟 = {hours * 3600}秒",
        )

    step = rng.randint(1, 5)
    return QuestionAnswer(question, "\n".join(_fill(item, num_tokens)))


def _fill(item: Callable[[int], str], num_tokens: int) -> list[str]:
    """item(1), item(2), … until together they reach `num_tokens`."""
    items: list[str] = []
    total = 0
    while not items or total < num_tokens:
        items.append(item(len(items) + 1))
        total += estimate_num_tokens(items[-1])
    return items


_Topic = Callable[[Random, Language, int], QuestionAnswer]
_SHORT_TOPICS: tuple[_Topic, ...] = (_spell, _one_sum)
_LONG_TOPICS: tuple[_Topic, ...] = (_many_products, _sort_numbers, _travel_plan, _conversions)
