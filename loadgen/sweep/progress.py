"""Live progress of a sweep: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from loadgen.sweep.runner import Progress

_LINE_EVERY_S = 5.0


class SweepProgress:
    """Call it with every `Progress`; use it as a context manager so that the terminal is left in order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._line_at = 0.0

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal:
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("runs, {task.fields[state]}"), TimeElapsedColumn()
            self._bars = Bars(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if self._bars is not None:
            if self._task is None:
                self._task = self._bars.add_task("", total=progress.total, state="")
            self._bars.update(self._task, completed=progress.done, state=_state(progress))
        elif perf_counter() - self._line_at >= _LINE_EVERY_S:
            self._line_at = perf_counter()
            self._console.print(f"{progress.done}/{progress.total} runs, {_state(progress)}", soft_wrap=True, highlight=False)


def _state(progress: Progress) -> str:
    parts = [f"{progress.on_front} on the front"]
    if progress.found:
        parts.append(f"{progress.found} from before")
    if progress.cannot_run:
        parts.append(f"{progress.cannot_run} cannot run")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.left_s is not None and progress.done < progress.total:
        parts.append(f"{duration(progress.left_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time for people: 45 s, 7 min, 2.5 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
