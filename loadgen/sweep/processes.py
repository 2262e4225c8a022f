"""Worker processes for runs: each reads the trace once, and one that crashes costs its run only."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from loadgen.results import Run
from loadgen.sweep.config import SweepError
from loadgen.sweep.evaluate import Evaluate, Task

_SPAWN = multiprocessing.get_context("spawn")
_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: its run, or why there is none (the process crashed, or the program has a fault)."""

    task: Task
    run: Run | None
    failure: str = ""


class Executor(Protocol):
    """Runs tasks. Outcomes come as they end, in any order; closing the iterator abandons what is under way."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]: ...

    def close(self) -> None: ...


class _Process:
    """A child and the task it has."""

    def __init__(self, make: Callable[[], Evaluate]) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()  # so that the child's end is the only one, and its death is seen
        self.ready = False
        self.task: Task | None = None

    def end(self) -> None:
        self.process.terminate()
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


class Processes:
    """`jobs` processes, kept from one batch of tasks to the next. `make` is called once in each and must be picklable."""

    def __init__(self, make: Callable[[], Evaluate], jobs: int) -> None:
        self._make = make
        self._jobs = jobs
        self._processes: list[_Process] = []

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Raises SweepError when a process cannot start."""
        waiting = deque(tasks)
        while waiting or any(process.task for process in self._processes):
            while len(self._processes) < min(self._jobs, len(waiting) + sum(1 for process in self._processes if process.task)):
                self._processes.append(_Process(self._make))
            for process in self._processes:
                if waiting and process.ready and process.task is None:
                    task = waiting.popleft()
                    try:
                        process.connection.send(task)
                    except OSError:  # it died idle; seen below
                        waiting.appendleft(task)
                    else:
                        process.task = task
            by_connection = {process.connection: process for process in self._processes}
            for connection in wait(list(by_connection)):
                assert isinstance(connection, Connection)
                outcome = self._hear(by_connection[connection])
                if outcome is not None:
                    yield outcome

    def _hear(self, process: _Process) -> Outcome | None:
        task = process.task
        try:
            message = process.connection.recv()
        except (EOFError, OSError):
            self._processes.remove(process)
            process.end()
            if not process.ready:
                raise SweepError(f"a worker process ended at its start ({_exit_text(process.process.exitcode)})") from None
            return None if task is None else Outcome(task, None, f"its process crashed ({_exit_text(process.process.exitcode)})")
        if not process.ready:
            if message:
                raise SweepError(message)
            process.ready = True
            return None
        assert task is not None
        process.task = None
        run, failure = message
        return Outcome(task, run, failure)

    def close(self) -> None:
        """End the processes at once, whatever they do."""
        for process in self._processes:
            process.process.terminate()
        for process in self._processes:
            process.end()
        self._processes.clear()


def _serve(connection: Connection, make: Callable[[], Evaluate]) -> None:
    """A child's life: make the evaluator, then a run for each task until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    try:
        evaluate = make()
    except Exception as error:
        connection.send(str(error) or type(error).__name__)
        return
    connection.send("")
    try:
        while True:
            connection.send(attempt(evaluate, connection.recv()))
    except (EOFError, OSError):
        return


def attempt(evaluate: Evaluate, task: Task) -> tuple[Run | None, str]:
    """The run, or the failure's last lines."""
    try:
        return evaluate(task), ""
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return name + ("; was memory short?" if name == "SIGKILL" else "")
    return f"exit status {code}"
