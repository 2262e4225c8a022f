"""A body read on from a known prefix gives what reading all of it gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.body import RAW_BLOCK, BodyReader, loads
from gateway.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, BadRequest, Dialect

# Text with everything that could fool a search for message boundaries: quotes, braces, the very patterns, unicode, controls.
texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(['{"role":"user"}', '},{"role"', '"messages":[{"role":', "]}", '\\"', "\u2028é漢😀", '],"tools":[']),
    st.sampled_from(["x" * 3000, "é" * 5000]),
)
arguments = st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2)})
contents = st.one_of(texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3), st.none())


def chat_messages() -> st.SearchStrategy[dict[str, Any]]:
    plain = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": contents})
    swapped = st.fixed_dictionaries({"content": contents, "role": st.sampled_from(["user", "assistant"])})
    calls = st.builds(
        lambda name, args, as_text: {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(args) if as_text else args}}
            ],
        },
        texts,
        arguments,
        st.booleans(),
    )
    return st.one_of(plain, swapped, calls)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[bytes], Dialect]:
    """The bodies of one growing conversation, as one client would spell them."""
    dialect = draw(st.sampled_from([CHAT, MESSAGES, RESPONSES]))
    filler = {"role": "user", "content": "a line of code\n" * draw(st.integers(0, 3 * RAW_BLOCK // 15))}
    items = [{"role": "system", "content": "s" * draw(st.integers(1, 2 * RAW_BLOCK))}, filler, *draw(st.lists(chat_messages(), max_size=3))]
    before = {"model": "m", **draw(st.dictionaries(st.sampled_from(["tools", "temperature"]), st.lists(texts, max_size=2), max_size=2))}
    after = draw(st.dictionaries(st.sampled_from(["stream", "max_tokens", "metadata"]), st.one_of(st.booleans(), arguments), max_size=3))
    spaced = draw(st.booleans())
    ascii_only = draw(st.booleans())
    bodies = []
    for _ in range(draw(st.integers(2, 4))):
        fields = {**before, dialect.items_key: items, **after}
        separators = (", ", ": ") if spaced else (",", ":")
        bodies.append(json.dumps(fields, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
        items = items + draw(st.lists(chat_messages(), min_size=1, max_size=3))
    return bodies, dialect


def without_items(fields: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != dialect.items_key}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(conversations())
def test_reading_on_equals_reading_whole(case: tuple[list[bytes], Dialect]) -> None:
    bodies, dialect = case
    reader = BodyReader()
    for body in [*bodies, bodies[0], bodies[-1]]:
        parsed = reader.read(dialect, body)
        fresh = BodyReader().read(dialect, body)
        assert parsed.chain == fresh.chain
        assert without_items(parsed.fields, dialect) == without_items(fresh.fields, dialect)


def growing(turns: int, dialect: Dialect = CHAT, **fields: Any) -> list[bytes]:
    items: list[dict[str, Any]] = [{"role": "system", "content": "rule " * 4000}]
    bodies = []
    for turn in range(turns):
        items.append({"role": "user", "content": f"{turn} " * 3000})
        bodies.append(json.dumps({"model": "m", dialect.items_key: items, **fields}).encode())
    return bodies


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
def test_a_grown_conversation_is_not_parsed_again(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = BodyReader()
    bodies = growing(8, dialect, stream=True, metadata={"a": [1]})
    reader.read(dialect, bodies[-2])
    monkeypatch.setattr("gateway.body.loads", lambda body: pytest.fail("the whole body was parsed"))
    parsed = reader.read(dialect, bodies[-1])
    monkeypatch.undo()
    assert parsed.chain == BodyReader().read(dialect, bodies[-1]).chain


def test_claude_code_keeps_its_prefix_when_cache_control_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(count: int) -> bytes:
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": f"{i} " * 4000}]} for i in range(count)]
        messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
        return json.dumps({"model": "m", "messages": messages, "system": [{"type": "text", "text": "s"}]}).encode()

    reader = BodyReader()
    before = reader.read(MESSAGES, turn(6)).chain.hashes
    monkeypatch.setattr("gateway.body.loads", lambda body: pytest.fail("the whole body was parsed"))
    after = reader.read(MESSAGES, turn(7)).chain.hashes
    assert after[: len(before)] == before


def test_new_tools_behind_the_conversation_are_another_prompt() -> None:
    reader = BodyReader()
    one = growing(3, tools=[{"name": "a"}])[-1]
    two = growing(3, tools=[{"name": "b"}])[-1]
    assert reader.read(CHAT, one).chain.hashes[0] != reader.read(CHAT, two).chain.hashes[0]
    assert reader.read(CHAT, two).chain == BodyReader().read(CHAT, two).chain


def test_memory_for_prefixes_is_bounded() -> None:
    reader = BodyReader(max_bytes=50_000)
    for session in range(40):
        items = [{"role": "user", "content": f"{session} " * 20_000}, {"role": "user", "content": "x" * RAW_BLOCK}]
        reader.read(CHAT, json.dumps({"model": "m", "messages": items}).encode())
    assert 0 < reader.kept_bytes <= 50_000


TEXT = "def f():\n    return 1\n" * 100


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": TEXT}],
        [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": TEXT[:50]}, {"type": "text", "text": TEXT[50:]}],
    ],
)
@pytest.mark.parametrize("dialect", [CHAT, MESSAGES])
def test_a_string_and_its_parts_are_one_prompt(dialect: Dialect, content: Any) -> None:
    chains = [
        BodyReader().read(dialect, json.dumps({"model": "m", "messages": [{"role": "user", "content": c}]}).encode()).chain.hashes
        for c in (TEXT, content)
    ]
    assert chains[0] == chains[1] != []


@pytest.mark.parametrize("change", [{"model": "n"}, {"cache_salt": "tenant"}, {"messages": [{"role": "user", "content": "!" + TEXT}]}])
def test_what_is_part_of_the_identity_changes_every_hash(change: dict[str, Any]) -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
    one, two = (BodyReader().read(CHAT, json.dumps(f).encode()).chain.hashes for f in (fields, {**fields, **change}))
    assert not set(one) & set(two)


def test_a_volatile_first_line_is_no_part_of_the_prompt() -> None:
    def body(number: int) -> bytes:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": TEXT}]
        return json.dumps({"model": "m", "system": system, "messages": [{"role": "user", "content": TEXT}]}).encode()

    one, two = (BodyReader().read(MESSAGES, body(n)) for n in (1, 2))
    assert one.volatile and one.chain.hashes == two.chain.hashes != []


def test_a_lone_surrogate_is_read_and_hashed_the_same_each_time() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\ud83d ' + b"x" * 2000 + b'"}]}'
    assert BodyReader().read(CHAT, body).chain.hashes == BodyReader().read(CHAT, body).chain.hashes != []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"a":NaN}',
        b'{"a":1e999',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":"\\ud83d", "b":NaN}',
        b'{"a":"\\ud83d", "b":1e999}',
        b"\xff\xfe{}",
    ],
)
def test_what_is_not_a_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        loads(body)


@pytest.mark.parametrize(("dialect", "value"), [(CHAT, "text"), (CHAT, None), (MESSAGES, {}), (COMPLETIONS, 3), (RESPONSES, 3)])
def test_a_conversation_of_the_wrong_type_is_named(dialect: Dialect, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        BodyReader().read(dialect, json.dumps({"model": "m", dialect.items_key: value, "pad": "x" * 2000}).encode())
    assert caught.value.param == dialect.items_key


BIG = {"role": "user", "content": "x" * 2 * RAW_BLOCK}
LONG = [BIG, *({"role": "user", "content": str(i) * 3000} for i in range(6))]
LOOKALIKE = [{"role": "user", "content": "q" * RAW_BLOCK} for _ in range(5)]


def spelled(*fields: tuple[str, Any]) -> bytes:
    """A JSON object whose keys may repeat."""
    return ("{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in fields) + "}").encode()


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "turns",
    [
        # the field behind the conversation is named once more, as a value behind another array
        [[("K", LONG), ("stream", True), ("stop", ["z" * RAW_BLOCK]), ("user", "stream")]] * 2,
        # another array of the same shape behind the conversation changes, or is all that changes
        [[("K", LONG), ("extra", [*LOOKALIKE, n]), ("stream", True)] for n in (BIG, {"role": "user", "content": "other"})],
        [[("K", LONG[:n]), ("tools", LOOKALIKE), ("stream", True)] for n in (4, 5, 6, 7)],
        # the conversation is given twice: the last one counts
        [[("K", LONG), ("K", LONG[:3])], [("K", LONG)], [("K", LONG), ("K", LONG[:3])], [("K", LONG), ("a", 1), ("K", LONG[:2])]],
        # fields behind it come, go and change
        [[("K", LONG), ("stream", True)], [("K", LONG + LONG), ("stream", False)], [("K", LONG + LONG)], [("K", LONG), ("a", [1])]],
    ],
    ids=["value-like-key", "array-behind-changes", "tools-behind", "given-twice", "fields-change"],
)
def test_what_looks_like_the_conversation_does_not_pass_for_it(dialect: Dialect, turns: list[list[tuple[str, Any]]]) -> None:
    reader = BodyReader()
    for fields in turns:
        body = spelled(("model", "m"), *((dialect.items_key if k == "K" else k, v) for k, v in fields))
        known, fresh = reader.read(dialect, body), BodyReader().read(dialect, body)
        assert known.chain == fresh.chain
        assert without_items(known.fields, dialect) == without_items(fresh.fields, dialect)


def test_content_nested_without_end_is_a_bad_request_or_read() -> None:
    nested: Any = "x"
    for _ in range(100):
        nested = [{"type": "tool_result", "content": nested}]
    body = json.dumps({"model": "m", "messages": [BIG, {"role": "user", "content": nested}, BIG]}).encode()
    assert BodyReader().read(MESSAGES, body).chain == BodyReader().read(MESSAGES, body).chain
