"""The nodes of a Ray cluster while tasks run on it: how many tasks fit on them, and whether the
cluster is lost, which Ray itself says late, or never."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from offline_packing.errors import StageError

logger = logging.getLogger(__name__)

#: An answer takes milliseconds. Ray ends the process, without an error to catch, when the head has
#: been silent for 60 seconds.
_MAX_SILENCE: Final = 30.0
_SECONDS_BETWEEN_QUESTIONS: Final = 2.0

NODE_DIED: Final = "the node of this process died (its raylet, or one of Ray's agents, ended)"


def lost(why: str) -> StageError:
    """The error of a cluster that can run no more tasks."""
    return StageError(
        f"the Ray cluster is lost: {why}; start it, and run again: completed work is kept"
    )


class ClusterWatch:
    """Asks for the nodes in a thread: when the head is gone, the question has no end."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._own_node = ray.get_runtime_context().get_node_id()
        self._nodes: list[dict[str, Any]] = ray.nodes()
        self._answered = time.monotonic()
        self._has_warned = False
        self._closed = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def check(self) -> None:
        """Raise StageError if the cluster is lost."""
        silence = time.monotonic() - self._answered
        if silence > _MAX_SILENCE:
            raise lost(f"its head (GCS) has not answered for {silence:.0f} s")
        if any(one["NodeID"] == self._own_node and not one["Alive"] for one in self._nodes):
            raise lost(NODE_DIED)

    def num_slots(self, needs: Mapping[str, float]) -> int:
        """Number of tasks that fit on the nodes at the same time, where each needs so much of these
        resources (`CPU`, `memory` in bytes, ...)."""
        num_slots = sum(
            int(min(one["Resources"].get(name, 0) / need for name, need in needs.items()))
            for one in self._nodes
            if one["Alive"]
        )
        if num_slots == 0 and not self._has_warned:
            self._has_warned = True
            logger.warning("no node of the Ray cluster has what a task needs, %s: waiting", needs)
        return num_slots

    def _ask(self) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_QUESTIONS):
            try:
                self._nodes = self._ray.nodes()
            except Exception:  # noqa: BLE001 - no answer; whether that is loss, time tells
                continue
            self._answered = time.monotonic()
