"""Readers: trace files of several formats become sessions.

| format    | file                 | prefixes                                  | gaps                                      |
|-----------|----------------------|-------------------------------------------|-------------------------------------------|
| weka, own | jsonl(.gz)           | hash_runs or hash_ids per request         | tool_wait_s, else drawn from the quantiles|
| mooncake  | jsonl(.gz)           | hash_ids, 512-token blocks, global        | timestamp (ms), delay (ms) in a session   |
| azure     | csv(.gz)             | none                                      | TIMESTAMP                                 |
| miniswe   | jsonl(.gz), or a dir | the real text                             | drawn from the quantiles                  |
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

import orjson

from loadgen.quantiles import TOOL_GAP_S, USER_GAP_S, draw
from loadgen.trace import BlockRuns, HashScope, Request, Session, StepKind, block_count, block_runs, open_text

TraceFormat = Literal["auto", "weka", "mooncake", "azure", "miniswe"]
Gaps = Literal["quantiles", "recorded"]

MOONCAKE_BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4  # of a prompt whose tokens nobody counted


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file, the line and what is wrong."""


def read_trace(path: str | Path, format: TraceFormat = "auto", gaps: Gaps = "quantiles", seed: int = 0) -> list[Session]:
    """All sessions of a trace file, or of every file of a directory.

    `gaps` is for traces that do not carry a trustworthy `tool_wait_s`: "quantiles" draws them (seeded), "recorded" takes the
    trace's `think_time` or timestamps. Raises TraceError.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    files = sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz", ".csv", ".csv.gz"))) if path.is_dir() else [path]
    sessions: list[Session] = []
    for file in files:
        sessions.extend(_read_file(file, format, gaps, seed))
    if not sessions:
        raise TraceError(f"{path}: holds no sessions")
    return sessions


def _read_file(path: Path, format: TraceFormat, gaps: Gaps, seed: int) -> list[Session]:
    if format == "auto":
        format = detect_format(path)
    if format == "azure":
        return _read_azure(path)
    reader: Callable[[Path, Gaps, int], list[Session]] = {"weka": _read_weka, "mooncake": _read_mooncake, "miniswe": _read_miniswe}[format]
    return reader(path, gaps, seed)


def detect_format(path: Path) -> TraceFormat:
    """The format, from the file's name and the fields of its first line. Raises TraceError for an unknown one."""
    if path.name.endswith((".csv", ".csv.gz")):
        return "azure"
    for _, row in _json_lines(path):
        if "requests" in row:
            return "weka"
        if "input_length" in row:
            return "mooncake"
        if "input" in row and "output" in row:
            return "miniswe"
        break
    known = ", ".join(name for name in get_args(TraceFormat) if name != "auto")
    raise TraceError(f"{path}:1: cannot tell the format from the first line; pass one of {known}")


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                row = orjson.loads(line)
                if not isinstance(row, dict):
                    raise TraceError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
                yield number, row
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from None


class _Line:
    """One JSON object of a trace file, whose fields are checked as they are taken."""

    def __init__(self, where: str, row: Any) -> None:
        self.where = where
        if not isinstance(row, dict):
            raise TraceError(f"{where}: expected a JSON object, found {type(row).__name__}")
        self.row = row

    def number(self, name: str, default: float | None = None) -> float:
        value = self.row.get(name, default)
        if value is None:
            if name in self.row and default is not None:
                return default
            raise TraceError(f"{self.where}: the field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise TraceError(f"{self.where}: {name!r} must be a number of at least 0, found {value!r}")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self.row.get(name, default)
        if value is None:
            raise TraceError(f"{self.where}: the field {name!r} is missing")
        return str(value)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.row.get(name) or default
        if value not in allowed:
            raise TraceError(f"{self.where}: {name!r} must be {' or '.join(allowed)}, found {value!r}")
        return str(value)

    def entries(self, name: str) -> list[Any]:
        value = self.row.get(name)
        if not isinstance(value, list):
            raise TraceError(f"{self.where}: {name!r} must be a list")
        return value

    def blocks(self) -> BlockRuns:
        """The prompt's blocks from `hash_runs` or `hash_ids`; () when it has neither."""
        name = "hash_runs" if self.row.get("hash_runs") is not None else "hash_ids"
        if self.row.get(name) is None:
            return ()
        try:
            if name == "hash_ids":
                return block_runs(int(block) for block in self.row[name])
            runs = tuple((int(first), int(count)) for first, count in self.row[name])
        except (TypeError, ValueError):
            shape = "[[first, count], ...]" if name == "hash_runs" else "a list of integers"
            raise TraceError(f"{self.where}: {name!r} must be {shape}") from None
        if any(count < 1 for _, count in runs):
            raise TraceError(f"{self.where}: 'hash_runs' has a run of length below 1")
        return runs


class _GapSource:
    """Draws the gap before a step; seeded by the session, so that a session's gaps do not depend on the others."""

    def __init__(self, seed: int, session_id: str) -> None:
        self._random = random.Random(f"{seed}/{session_id}")

    def gap_s(self, kind: StepKind) -> float:
        return draw(TOOL_GAP_S if kind == "tool" else USER_GAP_S, self._random.random())


# Weka, and our own


def _read_weka(path: Path, gaps: Gaps, seed: int) -> list[Session]:
    sessions = []
    for number, row in _json_lines(path):
        line = _Line(f"{path}:{number}", row)
        scope = line.choice("hash_id_scope", ("local", "global"), "local")
        block_size = int(line.number("block_size", 64))
        if block_size < 1:
            raise TraceError(f"{line.where}: 'block_size' must be at least 1")
        session = Session(line.string("id"), [], block_size, cast(HashScope, scope), start_s=line.number("start_s", 0))
        _fill_weka_session(line, session, gaps, seed)
        if session.requests:
            sessions.append(session)
    return sessions


def _fill_weka_session(line: _Line, session: Session, gaps: Gaps, seed: int) -> None:
    """Fill `session` with the line's requests. A sub-agent becomes a child of the request it follows."""
    session.tool_tokens = int(line.number("tool_tokens", 0))
    session.system_tokens = int(line.number("system_tokens", 0))
    source = _GapSource(seed, session.id)
    for place, entry in enumerate(line.entries("requests")):
        item = _Line(f"{line.where}: requests[{place}]", entry)
        if item.row.get("type") == "subagent":
            child = Session(
                id=f"{session.id}/{item.string('agent_id', str(place))}",
                requests=[],
                scope=session.scope,
                block_size=session.block_size,
                start_s=item.number("t", 0),
                subagent_type=item.string("subagent_type", ""),
            )
            _fill_weka_session(item, child, gaps, seed)
            if not session.requests:
                raise TraceError(f"{item.where}: a sub-agent must follow a request of its parent")
            if child.requests:
                session.requests[-1].spawns.append(child)
            continue
        session.requests.append(_weka_request(item, session, gaps, source))


def _weka_request(item: _Line, session: Session, gaps: Gaps, source: _GapSource) -> Request:
    input_types = item.row.get("input_types") or ()
    kind = cast(StepKind, item.choice("kind", ("user", "tool"), "tool" if "tool_result" in input_types else "user"))
    drawn = source.gap_s(kind)  # drawn for every step, so that a step's gap does not depend on the fields of those before it
    if not session.requests:
        gap = 0.0
    elif gaps == "recorded" and "think_time" in item.row:
        gap = item.number("think_time", 0)
    else:
        gap = item.number("tool_wait_s", drawn)
    request = Request(
        input_tokens=int(item.number("in")),
        output_tokens=int(item.number("out")),
        blocks=item.blocks(),
        t=item.number("t", 0),
        kind=kind,
        gap_s=gap,
        model=item.string("model", ""),
        stop=item.string("stop", ""),
    )
    if request.input_tokens < 1:
        raise TraceError(f"{item.where}: 'in' must be at least 1")
    if (block_count(request.blocks) - 1) * session.block_size >= request.input_tokens:
        blocks = f"{block_count(request.blocks)} blocks of {session.block_size} tokens"
        raise TraceError(f"{item.where}: {blocks} exceed in={request.input_tokens}")
    return request


# Mooncake


def _read_mooncake(path: Path, gaps: Gaps, seed: int) -> list[Session]:
    """Each row is a session, unless rows name their session (`session_id`); then later rows are its later turns."""
    sessions: dict[str, Session] = {}
    for number, row in _json_lines(path):
        line = _Line(f"{path}:{number}", row)
        name = line.string("session_id", f"row-{number}")
        session = sessions.get(name)
        if session is None:
            start_s = line.number("timestamp", 0) / 1000
            named = "session_id" in row
            session = Session(id=name, requests=[], scope="global", block_size=MOONCAKE_BLOCK_TOKENS, start_s=start_s, named=named)
            sessions[name] = session
            t, gap = 0.0, 0.0
        else:
            gap = line.number("delay", 0) / 1000
            t = max(0.0, line.number("timestamp", 0) / 1000 - session.start_s)
        input_tokens = int(line.number("input_length"))
        if input_tokens < 1:
            continue
        blocks = line.blocks()
        if (block_count(blocks) - 1) * MOONCAKE_BLOCK_TOKENS >= input_tokens:
            raise TraceError(f"{line.where}: {block_count(blocks)} blocks of 512 tokens exceed input_length={input_tokens}")
        session.requests.append(Request(input_tokens, int(line.number("output_length")), blocks, t=t, gap_s=gap))
    return [session for session in sessions.values() if session.requests]


# Azure


def _read_azure(path: Path) -> list[Session]:
    """Each row is a session of one request; the trace says nothing about prefixes, so none are shared."""
    sessions: list[Session] = []
    first: datetime | None = None
    with open_text(path) as file:
        rows = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ())
        if missing:
            raise TraceError(f"{path}:1: the columns {', '.join(sorted(missing))} are missing")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh digit of the fraction is beyond a datetime
                tokens, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (TypeError, ValueError) as error:
                raise TraceError(f"{where}: {error}") from None
            first = first or at
            if tokens > 0:
                start_s = (at - first).total_seconds()
                sessions.append(Session(f"row-{rows.line_num}", [Request(tokens, output)], start_s=start_s, named=False))
    return sessions


# miniswe: real text


def _read_miniswe(path: Path, gaps: Gaps, seed: int) -> list[Session]:
    """The rows of a file are the turns of its session (or sessions, where they name one)."""
    sessions: dict[str, Session] = {}
    sources: dict[str, _GapSource] = {}
    last_at: dict[str, float] = {}
    stem = path.name.split(".")[0]
    for number, row in _json_lines(path):
        line = _Line(f"{path}:{number}", row)
        name = line.string("session_id", stem)
        at = line.number("timestamp", 0) / 1e6
        session = sessions.get(name)
        if session is None:
            session = sessions[name] = Session(id=name, requests=[])
            sources[name] = _GapSource(seed, name)
            last_at[name] = at
        text = line.string("input")
        kind: StepKind = "tool" if session.requests else "user"
        gap = 0.0
        if session.requests:
            gap = at - last_at[name] if gaps == "recorded" else sources[name].gap_s(kind)
        last_at[name] = at
        tokens = max(1, len(text.encode()) // BYTES_PER_TOKEN)
        output = max(1, len(line.string("output").encode()) // BYTES_PER_TOKEN)
        session.requests.append(Request(tokens, output, kind=kind, gap_s=max(0.0, gap), text=text))
    return list(sessions.values())
