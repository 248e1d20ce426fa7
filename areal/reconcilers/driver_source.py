"""Which configuration class a driver of one's own reads its words into, from its text: nothing of it is imported.

Only what leaves no doubt counts: one call of ``load_expr_config`` in the module, of a class of areal's own, with the
arguments as the driver got them.
"""

from __future__ import annotations

import ast

CONFIGS = ("BaseExperimentConfig", "GRPOConfig", "PPOConfig", "SFTConfig", "RWConfig", "DPOConfig")


def config_class(text: str, function: str) -> str | None:
    """Its name in ``areal.api.cli_args``; None where it cannot be told. ``function``: the driver's."""
    tree = ast.parse(text)
    ours = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "areal"
        for alias in node.names
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_loading(node, ours)]
    driver = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if len(calls) != 1 or driver is None or calls[0] not in ast.walk(driver) or not driver.args.args:
        return None
    (words, cls), argument = calls[0].args, driver.args.args[0].arg
    used = [node for node in ast.walk(driver) if isinstance(node, ast.Name) and node.id == argument]
    if used != [words] or _is_called_with_more(tree, function):
        return None
    name = ours.get(cls.id) if isinstance(cls, ast.Name) else None
    return name if name in CONFIGS else None


def _is_loading(node: ast.Call, ours: dict[str, str]) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return ours.get(name) == "load_expr_config" and len(node.args) == 2 and not node.keywords


def _is_called_with_more(tree: ast.Module, function: str) -> bool:
    """A script may call its function with other words than it was given."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return any(
        [ast.unparse(argument) for argument in call.args] not in (["sys.argv[1:]"], ["sys.argv"])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == function
    )
