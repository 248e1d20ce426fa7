"""Make the data of the "reverse 4 digits" example: questions with their answers (train.jsonl, test.jsonl), the same as
conversations to fine-tune on (sft/), and pairs of a right and a wrong answer (preferences/).

python examples/reverse_digits/make_prompts.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COUNTS = {"train": 1600, "test": 200}
TAUGHT = {"train": 800, "test": 100}  # of those, in this order: conversations and pairs are longer lines


def wrong(answer: str, source: random.Random) -> str:
    """The answer with one to all of its digits changed."""
    changed = source.sample(range(len(answer)), source.randint(1, len(answer)))
    return "".join(
        source.choice([other for other in "0123456789" if other != digit]) if place in changed else digit
        for place, digit in enumerate(answer)
    )


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    source = random.Random(0)
    numbers = source.sample(range(10_000), sum(COUNTS.values()))
    for split, count in COUNTS.items():
        questions = [f"{numbers.pop():04d}" for _ in range(count)]
        solved = [(question, question[::-1]) for question in questions]
        write(HERE / f"{split}.jsonl", ({"question": question, "answer": answer} for question, answer in solved))
        taught = solved[: TAUGHT[split]]
        write(HERE / "sft" / f"{split}.jsonl", ({"messages": conversation(*pair)} for pair in taught))
        pairs = [
            {"chosen": conversation(question, answer), "rejected": conversation(question, wrong(answer, source))}
            for question, answer in taught
        ]
        write(HERE / "preferences" / f"{split}.jsonl", pairs)


if __name__ == "__main__":
    main()
