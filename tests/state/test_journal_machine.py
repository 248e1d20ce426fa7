"""Any history of commands that begin, note, end, commit, abort, die mid-write and recover each other: the orphans are
exactly the dead, and each holds exactly what was acknowledged."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from areal.state.home import Home
from areal.state.journal import Transaction, encode_line, orphans


@dataclass
class Command:
    """The model of one transaction: what was acknowledged to it."""

    transaction: Transaction
    data: dict[int, dict[str, int]] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)


class Journals(RuleBasedStateMachine):
    living = Bundle("living")

    def __init__(self) -> None:
        super().__init__()
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(dir=place)
        self.home = Home(Path(self.folder) / "home").ensure()
        self.dead: dict[Path, Command] = {}
        self.alive: list[Command] = []

    def teardown(self) -> None:
        for command in self.alive:
            os.close(command.transaction._fd)
        shutil.rmtree(self.folder)

    @rule(target=living)
    def open(self) -> Command:
        self.alive.append(Command(Transaction.open(self.home, "apply")))
        return self.alive[-1]

    @rule(command=living, run=st.integers(0, 9))
    def begin(self, command: Command, run: int) -> None:
        number = command.transaction.begin("spawn", run=run)
        command.data[number] = {"run": run}
        command.unfinished.add(number)

    @rule(command=living, pid=st.integers(0, 9), choice=st.randoms(use_true_random=False))
    def note(self, command: Command, pid: int, choice: object) -> None:
        for number in sorted(command.unfinished)[:1]:
            command.transaction.note(number, pid=pid)
            command.data[number]["pid"] = pid

    @rule(command=living)
    def end(self, command: Command) -> None:
        for number in sorted(command.unfinished)[:1]:
            command.transaction.end(number)
            command.unfinished.discard(number)

    @rule(command=consumes(living))
    def finish(self, command: Command) -> None:
        """Commit when all is done; a commit with an operation open is refused, and the command aborts."""
        self.alive.remove(command)
        if command.unfinished:
            command.transaction.abort("gave up")
            self.dead[command.transaction.path] = command
        else:
            command.transaction.commit()

    @rule(command=consumes(living), torn=st.integers(0, 60))
    def die(self, command: Command, torn: int) -> None:
        """Killed, perhaps in the middle of an append that was not acknowledged."""
        self.alive.remove(command)
        os.write(command.transaction._fd, encode_line({"type": "end", "n": 1, "data": {}})[:torn])
        os.close(command.transaction._fd)
        self.dead[command.transaction.path] = command

    @rule(killed=st.booleans(), target=living)
    def recover(self, killed: bool) -> Command:
        """The next mutating command settles the oldest orphan, or dies while it does."""
        found = orphans(self.home)
        if found:
            taken = Transaction.resume(found[0])
            assert taken is not None
            read, resumed = taken
            command = self.dead.pop(found[0].path)
            command.transaction = resumed
            for operation in read.unfinished:
                resumed.end(operation.n)
                command.unfinished.discard(operation.n)
                if killed:
                    os.close(resumed._fd)
                    self.dead[resumed.path] = command
                    break
            else:
                resumed.commit()
        self.alive.append(Command(Transaction.open(self.home, "apply")))
        return self.alive[-1]

    @invariant()
    def orphans_are_the_dead_with_what_they_were_told(self) -> None:
        found = orphans(self.home)
        assert {orphan.path for orphan in found} == self.dead.keys()
        for orphan in found:
            command = self.dead[orphan.path]
            assert {operation.n: operation.data for operation in orphan.operations} == command.data
            assert {operation.n for operation in orphan.unfinished} == command.unfinished
            assert orphan.damaged == 0

    @invariant()
    def every_file_is_a_living_or_a_dead_command(self) -> None:
        expected = {command.transaction.path for command in self.alive} | self.dead.keys()
        assert set(self.home.journal.iterdir()) == expected


Journals.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestJournals = Journals.TestCase
