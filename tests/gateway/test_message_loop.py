from __future__ import annotations

import copy
import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects import CHAT
from gateway.rendering import NotReproducible, Renderer, memory
from gateway.rendering.conversation import conversation, template_tools
from gateway.rendering.memory import RecentlyUsed
from gateway.rendering.template import ChatTemplate
from tests.gateway.test_rendering import MESSAGES_SENT, TOOL, huggingface
from tests.tiny_tokenizer import NAMES, model

NEIGHBOURS = """\
{% for m in messages %}
{% if loop.previtem and loop.previtem.role != m.role %}<{{ m.role }}>{% endif %}
{{- m.content }}{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}|{% endif %}
{% endfor %}"""
BY_NUMBER = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {{ m.content }} {%- if loop.index0 > ns.last %} +{% endif -%} {%- if ns.last >= loop.index %} -{% endif %}
  {%- if not loop.first and messages[loop.index0 - 1].role == m.role %} same{% endif -%}
  {%- if loop.last or messages[loop.index].role == 'tool' %} .{% endif %}
{%- endfor -%}
end"""
SETTINGS = """\
{%- macro show(text) %}{% if flag is defined and flag %}[{{ text }}]{% else %}{{ text }}{% endif %}{% endmacro %}
{%- set rest = messages[1:] %}
{{- messages[0].content }}
  {%+ for m in rest +%}
  {{ show(m.content) }}{{ mood if mood is defined else 'none' }}{# a comment {% for %} #}
  {%- for c in m.tool_calls or [] %}{{ loop.index }}{{ c | tojson(indent=2) }}{% if not loop.last %},{% endif %}{% endfor %}
  {% if tools %}{{ "{% endfor %}" }}{{ tools | tojson }}{% endif %}
  {%+ endfor +%}
!"""
SHADOWED = """\
{% set n = 1 %}{% set parts = messages %}
{% for m in messages[::-1] %}
{% if m.role == 'tool' %}{% set n = 3 %}{% set parts = [{'role': 'x'}, {'role': 'y'}] %}{% endif %}
{% if loop.index0 < n %}a{% endif %}{{ parts[loop.index0].role }}{% set own = namespace(x=1) %}{% set own.x = own.x + 1 %}{{ own.x }}
{% endfor %}"""
COUNTING = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endfor %}"
RARELY = """\
{% set ns = namespace(images=0) %}{% macro show(m) %}{% if m.content == 'c' %}{% set ns.images = ns.images + 1 %}{% endif %}{{ m.content }}
{% endmacro %}{% for m in messages %}{{ ns.images }}{{ show(m) }}{% endfor %}"""
SKIPPING = """\
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{{ m.content }}{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}"""
LISTING = "{% for m in messages %}{{ m.content }}{{ messages | length }}{% endfor %}"
REMEMBERED = {"neighbours": NEIGHBOURS, "by number": BY_NUMBER, "settings": SETTINGS, "shadowed": SHADOWED, "rarely": RARELY}
WHOLE = {"counting": COUNTING, "skipping": SKIPPING, "listing": LISTING}
# A part of these at a time, in any order: what was printed for a message comes back elsewhere, among others.
POOL: list[dict[str, Any]] = [
    {"role": "system", "content": "be  brief "},
    {"role": "user", "content": "q"},
    {"role": "user", "content": "日本 👍 <|im_end|>"},
    {"role": "user", "content": ""},
    {"role": "user", "content": "\x1c\ufffd"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": true}'}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": true, "b": 1.0}'}},
    ]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": True}}},
    ]},
    {"role": "assistant", "content": "<think>\nplan\n</think>\n\nanswer", "reasoning": None},
    {"role": "assistant", "content": "answer", "reasoning_content": "plan"},
    {"role": "tool", "content": "result", "tool_call_id": "1"},
    {"role": "tool", "content": [{"type": "text", "text": "result"}], "tool_call_id": "1"},
    {"role": "critic", "content": "c", "name": "bob"},
    {"role": "user", "content": "\ud800"},
]  # fmt: skip
VARIABLES = st.sampled_from(({}, {"flag": True}, {"flag": 1, "mood": "1"}, {"mood": 1}, {"mood": None}, {"mood": True}, {"mood": ["m"]}))


def expect(template: jinja2.Template, context: dict[str, Any]) -> str | None:
    try:
        return template.render(**context)
    except jinja2.TemplateError:
        return None


@pytest.fixture(params=[2, memory.RUN])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many messages and texts are remembered together; few, that short conversations have some."""
    monkeypatch.setattr("gateway.rendering.conversation.RUN", request.param)
    monkeypatch.setattr("gateway.rendering.message_loop.RUN", request.param)
    return int(request.param)


@pytest.mark.parametrize("name", [*REMEMBERED, *WHOLE])
def test_what_is_remembered_prints_as_if_rendered_anew(name: str, run: int) -> None:
    source = {**REMEMBERED, **WHOLE}[name]
    memory = RecentlyUsed()
    compiled, reference = ChatTemplate(source, memory), huggingface(source)
    assert compiled.fast
    assert (compiled._loop is not None) == (name in REMEMBERED)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=9), st.sampled_from((None, [TOOL])), VARIABLES, st.booleans())
    def check(chosen: list[int], tools: Any, variables: dict[str, Any], prompt: bool) -> None:
        sent = [copy.deepcopy(POOL[at]) for at in chosen]
        for upto in range(1, len(sent) + 1):
            made = conversation(sent[:upto], "string", memory)
            offered = template_tools(tools, memory) if tools else None
            context = {"messages": made, "tools": offered, "documents": None, "add_generation_prompt": prompt, **variables}
            expected = expect(reference, {**context, "messages": conversation(sent[:upto], "string", RecentlyUsed())})
            if expected is None:
                with pytest.raises(NotReproducible):
                    compiled.render(context)
            else:
                assert compiled.render(context) == expected

    check()


@pytest.mark.parametrize("template", NAMES)
def test_a_conversation_turn_by_turn_is_rendered_as_if_seen_for_the_first_time(template: str, run: int) -> None:
    known = Renderer(model(template))
    fresh = Renderer(model(template))
    (compiled,) = fresh._templates.values()
    compiled._loop = None

    @settings(max_examples=60, deadline=None)
    @given(MESSAGES_SENT, st.sampled_from((None, [TOOL])), st.sampled_from(({}, {"enable_thinking": False})))
    def check(messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> None:
        for upto in range(1, len(messages) + 1):
            fields = {"messages": messages[:upto], "tools": tools, "chat_template_kwargs": variables}
            before = copy.deepcopy(fields)
            fresh._memory = RecentlyUsed()
            try:
                expected = fresh.render(CHAT, fields)
            except NotReproducible:
                with pytest.raises(NotReproducible):
                    known.render(CHAT, fields)
                continue
            assert known.render(CHAT, fields) == known.render(CHAT, fields) == expected
            assert fields == before

    check()
    (compiled,) = known._templates.values()
    assert compiled._loop is not None, "nothing is remembered"


def test_a_turn_renders_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rendering.conversation.RUN", 1000)
    monkeypatch.setattr("gateway.rendering.message_loop.RUN", 1000)
    rendering = Renderer(model("qwen"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    added: list[int] = []
    (compiled,) = rendering._templates.values()
    assert compiled._loop is not None
    for turn in range(20):
        messages.append({"role": "assistant", "content": f"a{turn}"})
        messages.append({"role": "tool", "content": f"r{turn}", "tool_call_id": "1"})
        before = set(rendering._memory._young)
        rendering.render(CHAT, json.loads(json.dumps({"messages": messages})))
        added.append(len(set(rendering._memory._young) - before))
    assert set(added[1:]) == {6}, "two messages, their texts, and those of the first and the last before, whose neighbours have changed"


def test_a_message_left_open_is_not_taken_for_the_one_it_was_made_of() -> None:
    rendering = Renderer(model("qwen"))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Once upon"}]
    closed = {"messages": messages, "add_generation_prompt": False}
    first = rendering.render(CHAT, closed)
    assert str(rendering.render(CHAT, {**closed, "continue_final_message": True}).prompt).endswith("Once upon")
    assert rendering.render(CHAT, closed) == first


def test_a_list_in_the_place_of_a_message_is_not_taken_for_the_messages_in_it(run: int) -> None:
    known = RecentlyUsed()
    several = [{"role": "user", "content": str(at)} for at in range(run)]
    made = conversation(several, "string", known)
    assert conversation(copy.deepcopy(several), "string", known).keys == made.keys
    with pytest.raises(NotReproducible):
        conversation([several], "string", known)


def test_what_is_asked_for_stays() -> None:
    known = RecentlyUsed(max_bytes=1000)
    for number in range(200):
        known.put(number, str(number), 100)
        known.put("replaced", number, 50)
        assert known.get_all([number, "replaced", "never"]) == [str(number), number, None]
        assert known.get(0) == "0", "asked for each time"
        assert known.kept_bytes == sum(cost for kept in (known._young, known._old) for _, cost in kept.values()) <= 1000
    assert known.get(100) is None
    known.put("too large", "x", 1001)
    assert known.get("too large") is None


def test_what_is_remembered_is_bounded() -> None:
    memory = RecentlyUsed(max_bytes=50_000)
    compiled = ChatTemplate(NEIGHBOURS, memory)
    for number in range(100):
        sent = [{"role": "user", "content": f"{number} " + "x" * 1000}]
        made = conversation(sent, "string", memory)
        assert conversation(sent, "string", memory)[0] is made[0]
        compiled.render({"messages": made, "tools": None, "documents": None, "add_generation_prompt": True})
        assert template_tools([{**TOOL, "function": {"name": str(number)}}], memory)[0]["function"]["name"] == str(number)
        assert memory.kept_bytes <= 50_000
    assert memory.kept_bytes == sum(cost for kept in (memory._young, memory._old) for _, cost in kept.values())
    assert conversation([{"role": "user", "content": "99 " + "x" * 1000}], "string", memory)[0] is made[0]
