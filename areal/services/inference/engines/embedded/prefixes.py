"""Which computed prefixes are kept beyond their sequence, by the tokens they were computed from; pure.

Tokens of different kinds (``Sequence.kind``) are never alike.

An entry stands for keys and values that the runner holds under the same number. Entries are found by their longest
common prefix with a prompt, dropped when a longer one contains them, and otherwise least recently used first, so that
their tokens together never exceed the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Prefixes:
    def __init__(self, capacity: int, shortest: int) -> None:
        self.capacity = capacity  # tokens of all entries
        self.shortest = shortest  # tokens; less is not worth a copy
        self.size = 0
        self._entries: OrderedDict[int, list[int]] = OrderedDict()  # least recently used first
        self._heads: dict[int, tuple[int, ...]] = {}  # of each entry: its kind and its first tokens
        self._by_head: dict[tuple[int, ...], list[int]] = {}  # numbers of those that begin with these tokens
        self._numbers = 0

    def has_room(self, count: int) -> bool:
        """Whether so many tokens are worth keeping."""
        return self.shortest <= count <= self.capacity

    def add(self, tokens: list[int], kind: int = 0) -> tuple[int | None, list[int]]:
        """Number of the new entry, None when it is too short, too long or known; and the numbers dropped for it."""
        count = len(tokens)
        if not self.has_room(count):
            return None, []
        head = self._head(tokens, kind)
        alike = self._by_head.get(head, [])
        shared = {number: common_prefix(self._entries[number], tokens, self.shortest) for number in alike}
        if count in shared.values():
            return None, []
        dropped = [number for number, length in shared.items() if length == len(self._entries[number])]
        for number in dropped:
            self._drop(number)
        while self.size + count > self.capacity:
            dropped.append(next(iter(self._entries)))
            self._drop(dropped[-1])
        self._numbers += 1
        self._entries[self._numbers] = tokens
        self._heads[self._numbers] = head
        self._by_head.setdefault(head, []).append(self._numbers)
        self.size += count
        return self._numbers, dropped

    def find(self, tokens: Sequence[int], kind: int = 0) -> tuple[int, int]:
        """(number, length) of the entry that shares most with ``tokens``; length 0 when none shares enough."""
        best, length = 0, 0
        for number in self._by_head.get(self._head(tokens, kind), []):
            shared = common_prefix(self._entries[number], tokens, self.shortest)
            if shared > length:
                best, length = number, shared
        if length:
            self._entries.move_to_end(best)
        return best, length

    def clear(self) -> list[int]:
        """Forget all; their numbers."""
        numbers = list(self._entries)
        self._entries.clear()
        self._heads.clear()
        self._by_head.clear()
        self.size = 0
        return numbers

    def _head(self, tokens: Sequence[int], kind: int) -> tuple[int, ...]:
        return (kind, *tokens[: self.shortest])

    def _drop(self, number: int) -> None:
        tokens = self._entries.pop(number)
        self.size -= len(tokens)
        head = self._heads.pop(number)
        self._by_head[head].remove(number)
        if not self._by_head[head]:
            del self._by_head[head]


def common_prefix(one: Sequence[int], other: Sequence[int], shortest: int) -> int:
    """Length of the common prefix; 0 when it is below ``shortest``. By halving, so that slices do the comparing."""
    high = min(len(one), len(other))
    low = max(shortest, 1)
    if high < low or one[:low] != other[:low]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
