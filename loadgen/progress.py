"""Live progress of a replay: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from loadgen.replay import Progress
from loadgen.report import seconds

_LINE_EVERY_S = 5.0


class ProgressView:
    """Call it with every `Progress`; use it as a context manager so that the terminal is left in order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._line_at = 0.0

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
            self._bars = Bars(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        share = _share(progress)
        if self._bars is not None:
            if progress.policy not in self._tasks:
                self._tasks[progress.policy] = self._bars.add_task(progress.policy, total=1.0, state="")
            self._bars.update(self._tasks[progress.policy], completed=share, state=_state(progress, share))
        elif perf_counter() - self._line_at >= _LINE_EVERY_S:
            self._line_at = perf_counter()
            line = f"{progress.policy}: {progress.elapsed_s:.0f} s, {_state(progress, share)}"
            self._console.print(line, soft_wrap=True, highlight=False)


def _share(progress: Progress) -> float:
    """How much of the run is done, by requests or by time, whichever is further."""
    by_requests = progress.done / progress.total if progress.total else 0.0
    by_time = progress.elapsed_s / progress.duration_s if progress.duration_s else 0.0
    return min(1.0, max(by_requests, by_time))


def _state(progress: Progress, share: float) -> str:
    done = f"{progress.done}/{progress.total}" if progress.total else f"{progress.done}"
    parts = [f"{done} requests"]
    if progress.hit_rate is not None and progress.hit_bound is not None:
        parts.append(f"hit {progress.hit_rate:.1%} of {progress.hit_bound:.1%}")
    parts.append(f"TTFT p50 {seconds(progress.ttft_p50_s)}")
    if progress.errors:
        parts.append(f"{progress.errors} errors")
    if progress.duration_s and progress.elapsed_s >= progress.duration_s:
        parts.append(f"time is up, {progress.in_flight} answers awaited")
    elif 0.02 < share < 1:
        parts.append(f"{progress.elapsed_s / share - progress.elapsed_s:.0f} s left")
    return ", ".join(parts)
