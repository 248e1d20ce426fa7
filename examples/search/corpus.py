"""Search over a file of documents, by BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Corpus:
    """The documents of a file: a JSON object with ``title`` and ``text`` on each line."""

    def __init__(self, file: Path) -> None:
        documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        self._texts = [each["text"] for each in documents]
        counts = [Counter(words(f"{each['title']} {each['text']}")) for each in documents]
        lengths = [sum(each.values()) for each in counts]
        mean = sum(lengths) / len(lengths)
        self._weights: dict[str, dict[int, float]] = defaultdict(dict)  # of a word in a document
        for number, each in enumerate(counts):
            for word, count in each.items():
                norm = _K1 * (1 - _B + _B * lengths[number] / mean)
                self._weights[word][number] = count * (_K1 + 1) / (count + norm)

    def search(self, query: str, most: int) -> list[str]:
        """At most ``most`` documents that have a word of the query, the best first."""
        scores: Counter[int] = Counter()
        for word in words(query):
            found = self._weights.get(word, {})
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, weight in found.items():
                scores[number] += rarity * weight
        return [self._texts[number] for number, _ in scores.most_common(most)]
