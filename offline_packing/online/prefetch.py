"""A dataset read ahead of the trainer, by a thread that fills a bounded queue."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Any, Final

from torch.utils.data import IterableDataset

from task_encoders.field_types import Count, checked

_PATIENCE: Final = 0.1  # seconds after which a waiting producer looks whether it is still wanted
_END: Final = object()  # comes after the last item


class Prefetched(IterableDataset[Any]):
    """An iterable dataset whose items are made while the trainer computes.

    Each pass has one producer thread, at most ``queue_size`` + 1 items ahead of the trainer. It
    ends with the pass, when the trainer drops or closes the iterator, and when the dataset raises:
    the error is raised where the trainer takes the next item.

    The state is that of the last item taken; items in the queue are produced again. A dataset
    without a state is read again from its beginning.
    """

    @checked
    def __init__(self, dataset: Any, *, queue_size: Count = 8) -> None:
        super().__init__()
        self.dataset = dataset
        self.queue_size = queue_size
        self._state: Mapping[str, Any] | None = None
        #: items that the next pass skips, if the dataset has no state
        self._skipped = 0

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.dataset)
        skipped, self._skipped = self._skipped, 0
        self._state = self._state_after(skipped)  # before the producer moves on
        return self._consume(source, skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state after the last item taken."""
        return dict(self._state_after(0) if self._state is None else self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after that item with the next pass."""
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state)
        else:
            self._skipped = state["taken"]
        self._state = state

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has any."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _consume(self, source: Iterator[Any], skipped: int) -> Iterator[Any]:
        # Each item with the state after it; last _END, or the dataset's error with None.
        queue: Queue[tuple[Any, Mapping[str, Any] | None]] = Queue(self.queue_size)
        stop = threading.Event()

        def put(item: Any, state: Mapping[str, Any] | None) -> bool:
            """Put an item as soon as there is room; return False if the consumer is gone."""
            while not stop.is_set():
                with suppress(Full):
                    queue.put((item, state), timeout=_PATIENCE)
                    return True
            return False

        def produce() -> None:
            taken = 0
            try:
                for taken, item in enumerate(source, start=1):
                    state = self._state_after(taken)
                    if taken > skipped and not put(item, state):
                        return
                put(_END, self._state_after(taken))
            except BaseException as error:  # noqa: BLE001 (the trainer handles it, whatever it is)
                put(error, None)

        producer = threading.Thread(target=produce, name="prefetch", daemon=True)
        producer.start()
        try:
            while True:
                item, state = queue.get()
                if state is None:
                    raise item
                self._state = state
                if item is _END:
                    return
                yield item
        finally:
            stop.set()
            producer.join(timeout=1)  # it takes longer only while the dataset reads a sample

    def _state_after(self, taken: int) -> Mapping[str, Any]:
        """Return the dataset's present state; or how many items of the pass came so far."""
        has_state = hasattr(self.dataset, "state_dict")
        return self.dataset.state_dict() if has_state else {"taken": taken}
