"""What every kind of demo picture is: an image, and sentences that are true of it."""

from dataclasses import dataclass, field
from functools import lru_cache

from PIL import Image, ImageFont

INK = (45, 45, 50)
PALE_INK = (205, 205, 210)


@dataclass(frozen=True)
class QuestionAnswer:
    """One question about a picture, and its true answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Depiction:
    """A drawn picture together with what is true of it, in one language."""

    #: RGB or L, upright.
    image: Image.Image
    #: One short sentence about the whole.
    summary: str
    #: Sentences that hold one by one; any prefix of the list is a good description.
    details: list[str]
    #: Questions that can be asked in any order.
    questions: list[QuestionAnswer]
    #: A request that any prefix of `details` answers.
    describe_request: str
    #: `{"color", "shape", "center": [x, y]}` per drawn object, empty for charts and documents.
    objects: list[dict[str, object]] = field(default_factory=list)


@lru_cache(maxsize=64)
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own scalable font (ASCII only), so that no font file is needed.

    Raises RuntimeError if Pillow was built without FreeType.
    """
    font = ImageFont.load_default(size=size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError(
            "Pillow has no FreeType support, which the demo pictures need; install a Pillow wheel: "
            "pip install --force-reinstall --only-binary :all: pillow"
        )
    return font
