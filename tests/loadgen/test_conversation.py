from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.conversation import Conversation, Prompt
from loadgen.prompts import block_text
from loadgen.trace import Request, Session, StepKind, block_runs, common_blocks
from tests.loadgen.fake_worker import shared_prefix


def play(session: Session, **options: Any) -> list[Prompt]:
    settings = {"scope": session.id, "model": "m", "salt": "run"} | options
    conversation = Conversation(session, **settings)
    return [conversation.prompt(index) for index in range(len(session.requests))]


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    return orjson.loads(prompt.body)["messages"]


def text(prompt: Prompt) -> str:
    return "".join(message["content"] for message in messages(prompt))


def history_bytes(prompt: Prompt) -> bytes:
    """The body up to the end of its messages."""
    return prompt.body[: prompt.body.rindex(b'],"max_tokens"')]


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Sessions that grow, diverge anywhere (compaction, edited history), return to an older branch, and shrink."""
    block_size = draw(st.sampled_from([4, 16]))
    whole_blocks_only = draw(st.booleans())  # Weka leaves the partial last block out, Mooncake has it
    fresh = iter(range(1, 1_000_000))
    history: list[tuple[list[int], int]] = []  # (block ids, tokens) of earlier prompts
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        ids: list[int] = []
        if history:
            ids, _ = history[-1] if draw(st.booleans()) else draw(st.sampled_from(history))
            if draw(st.integers(0, 3)) == 0:
                ids = ids[: draw(st.integers(0, len(ids)))]
        tokens = len(ids) * block_size + draw(st.integers(1, 12 * block_size))
        blocks = tokens // block_size if whole_blocks_only else -(-tokens // block_size)
        ids = ids[:blocks] + [next(fresh) for _ in range(blocks - len(ids))]
        history.append((ids, tokens))
        kind: StepKind = draw(st.sampled_from(["user", "tool"]))
        requests.append(Request(tokens, draw(st.integers(0, 6 * block_size)), block_runs(ids), kind=kind))
    prefix = draw(st.integers(0, 6 * block_size))
    return Session("s", requests, block_size, tool_tokens=prefix, scope=draw(st.sampled_from(["local", "global"])))


def common_tokens(session: Session, a: int, b: int) -> int:
    """Tokens that two requests' recorded whole blocks share."""
    first, second = session.requests[a], session.requests[b]
    shared = common_blocks(first.blocks, second.blocks) * session.block_size
    return min(shared, first.input_tokens, second.input_tokens)


@given(sessions())
@settings(max_examples=200, deadline=None)
def test_prompts_share_text_exactly_as_their_blocks_do(session: Session) -> None:
    prompts = play(session)
    for b, prompt in enumerate(prompts):
        assert len(text(prompt)) == 4 * session.requests[b].input_tokens
        for a in range(b):
            shared = shared_prefix(text(prompts[a]), text(prompt))
            expected = 4 * common_tokens(session, a, b)
            assert shared >= expected
            # Beyond the recorded blocks only the partial last one, and the few characters that two stamps share by chance.
            assert shared < expected + 4 * session.block_size + 24


@given(sessions())
@settings(max_examples=200, deadline=None)
def test_messages_are_an_agents(session: Session) -> None:
    for prompt in play(session):
        roles = [message["role"] for message in messages(prompt)]
        assert roles[-1] in ("user", "tool")
        assert "system" not in roles[1:]
        for before, message in zip([None, *messages(prompt)], messages(prompt), strict=False):
            assert message["content"]
            if message["role"] == "tool":
                assert before is not None
                assert before["role"] == "assistant"
                assert [call["id"] for call in before["tool_calls"]] == [message["tool_call_id"]]
            elif before is not None and before["role"] == "assistant":
                assert "tool_calls" not in before


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 90)), min_size=2, max_size=8), st.integers(0, 120))
@settings(max_examples=100, deadline=None)
def test_a_turn_that_extends_the_last_starts_with_its_bytes(turns: list[tuple[int, int]], prefix: int) -> None:
    total = 0
    requests = []
    for new, output in turns:
        total += new if total else new + 16
        requests.append(Request(total, output, ((1, total // 16),), kind="tool"))
    prompts = play(Session("s", requests, 16, system_tokens=prefix))
    for earlier, later in pairwise(prompts):
        assert history_bytes(later).startswith(history_bytes(earlier))


def test_message_boundaries_fall_where_the_turns_fall() -> None:
    requests = [
        Request(100, 30, ((1, 6),)),
        Request(200, 20, ((1, 12),), kind="tool"),
        Request(260, 10, ((1, 16),), kind="user"),
    ]
    last = messages(play(Session("s", requests, 16, tool_tokens=40, system_tokens=8))[-1])
    assert [(m["role"], len(m["content"]) // 4) for m in last] == [
        ("system", 48), ("user", 52), ("assistant", 30), ("tool", 70), ("assistant", 20), ("user", 40),
    ]  # fmt: skip


def test_compaction_keeps_the_system_message_only() -> None:
    requests = [Request(100, 30, ((1, 6),)), Request(400, 20, ((1, 25),), kind="tool"), Request(90, 10, ((1, 3), (77, 2)), kind="tool")]
    prompts = play(Session("s", requests, 16, system_tokens=48))
    before, after = messages(prompts[1]), messages(prompts[2])
    assert after[0] == before[0]
    assert len(after) == 2
    assert after[1]["role"] == "user"


def test_local_ids_belong_to_their_session_and_global_ids_to_all() -> None:
    def prompt_of(id: str, scope: str) -> Prompt:
        return play(Session(id, [Request(64, 1, ((1, 4),))], 16, scope=scope))[0]  # type: ignore[arg-type]

    assert text(prompt_of("a", "local")) != text(prompt_of("b", "local"))
    assert text(prompt_of("a", "global")) == text(prompt_of("b", "global"))
    assert prompt_of("a", "local").chain != prompt_of("b", "local").chain
    assert prompt_of("a", "global").chain == prompt_of("b", "global").chain


def test_a_salt_changes_everything_and_a_lap_all_but_the_prefix() -> None:
    session = Session("s", [Request(160, 1, ((1, 10),))], 16, system_tokens=64)
    (base,), (salted,), (lapped,) = play(session), play(session, salt="other"), play(session, lap=1)
    assert shared_prefix(text(base), text(salted)) < 24
    assert shared_prefix(text(base), text(lapped)) // 4 // 16 == 4
    assert sum(a == b for a, b in zip(base.chain, lapped.chain, strict=True)) == 4


def test_unrecorded_prompts_share_nothing() -> None:
    session = Session("s", [Request(200, 1), Request(300, 1)], 16)
    first, second = play(session)
    assert shared_prefix(text(first), text(second)) < 24
    assert first.blocks == second.blocks == 0


def test_real_text_is_sent_as_it_is() -> None:
    session = Session("s", [Request(10, 5, text='say "hi"\n\u00e9\u4e2d')])
    (prompt,) = play(session)
    assert messages(prompt)[0]["content"].partition("\n")[2] == 'say "hi"\n\u00e9\u4e2d'


def test_completions_carry_the_same_text_as_one_prompt() -> None:
    session = Session("s", [Request(100, 30, ((1, 6),)), Request(200, 20, ((1, 12),), kind="tool")], 16, system_tokens=32)
    chat = play(session)
    plain = play(session, dialect="completions")
    assert [orjson.loads(p.body)["prompt"] for p in plain] == [text(p) for p in chat]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 600), st.integers(0, 2**64 - 1))
def test_block_text_has_its_size_and_is_ascii(block: int, tokens: int, seed: int) -> None:
    rendered = block_text(block, tokens, seed)
    assert len(rendered) == 4 * tokens
    assert rendered.isascii()
    assert rendered == block_text(block, tokens, seed)
