"""A dataset read ahead of the trainer, by a thread that fills a bounded queue."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Any, Final

from torch.utils.data import IterableDataset

from task_encoders.field_types import Count, checked

_PATIENCE: Final = 0.1  # seconds after which a waiting producer looks whether it is still wanted


#: An item, the state after it, and the error that ended the pass, if any: StopIteration at
#: the end of the dataset.
_Produced = tuple[Any, Mapping[str, Any] | None, BaseException | None]


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
        queue: Queue[_Produced] = Queue(self.queue_size)
        stop = threading.Event()
        producer = threading.Thread(
            target=self._produce, args=(source, skipped, queue, stop), name="prefetch", daemon=True
        )
        producer.start()
        try:
            while True:
                item, state, error = queue.get()
                if error is not None and not isinstance(error, StopIteration):
                    raise error
                self._state = state
                if error is not None:
                    return
                yield item
        finally:
            stop.set()
            producer.join(timeout=1)  # it takes longer only while the dataset reads a sample

    def _produce(
        self, source: Iterator[Any], skipped: int, queue: Queue[_Produced], stop: threading.Event
    ) -> None:
        """Run in the producer thread."""

        def put(*produced: Any) -> bool:
            """Put it as soon as there is room; False if the consumer is gone."""
            while not stop.is_set():
                with suppress(Full):
                    queue.put(produced, timeout=_PATIENCE)
                    return True
            return False

        taken = 0
        try:
            for taken, item in enumerate(source, start=1):
                state = self._state_after(taken)
                if taken > skipped and not put(item, state, None):
                    return
            put(None, self._state_after(taken), StopIteration())
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is the trainer's to handle)
            put(None, None, error)

    def _state_after(self, taken: int) -> Mapping[str, Any]:
        """Return the dataset's present state; or how many items of the pass came so far."""
        has_state = hasattr(self.dataset, "state_dict")
        return self.dataset.state_dict() if has_state else {"taken": taken}
