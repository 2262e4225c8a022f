"""A chat template's loop over messages, rewritten so that a message that was rendered before is not rendered again."""

from __future__ import annotations

import operator
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import minijinja
from jinja2 import nodes
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from gateway.rendering.conversation import Conversation, Tools
from gateway.rendering.loop_reads import PURE, LoopReads, Unclear
from gateway.rendering.memory import RUN, RecentlyUsed

# Where one of these shows jinja2 renders: Python strips the first four as white space and Rust does not, and the last is what
# minijinja puts for a lone surrogate, which must not pass for text.
_TELLTALES = ("\x1c", "\x1d", "\x1e", "\x1f", "\ufffd")
_NOBODY = -1  # in place of a message before the first or behind the last
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TAG = re.compile(
    rf"\{{\#.*?\#\}}|\{{%[-+]?\s*raw\s*[-+]?%\}}.*?\{{%[-+]?\s*endraw\s*[-+]?%\}}|\{{\{{(?:{_STRING}|[^'\"])*?\}}\}}"
    rf"|\{{%(?P<left>[-+]?)\s*(?P<name>\w+)(?P<rest>(?:{_STRING}|[^'\"])*?)(?P<right>[-+]?)%\}}",
    re.DOTALL,
)


def has_telltale(text: str) -> bool:
    """Whether a rendered text holds what minijinja may have treated in its own way."""
    return any(character in text for character in _TELLTALES)


class MessageLoop:
    """The loop of one template. Raises Unclear for a template where it cannot be told what a pass depends on.

    `memory` keeps what passes print, by the message and all else that they read. `rewritten` is the template that prints a mark
    in place of the loop, and makes those passes alone that are not remembered; it calls `functions`.
    """

    def __init__(self, source: str, tree: nodes.Template, memory: RecentlyUsed):
        loops = [*tree.find_all(nodes.For)]
        outer = [at for at, loop in enumerate(loops) if any(loop is node for node in tree.body)]
        if not outer:
            raise Unclear
        own = max(outer, key=lambda at: sum(1 for _ in loops[at].find_all(nodes.Node)))
        self.stateful = False  # found out: a pass changes what those behind it read
        self._reads = LoopReads(tree, loops[own])
        self._lists = [*dict.fromkeys(name for name, _ in self._reads.neighbours)]
        self._mark = f"\x02{secrets.token_hex(16)}\x03"
        self._seed = xxh3_64_intdigest(source.encode("utf-8", "surrogatepass"))
        self._memory = memory
        self.rewritten = self._rewrite(source, len(loops), own, loops[own])
        self.functions: dict[str, Any] = {"warm_plan": self._plan, "warm_keep": self._keep, "warm_mark": self._mark}
        # of the rendering that goes on
        self._messages = Conversation()
        self._by_identity: dict[int, int | None] = {}  # the keys by message, made when something else than the whole list is read
        self._rows: dict[int, tuple[Any, ...]] = {}
        self._texts: list[str | None] = []
        self._state = ""

    def render(self, environment: minijinja.Environment, name: str, context: dict[str, Any]) -> str | None:
        """The prompt, None where it has to be rendered whole. The rewritten template has this name in the environment."""
        messages = context["messages"]
        if type(messages) is not Conversation or not PURE.isdisjoint(context):
            return None
        self._messages, self._by_identity = messages, {}
        try:
            around = environment.render_template(name, **context)
        except Exception:  # a refusal, or something that is not remembered
            return None
        before, _, behind = around.partition(self._mark)
        return None if has_telltale(around) else "".join((before, *self._texts, behind))  # type: ignore[arg-type]

    # --- called by the template ---

    def _plan(self, messages: Any, facts: Any, numbers: Any, lists: Any, state: Any) -> dict[str, Any]:
        """Before the loop: which passes have to be made, the first of them, and what to walk over."""
        keys = self._keys(messages)
        by_list = {name: self._keys(listed) for name, listed in zip(self._lists, lists, strict=True)}
        self._state = self._known(state)
        same = xxh3_128_intdigest((self._known(facts) + self._state).encode("utf-8", "surrogatepass"), self._seed)
        columns: list[Sequence[Any]] = [keys, *(_column(place, keys) for place in self._reads.places)]
        columns += [_shifted(by_list[name], distance, len(keys)) for name, distance in self._reads.neighbours]
        for (how, _, start, first), number in zip(self._reads.compared, numbers, strict=True):
            if type(number) is not int:
                raise Unclear
            compare = _COMPARE[how]
            columns.append([compare(number, at) if first else compare(at, number) for at in range(start, start + len(keys))])
        self._rows, self._texts = {}, []
        for start in range(0, len(keys), RUN):
            self._texts += self._remembered(start, same, [column[start : start + RUN] for column in columns])
        missing = [text is None for text in self._texts]
        made = [at for at, is_missing in enumerate(missing) if is_missing]
        walked = [None] * len(missing)  # costs the template engine a fraction of what messages do
        for at in made:
            walked[max(at - 1, 0) : at + 2] = messages[max(at - 1, 0) : at + 2]  # `loop` knows the neighbours
        return {"messages": walked, "missing": missing, "first": made[0] if made else len(missing)}

    def _remembered(self, start: int, same: int, columns: list[Sequence[Any]]) -> list[str | None]:
        """What passes in a row print, from pass `start` on, None where that is not known: one look-up where all of it is."""
        run = (same, *map(tuple, columns)) if len(columns[0]) == RUN else None
        known: list[str | None] | None = self._memory.get(run)
        if known is None:
            rows = list(zip(repeat(same, len(columns[0])), *columns, strict=True))
            self._rows |= zip(range(start, start + len(rows)), rows, strict=True)
            known = self._memory.get_all(rows)
            if run is not None and None not in known:
                self._memory.put(run, known, sum(map(sys.getsizeof, known)) + 400)
        return known

    def _keep(self, at: int, text: str, state: Any) -> None:
        """Behind a pass that was made."""
        if self._known(state) != self._state:
            self.stateful = True
            raise Unclear
        if has_telltale(text):
            raise Unclear
        self._texts[at] = text
        if None not in self._rows[at]:
            self._memory.put(self._rows[at], text, sys.getsizeof(text) + 400)

    def _keys(self, messages: Any) -> list[int | None]:
        return self._messages.keys if messages is self._messages else [self._key(message) for message in messages]

    def _key(self, message: Any) -> int | None:
        if not self._by_identity:
            self._by_identity = dict(zip(map(id, self._messages), self._messages.keys, strict=True))
        return self._by_identity.get(id(message))

    def _known(self, values: Iterable[Any]) -> str:
        """Values as a text that differs where they differ. Raises Unclear."""
        told = []
        for value in values:
            if value is None or type(value) in (bool, int, float, str):
                told.append(repr(value))
                continue
            key = value.key if type(value) is Tools else self._key(value)
            if key is None:
                raise Unclear
            told.append(f"<{key}>")
        return ",".join(told)

    # --- at load ---

    def _rewrite(self, source: str, loops: int, own: int, loop: nodes.For) -> str:
        """Each tag that is put in strips the white space which the tag in its place stripped."""
        tags = [tag for tag in _TAG.finditer(source) if tag["name"] in ("for", "endfor")]
        opening = [at for at, tag in enumerate(tags) if tag["name"] == "for"]
        target, _, listed = tags[opening[own]]["rest"].partition(" in ")
        variable = loop.iter.node if isinstance(loop.iter, nodes.Getitem) else loop.iter
        if len(opening) != loops or len(tags) != 2 * loops or target.strip() != loop.target.name or not isinstance(variable, nodes.Name):  # type: ignore[attr-defined]
            raise Unclear
        closing, depth = opening[own], 1
        while depth:
            closing += 1
            depth += 1 if tags[closing]["name"] == "for" else -1
        start, end = tags[opening[own]], tags[closing]
        reads = self._reads
        numbers = [f"({number} if {number.partition('.')[0]} is defined)" for _, number, _, _ in reads.compared]
        state = _listing(reads.written)
        plan = f"warm_plan({listed}, {_listing(reads.facts)}, [{', '.join(numbers)}], [{', '.join(self._lists)}], {state})"
        return "".join((
            source[: start.start()],
            f"{{%{start['left']} set warm = {plan} %}}{{% set warm_first = warm.first %}}",
            f"{{% set warm_missing = warm.missing %}}{{{{ warm_mark }}}}{{% for {target} in warm.messages %}}",
            "{% if loop.index0 >= warm_first and warm_missing[loop.index0] %}",
            f"{{% set warm_text {start['right']}%}}{source[start.end() : end.start()]}{{%{end['left']} endset %}}",
            f"{{% set warm_kept = warm_keep(loop.index0, warm_text, {state}) %}}{{% endif %}}{{% endfor {end['right']}%}}",
            source[end.end() :],
        ))  # fmt: skip


def _column(place: str, keys: list[int | None]) -> Sequence[Any]:
    """The same for all passes, as far as it tells them apart."""
    count = len(keys)
    match place:
        case "first":
            return [at == 0 for at in range(count)]
        case "last":
            return [at == count - 1 for at in range(count)]
        case "previtem":
            return [_NOBODY, *keys[:-1]]
        case "nextitem":
            return [*keys[1:], _NOBODY]
    return range(count)


def _listing(expressions: Iterable[str]) -> str:
    """A template's list that tells apart what is not defined and what is none."""
    told = []
    for expression in expressions:
        name, dot, _ = expression.partition(".")
        defined = f"{name} is defined"
        told += [f"{defined} and {expression} is defined", f"({expression} if {defined})"] if dot else [defined, name]
    return f"[{', '.join(told)}]"


def _shifted(keys: list[int | None], distance: int, count: int) -> list[int | None]:
    """For each pass the element so far from it, which counts from the end where it would lie before the begin."""
    start = distance + len(keys)
    nobody: list[int | None] = [_NOBODY] * count
    before = nobody[: max(-start, 0)]
    return (before + (keys + keys)[max(start, 0) : max(start + count, 0)] + nobody)[:count]
