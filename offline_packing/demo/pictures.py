"""Demo pictures and facts about them: scenes of shapes, charts, documents."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from random import Random
from typing import Any, Final

import yaml
from PIL import Image, ImageDraw, ImageFont

_PHRASES: Final = yaml.safe_load(resources.files(__package__).joinpath("phrases.yaml").read_bytes())
_DRAWN: Final = _PHRASES.pop("drawn")
_COLORS, _GROUNDS = ({k: tuple(rgb) for k, rgb in _DRAWN[n].items()} for n in ("colors", "grounds"))
_INK, _PALE_INK, _WHITE = (45, 45, 50), (205, 205, 210), (255, 255, 255)
_load_font = lru_cache(ImageFont.load_default)  # scalable, and needs no font file


class Language(dict[str, Any]):
    """Names of things, `say["color"]["red"]`, and sentences, `say("ask_sum", a=1, b=2)`."""

    def __call__(self, phrase: str, **values: Any) -> str:
        return str(self[phrase].format(**values))


LANGUAGES: Final = {name: Language(phrases) for name, phrases in _PHRASES.items()}


@dataclass(frozen=True)
class Picture:
    """A picture with true statements about it, in one language."""

    #: RGB, upright.
    image: Image.Image
    #: A request that any first few of `details` answer.
    request: str
    #: True one by one; the first is about the whole.
    details: list[str]
    #: (question, its only right answer), to be asked in any order; at least four.
    questions: list[tuple[str, str]]
    #: `{"objects": [{"color", "shape", "center": [x, y], "radius"}]}` in pixels,
    #: `{"values": {name: value}}` or `{"lines": [text]}`.
    drawn: dict[str, Any]


def draw_picture(rng: Random, say: Language, *, overlong: bool) -> Picture:
    """A picture of a random kind and size, or one whose description alone is longer than a
    sequence, whatever pixel limits make of the picture itself."""
    (kind,) = rng.choices(list(_DRAWN["kinds"]), list(_DRAWN["kinds"].values()))
    if overlong:
        return draw_scene(rng, say, (700, 520), 96)
    if kind in _DRAWN["sides"]:
        width, height = (rng.randint(*sides) for sides in rng.sample(_DRAWN["sides"][kind], 2))
    else:
        usual = (round(280 * math.exp(rng.gauss(0, 0.5))) for _ in range(2))
        width, height = (max(60, min(900, side)) for side in usual)
    if kind in ("chart", "document"):
        return (draw_chart if kind == "chart" else draw_document)(rng, say, (width, height))
    return draw_scene(rng, say, (width, height), rng.randint(18, 40) if kind == "crowd" else None)


def draw_scene(
    rng: Random, say: Language, size: tuple[int, int], num_shapes: int | None = None
) -> Picture:
    """Shapes in different cells of a grid over (width, height) pixels: none overlap, none touch the
    border. Cells are made small enough for about `num_shapes`, if that many are wanted."""
    width, height = size
    cell = math.exp(rng.uniform(math.log(38), math.log(150)))
    cell = min(cell, 0.9 * math.sqrt(width * height / (num_shapes or 1)))
    columns, rows = max(1, round(width / cell)), max(1, round(height / cell))
    sides = width / columns, height / rows
    count = min(num_shapes or rng.randint(1, min(columns * rows, 40)), columns * rows)
    ground = rng.choice(list(_GROUNDS))
    image = Image.new("RGB", (2 * width, 2 * height), _GROUNDS[ground])  # halved: smooth edges
    objects: list[dict[str, Any]] = []
    for number in sorted(rng.sample(range(columns * rows), count)):
        radius = max(4, int(rng.uniform(0.26, 0.42) * min(sides)))
        x, y = (
            int((place + 0.5) * side + rng.uniform(-1, 1) * max(0, side / 2 - radius - 2))
            for place, side in zip((number % columns, number // columns), sides, strict=True)
        )
        color, shape = rng.choice(list(_COLORS)), rng.choice(list(_DRAWN["shapes"]))
        objects.append({"color": color, "shape": shape, "center": [x, y], "radius": radius})
        corners, first = _DRAWN["shapes"][shape]
        outline = []
        for i in range(corners):
            angle = math.radians(first + 360 * i / corners)
            reach = radius * (0.45 if shape == "star" and i % 2 else 1)
            corner = (x + 0.5 + reach * math.cos(angle), y + 0.5 + reach * math.sin(angle))
            outline.append((2 * corner[0], 2 * corner[1]))
        ImageDraw.Draw(image).polygon(outline, _COLORS[color])
    return _tell_scene(rng, say, image.reduce(2), objects, ground)


def _tell_scene(
    rng: Random, say: Language, image: Image.Image, objects: list[dict[str, Any]], ground: str
) -> Picture:
    names = [
        say("object", color=say["color"][item["color"]], shape=say["shape"][item["shape"]])
        for item in objects
    ]
    details = [say("scene", ground=say["ground"][ground], n=len(objects))]
    for kind in ("color", "shape"):
        counts = Counter(say[kind][item[kind]] for item in objects).items()
        details.append(say(f"{kind}s", counts=", ".join(f"{name} {n}" for name, n in counts)))
    for item, name in zip(objects, names, strict=True):
        (x, y), radius = item["center"], item["radius"]
        region = say["region"][3 * y // image.height * 3 + 3 * x // image.width]
        details.append(say("place", region=region, name=name, radius=radius, x=x, y=y))
    color = rng.choice(list(_COLORS))
    (x, y), picked = rng.choice([(o["center"], n) for o, n in zip(objects, names, strict=True)])
    ordered = sorted(range(len(objects)), key=lambda i: objects[i]["center"])
    same_color = sum(item["color"] == color for item in objects)
    questions = [
        (say("ask_count"), str(len(objects))),
        (say("ask_color", color=say["color"][color]), str(same_color)),
        (say("ask_ground"), say["ground"][ground]),
        (say("ask_point", x=x, y=y), picked),
        (say("ask_order"), ", ".join(names[i] for i in ordered)),
    ]
    return Picture(image, say("ask_scene"), details, questions, {"objects": objects})


def draw_chart(rng: Random, say: Language, size: tuple[int, int]) -> Picture:
    """Whole numbers, no two equal, as bars or as a line with every value printed. (width, height)
    in pixels are bent to what can be read."""
    width = max(size[0], 200)
    height = min(max(size[1], 150, width // 3), 2 * width)
    kind, title = rng.choice(["bar", "line"]), rng.choice(_DRAWN["titles"])
    names = rng.choice(_DRAWN["series"])[: rng.randint(3, max(3, (width - 50) // 42))]
    values = dict(zip(names, rng.sample(range(4, 97), len(names)), strict=True))
    image = _draw_values(rng, (width, height), kind, title, values)
    details = [say("chart", kind=say["kind"][kind], title=title, n=len(values))]
    details += [say("value", name=name, value=value) for name, value in values.items()]
    details.append(say("total", n=sum(values.values())))
    (name, other), limit = rng.sample(names, 2), rng.choice([20, 40, 60, 80])
    higher = say["answer"][values[name] > values[other]]
    questions = [
        (say("ask_value", name=name), str(values[name])),
        (say("ask_value", name=other), str(values[other])),
        (say("ask_highest"), max(names, key=values.__getitem__)),
        (say("ask_lowest"), min(names, key=values.__getitem__)),
        (say("ask_higher", name=name, other=other), higher),
        (say("ask_above", n=limit), str(sum(value > limit for value in values.values()))),
    ]
    return Picture(image, say("ask_chart"), details, questions, {"values": values})


def _draw_values(
    rng: Random, size: tuple[int, int], kind: str, title: str, values: dict[str, int]
) -> Image.Image:
    (width, height), fill = size, rng.choice(list(_COLORS.values()))
    image = Image.new("RGB", size, _WHITE)
    draw = ImageDraw.Draw(image)
    em = max(11, min(20, height // 18, width // max(17, 4 * len(values))))
    font = _load_font(em)
    left, right, top, bottom = 2.6 * em, width - 0.6 * em, 4.4 * em, height - 2.2 * em
    slot, unit = (right - left) / len(values), (bottom - top) / 100
    draw.text((width / 2, 0.5 * em), title, _INK, font, "ma")
    for tick in range(0, 101, 20):
        y = bottom - tick * unit
        draw.line((left, y, right, y), _PALE_INK if tick else _INK)
        draw.text((left - 0.4 * em, y), str(tick), _INK, font, "rm")
    points = [(left + (i + 0.5) * slot, bottom - v * unit) for i, v in enumerate(values.values())]
    if kind == "line":
        draw.line(points, fill, max(2, em // 5), joint="curve")
    for (x, y), (name, value) in zip(points, values.items(), strict=True):
        if kind == "bar":
            draw.rectangle((x - 0.32 * slot, y, x + 0.32 * slot, bottom - 1), fill)
        # A white edge keeps the figure readable where the line runs through it.
        edge: dict[str, Any] = {"stroke_width": 2, "stroke_fill": _WHITE}
        draw.text((x, y - 0.4 * em), str(value), _INK, font, "mb", **edge)
        draw.text((x, bottom + 0.4 * em), name, _INK, font, "ma")
    return image


def draw_document(rng: Random, say: Language, size: tuple[int, int]) -> Picture:
    """A receipt, a notice or a table, at least `size[0]` pixels wide; its text sets its height."""
    kind = rng.choice(["receipt", "notice", "table"])
    if kind == "receipt":
        cents = {item: rng.randint(50, 900) for item in _some(rng, "goods")}
        cents["TOTAL"] = sum(cents.values())
        rows = [[rng.choice(_DRAWN["shops"])], *([k, f"{v / 100:.2f}"] for k, v in cents.items())]
    elif kind == "notice":
        clock = f"{rng.randint(8, 20)}:{rng.randrange(0, 60, 15):02d}"
        rows = [[rng.choice(_DRAWN["events"])], [f"Hall {rng.choice('ABC')} at {clock}"]]
        rows += [[remark] for remark in _some(rng, "remarks")]
    else:
        goods = _some(rng, "goods", max(2, min(5, size[0] // 110)))
        rows = [["Name", *goods]]
        rows += [[name, *(str(rng.randint(0, 99)) for _ in goods)] for name in _some(rng, "people")]
    lines = [" ".join(row) for row in rows]
    picked = rng.randrange(1, len(lines))
    details = [say("document", kind=say["kind"][kind], n=len(lines), title=lines[0])]
    details += [say("line", i=i, text=text) for i, text in enumerate(lines, 1)]
    questions = [
        (say("ask_line", i=picked + 1), lines[picked]),
        (say("ask_last", i=picked + 1), lines[picked].split()[-1]),
        (say("ask_lines"), str(len(lines))),
        (say("ask_text"), "\n".join(lines)),
    ]
    image = _draw_rows(rows, size[0])
    return Picture(image, say("ask_document"), details, questions, {"lines": lines})


def _some(rng: Random, names: str, most: int = 10) -> list[str]:
    return rng.sample(_DRAWN[names], rng.randint(2, min(most, len(_DRAWN[names]))))


def _draw_rows(rows: list[list[str]], width: int) -> Image.Image:
    """Ruled rows, the first one shaded, all cells but the first of a row aligned right."""
    em = max(11, min(20, width // 18))
    font = _load_font(em)
    width = max(width, *(int(font.getlength("    ".join(row))) + 2 * em for row in rows))
    image = Image.new("RGB", (width, 2 * em * len(rows) + 1), _WHITE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 2 * em), (228, 233, 242))
    for i, row in enumerate(rows):
        draw.line((0, 2 * (i + 1) * em, width, 2 * (i + 1) * em), _PALE_INK)
        for j, text in enumerate(row):
            x = em + (width - 2 * em) * j / max(1, len(row) - 1)
            draw.text((x, (2 * i + 1) * em), text, _INK, font, "rm" if j else "lm")
    return image
