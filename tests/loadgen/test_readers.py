from __future__ import annotations

import gzip
from pathlib import Path

import orjson
import pytest

from loadgen.inspect import inspect
from loadgen.readers import TraceError, read_trace
from loadgen.trace import Request, Session, block_ids, block_runs, common_blocks, limit_context, write_trace


def write_lines(path: Path, *rows: object) -> Path:
    data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def weka_row(**fields: object) -> dict[str, object]:
    requests = [
        {"t": 0, "type": "n", "model": "m", "in": 200, "out": 20, "hash_ids": [1, 2, 3],
         "input_types": ["text"], "stop": "tool_use", "think_time": 0},
        {"t": 1, "type": "subagent", "agent_id": "a1", "subagent_type": "Plan", "tool_tokens": 64, "system_tokens": 0,
         "requests": [{"t": 0, "type": "n", "model": "m", "in": 70, "out": 5, "hash_runs": [[9, 1]]}]},
        {"t": 9, "type": "n", "model": "m", "in": 330, "out": 30, "hash_runs": [[1, 5]], "input_types": ["tool_result"], "think_time": 7.0},
    ]  # fmt: skip
    return {"id": "t1", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 100, "system_tokens": 28, "requests": requests, **fields}


def test_weka_hash_ids_and_hash_runs_mean_the_same(tmp_path: Path) -> None:
    (session,) = read_trace(write_lines(tmp_path / "t.jsonl.gz", weka_row()))
    assert [request.blocks for request in session.requests] == [((1, 3),), ((1, 5),)]
    assert [request.kind for request in session.requests] == ["user", "tool"]
    assert session.prefix_tokens == 128


def test_weka_subagent_is_a_child_of_the_request_before_it(tmp_path: Path) -> None:
    (session,) = read_trace(write_lines(tmp_path / "t.jsonl", weka_row()))
    (child,) = session.requests[0].spawns
    assert (child.id, child.subagent_type, child.prefix_tokens, len(child.requests)) == ("t1/a1", "Plan", 64, 1)
    assert session.requests[1].spawns == []


def test_weka_think_times_are_used_only_when_asked_for(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", weka_row())
    drawn = read_trace(path, seed=3)[0].requests[1].gap_s
    assert drawn == read_trace(path, seed=3)[0].requests[1].gap_s
    assert drawn != read_trace(path, seed=4)[0].requests[1].gap_s
    assert read_trace(path, gaps="recorded")[0].requests[1].gap_s == 7.0


def test_own_format_survives_writing_and_reading(tmp_path: Path) -> None:
    child = Session("s/helper", [Request(100, 5, ((50, 1),), kind="user", stop="end_turn")], tool_tokens=64, start_s=3.0, scope="global")
    first = Request(200, 20, ((1, 3),), kind="user", stop="tool_use", model="m", spawns=[child])
    second = Request(330, 30, ((1, 3), (9, 2)), t=4.5, kind="tool", gap_s=1.25, stop="end_turn", model="m")
    session = Session("s", [first, second], scope="global", tool_tokens=60, system_tokens=70, start_s=2.0)
    write_trace(tmp_path / "t.jsonl.gz", [session])
    (read,) = read_trace(tmp_path / "t.jsonl.gz")
    read.requests[0].spawns[0].id = "s/helper"  # written names are the child's own, read ones have the parent's before them
    assert read == session


def test_mooncake_rows_are_sessions_unless_they_name_one(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]},
    ]
    sessions = read_trace(write_lines(tmp_path / "m.jsonl", *rows))
    assert [(s.start_s, s.scope, s.block_size, s.requests[0].blocks) for s in sessions] == [
        (0.0, "global", 512, ((0, 2),)),
        (2.5, "global", 512, ((0, 1), (4, 1))),
    ]
    later = {"session_id": "a", "delay": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
    (session,) = read_trace(write_lines(tmp_path / "s.jsonl", rows[0] | {"session_id": "a"}, later))
    assert [request.gap_s for request in session.requests] == [0.0, 1.5]


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,3180,8\n")
    sessions = read_trace(path)
    assert [(s.start_s, s.requests[0].input_tokens, s.requests[0].output_tokens) for s in sessions] == [(0.0, 4808, 10), (1.5, 3180, 8)]


def test_miniswe_file_is_a_session_of_real_text(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1_000_000, "input": "abcd" * 10, "output": "x" * 8},
        {"timestamp": 3_000_000, "input": "abcd" * 20, "output": "y"},
    ]
    write_lines(tmp_path / "one.jsonl", *rows)
    write_lines(tmp_path / "two.jsonl.gz", rows[0])
    sessions = read_trace(tmp_path, gaps="recorded")
    assert [session.id for session in sessions] == ["one", "two"]
    assert [(r.text, r.input_tokens, r.output_tokens, r.gap_s) for r in sessions[0].requests] == [
        ("abcd" * 10, 10, 2, 0.0),
        ("abcd" * 20, 20, 1, 2.0),
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"requests": [], "id": "x", "block_size": 0}, "'block_size' must be at least 1"),
        ({"requests": {}, "id": "x"}, "'requests' must be a list"),
        ({"requests": [{"in": 5}], "id": "x"}, "requests[0]: the field 'out' is missing"),
        ({"requests": [{"in": -5, "out": 1}], "id": "x"}, "'in' must be a number of at least 0, found -5"),
        ({"requests": [{"in": 5, "out": 1, "hash_runs": [1, 2]}], "id": "x"}, "'hash_runs' must be [[first, count], ...]"),
        ({"requests": [{"in": 5, "out": 1, "hash_ids": [1, 2]}], "id": "x"}, "2 blocks of 64 tokens exceed in=5"),
        ({"requests": [{"type": "subagent", "requests": []}], "id": "x"}, "must follow a request of its parent"),
        ({"requests": [], "id": "x", "hash_id_scope": "galaxy"}, "must be local or global, found 'galaxy'"),
        ({"what": 1}, "cannot tell the format"),
        ([1], "expected a JSON object, found list"),
    ],
)
def test_errors_name_file_line_and_fault(tmp_path: Path, row: object, complaint: str) -> None:
    good = weka_row()
    path = write_lines(tmp_path / "bad.jsonl", *([good, row] if isinstance(row, dict) and "requests" in row else [row]))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    line = 2 if isinstance(row, dict) and "requests" in row else 1
    assert f"{path}:{line}" in str(error.value)
    assert complaint in str(error.value)


def test_broken_files_are_reported(tmp_path: Path) -> None:
    broken = tmp_path / "x.jsonl"
    broken.write_bytes(orjson.dumps(weka_row()) + b"\n{nope\n")
    with pytest.raises(TraceError, match=r"x\.jsonl:2: not JSON"):
        read_trace(broken)
    fake_gzip = tmp_path / "y.jsonl.gz"
    fake_gzip.write_bytes(b"plain text")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(fake_gzip)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "absent.jsonl")


def test_runs_code_ids_and_compare_prefixes() -> None:
    ids = [5, 6, 7, 2, 3, 9]
    assert block_runs(ids) == ((5, 3), (2, 2), (9, 1))
    assert block_ids(block_runs(ids)) == ids
    assert block_ids(block_runs(ids), 4) == [3, 9]
    assert common_blocks(block_runs([5, 6, 7, 2]), block_runs(ids)) == 4
    assert common_blocks(block_runs([5, 6, 8]), block_runs(ids)) == 2
    assert common_blocks(((1, 4),), ((1, 2), (3, 2))) == 4  # runs may be cut anywhere


def test_limit_context_cuts_sessions_and_drops_empty_ones() -> None:
    sessions = [Session("a", [Request(100, 10), Request(300, 10), Request(100, 10)]), Session("b", [Request(500, 10)])]
    (session,) = limit_context(sessions, 200)
    assert session.id == "a"
    assert len(session.requests) == 1


def test_real_weka_sessions_have_their_known_shape(real_traces: Path) -> None:
    sessions = read_trace(real_traces / "weka_agentic.jsonl.gz")
    assert len(sessions) == 496
    assert sum(len(list(session.tree())) - 1 for session in sessions) == 50
    # Gaps come from the quantiles: the median after a tool is a quarter of a second, not the recorded nine.
    gaps = sorted(request.gap_s for session in sessions for request in session.requests[1:] if request.kind == "tool")
    assert 0.2 < gaps[len(gaps) // 2] < 0.4


@pytest.mark.slow
def test_real_weka_bound(real_traces: Path) -> None:
    shape = inspect(read_trace(real_traces / "weka_agentic.jsonl.gz"))
    assert shape.hit_bound == pytest.approx(0.963, abs=0.01)


@pytest.mark.slow
def test_real_mooncake_bounds(real_traces: Path) -> None:
    sessions = read_trace(real_traces / "mooncake_conversation.jsonl.gz")
    shapes = {size: inspect(sessions, size) for size in (1_000_000, 3_000_000, 10_000_000)}
    assert shapes[1_000_000].hit_bound == pytest.approx(0.374, abs=0.005)
    # 0.053, 0.136 and 0.285 are the figures that came with the trace; how they counted is not recorded, ours are up to 0.6 points higher.
    assert {size: shape.hit_bound_lru for size, shape in shapes.items()} == pytest.approx(
        {1_000_000: 0.053, 3_000_000: 0.136, 10_000_000: 0.285}, abs=0.007
    )


def test_real_azure_and_miniswe_load(real_traces: Path) -> None:
    assert len(read_trace(real_traces / "azure_code_2023.csv.gz")) == 8819
    sessions = read_trace(real_traces / "miniswe")
    assert sum(len(session.requests) for session in sessions) == 178
    assert 0.90 < inspect(sessions).hit_bound < 0.96
