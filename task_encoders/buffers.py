"""Memory for the pixels of batches, used again once a batch is gone.

The kernel clears every page that it hands out, which takes longer than writing pixels into pages at
hand. A buffer is handed out again when nothing refers to it any more: no batch, tensor, array or
view. What waits is bounded by `_WAITING` buffers of at most `_LARGEST` bytes in a process.
"""

import math
import os
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Bytes from which the kernel hands out memory anew each time, as malloc keeps smaller pieces.
_SMALLEST: Final = 4 << 20
_LARGEST: Final = 1 << 30
#: One for images and one for videos; or for a batch that is read while another is trained on.
_WAITING: Final = 2

#: Buffers that nothing refers to. A deque takes them without a lock, which a finalizer, running
#: while this thread has the lock, would wait for without end.
_waiting: deque[npt.NDArray[np.uint8]] = deque(maxlen=_WAITING)
# A child would write into copies of its parent's pages.
os.register_at_fork(after_in_child=_waiting.clear)


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array without defined content, as `np.empty` does."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not _SMALLEST <= size <= _LARGEST:
        return np.empty(shape, dtype)
    memory = _take(size)
    # NumPy makes the owner of the memory the base of every view, but stops at an array that is
    # itself made of a memoryview: as long as there is a view, there is this array.
    lent = np.asarray(memoryview(memory))  # type: ignore[arg-type]
    weakref.finalize(lent, _waiting.append, memory).atexit = False
    return lent[:size].view(dtype).reshape(shape)


def _take(size: int) -> npt.NDArray[np.uint8]:
    """Take the smallest waiting buffer of at least `size` bytes, or a new one."""
    found = []
    with suppress(IndexError):  # what other threads take at the same time is not seen
        while True:
            found.append(_waiting.popleft())
    taken = min((one for one in found if len(one) >= size), key=len, default=None)
    _waiting.extend(one for one in found if one is not taken)
    # Batches differ a little: most later ones fit.
    return np.empty(size + size // 8, np.uint8) if taken is None else taken
