"""Imports between the packages point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "gateway": {"routing", "kvindex", "workers"},
    "routing": {"kvindex", "workers"},
    "loadgen": {"routing", "kvindex", "workers"},
    "kvindex": set(),
    "workers": set(),
}


def imported_packages(source: str, module: str) -> set[str]:
    """The top-level names that a module's source imports, also inside functions. Relative imports stay within the package."""
    found = set()
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules, f"{package} has no modules"
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    wrong = {
        str(path.relative_to(ROOT)): sorted(names)
        for path in modules
        if (names := imported_packages(path.read_text("utf-8"), str(path)) & (forbidden | {"tests", "benchmarks"}))
    }
    assert wrong == {}


def test_an_import_inside_a_function_is_seen() -> None:
    assert imported_packages("def f():\n    import gateway.app\n    from loadgen.replay import replay\n", "m") == {"gateway", "loadgen"}
