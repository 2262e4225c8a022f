"""Whether a chat template walks over content parts ("openai") or expects content to be one text ("string").

After vLLM's detection, its quirks included: what it does not understand counts as "string".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from jinja2 import nodes

from gateway.rendering.conversation import ContentFormat


def content_format(template: nodes.Template) -> ContentFormat:
    """The format that the engine detects for a parsed template."""
    try:
        next(_loops_over_content(template))
    except StopIteration:
        return "string"
    except _Unclear:
        return "string"
    return "openai"


class _Unclear(Exception):
    """The template binds something in a way the detection gives up on."""


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _is(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether a node is the variable (or its attribute `key`), or slices, filters or tests of it."""
    if isinstance(node, nodes.Filter | nodes.Test) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        return node.node is not None and _is(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, variable) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, variable) and node.attr == key


def _is_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def _names_of_messages(root: nodes.Template) -> list[str]:
    """`messages` and whatever it is assigned to."""
    names = ["messages"]
    queue = deque(names)
    while queue:
        name = queue.popleft()
        for assign in root.find_all(nodes.Assign):
            if _is(assign.node, name):
                target = _name(assign.target)
                names.append(target)
                if target != name:
                    queue.append(target)
    return names


def _names_of_message(root: nodes.Template) -> list[str]:
    """Loop variables of the loops over messages."""
    lists = _names_of_messages(root)
    return [_name(loop.target) for loop in root.find_all(nodes.For) if any(_is(loop.iter, name) for name in lists)]


def _loops_over_content(root: nodes.Template) -> Iterator[nodes.For]:
    messages = _names_of_message(root)

    def is_content(node: nodes.Node) -> bool:
        return any(_is(node, name, "content") for name in messages)

    in_macros: set[int] = set()
    parameters_by_loop: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = {argument.name for argument in macro.args}
        parameters: set[str] = set()  # those that are called with a message's content
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = zip(macro.args, call.args, strict=False)
                parameters |= {argument.name for argument, value in given if is_content(value)}
                parameters |= {keyword.key for keyword in call.kwargs if keyword.key in names and is_content(keyword.value)}
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if parameters:
                parameters_by_loop[id(loop)] = parameters

    for loop in root.find_all(nodes.For):
        if is_content(loop.iter):
            _name(loop.target)
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            bound = loop.iter.name in parameters_by_loop.get(id(loop), ())
            if bound or (id(loop) not in in_macros and loop.iter.name == "content"):
                _name(loop.target)
                yield loop
