"""No module imports, lazily or for type checkers only, one that imports it in turn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _imported(path: Path, package: str) -> Iterator[str]:
    """The names that a file imports anywhere in it, a module or an attribute of one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_modules_import_without_circles() -> None:
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "areal").rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in files.values()}
    graph: TopologicalSorter[str] = TopologicalSorter()
    for path, name in files.items():
        module = name.removesuffix(".__init__")
        for imported in _imported(path, name.rpartition(".")[0]):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != module:
                graph.add(module, target)
    graph.prepare()  # raises CycleError naming the circle
