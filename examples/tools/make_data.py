"""Make train.jsonl and test.jsonl: tasks for a calculator (sums and products) and for Python (a number backwards).

python make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
COUNTS = {"train": 240, "test": 80}
COMPUTE, REVERSE = "What is {} {} {}?", "Write {} backwards."


def task(source: random.Random) -> dict[str, str]:
    a, b = source.randint(10, 99), source.randint(10, 99)
    if source.random() < 0.5:
        sign, result = source.choice((("+", a + b), ("*", a * b)))
        return {"prompt": COMPUTE.format(a, sign, b), "answer": str(result)}
    number = f"{a}{b}"
    return {"prompt": REVERSE.format(number), "answer": number[::-1]}


def main() -> None:
    source, seen = random.Random(0), set[str]()
    for split, count in COUNTS.items():
        rows = []
        while len(rows) < count:
            row = task(source)
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                rows.append(row)
        (HERE / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
