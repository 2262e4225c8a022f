"""What one pass of a chat template's loop over messages prints: everything it depends on, told from the template's syntax tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from jinja2 import nodes

PURE = frozenset(("raise_exception", "namespace", "range", "dict"))  # functions that give the same for the same
PLACES = frozenset(("first", "last", "index", "index0", "previtem", "nextitem"))  # attributes of `loop`
COMPARISONS = frozenset(("gt", "gteq", "lt", "lteq", "eq", "ne"))
_HARMLESS = (
    nodes.Output, nodes.TemplateData, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.Scope, nodes.Const, nodes.List, nodes.Tuple,
    nodes.Dict, nodes.Pair, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Keyword, nodes.Getitem, nodes.Getattr, nodes.Slice,
    nodes.Concat, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr,
)  # fmt: skip
_Loop = Literal["main", "inner", "none"]  # the loop that `loop` stands for


class Unclear(Exception):
    """There is no rule for what the template does."""


class LoopReads:
    """What the body of a loop reads besides its message, each as the template writes it. Raises Unclear.

    Names that the body only binds itself count as well: before the loop they are not defined, which is as good as any value.
    """

    def __init__(self, tree: nodes.Template, loop: nodes.For):
        if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
            raise Unclear
        self.facts: dict[str, None] = {}  # variables and attributes of variables: the same in every pass
        self.places: dict[str, None] = {}  # of PLACES
        self.neighbours: dict[tuple[str, int], None] = {}  # (list, how far from the pass's own number)
        self.compared: dict[tuple[str, str, int, bool], None] = {}  # (of COMPARISONS, number, passes count from, number stands first)
        self.written: dict[str, None] = {}  # attributes that a pass may change for those behind it
        self._target = loop.target.name
        self._assigns = [*tree.find_all(nodes.Assign)]
        assigned = {_target(assign) for assign in self._assigns}
        self._macros = {node.name: node for node in tree.body if isinstance(node, nodes.Macro) and node.name not in assigned}
        self._pure = PURE - assigned
        self._called: list[nodes.Macro] = []
        self._visit_all(loop.body, "main")
        self._target = ""  # macros do not see it
        for macro in self._called:  # grows
            self._visit_all([*macro.defaults, *macro.body], "none")
        self._find_writes([*loop.body, *self._called])

    def _visit_all(self, visited: Iterable[nodes.Node], loop: _Loop) -> None:
        for node in visited:
            self._visit(node, loop)

    def _visit(self, node: nodes.Node, loop: _Loop) -> None:
        match node:
            case nodes.Name(name="loop"):
                raise Unclear
            case nodes.Name(ctx="load"):
                if node.name in self._macros or node.name in self._pure:
                    raise Unclear  # handed on, not called
                if node.name != self._target:
                    self.facts[node.name] = None
            case nodes.Name() | nodes.NSRef():
                pass
            case nodes.Getattr(node=nodes.Name(name="loop")):
                if loop == "none" or (loop == "main" and node.attr not in PLACES):
                    raise Unclear
                if loop == "main":
                    self.places[node.attr] = None
            case nodes.Getattr(node=nodes.Name() as owner) if owner.name not in (self._target, *self._macros, *self._pure):
                self.facts[f"{owner.name}.{node.attr}"] = None
            case nodes.Compare() if loop == "main" and (compared := _comparison(node)):
                self.compared[compared] = None
                self.places["index0"] = None  # the pass may have bound that name itself
            case nodes.Getitem(node=nodes.Name() as owner) if loop == "main" and (distance := _distance(node.arg)) is not None:
                self.neighbours[owner.name, distance] = None
                self.places["index0"] = None
            case nodes.Call():
                self._visit_call(node, loop)
            case nodes.For():
                self._visit_all([node.target, node.iter, *node.else_], loop)
                self._visit_all([*([node.test] if node.test else ()), *node.body], "inner")
            case nodes.Filter(name="random"):
                raise Unclear
            case _ if isinstance(node, _HARMLESS):
                self._visit_all(node.iter_child_nodes(), loop)
            case _:
                raise Unclear

    def _visit_call(self, call: nodes.Call, loop: _Loop) -> None:
        called = call.node
        if isinstance(called, nodes.Getattr):  # a method of a value, which no template can change
            self._visit(called.node, loop)
        elif not isinstance(called, nodes.Name):
            raise Unclear
        elif macro := self._macros.get(called.name):
            if macro not in self._called:
                self._called.append(macro)
        elif called.name not in self._pure:
            raise Unclear
        if call.dyn_args or call.dyn_kwargs:
            raise Unclear
        self._visit_all([*call.args, *call.kwargs], loop)

    def _find_writes(self, regions: list[nodes.Node]) -> None:
        """A namespace that a pass makes is its own; what it writes in any other has to be found unchanged behind it."""
        inside: list[nodes.Assign] = []
        parameters: set[str] = set()
        for region in regions:
            inside += [region] if isinstance(region, nodes.Assign) else region.find_all(nodes.Assign)
            if isinstance(region, nodes.Macro):
                parameters |= {argument.name for argument in region.args}
        for write in inside:
            if not isinstance(write.target, nodes.NSRef):
                continue
            name = write.target.name
            made = [assign for assign in self._assigns if _target(assign) == name]
            own = [assign for assign in inside if _target(assign) == name]
            if not made or name in parameters or (own and (len(own) < len(made) or not all(map(_makes_namespace, own)))):
                raise Unclear
            if not own:
                self.written[f"{name}.{write.target.attr}"] = None


def _target(assign: nodes.Assign) -> str | None:
    return assign.target.name if isinstance(assign.target, nodes.Name) else None


def _makes_namespace(assign: nodes.Assign) -> bool:
    return isinstance(assign.node, nodes.Call) and isinstance(assign.node.node, nodes.Name) and assign.node.node.name == "namespace"


def _counted_from(node: nodes.Node) -> int | None:
    """0 for `loop.index0`, 1 for `loop.index`."""
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
        return {"index0": 0, "index": 1}.get(node.attr)
    return None


def _comparison(node: nodes.Compare) -> tuple[str, str, int, bool] | None:
    """A comparison of the pass's number with a variable or an attribute of one."""
    if len(node.ops) != 1 or node.ops[0].op not in COMPARISONS:
        return None
    left, right = node.expr, node.ops[0].expr
    for counter, number in ((left, right), (right, left)):
        start = _counted_from(counter)
        if start is None:
            continue
        if isinstance(number, nodes.Name):
            return node.ops[0].op, number.name, start, number is left
        if isinstance(number, nodes.Getattr) and isinstance(number.node, nodes.Name) and number.node.name != "loop":
            return node.ops[0].op, f"{number.node.name}.{number.attr}", start, number is left
    return None


def _distance(index: nodes.Node) -> int | None:
    """How far `loop.index0 + 1` and its like are from the pass's number, which counts from 0."""
    if isinstance(index, nodes.Add | nodes.Sub) and isinstance(index.right, nodes.Const) and type(index.right.value) is int:
        start = _counted_from(index.left)
        if start is None:
            return None
        return start + (index.right.value if isinstance(index, nodes.Add) else -index.right.value)
    return _counted_from(index)
