"""``areal init KIND``: a manifest to start from. What is needed is filled in, everything else is there as a comment
with its meaning and default, so that removing ``# `` is enough."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal.resources import registry
from areal.resources.docs import field_docs, model_doc
from areal.resources.kinds import API_VERSION
from areal.resources.registry import FieldInfo
from areal.resources.scalars import resolve_plain
from areal.resources.schema import BASE_URL
from areal.resources.tree import ABSENT
from areal.resources.typetext import plain_default, type_text

if TYPE_CHECKING:
    pass

_WIDTH = 110
_BARE = re.compile(r"[A-Za-z][\w./-]*(?::[\w.]+)?")

# What a manifest of each kind begins with. A test applies each of them.
_NAMES = {"InferenceService": "default", "Model": "my-model", "AgentService": "my-agent", "TrainJob": "my-job"}
_FILLED: dict[str, dict[str, Any]] = {
    "InferenceService": {"gateway": {"host": "127.0.0.1", "port": 8080}},
    "Model": {"service": "default", "backend": "embedded", "path": "Qwen/Qwen3-0.6B", "replicas": 1},
    "AgentService": {"agent": "my_package.agent:MyAgent", "pairs": 1, "inference": {"service": "default"}},
    "TrainJob": {"driver": "my_package.train:main", "config": "config.yaml"},
}
# Shown, commented, for fields whose absence is their default.
_EXAMPLES: dict[str, Any] = {
    "models": [{"name": "my-model", "backend": "embedded", "path": "Qwen/Qwen3-0.6B"}],
    "engineArgs": {"max-model-len": 8192},
    "overrides": ["actor.optimizer.lr=5e-6"],
    "external": {"url": "https://api.openai.com/v1", "model": "gpt-5", "apiKeyFrom": {"env": "OPENAI_API_KEY"}},
    "envFrom": {"HF_TOKEN": {"env": "HF_TOKEN"}},
    "rollout": {"service": "default", "model": "my-model"},
    "adminKeyFrom": {"file": "admin.key"},
}


def init(kind: str, *, schema: str | None = None) -> str:
    """The manifest; ``schema`` is the URL or path for the editor's modeline."""
    url = schema or f"{BASE_URL}{kind.lower()}.schema.json"
    model = registry.spec_model(kind)
    fields = registry.fields_of(model)
    order = dict.fromkeys((*_FILLED[kind], *fields))
    lines = [
        f"# yaml-language-server: $schema={url}",
        *_comment(model_doc(model), 0),
        *_comment(f"Every field explained: areal explain {kind.lower()}.spec", 0),
        f"apiVersion: {API_VERSION}",
        f"kind: {kind}",
        "metadata:",
        f"  name: {_NAMES[kind]}",
        "  # labels: {team: rl}",
        "spec:",
        *(line for name in order for line in _field(fields[name], _FILLED[kind])),
    ]
    return "\n".join(lines) + "\n"


def _field(info: FieldInfo, filled: dict[str, Any]) -> Iterator[str]:
    doc = field_docs(info.owner).get(info.attribute, "")
    yield from _comment(f"{doc} ({type_text(info)})" if info.nested is None else doc, 2)
    if info.name in filled:
        yield from _yaml({info.name: filled[info.name]}, "  ")
    else:
        yield from (f"  # {line}" for line in _yaml({info.name: _shown(info)}, ""))


def _shown(info: FieldInfo) -> Any:
    """The default, or where that is nothing, an example of the field's shape."""
    if info.name in _EXAMPLES:
        return _EXAMPLES[info.name]
    default = plain_default(info.default)
    if default is not None and default is not ABSENT:
        return default
    return {} if info.nested is not None or info.repeated else None


def _yaml(value: dict[str, Any], indent: str) -> Iterator[str]:
    """Block style for maps that are not empty, flow style for the rest."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{indent}{key}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield f"{indent}{key}:"
            for entry in item:
                first, *rest = _yaml(entry, "")
                yield f"{indent}- {first}"
                yield from (f"{indent}  {line}" for line in rest)
        else:
            yield f"{indent}{key}: {_flow(item)}"


def _flow(value: Any) -> str:
    bare = isinstance(value, str) and _BARE.fullmatch(value) and isinstance(resolve_plain(value), str)
    return str(value) if bare else json.dumps(value, ensure_ascii=False)


def _comment(text: str, indent: int) -> Iterator[str]:
    start = " " * indent + "# "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=start)
