"""Runs of a sweep over the machines of a Ray cluster that is there already. They need this package and its Python, as Ray does."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from loadgen.results import Run
from loadgen.sweep.config import SweepError
from loadgen.sweep.evaluate import Evaluate, Task
from loadgen.sweep.processes import Outcome, attempt


class RayRuns:
    """One actor for each CPU of the cluster; each makes its evaluator once. An actor that dies costs its run and is replaced."""

    def __init__(self, make: Callable[[], Evaluate]) -> None:
        """`make` is called here, and what it made is sent: the machines need not have the trace. Raises SweepError."""
        try:
            import ray
        except ImportError:
            raise SweepError("--ray needs Ray: pip install 'warmroute[ray]'") from None
        evaluate = make()
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise SweepError(f"--ray: no Ray cluster is here ({error}); start one with `ray start --head`, or leave out --ray") from None
        self._ray: Any = ray
        self._evaluate = ray.put(evaluate)
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._actors: list[Any] = []

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        ray, waiting = self._ray, deque(tasks)
        at_once = max(1, int(ray.cluster_resources().get("CPU", 1)))
        under_way: dict[Any, tuple[Any, Task]] = {}
        idle = list(self._actors)
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                if not idle:
                    idle.append(self._actor.remote(self._evaluate))
                    self._actors.append(idle[-1])
                actor, task = idle.pop(), waiting.popleft()
                under_way[actor.attempt.remote(task)] = (actor, task)
            for done in ray.wait(list(under_way))[0]:
                actor, task = under_way.pop(done)
                try:
                    run, failure = ray.get(done)
                except ray.exceptions.RayError as error:
                    self._actors.remove(actor)
                    yield Outcome(task, None, f"its actor died: {str(error).splitlines()[0]}")
                else:
                    idle.append(actor)
                    yield Outcome(task, run, failure)

    def close(self) -> None:
        """End the actors; the cluster stays."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        self._ray.shutdown()


class _Actor:
    """On some machine of the cluster."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def attempt(self, task: Task) -> tuple[Run | None, str]:
        return attempt(self._evaluate, task)
