"""Write the demo dataset: pictures of scenes, charts and documents; captions, questions and
dialogues with known true answers.

PATH/captioning/cap_000000.jpg + .json      {"captions": [{"content": …}]} or {"caption": …}
PATH/vqa/000000000003.png + .json           {"messages": […], "images": ["000000000003.png"]}
PATH/vqa/000000000000_1.jpg + .json         numbered copy: one more question about that picture
PATH/bmr/dialogue_000001.json + pictures    several turns, system prompts, up to three pictures
PATH/bmr/output_00000000.json               text only, "images": []
PATH/bmr_jsonl/dialogues.jsonl + images/    one {"id", "messages", "images", "rating"} per line
PATH/truth.json                             what was drawn, and which samples are bad on purpose
"""

import contextlib
import io
import itertools
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson
import yaml
from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Transpose
from tqdm import tqdm

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
    """Distinct whole numbers, as bars or as a line with every value printed. (width, height) in
    pixels are changed until it can be read."""
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


#: `seed`, `num_samples`, `version`; `images`: relative path -> `size` (width, height) upright in
#: pixels, `orientation` (1: no EXIF tag), `mode`, and its content, as in `Picture.drawn`;
#: `set_aside`: "folder/key" of each sample that is bad on purpose -> the reason it must get.
Truth = dict[str, Any]

MIN_NUM_SAMPLES: Final = 50
#: Raise it when the same seed gives other files than before.
_VERSION: Final = 2
#: Folder -> its share of the samples, and the faults planted in it whatever its size.
_FOLDERS: Final[dict[str, tuple[float, tuple[str, ...]]]] = {
    "captioning": (0.35, ("truncated_image", "overlong")),
    "vqa": (0.30, ("missing_image", "overlong", "empty_answer")),
    "bmr": (0.27, ("bad_json", "overlong", "image_count_mismatch", "overlong")),
    "bmr_jsonl": (0.08, ("overlong",)),
}
#: EXIF orientation -> the transposition that turns the upright picture into the stored one.
_STORED_BY: Final = {6: Transpose.ROTATE_90, 3: Transpose.ROTATE_180, 8: Transpose.ROTATE_270}
#: Every _TURN_EVERY-th JPEG is stored turned, every _MODE_EVERY-th picture in another mode.
_TURN_EVERY, _MODE_EVERY = 20, 8
#: Text and pictures of one sample stay below this, except where it is meant to be overlong.
_MAX_NUM_TOKENS: Final = 1750
#: The first _NUM_COPIES of every _COPIES_EVERY VQA samples ask about one picture.
_COPIES_EVERY, _NUM_COPIES = 25, 3
_TOKEN_LIKE: Final = re.compile(r"[A-Za-zÀ-ÿ]{1,6}|[^\sA-Za-zÀ-ÿ]|\n+| (?=\d)")

Turn = tuple[str, str]  # question and answer
Sample = tuple[str, dict[str, Any], dict[str, Picture]]  # key, JSON, pictures by file name


def generate_demo_dataset(
    path: str | os.PathLike[str], *, seed: int = 0, num_samples: int = 2000, progress: bool = True
) -> Truth:
    """Write the dataset to `path` (which appears only when complete) and return the truth about it.

    The same seed and number give the same bytes with the same Pillow. If `path` already holds that
    dataset, nothing is written. Raises FileExistsError if `path` holds anything else, ValueError if
    `num_samples` is below MIN_NUM_SAMPLES.
    """
    if num_samples < MIN_NUM_SAMPLES:
        raise ValueError(f"demo: num_samples {num_samples} < {MIN_NUM_SAMPLES}; ask for more")
    path, about = Path(path), {"seed": seed, "num_samples": num_samples, "version": _VERSION}
    if path.exists():
        with contextlib.suppress(OSError, ValueError):
            found: Truth = orjson.loads((path / "truth.json").read_bytes())
            if about.items() <= found.items():
                return found
        raise FileExistsError(
            f"'{path}' exists and is not the demo dataset {about}; remove that folder or choose "
            "another"
        )
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left over from a killed run
    truth: Truth = {**about, "images": {}, "set_aside": {}}
    counts = {folder: int(share * num_samples) for folder, (share, _) in _FOLDERS.items()}
    counts["captioning"] += num_samples - sum(counts.values())
    with tqdm(total=num_samples, desc="demo data", unit="sample", disable=not progress) as bar:
        for folder, count in counts.items():
            _write_folder(partial / folder, count, truth, bar)
    (partial / "truth.json").write_bytes(orjson.dumps(truth, option=orjson.OPT_INDENT_2))
    partial.rename(path)
    return truth


def _write_folder(folder: Path, count: int, truth: Truth, bar: tqdm) -> None:
    """Make and write the samples of a folder, its faults spread evenly among them."""
    names, lines = _FOLDERS[folder.name][1], folder / "dialogues.jsonl"
    faults = {(i + 1) * count // (len(names) + 1): name for i, name in enumerate(names)}
    (folder / "images" if folder.name == "bmr_jsonl" else folder).mkdir(parents=True)
    for index in range(count):
        fault = faults.get(index)
        key, record, pictures = _make_sample(folder.name, truth["seed"], index, fault)
        if fault:
            truth["set_aside"][f"{folder.name}/{key}"] = fault
        for name, picture in pictures.items():
            if fault != "missing_image":
                content = _encode(picture, f"{folder.name}/{name}", truth["images"])
                cut = len(content) * 8 // 10 if fault == "truncated_image" else None
                (folder / name).write_bytes(content[:cut])
        if fault == "image_count_mismatch":
            record["messages"][-2]["content"] = "<image>\n" * (len(pictures) + 1) + "What is this?"
        elif fault == "empty_answer":
            record["messages"][-1]["content"] = ""
        line = orjson.dumps(record) + b"\n"
        line = line[: len(line) // 2] if fault == "bad_json" else line
        with (lines if folder.name == "bmr_jsonl" else folder / f"{key}.json").open("ab") as file:
            file.write(line)
        bar.update()


def _encode(picture: Picture, name: str, images: dict[str, Any]) -> bytes:
    """The file of a picture by the suffix of its name; the truth about it is put into `images`."""
    jpeg, count, orientation = name.endswith(".jpg"), len(images), 1
    modes = ["L"] if "lines" in picture.drawn else ["CMYK"] if jpeg else ["P", "RGBA"]
    mode = modes[count // _MODE_EVERY % len(modes)] if count % _MODE_EVERY == 5 else "RGB"
    image, exif = picture.image.convert(mode), Image.Exif()
    turn, place = divmod(sum(other.endswith(".jpg") for other in images), _TURN_EVERY)
    if jpeg and place == _TURN_EVERY // 2:
        orientation = list(_STORED_BY)[turn % len(_STORED_BY)]
        image, exif[0x0112] = image.transpose(_STORED_BY[orientation]), orientation
    about = {"size": list(picture.image.size), "orientation": orientation, "mode": mode}
    images[name] = about | picture.drawn
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if jpeg else "PNG", quality=90, exif=exif)
    return buffer.getvalue()


def _make_sample(folder: str, seed: int, index: int, fault: str | None) -> Sample:
    """Sample `index` of a folder, which depends on nothing else. `fault` is the reason it must be
    set aside for; here it matters only if it changes the picture or the text."""
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
    elif pictures:
        turns = _picture_turns(rng, say, pictures, fault)
    else:
        turns = _text_turns(rng, say, fault)
    texts = [text for turn in turns for text in turn]
    if "<image>" not in texts[0] and rng.random() > 0.06:  # none at all means the same
        texts[0] = "<image>\n" * len(pictures) + texts[0]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if is_dialogue and rng.random() < 1 / 6:
        messages.insert(0, {"role": "system", "content": rng.choice(say["system"])})
    identity = {"id": key} if folder == "bmr_jsonl" else {}
    rated = {"rating": 1 + index % 5} if is_dialogue else {}
    return key, {**identity, "messages": messages, "images": list(drawn), **rated}, drawn


def _question(rng: Random, say: Language, picture: Picture, copy: int, fault: str | None) -> Turn:
    """One question; each copy of a sample asks another question."""
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


def _text_turns(rng: Random, say: Language, fault: str | None) -> list[Turn]:
    """Up to eight small tasks with right answers; short dialogues have few."""
    budget = 4000 if fault == "overlong" else _log_uniform(rng, 10, 1500)
    count = rng.randint(1, max(1, min(8, budget // 12)))
    each, turns = budget // count, list[Turn]()
    for _ in range(count):
        if each < 25:
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            turns.append((say("ask_sum", a=a, b=b), str(a + b)))
        elif rng.random() < 0.4:
            numbers = [rng.randint(1, 999) for _ in range(max(3, min(90, each // 10)))]
            asked, answer = (", ".join(map(str, some)) for some in (numbers, sorted(numbers)))
            turns.append((say("ask_sort", numbers=asked), answer))
        else:
            days, left = list[str](), each
            while not days or left > 0:
                parts = {part: rng.choice(say[part]) for part in ("morning", "noon")}
                days.append(say("day", i=len(days) + 1, hour=rng.randint(7, 10), **parts))
                left -= estimate_num_tokens(days[-1])
            turns.append((say("ask_trip", n=len(days)), "\n\n".join(days)))
    return turns


def _text_budget(rng: Random, pictures: Sequence[Picture], fault: str | None) -> int:
    """Tokens for the text beside some pictures. One text in six is as long as possible: drawn
    lengths alone would leave the long tail thin."""
    used = sum(round(p.image.width / 28) * round(p.image.height / 28) + 4 for p in pictures)
    room = max(40, _MAX_NUM_TOKENS - used)
    budget = room if rng.random() < 1 / 6 else _log_uniform(rng, 8, room)
    return 1_000_000 if fault == "overlong" else budget


def _log_uniform(rng: Random, low: float, high: float) -> int:
    """Draw log-uniformly: 10 to 100 is as likely as 100 to 1000."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _description(picture: Picture, say: Language, budget: int) -> str:
    """The first detail and all others that fit, four to a paragraph."""
    used = itertools.accumulate(map(estimate_num_tokens, picture.details[1:]))
    kept = picture.details[: 1 + sum(tokens <= budget for tokens in used)]
    paragraphs = (kept[i : i + 4] for i in range(0, len(kept), 4))
    return "\n\n".join(map(say["space"].join, paragraphs))


def estimate_num_tokens(text: str) -> int:
    """Estimate a text's number of Qwen tokens without loading a tokenizer."""
    return len(_TOKEN_LIKE.findall(text))
