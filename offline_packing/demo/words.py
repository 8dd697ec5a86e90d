"""The bilingual vocabulary of the demo dataset, and small helpers for true sentences."""

import re
from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]


@dataclass(frozen=True)
class Color:
    """A named color; the value in `rgb` is what is drawn."""

    zh: str
    rgb: tuple[int, int, int]


#: Far enough apart that the nearest one is still the right one after JPEG compression.
COLORS: dict[str, Color] = {
    "red": Color("红色", (214, 40, 40)),
    "orange": Color("橙色", (245, 130, 20)),
    "yellow": Color("黄色", (240, 205, 20)),
    "green": Color("绿色", (34, 139, 60)),
    "cyan": Color("青色", (0, 180, 190)),
    "blue": Color("蓝色", (38, 84, 200)),
    "purple": Color("紫色", (120, 50, 160)),
    "pink": Color("粉色", (245, 130, 180)),
    "brown": Color("棕色", (120, 70, 35)),
    "black": Color("黑色", (25, 25, 25)),
    "gray": Color("灰色", (128, 128, 128)),
}
#: Pale, so that every color above stands out.
BACKGROUNDS: dict[str, Color] = {
    "white": Color("白色", (255, 255, 255)),
    "cream": Color("米色", (252, 244, 220)),
    "light blue": Color("浅蓝色", (222, 236, 250)),
    "light green": Color("浅绿色", (224, 242, 224)),
}
SHAPES: dict[str, str] = {
    "circle": "圆形",
    "square": "正方形",
    "triangle": "三角形",
    "diamond": "菱形",
    "hexagon": "六边形",
    "star": "五角星",
}
#: REGIONS[row][column]: the picture in thirds.
REGIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("top left", "左上方"), ("top center", "上方中间"), ("top right", "右上方")),
    (("middle left", "左侧中间"), ("center", "正中间"), ("middle right", "右侧中间")),
    (("bottom left", "左下方"), ("bottom center", "下方中间"), ("bottom right", "右下方")),
)
ORDINALS: tuple[tuple[str, str], ...] = (("first", "第一"), ("second", "第二"), ("third", "第三"))

_TOKEN_LIKE = re.compile(r"[A-Za-z]+|[^\sA-Za-z]|\n+| (?=\d)")
_CJK = re.compile(r"[\u4e00-\u9fff]")


def say(language: Language, en: str, zh: str) -> str:
    """The sentence in the wanted language."""
    return en if language == "en" else zh


def count_noun(count: int, noun: str) -> str:
    """`1 star`, `2 stars`, `0 stars`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def with_article(phrase: str) -> str:
    """`a red circle`, `an orange circle`."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def capitalized(sentence: str) -> str:
    """The sentence with a capital first letter and the rest as it was."""
    return sentence[:1].upper() + sentence[1:]


def yes_no(language: Language, value: bool) -> str:
    """`Yes` or `No` in the wanted language."""
    return say(language, "Yes" if value else "No", "是" if value else "否")


def estimate_num_tokens(text: str) -> int:
    """About as many tokens as a Qwen tokenizer makes of a text, without loading one.

    One per English word, digit or sign, one for a blank before a digit, three for four Chinese
    characters. It steers lengths; nothing relies on it being exact.
    """
    num_tokens = len(_TOKEN_LIKE.findall(text))
    num_cjk = len(_CJK.findall(text))
    return num_tokens - num_cjk // 4
