"""Seeds of calls that have none of their own.

A session that was started with a seed gives each of its calls another one, derived from the session's, the prompt's
tokens, and how often the session has sampled that prompt: the order in which calls of one moment arrive does not
matter. Seeds are kept in memory: after a restart of the data proxy a session's further calls are not seeded.

A ``default_seed`` is used only where it costs the engine nothing (``Capabilities.free_seeds``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from areal.dataclasses import dataclass, field
from areal.services.http.errors import unsupported
from areal.services.inference.engines.base import Capabilities
from areal.services.inference.recorder.records import token_array, token_digest
from areal.services.inference.recorder.session import SessionName
from areal.wire.sampling import derived_seed

_MOST_SESSIONS = 65_536
_NONE = Capabilities(sampling_fields=frozenset())


@dataclass
class _SessionSeed:
    seed: int
    sampled: Counter[bytes] = field(default_factory=Counter)


class SessionSeeds:
    """``capabilities`` None: an external model, which has no seeds."""

    def __init__(self, capabilities: Capabilities | None) -> None:
        self._capabilities = capabilities or _NONE
        self._sessions: OrderedDict[tuple[str, int], _SessionSeed] = OrderedDict()

    def chosen(self, seed: int | None, default_seed: int | None) -> int | None:
        """The seed of a group that is being started. Raises 400 for a ``seed`` that the engine does not have."""
        if seed is not None and "seed" not in self._capabilities.sampling_fields:
            raise unsupported("seed", "this engine does not have it")
        return seed if seed is not None or not self._capabilities.free_seeds else default_seed

    def start(self, seed: int, session_ids: Sequence[str]) -> None:
        for member, name in enumerate(map(SessionName.require, session_ids)):
            self._sessions[name.tag, name.number] = _SessionSeed(derived_seed(seed, member))
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def end(self, tag: str, session: int) -> None:
        self._sessions.pop((tag, session), None)

    def of_call(self, tag: str, session: int, prompts: Sequence[Sequence[int]]) -> list[int] | None:
        """A seed for each prompt of a call; None where the session has none."""
        held = self._sessions.get((tag, session))
        if held is None:
            return None
        seeds = []
        for digest in (token_digest(token_array(prompt)) for prompt in prompts):
            seeds.append(derived_seed(held.seed, digest.hex(), held.sampled[digest]))
            held.sampled[digest] += 1
        return seeds
