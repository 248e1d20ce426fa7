"""Make posts/ (prompt, completion) and pairs/ (prompt, chosen, rejected): posts with their summaries, in the form of
the TL;DR data sets. All of it is made up here.

python make_data.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COUNTS = {"train": 240, "test": 80}
NAMES = ("Ann", "Ben", "Eva", "Ida", "Max", "Tom")
DEEDS = ("lost", "found", "broke", "sold")
THINGS = ("bike", "book", "cup", "key", "lamp", "phone")
PLACES = ("at home", "at work", "on the bus", "in the park")
BEFORE = ("This happened last week.", "I need some advice.", "It was a long day.")
AFTER = ("Nobody knows what to do now.", "We talked about it for hours.", "What would you do?")
POST = "SUBREDDIT: r/{sub}\nPOST: {before} My friend {name} {deed} a {thing} {place}. {after}\nTL;DR:"
SUMMARY = " {name} {deed} a {thing}."


def facts(source: random.Random) -> dict[str, str]:
    chosen = {"sub": ("advice", "stories"), "name": NAMES, "deed": DEEDS, "thing": THINGS, "place": PLACES}
    chosen |= {"before": BEFORE, "after": AFTER}
    return {key: source.choice(values) for key, values in chosen.items()}


def wrong(of: dict[str, str], source: random.Random) -> dict[str, str]:
    """Return the facts with one that is not in the post."""
    key, values = source.choice([("name", NAMES), ("deed", DEEDS), ("thing", THINGS)])
    return {**of, key: source.choice([value for value in values if value != of[key]])}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    source = random.Random(0)
    for split, count in COUNTS.items():
        posts, pairs = [], []
        for _ in range(count):
            of = facts(source)
            prompt, chosen = [{"role": "user", "content": POST.format(**of)}], SUMMARY.format(**of)
            posts.append({"prompt": prompt, "completion": chosen})
            rejected = SUMMARY.format(**wrong(of, source))
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        write(HERE / "posts" / f"{split}.jsonl", posts)
        write(HERE / "pairs" / f"{split}.jsonl", pairs)


if __name__ == "__main__":
    main()
