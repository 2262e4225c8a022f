"""A trace: sessions of requests whose prompts are given as runs of KV block ids.

The meaning is the Weka format's (callanjfox/kv-cache-tester): a session is one agent's conversation; equal leading block ids are
an equal prompt prefix; a sub-agent is a session of its own that starts after one of its parent's answers and that the parent's
next request waits for. On disk a trace is JSON lines, one session a line (see `session_to_json` for the fields).
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

import orjson

StepKind = Literal["user", "tool"]
HashScope = Literal["local", "global"]
BlockRuns = tuple[tuple[int, int], ...]
"""Consecutive block ids, run-length coded: ((first, count), ...)."""


@dataclass(slots=True)
class Request:
    """One step of a session: a whole prompt, of which `blocks` says what it shares with other prompts."""

    input_tokens: int
    output_tokens: int
    blocks: BlockRuns = ()
    t: float = 0.0  # seconds after the session's start, as recorded
    kind: StepKind = "user"  # what this step answers to: a user's message or a tool's result
    gap_s: float = 0.0  # seconds from the answer of the step before to this request
    model: str = ""
    stop: str = ""
    text: str | None = None  # the real prompt, where the trace has it; `blocks` is empty then
    spawns: list[Session] = field(default_factory=list)  # sub-agents that start with this step's answer


@dataclass(slots=True)
class Session:
    """One conversation. Block ids are its own (scope "local") or shared with the other sessions of the trace ("global")."""

    id: str
    requests: list[Request]
    block_size: int = 64  # tokens per block
    scope: HashScope = "local"
    tool_tokens: int = 0
    system_tokens: int = 0
    start_s: float = 0.0  # when the session starts, for open-loop replay
    subagent_type: str = ""
    named: bool = True  # whether its client says which session it is; lone requests of a trace may be anybody's

    @property
    def prefix_tokens(self) -> int:
        """Tokens of tool definitions and system prompt, which lead every prompt of the session."""
        return self.tool_tokens + self.system_tokens

    def tree(self) -> Iterator[Session]:
        """This session and its sub-agents, at any depth."""
        yield self
        for request in self.requests:
            for child in request.spawns:
                yield from child.tree()


def block_count(runs: BlockRuns) -> int:
    return sum(count for _, count in runs)


def block_ids(runs: BlockRuns, start: int = 0) -> list[int]:
    """The ids themselves, from position `start` on."""
    ids: list[int] = []
    for first, count in runs:
        if start < count:
            ids += range(first + start, first + count)
            start = 0
        else:
            start -= count
    return ids


def block_runs(ids: Iterable[int]) -> BlockRuns:
    """Run-length code of block ids: [1, 2, 3, 9] -> ((1, 3), (9, 1))."""
    runs: list[tuple[int, int]] = []
    for block in ids:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def common_blocks(a: BlockRuns, b: BlockRuns) -> int:
    """How many leading blocks two prompts share."""
    shared = i = j = 0
    used_a = used_b = 0  # blocks of the current run already compared
    while i < len(a) and j < len(b):
        if a[i][0] + used_a != b[j][0] + used_b:
            break
        step = min(a[i][1] - used_a, b[j][1] - used_b)
        shared, used_a, used_b = shared + step, used_a + step, used_b + step
        if used_a == a[i][1]:
            i, used_a = i + 1, 0
        if used_b == b[j][1]:
            j, used_b = j + 1, 0
    return shared


def limit_context(sessions: Iterable[Session], max_tokens: int) -> list[Session]:
    """The sessions cut before their first step whose prompt and answer exceed `max_tokens`; sessions left empty are dropped."""
    kept = []
    for session in sessions:
        requests = []
        for request in session.requests:
            if request.input_tokens + request.output_tokens > max_tokens:
                break
            request.spawns = limit_context(request.spawns, max_tokens)
            requests.append(request)
        if requests:
            session.requests = requests
            kept.append(session)
    return kept


def session_to_json(session: Session) -> dict[str, Any]:
    """The session as one line of a trace file. Weka's fields, plus `kind` and `tool_wait_s` (the gap) of each request."""
    models = sorted({request.model for request in session.requests})
    line: dict[str, Any] = {
        "id": session.id,
        "models": models,
        "block_size": session.block_size,
        "hash_id_scope": session.scope,
        "tool_tokens": session.tool_tokens,
        "system_tokens": session.system_tokens,
        "requests": _entries(session),
    }
    if session.start_s:
        line["start_s"] = round(session.start_s, 2)
    return line


def _entries(session: Session) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for request in session.requests:
        calls_tool = request.stop == "tool_use"
        entries.append({
            "t": round(request.t, 2),
            "type": "s",
            "model": request.model,
            "in": request.input_tokens,
            "out": request.output_tokens,
            "input_types": ["tool_result" if request.kind == "tool" else "text"],
            "output_types": ["text", "tool_use"] if calls_tool else ["text"],
            "stop": request.stop,
            "kind": request.kind,
            "tool_wait_s": round(request.gap_s, 3),
            "hash_runs": [list(run) for run in request.blocks],
        })  # fmt: skip
        entries.extend(
            {
                "t": round(child.start_s, 2),
                "type": "subagent",
                "agent_id": child.id,
                "subagent_type": child.subagent_type,
                "tool_tokens": child.tool_tokens,
                "system_tokens": child.system_tokens,
                "requests": _entries(child),
            }
            for child in request.spawns
        )
    return entries


def write_trace(path: Path, sessions: Iterable[Session]) -> None:
    """Write one session a line; gzip when the name ends in .gz (with a fixed header, so that equal sessions give equal bytes)."""
    data = b"".join(orjson.dumps(session_to_json(session)) + b"\n" for session in sessions)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def open_text(path: Path) -> IO[str]:
    """A text file, gzipped or not, read as UTF-8."""
    if path.suffix == ".gz":
        return cast(IO[str], io.TextIOWrapper(gzip.open(path), encoding="utf-8"))  # the caller closes it
    return path.open(encoding="utf-8")
