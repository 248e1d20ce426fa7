"""The journals that one data proxy serves: its own, and those whose processes are gone.

``root`` holds one folder a process, by its run's uid. A process restarted under the same uid finds its own journal
again. Any other journal whose lock is free is adopted, after a moment in which its own process may come back; it is
served in place, under its own tag, and deleted once nothing is left in it. New sessions go to the own journal.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from areal.errors import UsageFault
from areal.services.inference.recording.folder import Folder, hold, others
from areal.services.inference.recording.journal import Journal, Rules, open_journal
from areal.services.inference.recording.names import tag_of_key

_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
_ADOPT_EVERY_S = 5.0
_MOST_OWN_FOLDERS = 100


class Vault:
    """Open with ``open_vault``; ``run`` is its background work."""

    def __init__(self, root: Path, own: Journal) -> None:
        self.root = root
        self.own = own
        self.journals: dict[str, Journal] = {own.tag: own}
        self.unreadable: dict[Path, str] = {}
        self._ready = asyncio.Event()
        self._adopting = asyncio.Lock()
        own.on_ready = self._wake

    def __iter__(self) -> Iterator[Journal]:
        return iter(tuple(self.journals.values()))

    def journal(self, tag: str) -> Journal | None:
        return self.journals.get(tag)

    def holder_of_key(self, key: bytes) -> tuple[Journal, int] | None:
        """The journal and number of the session that this key opens."""
        tag = tag_of_key(key.decode("ascii", "replace"))
        places = [self.journals[tag]] if tag in self.journals else list(self)
        for journal in places:
            if (number := journal.session_by_key(key)) is not None:
                return journal, number
        return None

    # -- readiness of online trajectories

    def _wake(self) -> None:
        self._ready.set()
        self._ready = asyncio.Event()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when a trajectory may have become ready, or after ``timeout_s``."""
        due = [at for journal in self if (at := journal.next_due()) is not None]
        patience = min([timeout_s, *(max(0.0, at - self.own.clock()) for at in due)])
        event = self._ready
        try:
            async with asyncio.timeout(patience):
                await event.wait()
        except TimeoutError:
            return

    # -- upkeep

    async def run(self, adopt_after_s: float) -> None:
        """Sweep, and adopt what is free, for as long as the process lives."""
        loop = asyncio.get_running_loop()
        adopt_at = loop.time() + adopt_after_s
        while True:
            for journal in self:
                if await journal.sweep():
                    continue
                if journal is not self.own and journal.is_spent():
                    await self._retire(journal)
            if loop.time() >= adopt_at:
                await self.adopt()
                adopt_at = loop.time() + _ADOPT_EVERY_S
            await asyncio.sleep(_SWEEP_S)

    async def adopt(self) -> list[str]:
        """Take over every journal whose lock is free: their tags. One that cannot be read is reported and left."""
        async with self._adopting:
            held = {journal.folder.path for journal in self}
            adopted = []
            for path in others(self.root, held):
                folder = hold(path)
                if folder is None:
                    continue
                journal = await self._open(folder)
                if journal is not None:
                    self.journals[journal.tag] = journal
                    adopted.append(journal.tag)
                    _log.info("adopted the journal %s with %d sessions", path.name, journal.live_sessions())
            if adopted:
                self._wake()
            return adopted

    async def _open(self, folder: Folder) -> Journal | None:
        try:
            journal = await open_journal(folder, self.own.rules, self.own.clock)
        except sqlite3.Error as error:
            if folder.path not in self.unreadable:
                _log.error("the journal %s cannot be read: %s", folder.path, error)
            self.unreadable[folder.path] = str(error)
            folder.release()
            return None
        self.unreadable.pop(folder.path, None)
        journal.on_ready = self._wake
        return journal

    async def _retire(self, journal: Journal) -> None:
        del self.journals[journal.tag]
        await journal.close(remove=True)
        _log.info("the adopted journal %s is empty and gone", journal.folder.path.name)

    async def close(self) -> None:
        for journal in self:
            await journal.close()


async def open_vault(root: Path, uid: str, rules: Rules) -> Vault:
    """The vault with this process's own journal. Raises UsageFault when that cannot be opened."""
    try:
        folder = next(filter(None, map(hold, _own_folders(root, uid))))
        return Vault(root, await open_journal(folder, rules))
    except (OSError, sqlite3.Error) as error:
        hint = "move the folder away to start without what is recorded in it, or name another --state-dir"
        raise UsageFault(f"cannot open the journal {root / uid}: {error}", hint=hint) from error


def _own_folders(root: Path, uid: str) -> Iterator[Path]:
    """Folders to try: a sibling may have adopted ours while we were away."""
    yield root / uid
    for number in range(2, _MOST_OWN_FOLDERS):
        yield root / f"{uid}-{number}"
