"""Tasks on a Ray cluster: the one at RAY_ADDRESS, or one started on this machine.

All machines must have this package installed, and see source and output under the same paths or in
object storage. The tasks of a worker or node that dies run again on another: a task leaves nothing
under a final name until it is complete. The bar advances as tasks end. That the cluster is lost,
Ray itself says late, or never: its nodes are watched.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from offline_packing.engines.local import (
    SECONDS_BETWEEN_REPORTS,
    TASKS_PER_WORKER,
    Advance,
    Engine,
    Result,
    Task,
    told_to,
)
from offline_packing.errors import ConfigError, StageError

logger = logging.getLogger(__name__)

#: An answer takes milliseconds. Ray ends the process, without an error to catch, when the head has
#: been silent for 60 seconds.
_MAX_SILENCE: Final = 30.0
_SECONDS_BETWEEN_QUESTIONS: Final = 2.0

NODE_DIED: Final = "the node of this process died (its raylet, or one of Ray's agents, ended)"


def lost(why: str) -> StageError:
    """Return the error of a cluster that can run no more tasks."""
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
        """Count the tasks that fit on the nodes at the same time, given the resources of each
        (`CPU`, `memory` in bytes, ...)."""
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


#: Options of every task: one CPU; repetitions of a task whose worker or node died.
_TASK_OPTIONS: Final = {"num_cpus": 1, "max_retries": 5}
#: The resources that a task's options name, as nodes call them.
_RESOURCES: Final = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def _run_task(function: Callable[[Task], Result], task: Task) -> tuple[int, Result]:
    """Run a task in a worker of Ray. Return how far it advanced, and its result."""
    counts: list[int] = []
    with told_to(counts.append):
        result = function(task)
    return sum(counts), result


class RayEngine(Engine):
    """Ray tasks. `workers`: CPUs of a cluster started here, and only of one."""

    def __init__(self, workers: int, ray_remote_args: Mapping[str, Any] | None = None) -> None:
        """Take `ray_remote_args`, options of `ray.remote` for each task, named as in Ray Data."""
        super().__init__(workers)
        self._given = dict(ray_remote_args or {})
        self._options = _TASK_OPTIONS | self._given
        needs = {name: self._options.get(option) for option, name in _RESOURCES.items()}
        needs |= self._given.get("resources") or {}
        self._needs = {name: need for name, need in needs.items() if need} or {"CPU": 1}
        self._ray: Any = None
        self._watch: ClusterWatch | None = None

    def run(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        listener: Advance | None = None,
    ) -> Iterator[Result]:
        remote = self._remote(getattr(function, "__name__", "task"))
        ray, watch = self._connected()
        remaining = iter(tasks)
        pending: list[Any] = []
        try:
            while True:
                watch.check()
                # Few: they are in memory with their tables, or their results.
                room = TASKS_PER_WORKER * max(1, watch.num_slots(self._needs)) - len(pending)
                some = islice(remaining, max(0, room))
                pending += [remote.remote(function, task) for task in some]
                if not pending:
                    return
                done, pending = ray.wait(pending, timeout=SECONDS_BETWEEN_REPORTS)
                found = [self._result(reference) for reference in done]
                if listener is not None:
                    listener(sum(count for count, _ in found))
                yield from (result for _, result in found)
        finally:
            for reference in pending:
                ray.cancel(reference)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._ray.shutdown()
            self._ray = self._watch = None

    def _remote(self, name: str) -> Any:
        """Return `_run_task` with the options of a task; the name is what Ray's dashboard shows."""
        try:
            return _import_ray().remote(_run_task).options(**{"name": name} | self._options)
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"engine.ray_remote_args={self._given}: {text}") from error

    def _result(self, reference: Any) -> Any:
        """Return a task's result, or raise its error, as on local processes."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise StageError(
                f"a task's worker died {self._options['max_retries'] + 1} times, perhaps for lack "
                "of memory; see Ray's logs, and run again"
            ) from error
        except errors.LocalRayletDiedError as error:
            raise lost(NODE_DIED) from error
        except errors.RayError as error:
            text = " ".join(str(error).split())[:300]
            raise StageError(f"Ray could not run a task: {text}; run again") from error

    def _connected(self) -> tuple[Any, ClusterWatch]:
        """Connect to a cluster. Return Ray's module, and the cluster's watcher. Raises StageError
        if there is no cluster."""
        if self._watch is not None:
            return self._ray, self._watch
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if "RAY_ADDRESS" not in os.environ:
            # Our own cluster needs no token in the home folder, and reports no usage.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            # Not one that happens to run here, which takes no number of CPUs.
            settings |= {"address": "local", "num_cpus": max(1, self.workers)}
            settings |= {"include_dashboard": False}
        ray = _import_ray()
        try:
            ray.init(**settings)
        except Exception as error:
            # Ray raises Exception itself.
            text = " ".join(str(error).split())[:300]
            address = os.environ.get("RAY_ADDRESS", "none")
            raise StageError(
                f"no Ray cluster (RAY_ADDRESS: {address}): {text}; start it, and run again"
            ) from error
        self._ray, self._watch = ray, ClusterWatch(ray)
        return self._ray, self._watch


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise StageError(
            "engine.name=ray needs Ray; pip install 'ray>=2.55' (in a clone: pip install "
            "-e '.[ray]')"
        ) from error
    return ray
