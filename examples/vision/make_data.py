"""Make train.jsonl and test.jsonl: drawings of coloured shapes, each with a question of one right answer.

python make_data.py
"""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).parent
COUNTS = {"train": 240, "test": 80}
SIZE, CELL = 32, 16  # pixels
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
Things = dict[str, tuple[str, str]]  # (colour, shape) by place


def draw(source: random.Random) -> tuple[Image.Image, Things]:
    """One to three shapes in the quarters of a square."""
    places = source.sample(PLACES, source.randint(1, 3))
    things = {place: (source.choice(list(COLOURS)), source.choice(SHAPES)) for place in places}
    image = Image.new("RGB", (SIZE, SIZE), (245, 245, 245))
    pen = ImageDraw.Draw(image)
    for place, (colour, shape) in things.items():
        size = source.randint(10, 12)
        left = CELL * ("right" in place) + source.randint(1, CELL - size - 1)
        top = CELL * ("bottom" in place) + source.randint(1, CELL - size - 1)
        box = (left, top, left + size, top + size)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(left, top + size), (left + size, top + size), (left + size / 2, top)], fill=COLOURS[colour])
    return image, things


def question(things: Things, source: random.Random) -> tuple[str, str]:
    """Return a question about a drawing, and its answer."""
    place, (colour, shape) = source.choice(list(things.items()))
    return source.choice(
        (
            (f"What color is at the {place}?", colour),
            (f"What shape is at the {place}?", shape),
            ("How many shapes are there?", str(len(things))),
        )
    )


def row(source: random.Random) -> dict[str, object]:
    image, things = draw(source)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    asked, answer = question(things, source)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"images": [url], "question": asked, "answer": answer}


def main() -> None:
    source = random.Random(0)
    for split, count in COUNTS.items():
        (HERE / f"{split}.jsonl").write_text("".join(f"{json.dumps(row(source))}\n" for _ in range(count)))


if __name__ == "__main__":
    main()
