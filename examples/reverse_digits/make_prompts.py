"""Make the questions of the "reverse 4 digits" example, as JSON lines of a question and its answer.

python examples/reverse_digits/make_prompts.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
COUNTS = {"train": 1600, "test": 200}


def main() -> None:
    numbers = random.Random(0).sample(range(10_000), sum(COUNTS.values()))
    for split, count in COUNTS.items():
        questions = [f"{numbers.pop():04d}" for _ in range(count)]
        lines = (json.dumps({"question": question, "answer": question[::-1]}) for question in questions)
        (HERE / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
