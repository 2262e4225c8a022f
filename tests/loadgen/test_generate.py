from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.generate import generate
from loadgen.inspect import inspect
from loadgen.quantiles import NEW_TOKENS, OUTPUT_TOKENS, TOOL_GAP_S, draw, position_of
from loadgen.readers import read_trace
from loadgen.trace import Request, Session, block_ids, common_blocks, write_trace

SHIPPED = Path(__file__).parents[2] / "traces" / "agentic.jsonl"


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    return generate(64, seed=7, max_context=60_000)


def steps(sessions: list[Session]) -> list[tuple[Request, Request]]:
    """Every pair of consecutive requests of the root sessions."""
    return [pair for session in sessions for pair in zip(session.requests, session.requests[1:], strict=False)]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_the_shipped_trace_is_what_the_defaults_generate(tmp_path: Path, sessions: list[Session]) -> None:
    write_trace(tmp_path / "again.jsonl", sessions)
    assert (tmp_path / "again.jsonl").read_bytes() == SHIPPED.read_bytes()
    assert SHIPPED.stat().st_size < 1_000_000
    # The working set of half its sessions is more than one worker's 600k tokens of KV and less than four workers'.
    peaks = sum(max(request.input_tokens for request in session.requests) for session in sessions)
    assert 600_000 < peaks / 2 < 4 * 600_000


def test_another_seed_gives_another_trace_and_gzip_the_same_sessions(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.jsonl.gz", generate(3, 1, 30_000))
    write_trace(tmp_path / "b.jsonl.gz", generate(3, 1, 30_000))
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert read_trace(tmp_path / "a.jsonl.gz") == generate_as_read(3, 1, 30_000)
    assert generate(3, 2, 30_000) != generate(3, 1, 30_000)


def generate_as_read(count: int, seed: int, max_context: int) -> list[Session]:
    """Generated sessions with what a file rounds or qualifies: sub-agents' names and starts."""
    made = generate(count, seed, max_context)
    for session in made:
        for request in session.requests:
            for child in request.spawns:
                child.id = f"{session.id}/{child.id}"
                child.start_s = round(child.start_s, 2)
    return made


@pytest.mark.parametrize("max_context", [4096, 20_000, 60_000, 200_000])
def test_contexts_stay_within_the_limit_and_blocks_within_the_prompt(max_context: int) -> None:
    for root in generate(12, 3, max_context):
        for session in root.tree():
            for request in session.requests:
                assert request.input_tokens + request.output_tokens <= max_context
                assert len(block_ids(request.blocks)) == request.input_tokens // session.block_size
                assert request.output_tokens >= 1


def test_sessions_of_a_harness_share_tools_and_system_prompt_only(sessions: list[Session]) -> None:
    first = [session for session in sessions if session.prefix_tokens == sessions[0].prefix_tokens]
    assert len(first) > 5
    for other in first[1:]:
        shared = common_blocks(first[0].requests[0].blocks, other.requests[0].blocks)
        assert shared == other.prefix_tokens // other.block_size
    assert len({session.prefix_tokens for session in sessions}) == 4


def test_turns_extend_the_turn_before_except_at_compactions(sessions: list[Session]) -> None:
    compactions = 0
    for session in sessions:
        for before, after in zip(session.requests, session.requests[1:], strict=False):
            shared = common_blocks(before.blocks, after.blocks)
            if after.input_tokens > before.input_tokens:
                assert shared == len(block_ids(before.blocks))
                assert after.input_tokens - before.input_tokens > before.output_tokens  # the answer is part of the next prompt
            else:
                compactions += 1
                assert shared == session.prefix_tokens // session.block_size
    assert 0 < compactions < 0.05 * len(steps(sessions))


def test_lengths_and_gaps_follow_the_recorded_percentiles(sessions: list[Session]) -> None:
    pairs = steps(sessions)
    grown = [after.input_tokens - before.input_tokens for before, after in pairs if after.input_tokens > before.input_tokens]
    assert median([request.output_tokens for session in sessions for request in session.requests]) == pytest.approx(
        draw(OUTPUT_TOKENS, 0.5), rel=0.1
    )
    # Growth is at least the answer before, which lifts its median over the table's.
    assert draw(NEW_TOKENS, 0.5) <= median(grown) < 1.4 * draw(NEW_TOKENS, 0.5)
    assert median([after.gap_s for _, after in pairs if after.kind == "tool"]) == pytest.approx(draw(TOOL_GAP_S, 0.5), rel=0.15)
    assert 0.07 < sum(after.kind == "user" for _, after in pairs) / len(pairs) < 0.11
    assert 0.1 < sum(any(r.spawns for r in s.requests) for s in sessions) / len(sessions) < 0.45
    assert 0.93 < inspect(sessions).hit_bound < 0.98  # recorded sessions: 0.957 to 0.963


def test_too_small_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4096"):
        generate(1, 1, 1000)


def test_drawing_and_its_inverse() -> None:
    assert draw(OUTPUT_TOKENS, 0.0) == OUTPUT_TOKENS[0]
    assert draw(OUTPUT_TOKENS, 0.9999999) <= OUTPUT_TOKENS[-1]
    for value in (58.0, 216.0, 5000.0):
        assert draw(OUTPUT_TOKENS, position_of(OUTPUT_TOKENS, value)) == pytest.approx(value)
    assert position_of(OUTPUT_TOKENS, 1e9) == 1.0
    assert position_of(NEW_TOKENS, 0.0) == 0.0
