"""Demo charts: one series of whole numbers as bars or as a line, every value printed on it."""

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from offline_packing.demo.depiction import INK, PALE_INK, Depiction, QuestionAnswer, load_font
from offline_packing.demo.words import COLORS, Language, say, yes_no

#: A chart smaller than this (width, height) cannot be read.
MIN_SIZE = (200, 150)

#: What is measured: (drawn title, Chinese, English unit, Chinese unit).
_TOPICS = (
    ("Rainfall", "降雨量", "mm", "毫米"),
    ("Visitors", "访客数", "people", "人"),
    ("Books sold", "售书量", "copies", "本"),
    ("Energy used", "用电量", "kWh", "千瓦时"),
    ("Parcels sent", "寄出包裹数", "parcels", "件"),
    ("Cycling", "骑行里程", "km", "公里"),
)
_CATEGORIES = (
    ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
    ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    ("North", "East", "South", "West"),
    ("2017", "2018", "2019", "2020", "2021", "2022", "2023", "2024"),
    ("Oslo", "Rome", "Lima", "Cairo", "Delhi", "Quito", "Seoul", "Paris"),
)
_GRID_STEP = 20


@dataclass(frozen=True)
class Chart:
    """`values[i]`, from 4 to 96, belongs to `categories[i]`; no two values are equal."""

    kind: str
    topic: tuple[str, str, str, str]
    categories: tuple[str, ...]
    values: tuple[int, ...]
    color: str

    def unit(self, language: Language) -> str:
        """The unit of the values."""
        return say(language, self.topic[2], self.topic[3])


def make_chart(rng: Random, width: int) -> Chart:
    """A chart with as many categories as a picture `width` pixels wide can label."""
    all_categories = rng.choice(_CATEGORIES)
    count = rng.randint(3, max(3, min(len(all_categories), (width - 50) // 42)))
    return Chart(
        kind=rng.choice(["bar", "line"]),
        topic=rng.choice(_TOPICS),
        categories=all_categories[:count],
        values=tuple(rng.sample(range(4, 97), count)),
        color=rng.choice([color for color in COLORS if color != "yellow"]),
    )


def draw_chart(chart: Chart, size: tuple[int, int]) -> Image.Image:
    """The RGB picture of a chart, `size` (width, height) in pixels, at least MIN_SIZE."""
    width, height = size
    image = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(image)
    font_size = max(11, min(20, height // 18, width // 17))
    font, title_font = load_font(font_size), load_font(font_size + 4)
    left, right = 2.6 * font_size, width - 0.6 * font_size
    top, bottom = 4.4 * font_size, height - 2.2 * font_size
    title = f"{chart.topic[0]} ({chart.topic[2]})"
    draw.text((width / 2, 0.5 * font_size), title, INK, title_font, anchor="ma")
    for tick in range(0, 101, _GRID_STEP):
        y = bottom - (bottom - top) * tick / 100
        draw.line((left, y, right, y), fill=INK if tick == 0 else PALE_INK)
        draw.text((left - 0.4 * font_size, y), str(tick), INK, font, anchor="rm")
    slot = (right - left) / len(chart.values)
    points = [
        (left + (i + 0.5) * slot, bottom - (bottom - top) * value / 100)
        for i, value in enumerate(chart.values)
    ]
    color = COLORS[chart.color].rgb
    if chart.kind == "line":
        draw.line(points, fill=color, width=max(2, font_size // 5), joint="curve")
    for (x, y), value, category in zip(points, chart.values, chart.categories, strict=True):
        if chart.kind == "bar":
            draw.rectangle((x - 0.32 * slot, y, x + 0.32 * slot, bottom - 1), fill=color)
        else:
            dot = max(3, font_size // 4)
            draw.ellipse((x - dot, y - dot, x + dot, y + dot), fill=color)
        # A white edge keeps the figure readable where the line runs through it.
        place = (x, y - 0.4 * font_size)
        draw.text(place, str(value), INK, font, "mb", stroke_width=2, stroke_fill=(255, 255, 255))
        draw.text((x, bottom + 0.4 * font_size), category, INK, font, anchor="ma")
    return image


def depict_chart(rng: Random, size: tuple[int, int], language: Language) -> Depiction:
    """Make, draw and describe a chart; `size` (width, height) is bent to what can be read."""
    width = max(size[0], MIN_SIZE[0])
    height = max(size[1], MIN_SIZE[1], width // 3)
    size = (width, min(height, 2 * width))
    chart = make_chart(rng, size[0])
    title, title_zh = chart.topic[:2]
    kind_zh = {"bar": "柱状图", "line": "折线图"}[chart.kind]
    count = len(chart.values)
    return Depiction(
        image=draw_chart(chart, size),
        summary=say(
            language,
            f"A {chart.kind} chart titled {title} with {count} values.",
            f"一张{kind_zh}，显示{title_zh}的{count}个数值。",
        ),
        details=_details(chart, language),
        questions=_questions(rng, chart, language),
        describe_request=say(language, "Describe this chart.", "请描述这张图表。"),
    )


def _details(chart: Chart, language: Language) -> list[str]:
    """Colour and unit, one entry per value with its change, then the sums."""
    unit, total = chart.unit(language), sum(chart.values)
    marks, marks_zh = ("bars", "柱子") if chart.kind == "bar" else ("line", "折线")
    verb = "are" if chart.kind == "bar" else "is"
    sentences = [
        say(
            language,
            f"The {marks} {verb} {chart.color} and the values are given in {unit}.",
            f"{marks_zh}为{COLORS[chart.color].zh}，单位是{unit}。",
        )
    ]
    for i, (category, value) in enumerate(zip(chart.categories, chart.values, strict=True)):
        sentence = say(
            language, f"{category} stands at {value} {unit}.", f"{category}为{value}{unit}。"
        )
        if i > 0:
            previous, change = chart.categories[i - 1], value - chart.values[i - 1]
            more, more_zh = ("more", "多") if change > 0 else ("less", "少")
            sentence += say(
                language,
                f" That is {abs(change)} {more} than {previous}.",
                f"比{previous}{more_zh}{abs(change)}{unit}。",
            )
        sentences.append(sentence)
    high, low = max(chart.values), min(chart.values)
    high_at = chart.categories[chart.values.index(high)]
    low_at = chart.categories[chart.values.index(low)]
    sentences += [
        say(
            language,
            f"The highest value is {high} at {high_at} and the lowest is {low} at {low_at}, "
            f"a range of {high - low}.",
            f"最高值是{high_at}的{high}，最低值是{low_at}的{low}，相差{high - low}。",
        ),
        say(
            language,
            f"All {len(chart.values)} values together make {total} {unit}.",
            f"{len(chart.values)}个数值合计{total}{unit}。",
        ),
    ]
    return sentences


def _questions(rng: Random, chart: Chart, language: Language) -> list[QuestionAnswer]:
    """Questions with one right answer each, in random order."""
    categories, values, unit = chart.categories, chart.values, chart.unit(language)
    first, second = rng.sample(range(len(values)), 2)
    limit = rng.choice([20, 40, 60, 80])
    title = say(language, chart.topic[0], chart.topic[1])
    amount = say(language, f"{values[first]} {unit}", f"{values[first]}{unit}")
    pairs = [
        (
            f"What is the value for {categories[first]}?",
            f"{categories[first]}的数值是多少？",
            amount,
        ),
        (
            f"What is the value for {categories[second]}?",
            f"{categories[second]}的数值是多少？",
            str(values[second]),
        ),
        (
            "Which entry has the highest value?",
            "哪一项的数值最高？",
            categories[values.index(max(values))],
        ),
        (
            "Which entry has the lowest value?",
            "哪一项的数值最低？",
            categories[values.index(min(values))],
        ),
        (
            f"How far apart are {categories[first]} and {categories[second]}?",
            f"{categories[first]}和{categories[second]}相差多少？",
            str(abs(values[first] - values[second])),
        ),
        (
            f"Is {categories[first]} higher than {categories[second]}?",
            f"{categories[first]}比{categories[second]}高吗？",
            yes_no(language, values[first] > values[second]),
        ),
        (
            f"How many entries are above {limit}?",
            f"有几项超过{limit}？",
            str(sum(value > limit for value in values)),
        ),
        (
            "What does the chart show?",
            "这张图表显示的是什么？",
            say(language, f"{title}, in {unit}.", f"{title}，单位为{unit}。"),
        ),
    ]
    rng.shuffle(pairs)
    return [QuestionAnswer(say(language, en, zh), answer) for en, zh, answer in pairs]
