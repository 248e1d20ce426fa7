"""Seeds for the calls that do not set one.

A session that was started with a seed gives each of its calls a different seed, derived from the session's seed, the
prompt's tokens, and how often the session has sampled that prompt. The seeds therefore do not depend on the order in
which concurrent calls arrive. They are kept in memory: after a restart of the data proxy, further calls of the session
are not seeded.

A ``default_seed`` is used only if seeding costs the engine nothing (``Capabilities.free_seeds``).
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
    """The seeds of the sessions. ``capabilities`` None: an external model, which does not support seeds."""

    def __init__(self, capabilities: Capabilities | None) -> None:
        self._capabilities = capabilities or _NONE
        self._sessions: OrderedDict[tuple[str, int], _SessionSeed] = OrderedDict()

    def chosen(self, seed: int | None, default_seed: int | None) -> int | None:
        """Return the seed of a group that is being started. Raises 400 for a ``seed`` if the engine does not support
        seeds."""
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
        """Return a seed for each prompt of a call, or None if the session has no seed."""
        held = self._sessions.get((tag, session))
        if held is None:
            return None
        seeds = []
        for digest in (token_digest(token_array(prompt)) for prompt in prompts):
            seeds.append(derived_seed(held.seed, digest.hex(), held.sampled[digest]))
            held.sampled[digest] += 1
        return seeds
