"""The simulated engine's prompts: equal conversations are equal streams, whatever their spelling and dialect's form."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from workers.simanswer import Answer, ToolCall, answer_to
from workers.simprompt import (
    PromptError,
    block_hashes,
    render_chat,
    render_completion,
    render_messages,
    render_responses,
)

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}


@given(st.binary(max_size=700), st.binary(max_size=700), st.integers(1, 64))
def test_hashes_are_cumulative(head: bytes, more: bytes, block: int) -> None:
    hashes = block_hashes(head, block, parent=7)
    assert len(hashes) == len(head) // block
    longer = block_hashes(head + more, block, parent=7)
    assert longer[: len(hashes)] == hashes
    parent = 7
    for i, value in enumerate(hashes):
        parent = xxhash.xxh3_64_intdigest(head[i * block : (i + 1) * block], parent)
        assert value == parent


def test_a_changed_byte_changes_every_hash_from_its_block_on() -> None:
    stream = bytes(1000)
    changed = stream[:500] + b"x" + stream[501:]
    before, after = block_hashes(stream, 64), block_hashes(changed, 64)
    assert before[:7] == after[:7]
    assert not set(before[7:]) & set(after[7:])


def test_spelling_does_not_count() -> None:
    plain = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]}
    parts = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        ]
    }
    assert render_chat(plain) == render_chat(parts)


def test_cache_control_on_a_tool_does_not_count() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert render_chat(body | {"tools": [TOOL]}) == render_chat(body | {"tools": [TOOL | {"cache_control": {"type": "ephemeral"}}]})
    assert render_chat(body | {"tools": [TOOL]}) != render_chat(body)


def test_tools_stand_before_the_system_prompt() -> None:
    text = render_chat(
        {"tools": [TOOL], "messages": [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "USER"}]}
    ).decode()
    assert text.index('"read"') < text.index("SYSTEM") < text.index("USER") < text.index("<|im_start|>assistant")


CALL = ToolCall("call_1", "read", '{"path":"value"}')


@pytest.mark.parametrize("answer", [Answer(123, 40, "length"), Answer(0, 20, "tool_calls", CALL)], ids=["text", "call"])
def test_next_turn_begins_with_the_prompt_and_its_answer(answer: Answer) -> None:
    said = answer.rendered()
    text = said.decode()
    function = {"name": CALL.name, "arguments": CALL.arguments}
    chat = [{"role": "user", "content": "x"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    responses: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    if answer.call:
        chat_turn = [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "result"},
        ]
        messages_turn: list[dict[str, Any]] = [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {"path": "value"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "result"}]}]},
        ]
        responses_turn: list[dict[str, Any]] = [
            {"type": "function_call", "call_id": "1", **function},
            {"type": "function_call_output", "call_id": "1", "output": "result"},
        ]
    else:
        chat_turn = [{"role": "assistant", "content": text}, {"role": "user", "content": "y"}]
        messages_turn = [{"role": "assistant", "content": [{"type": "text", "text": text}]}, {"role": "user", "content": "y"}]
        responses_turn = [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            {"role": "user", "content": "y"},
        ]
    for render, key, history, turn in (
        (render_chat, "messages", chat, chat_turn),
        (render_messages, "messages", messages, messages_turn),
        (render_responses, "input", responses, responses_turn),
    ):
        assert render({key: history + turn}).startswith(render({key: history}) + said + b"<|im_end|>\n")


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": "x"}, {"messages": []}, {"messages": ["x"]}, {"messages": [{"role": "user", "content": 5}]}],
)
def test_a_body_without_a_prompt_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        render_chat(body)


def test_token_ids_are_a_token_each() -> None:
    assert len(render_completion({"prompt": [1, 2, 3]})) == 12
    assert render_completion({"prompt": ["text"]}) == render_completion({"prompt": "text"}) == b"text"


@given(st.integers(0, 2**64 - 1), st.integers(1, 40_000), st.data())
def test_an_answer_is_four_bytes_a_token_and_the_same_in_pieces(seed: int, tokens: int, data: st.DataObject) -> None:
    answer = Answer(seed, tokens, "length")
    cut = data.draw(st.integers(0, tokens))
    assert answer.text(0, cut) + answer.text(cut, tokens) == answer.text(0, tokens)
    assert len(answer.rendered()) == 4 * tokens


def test_output_length_is_the_limit_unless_it_is_a_ceiling() -> None:
    def answer(**body: Any) -> tuple[int, str]:
        given = answer_to("/v1/chat/completions", body, 0, room=50_000)
        return given.tokens, given.reason

    assert answer(max_tokens=7) == (7, "length")
    assert answer(max_completion_tokens=9, max_tokens=7) == (9, "length")
    assert answer() == (128, "stop")
    assert answer(max_tokens=128_000) == (128, "stop")
