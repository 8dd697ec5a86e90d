"""Demo scenes: colored shapes on a plain ground; counts, colors and places are known exactly."""

import math
from collections import Counter
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from offline_packing.demo.depiction import Depiction, QuestionAnswer
from offline_packing.demo.words import (
    BACKGROUNDS,
    COLORS,
    REGIONS,
    SHAPES,
    Language,
    capitalized,
    count_noun,
    say,
    with_article,
    yes_no,
)

#: Shapes are drawn this much larger and reduced, which smooths their edges.
_OVERSAMPLING = 2
#: Unless more are asked for.
_MAX_OBJECTS = 40


@dataclass(frozen=True)
class SceneObject:
    """One shape; coordinates in pixels of the upright picture. Its center has its color."""

    color: str
    shape: str
    x: int
    y: int
    radius: int

    def name(self, language: Language) -> str:
        """`red circle`, without article."""
        return say(
            language, f"{self.color} {self.shape}", f"{COLORS[self.color].zh}{SHAPES[self.shape]}"
        )


@dataclass(frozen=True)
class Scene:
    """A picture of `objects` in reading order; none overlap, none touch the border."""

    width: int
    height: int
    background: str
    objects: tuple[SceneObject, ...]


def make_scene(rng: Random, size: tuple[int, int], num_objects: int | None = None) -> Scene:
    """Place shapes in different cells of a grid over a picture of `size` (width, height) in pixels.

    `num_objects` asks for about that many shapes by making the cells small enough.
    """
    width, height = size
    cell = math.exp(rng.uniform(math.log(38), math.log(150)))
    if num_objects is not None:
        cell = min(cell, 0.9 * math.sqrt(width * height / num_objects))
    num_columns, num_rows = max(1, round(width / cell)), max(1, round(height / cell))
    cells = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    count = num_objects or rng.randint(1, min(len(cells), _MAX_OBJECTS))
    objects = []
    for row, column in sorted(rng.sample(cells, min(count, len(cells)))):
        cell_width, cell_height = width / num_columns, height / num_rows
        radius = rng.uniform(0.26, 0.42) * min(cell_width, cell_height)
        # Jitter keeps the whole shape inside its own cell, so shapes never overlap.
        slack_x, slack_y = cell_width / 2 - radius - 1, cell_height / 2 - radius - 1
        x = (column + 0.5) * cell_width + rng.uniform(-1, 1) * max(0.0, slack_x)
        y = (row + 0.5) * cell_height + rng.uniform(-1, 1) * max(0.0, slack_y)
        color, shape = rng.choice(list(COLORS)), rng.choice(list(SHAPES))
        objects.append(SceneObject(color, shape, int(x), int(y), max(4, int(radius))))
    return Scene(width, height, rng.choice(list(BACKGROUNDS)), tuple(objects))


def draw_scene(scene: Scene) -> Image.Image:
    """The RGB picture of a scene."""
    size = (scene.width * _OVERSAMPLING, scene.height * _OVERSAMPLING)
    image = Image.new("RGB", size, BACKGROUNDS[scene.background].rgb)
    draw = ImageDraw.Draw(image)
    for item in scene.objects:
        # + 0.5: the middle of the pixel (x, y).
        x, y = (item.x + 0.5) * _OVERSAMPLING, (item.y + 0.5) * _OVERSAMPLING
        radius, fill = item.radius * _OVERSAMPLING, COLORS[item.color].rgb
        if item.shape == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            draw.polygon(_outline(item.shape, x, y, radius), fill=fill)
    return image.reduce(_OVERSAMPLING)


def _outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a shape about 2 * radius wide whose inside holds (x, y)."""
    if shape == "square":
        signs = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        return [(x + sx * radius, y + sy * radius) for sx, sy in signs]
    if shape == "triangle":
        return [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
    if shape == "star":
        radii, start = [radius, 0.45 * radius] * 5, -math.pi / 2
    else:
        radii, start = [radius] * {"diamond": 4, "hexagon": 6}[shape], 0.0
    step = 2 * math.pi / len(radii)
    return [
        (x + r * math.cos(start + i * step), y + r * math.sin(start + i * step))
        for i, r in enumerate(radii)
    ]


def depict_scene(
    rng: Random, size: tuple[int, int], language: Language, num_objects: int | None = None
) -> Depiction:
    """Make, draw and describe a scene of `size` (width, height) in pixels."""
    scene = make_scene(rng, size, num_objects)
    return Depiction(
        image=draw_scene(scene),
        summary=_summary(scene, language),
        details=_details(scene, language),
        questions=_questions(rng, scene, language),
        describe_request=say(
            language,
            "Describe what you see, starting at the top.",
            "请从上到下描述这张图片。",
        ),
        objects=[
            {"color": item.color, "shape": item.shape, "center": [item.x, item.y]}
            for item in scene.objects
        ],
    )


def _summary(scene: Scene, language: Language) -> str:
    count, ground = len(scene.objects), scene.background
    ground_zh = BACKGROUNDS[ground].zh
    if count == 1:
        name = scene.objects[0].name(language)
        english = capitalized(f"{with_article(name)} on {with_article(ground)} background.")
        return say(language, english, f"{ground_zh}背景上有一个{name}。")
    return say(
        language,
        f"{count} colored shapes on {with_article(ground)} background.",
        f"{ground_zh}背景上有{count}个彩色图形。",
    )


def _region(scene: Scene, item: SceneObject, language: Language) -> str:
    en, zh = REGIONS[3 * item.y // scene.height][3 * item.x // scene.width]
    return say(language, en, zh)


def _details(scene: Scene, language: Language) -> list[str]:
    """Colours and kinds counted, then one entry per shape."""
    colors = Counter(item.color for item in scene.objects)
    shapes = Counter(item.shape for item in scene.objects)
    by_color = ", ".join(f"{n} {color}" for color, n in colors.items())
    by_shape = ", ".join(count_noun(n, shape) for shape, n in shapes.items())
    by_color_zh = "、".join(f"{n}个{COLORS[color].zh}" for color, n in colors.items())
    by_shape_zh = "、".join(f"{n}个{SHAPES[shape]}" for shape, n in shapes.items())
    sentences = [
        say(language, f"Counted by color: {by_color}.", f"按颜色统计：{by_color_zh}。"),
        say(language, f"Counted by kind: {by_shape}.", f"按形状统计：{by_shape_zh}。"),
    ]
    for item in scene.objects:
        name, region = item.name(language), _region(scene, item, language)
        width = 2 * item.radius
        sentence = say(
            language,
            f"In the {region} there is {with_article(name)}, centered at ({item.x}, {item.y}) "
            f"and about {width} pixels wide.",
            f"{region}有一个{name}，中心在({item.x}, {item.y})，宽约{width}像素。",
        )
        sentences.append(sentence + _neighbor_clause(scene, item, language))
    return sentences


def _neighbor_clause(scene: Scene, item: SceneObject, language: Language) -> str:
    """Where the nearest other shape lies, by the larger of the two distances."""
    others = [other for other in scene.objects if other is not item]
    if not others:
        return ""
    other = min(others, key=lambda o: (math.dist((o.x, o.y), (item.x, item.y)), o.y, o.x))
    dx, dy = other.x - item.x, other.y - item.y
    if abs(dx) >= abs(dy):
        en, zh = ("to its right", "右边") if dx > 0 else ("to its left", "左边")
    else:
        en, zh = ("below it", "下边") if dy > 0 else ("above it", "上边")
    name, gap = other.name(language), max(abs(dx), abs(dy))
    return say(
        language,
        f" Its nearest neighbor is {with_article(name)} {gap} pixels {en}.",
        f"离它最近的是它{zh}{gap}像素处的一个{name}。",
    )


def _questions(rng: Random, scene: Scene, language: Language) -> list[QuestionAnswer]:
    """Questions with one right answer each, in random order."""
    items = scene.objects
    color, shape = rng.choice(list(COLORS)), rng.choice(list(SHAPES))
    color_zh, shape_zh = COLORS[color].zh, SHAPES[shape]
    pick = rng.choice(items)
    leftmost = min(items, key=lambda item: item.x)
    pairs = [
        ("How many shapes are there?", "图中有多少个图形？", str(len(items))),
        (
            f"How many {color} shapes can you count?",
            f"图中有几个{color_zh}的图形？",
            str(sum(item.color == color for item in items)),
        ),
        (
            f"How many {shape}s are there?",
            f"图中有几个{shape_zh}？",
            str(sum(item.shape == shape for item in items)),
        ),
        (
            f"Is there {with_article(color)} {shape}?",
            f"图中有{color_zh}的{shape_zh}吗？",
            yes_no(language, any((i.color, i.shape) == (color, shape) for i in items)),
        ),
        (
            "What color is the background?",
            "背景是什么颜色？",
            say(language, capitalized(scene.background), BACKGROUNDS[scene.background].zh),
        ),
        (
            f"What is drawn around the point ({pick.x}, {pick.y})?",
            f"坐标({pick.x}, {pick.y})处画的是什么？",
            say(language, capitalized(with_article(pick.name("en"))), f"一个{pick.name('zh')}"),
        ),
    ]
    if sum(item.x == leftmost.x for item in items) == 1:
        name = leftmost.name(language)
        answer = say(language, f"The {name} in the {_region(scene, leftmost, 'en')}.", name)
        pairs.append(("Which shape is furthest to the left?", "最左边的图形是什么？", answer))
    if len(items) > 1 and len({item.x for item in items}) == len(items):
        ordered = [item.name(language) for item in sorted(items, key=lambda item: item.x)]
        pairs.append(
            (
                "List the shapes from left to right.",
                "请从左到右列出所有图形。",
                say(language, ", ".join(ordered) + ".", "、".join(ordered) + "。"),
            )
        )
    rng.shuffle(pairs)
    return [QuestionAnswer(say(language, en, zh), answer) for en, zh, answer in pairs]
