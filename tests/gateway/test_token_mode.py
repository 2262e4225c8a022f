from __future__ import annotations

import copy
import logging
import threading
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiny_tokenizer import source_text
from gateway.dialects import CHAT, COMPLETIONS, RESPONSES
from gateway.token_mode import TokenMode
from kvindex.chain import ChainState, token_seed
from kvindex.tokenizer import pack
from tests.gateway.test_rendering import BY_NAME, RECORDED
from tests.kvindex.test_tokenizer import whole
from tests.tiny_tokenizer import NAMES, model

BLOCK = 8


@cache
def shared(template: str) -> TokenMode:
    return TokenMode(model(template), BLOCK)


def expected(mode: TokenMode, template: str, fields: dict[str, Any], lora: str = "", salt: str = "") -> Any:
    """The chain of the whole prompt's tokens, from scratch."""
    rendered = mode.renderer.render(CHAT, copy.deepcopy(fields))
    tokens = whole(model(template), str(rendered.prompt), rendered.add_special_tokens)
    return ChainState.start(token_seed(lora, salt), 4 * BLOCK).extend(tokens).chain()


WORDS = st.sampled_from(("look", "<|im_end|>", "<think>\nhm\n</think>\n\n", "日本", "🎉", "\n\n", "    return x", "", "</think>", " "))
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)
TURNS = st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 2000)), min_size=1, max_size=5)


@pytest.mark.parametrize("template", NAMES)
def test_a_session_has_the_chains_of_its_whole_prompts(template: str) -> None:
    mode = shared(template)
    fixed = {"date_string": "today"}

    @settings(max_examples=8, deadline=None)
    @given(TURNS, st.booleans())
    def check(turns: list[tuple[str, str, int]], compacted: bool) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You help. " * 20}]
        for question, answer, length in turns:
            messages.append({"role": "user", "content": question + " word" * length})
            fields = {"messages": messages, "chat_template_kwargs": fixed}
            prompt = mode.prompt(CHAT, fields)
            assert prompt is not None
            assert prompt.chain == expected(mode, template, fields)
            assert prompt.tokens * 4 == prompt.chain.length
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
            messages += [
                {"role": "assistant", "content": answer, "reasoning": question, "tool_calls": [call]},
                {"role": "tool", "content": answer * 3, "tool_call_id": "c"},
            ]
        if compacted:
            messages[1:-2] = [{"role": "user", "content": "summary"}]
        fields = {"messages": messages, "chat_template_kwargs": fixed}
        prompt = mode.prompt(CHAT, fields)
        assert prompt is not None and prompt.chain == expected(mode, template, fields)

    check()


def test_adapters_and_salts_have_caches_of_their_own() -> None:
    mode = shared("chatml")
    fields = {"messages": [{"role": "user", "content": "word " * 100}]}
    chains = [mode.prompt(CHAT, fields, *identity) for identity in (("", ""), ("adapter", ""), ("", "adapter"), ("", ""))]
    hashes = [tuple(prompt.chain.hashes) for prompt in chains if prompt is not None]
    assert len(hashes) == 4 and len(set(hashes)) == 3 and hashes[0] == hashes[3]


def test_token_ids_that_were_sent_are_the_prompt() -> None:
    mode = shared("chatml")
    ids = list(range(50))
    prompt = mode.prompt(COMPLETIONS, {"prompt": ids})
    assert prompt is not None and prompt.tokens == 50
    assert prompt.chain == ChainState.start(token_seed(), 4 * BLOCK).extend(pack(ids)).chain()
    assert mode.prompt(COMPLETIONS, {"prompt": [1, -1]}) is None


def test_what_cannot_be_told_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    mode = TokenMode(model("chatml"), 0)
    fields = {"messages": [{"role": "user", "content": "x"}]}
    assert mode.prompt(CHAT, fields) is None, "the engine's block is not known"
    mode.block_tokens = BLOCK
    assert mode.prompt(CHAT, fields) is not None
    with caplog.at_level(logging.INFO, logger="warmroute.token_mode"):
        for _ in range(3):
            assert mode.prompt(RESPONSES, {"input": "x", "previous_response_id": "r"}) is None
            assert mode.prompt(CHAT, {"messages": [{"role": "user", "content": "a\ud83d"}]}) is None
    assert sorted(mode.fallbacks.values()) == [1, 3, 3]
    assert len(caplog.messages) == 2


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.just(1.5), st.text(max_size=3), st.just("a\ud83d"),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=2),
    st.dictionaries(st.sampled_from(("type", "text")), st.none()),
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside of a JSON value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(RECORDED["cases"]), JUNK, st.data())
def test_no_request_breaks_it(case: dict[str, Any], junk: Any, data: st.DataObject) -> None:
    """Whatever a client sends where something else belongs: the prompt cannot be told, and that is all."""
    fields = copy.deepcopy(case["fields"])
    container, key = data.draw(st.sampled_from(places(fields)))
    container[key] = junk
    for template in ("chatml", "qwen"):
        prompt = shared(template).prompt(BY_NAME[case["dialect"]], fields)
        assert prompt is None or prompt.chain.length == 4 * prompt.tokens


async def test_a_long_new_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chain, and none of the tokenising on the event loop's thread."""
    mode, plain = TokenMode(model("qwen"), 32), TokenMode(model("qwen"), 32)
    encode, threads = mode.tokenizer._encode, []
    monkeypatch.setattr(mode.tokenizer, "_encode", lambda texts: threads.append(threading.current_thread()) or encode(texts))
    monkeypatch.setattr(mode.tokenizer, "_by_words", lambda piece: pytest.fail("tokenised by the event loop"))
    fields = {"messages": [{"role": "user", "content": "".join(source_text(400_000))}]}
    prompt = await mode.prompt_beside(CHAT, fields)
    expected = plain.prompt(CHAT, fields)
    assert prompt is not None and expected is not None
    assert prompt.tokens == expected.tokens and prompt.chain.hashes == expected.chain.hashes
    assert threads and threading.main_thread() not in threads
    surrogate = {"messages": [{"role": "user", "content": "x" * 100_000 + "\ud83d"}]}
    assert await mode.prompt_beside(CHAT, surrogate) is None
