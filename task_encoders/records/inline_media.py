"""Media that stand in a record as text: `data:` URIs (RFC 2397), and base64 alone.

{"image_url": {"url": "data:image/png;base64,iVBORw0KGgo..."}} or {"image": "/9j/4AAQSk..."}
"""

import base64
import binascii
import re
from typing import Final
from urllib.parse import unquote

from task_encoders.samples import SampleError

#: No file of an image or a video is as short; the name of one may be.
_MIN_LENGTH: Final = 64
#: How the files of images and videos begin.
_BEGINNINGS: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*\0|MM\0\*|\x1aE\xdf\xa3|....ftyp", re.DOTALL
)
_HEADING: Final = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)


def is_inline(name: str) -> bool:
    """Whether the name of a medium is the medium itself: a `data:` URI, or base64 without a dot
    of a known kind of file."""
    if name[:5].lower() == "data:":
        return True
    if len(name) < _MIN_LENGTH or "." in name:
        return False
    try:
        return _BEGINNINGS.match(base64.b64decode(name[:16], validate=True)) is not None
    except ValueError:
        return False


def decode_inline(name: str) -> bytes:
    """The bytes of such a medium. Raises SampleError: bad_image, or of a video bad_video."""
    payload = name
    if name[:5].lower() == "data:":
        heading = _HEADING.match(name)
        if heading is None:
            raise _bad(name, "is not data:TYPE;base64,...")
        payload = name[heading.end() :]
        payload = unquote(payload) if "%" in payload else payload
    payload = "".join(payload.split()).rstrip("=")  # MIME breaks lines; some leave the end out
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(name, f"is no base64: {error}") from error


def _bad(name: str, problem: str) -> SampleError:
    reason = "bad_video" if name[:10].lower() == "data:video" else "bad_image"
    return SampleError(reason, f"{name[:40]!r}... {problem}")
