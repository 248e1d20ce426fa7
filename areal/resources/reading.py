"""From source texts to documents that are plain: chosen by profile, generated, every expression evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document, read_documents
from areal.resources.expressions import Environment, Scope
from areal.resources.generate import expand
from areal.resources.nodes import plain
from areal.resources.sources import SourceText
from areal.resources.suggest import did_you_mean
from areal.resources.templating import Budget, Context

MAX_DOCUMENTS = 50_000


@dataclass
class Reading:
    """One rendering's reading of files. ``profiles`` collects the profiles that files speak of; ``seen`` counts the
    documents met, whether or not they belong to the profile, ``count`` the resources they became."""

    problems: Problems
    env: Environment
    profile: str | None = None
    budget: Budget = field(default_factory=Budget)
    profiles: set[str] = field(default_factory=set)
    seen: int = 0
    count: int = 0

    def context(self, values: Mapping[str, Any]) -> Context:
        return Context(Scope(values, self.env, self.profile), self.problems, self.budget)

    def documents(self, sources: Iterable[SourceText], values: Mapping[str, Any]) -> list[Document]:
        """The documents of ``sources`` that belong to the profile, without ``generate`` and expressions."""
        context = self.context(values)
        found: list[Document] = []
        for source in sources:
            for document in read_documents(source, self.problems):
                self.seen += 1
                if not self._is_active(document):
                    continue
                for expanded in expand(document, context):
                    self.count += 1
                    if self.count > MAX_DOCUMENTS:
                        self.problems.add(document.node.pos, "", f"more than {MAX_DOCUMENTS} resources")
                        return found
                    found.append(expanded)
        return found

    def check_profile(self) -> None:
        """A profile that no file speaks of, while some speak of others, is a slip of the pen."""
        if self.profile is not None and self.profiles and self.profile not in self.profiles:
            near = did_you_mean(self.profile, self.profiles)
            known = ", ".join(sorted(self.profiles))
            self.problems.add(Pos("--profile", 1, 1), "", f'unknown profile "{self.profile}"{near}: there are {known}')

    def _is_active(self, document: Document) -> bool:
        """Whether the document names the profile, or none."""
        node = document.node.get("profiles")
        if node is None:
            return True
        names = plain(node)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.problems.add(document.node.key_pos("profiles"), "profiles", "expected a list of profile names")
            return True
        self.profiles.update(names)
        return self.profile in names
