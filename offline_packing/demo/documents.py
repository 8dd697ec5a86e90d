"""Demo documents: receipts, notices, tables and signs drawn as ASCII text, every word known."""

from collections.abc import Callable
from random import Random

from PIL import Image, ImageDraw

from offline_packing.demo.depiction import INK, PALE_INK, Depiction, QuestionAnswer, load_font
from offline_packing.demo.words import Language, count_noun, say

_NAMES = ("Ada", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun")
_SHOPS = ("Corner Bakery", "Green Grocer", "Harbor Cafe", "Paper & Pen", "Hill Market")
_GOODS = ("Bread", "Coffee", "Apples", "Milk", "Tea", "Rice", "Soap", "Pencils", "Honey", "Soup")
_ROOMS = ("Room 12", "Room 27", "Hall A", "Hall B", "the library", "the garden")
_EVENTS = ("Staff meeting", "Chess evening", "Fire drill", "Book fair", "Choir practice")
_REMARKS = (
    "Please arrive ten minutes early.",
    "Tea and biscuits will be served.",
    "Bring your own pen and paper.",
    "The side entrance stays locked.",
    "Guests are welcome to join.",
    "Parking is free after six.",
    "Sign the list at the front desk.",
    "Questions go to the office.",
    "The lift is being repaired.",
    "Keep the corridor clear of bags.",
    "Photos may be taken for the newsletter.",
    "The next date will be announced.",
)
_SIGNS = ("PLATFORM", "GATE", "EXIT", "TRACK", "BAY", "PIER")
_PLACES = ("OSLO", "ROME", "LIMA", "CAIRO", "DELHI", "PARIS")

#: Left and right text of each drawn line; a single text stands on the left alone.
_Lines = list[tuple[str, str]]


def depict_document(rng: Random, size: tuple[int, int], language: Language) -> Depiction:
    """Draw and describe a document about `size[0]` pixels wide; its text decides its height."""
    return rng.choice(_KINDS)(rng, size[0], language)


def depict_sign(rng: Random, width: int, language: Language) -> Depiction:
    """A one-line sign eight times as wide as high."""
    sign, number, place = rng.choice(_SIGNS), rng.randint(1, 40), rng.choice(_PLACES)
    text = f"{sign} {number}  {place}  {rng.randint(6, 22):02d}:{rng.randrange(0, 60, 5):02d}"
    clock = text[-5:]
    height = width // 8
    image = Image.new("RGB", (width, height), (20, 50, 110))
    ImageDraw.Draw(image).text(
        (width / 2, height / 2), text, (255, 255, 255), load_font(int(height * 0.5)), anchor="mm"
    )
    details = [
        say(language, f"The sign reads: {text}.", f"牌子上写着：{text}。"),
        say(language, f"The time on it is {clock}.", f"上面的时间是{clock}。"),
    ]
    questions = [
        QuestionAnswer(say(language, "What time is shown?", "上面显示的时间是几点？"), clock),
        QuestionAnswer(say(language, "Which city is named?", "上面写的是哪座城市？"), place),
        QuestionAnswer(
            say(language, "What number is on the sign?", "牌子上的编号是多少？"), str(number)
        ),
    ]
    summary = say(
        language, f"A blue sign that names {place.capitalize()}.", f"一块写有{place}的蓝色牌子。"
    )
    return _document(image, summary, details, questions, language)


def _depict_receipt(rng: Random, width: int, language: Language) -> Depiction:
    shop = rng.choice(_SHOPS)
    goods = rng.sample(_GOODS, rng.randint(2, len(_GOODS)))
    bought = [(item, rng.randint(1, 5), rng.randint(50, 900)) for item in goods]
    total = sum(count * cents for _, count, cents in bought)
    date = f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    lines: _Lines = [(shop, ""), (f"Date {date}", ""), ("", "")]
    lines += [(f"{count} x {item}", _money(count * cents)) for item, count, cents in bought]
    lines += [("", ""), ("TOTAL", _money(total))]
    details = [say(language, f"It is dated {date}.", f"日期是{date}。")]
    for item, count, cents in bought:
        details.append(
            say(
                language,
                f"{count} x {item} at {_money(cents)} each comes to {_money(count * cents)}.",
                f"{item}单价{_money(cents)}，买了{count}份，共{_money(count * cents)}。",
            )
        )
    details.append(say(language, f"The total is {_money(total)}.", f"总计{_money(total)}。"))
    item, count, cents = rng.choice(bought)
    pairs = [
        ("What is the total?", "总金额是多少？", _money(total)),
        ("What is the date?", "日期是哪一天？", date),
        ("Which shop is it from?", "这是哪家店的小票？", shop),
        (f"How many {item} were bought?", f"{item}买了几份？", str(count)),
        (f"How much is the line for {item}?", f"{item}这一行是多少钱？", _money(count * cents)),
        ("How many different items are listed?", "一共列了几种商品？", str(len(bought))),
    ]
    summary = say(
        language,
        f"A receipt from {shop} with {count_noun(len(bought), 'item')}.",
        f"{shop}的一张小票，共{len(bought)}种商品。",
    )
    questions = _shuffled(rng, pairs, language)
    # A receipt is black on white: half of them are stored with one channel.
    image = _draw_lines(lines, min(width, 420))
    image = image.convert("L") if rng.random() < 0.5 else image
    return _document(image, summary, details, questions, language)


def _depict_notice(rng: Random, width: int, language: Language) -> Depiction:
    event, room, name = rng.choice(_EVENTS), rng.choice(_ROOMS), rng.choice(_NAMES)
    clock = f"{rng.randint(8, 20):02d}:{rng.randrange(0, 60, 15):02d}"
    remarks = rng.sample(_REMARKS, rng.randint(1, len(_REMARKS)))
    texts = [event, f"Where: {room}", f"When: {clock}", f"Ask: {name}", "", *remarks]
    details = [
        say(language, f"The heading says: {event}.", f"标题是：{event}。"),
        say(
            language,
            f"It takes place in {room} at {clock}, and {name} answers questions.",
            f"地点是{room}，时间是{clock}，联系人是{name}。",
        ),
    ]
    for i, remark in enumerate(remarks, start=1):
        details.append(
            say(language, f'Remark {i} reads: "{remark}"', f"第{i}条说明写着：“{remark}”")
        )
    pairs = [
        ("Where does it take place?", "活动在哪里举行？", room),
        ("At what time does it start?", "活动几点开始？", clock),
        ("Who should be asked?", "有问题应该找谁？", name),
        ("What is announced?", "通知的内容是什么？", event),
        ("What does the last line say?", "最后一行写的是什么？", remarks[-1]),
        ("Transcribe the remarks.", "请抄写所有说明。", "\n".join(remarks)),
    ]
    summary = say(language, f"A notice about: {event}.", f"一张关于{event}的通知。")
    questions = _shuffled(rng, pairs, language)
    image = _draw_lines([(text, "") for text in texts], width)
    return _document(image, summary, details, questions, language)


def _depict_table(rng: Random, width: int, language: Language) -> Depiction:
    num_columns = rng.randint(2, max(2, min(5, width // 110)))
    columns = rng.sample(_GOODS, num_columns)
    rows = rng.sample(_NAMES, rng.randint(2, len(_NAMES)))
    cells = {(row, column): rng.randint(0, 99) for row in rows for column in columns}
    details = [
        say(
            language,
            f"The columns are {', '.join(columns)}.",
            f"各列依次是{'、'.join(columns)}。",
        )
    ]
    for row in rows:
        values = ", ".join(f"{column} {cells[row, column]}" for column in columns)
        total = sum(cells[row, column] for column in columns)
        details.append(
            say(
                language,
                f"The row of {row} holds {values}, {total} in all.",
                f"{row}这一行是{values}，合计{total}。",
            )
        )
    row, column = rng.choice(rows), rng.choice(columns)
    column_total = sum(cells[name, column] for name in rows)
    pairs = [
        (
            f"What is the value of {row} under {column}?",
            f"{row}在{column}一列的数值是多少？",
            str(cells[row, column]),
        ),
        (
            f"What is the sum of the column {column}?",
            f"{column}一列的总和是多少？",
            str(column_total),
        ),
        ("How many rows are below the header?", "表头下面有几行？", str(len(rows))),
        ("How many columns follow Name?", "Name之后有几列？", str(len(columns))),
        ("Whose row comes first?", "第一行是谁的？", rows[0]),
        ("Whose row comes last?", "最后一行是谁的？", rows[-1]),
    ]
    summary = say(
        language,
        f"A table with {len(rows)} rows and {count_noun(num_columns, 'column')} of numbers.",
        f"一张{len(rows)}行、{num_columns}列数字的表格。",
    )
    grid = [["Name", *columns], *([row, *(str(cells[row, c]) for c in columns)] for row in rows)]
    image = _draw_grid(grid, width)
    return _document(image, summary, details, _shuffled(rng, pairs, language), language)


def _document(
    image: Image.Image,
    summary: str,
    details: list[str],
    questions: list[QuestionAnswer],
    language: Language,
) -> Depiction:
    request = say(language, "Describe this document.", "请描述这份文件的内容。")
    return Depiction(image, summary, details, questions, request)


def _shuffled(
    rng: Random, pairs: list[tuple[str, str, str]], language: Language
) -> list[QuestionAnswer]:
    rng.shuffle(pairs)
    return [QuestionAnswer(say(language, en, zh), answer) for en, zh, answer in pairs]


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def _draw_lines(lines: _Lines, width: int) -> Image.Image:
    """Lines of text, the first one as heading, in the largest font that fits `width` pixels."""
    font_size = 22
    while font_size > 10 and _widest(lines, font_size) > 0.9 * width:
        font_size -= 1
    # Too narrow even for the smallest font: the page grows, the text is never cut.
    width = max(width, int(_widest(lines, font_size) / 0.9) + 1)
    margin, step = 0.05 * width, 1.55 * font_size
    image = Image.new("RGB", (width, int(2 * margin + step * len(lines))), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for i, (left, right) in enumerate(lines):
        y = margin + (i + 0.5) * step
        font = load_font(font_size + 3 if i == 0 else font_size)
        draw.text((margin, y), left, INK, font, anchor="lm")
        draw.text((width - margin, y), right, INK, font, anchor="rm")
    y = margin + step
    draw.line((margin, y, width - margin, y), fill=PALE_INK, width=2)
    return image


def _widest(lines: _Lines, font_size: int) -> float:
    """Pixels of the widest line, with a gap between left and right text."""
    heading, body = load_font(font_size + 3), load_font(font_size)
    widths = [body.getlength(left + "    " + right if right else left) for left, right in lines]
    return max(heading.getlength(lines[0][0]), *widths)


def _draw_grid(grid: list[list[str]], width: int) -> Image.Image:
    """A ruled table with a shaded first row; all columns equally wide."""
    font_size = max(11, min(20, width // (6 * len(grid[0]))))
    font, step = load_font(font_size), 2 * font_size
    needed = max(font.getlength(text) for row in grid for text in row) + font_size
    width = max(width, int(needed * len(grid[0])) + 1)
    image = Image.new("RGB", (width, step * len(grid) + 1), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, step), fill=(228, 233, 242))
    column_width = (width - 1) / len(grid[0])
    for i, row in enumerate(grid):
        for j, text in enumerate(row):
            draw.text(((j + 0.5) * column_width, (i + 0.5) * step), text, INK, font, anchor="mm")
        draw.line((0, i * step, width, i * step), fill=PALE_INK)
    for j in range(len(grid[0]) + 1):
        draw.line((j * column_width, 0, j * column_width, image.height), fill=PALE_INK)
    draw.line((0, image.height - 1, width, image.height - 1), fill=PALE_INK)
    return image


_KINDS: tuple[Callable[[Random, int, Language], Depiction], ...] = (
    _depict_receipt,
    _depict_notice,
    _depict_table,
)
