"""Numbers have one form in the terminal and on the page."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import areal.ui
from areal import numbers

SCRIPT = Path(areal.ui.__file__).parent / "static" / "numbers.js"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.5, "0.5"),
        (1 / 3, "0.3333"),
        (2.0625, "2.063"),
        (-2.0625, "-2.063"),
        (1234.56, "1235"),
        (12345.6, "12350"),
        (1e-5 / 3, "3.33e-6"),
        (1234567.8, "1.23e+6"),
        (0.99999, "1"),
        (-5.0, "-5"),
        (1e15 - 1, "999999999999999"),
        (1e15, "1.00e+15"),
        (999999.5, "1000000"),
        (1e6 + 0.5, "1.00e+6"),
        (1e-4, "0.0001"),
        (9.994e-5, "9.99e-5"),
        (math.inf, "Infinity"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
    ],
)
def test_number_has_four_digits(value: float, text: str) -> None:
    assert numbers.number(value) == text


def test_times_and_bytes_have_their_units() -> None:
    times = {0.00064: "640us", 0.0123: "12.3ms", 0.9996: "1s", 9.996: "10s", 45.6: "45s", 200: "3m20s", None: "-"}
    times |= {0: "0us", 1e-9: "0.001us", 9e-10: "0us", 0.000999: "999us", 0.001: "1ms", 0.9994: "999ms", 1: "1s"}
    times |= {9.994: "9.99s", 10: "10s"}
    assert {each: numbers.duration(each) for each in times} == times
    sizes = {512: "512B", 1536: "1.5KiB", (1 << 20) - 100: "1MiB", 12 << 30: "12GiB", None: "-"}
    sizes |= {
        1023: "1023B",
        1024: "1KiB",
        102348: "99.9KiB",
        102400: "100KiB",
        1023 << 10: "1023KiB",
        5 << 50: "5120TiB",
    }
    assert {each: numbers.size(each) for each in sizes} == sizes


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_page_and_terminal_show_the_same_numbers() -> None:
    draw = random.Random(3)
    values = [draw.choice((1, -1)) * draw.random() * 10 ** draw.uniform(-9, 9) for _ in range(3000)]
    values += [draw.randrange(-(2**20), 2**20) / 2 ** draw.randrange(12) for _ in range(3000)]  # halves in every place
    sizes = [abs(value) for value in values]
    source = SCRIPT.read_text() + (
        "\nlet text = ''; for await (const part of process.stdin) text += part;"
        "\nconst [values, sizes] = JSON.parse(text);"
        "\nconsole.log(JSON.stringify([values.map((each) => number(each).replaceAll(',', '')), sizes.map(duration),"
        " sizes.map(age), sizes.map(Math.trunc).map(bytes)]));"
    )
    command = ["node", "--input-type=module", "-e", source]
    done = subprocess.run(command, input=json.dumps([values, sizes]), capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    forms: list[tuple[Callable[[float], str], list[float]]] = [
        (numbers.number, values),
        (numbers.duration, sizes),
        (numbers.age, sizes),
        (numbers.size, [math.trunc(each) for each in sizes]),
    ]
    for (form, given), page in zip(forms, shown, strict=True):
        assert [(value, form(value)) for value in given] == list(zip(given, page, strict=True))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_log_axis_has_few_lines_in_every_range() -> None:
    draw = random.Random(5)
    lows = [0.0011804950190708041 / 1.2, 9.84e-4, 0.99, 1.0, *(10 ** draw.uniform(-12, 12) for _ in range(3000))]
    ranges = [(low, low * 1.44 * 10 ** draw.choice((0, 0, draw.uniform(0, 2), draw.uniform(0, 20)))) for low in lows]
    source = SCRIPT.read_text() + (
        "\nlet text = ''; for await (const part of process.stdin) text += part;"
        "\nconsole.log(JSON.stringify(JSON.parse(text).map(([low, high]) => logTicks(low, high))));"
    )
    command = ["node", "--input-type=module", "-e", source]
    done = subprocess.run(command, input=json.dumps(ranges), capture_output=True, text=True, check=True)
    for (low, high), ticks in zip(ranges, json.loads(done.stdout), strict=True):
        assert 2 <= len(ticks) <= 10 and ticks == sorted(set(ticks)), (low, high, ticks)
        assert low <= ticks[0] and ticks[-1] <= high
