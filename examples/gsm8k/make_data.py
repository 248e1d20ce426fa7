"""Make train.jsonl and test.jsonl: word problems of one addition, in GSM8K's form. No row of GSM8K is among them.

python make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
COUNTS = {"train": 240, "test": 80}
NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("apples", "books", "coins", "shells")
STORIES = (
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?",
    "{name} buys {a} {things} and then {b} {things}. How many {things} does {name} buy?",
    "There are {a} {things} in a box. {name} adds {b}. How many {things} are in the box?",
)


def problem(story: str, name: str, things: str, a: int, b: int) -> dict[str, str]:
    question = story.format(name=name, things=things, a=a, b=b)
    return {"question": question, "answer": f"{name} counts {a} + {b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"}


def main() -> None:
    source = random.Random(0)
    every = [
        problem(story, name, things, a, b)
        for story in STORIES
        for name in NAMES
        for things in THINGS
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    rows = source.sample(every, sum(COUNTS.values()))
    for split, count in COUNTS.items():
        chosen, rows = rows[:count], rows[count:]
        (HERE / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chosen))


if __name__ == "__main__":
    main()
