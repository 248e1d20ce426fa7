"""Numbers have one form in the terminal and on the page."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import areal.ui
from areal import numbers

SCRIPT = Path(areal.ui.__file__).parent / "static" / "numbers.js"


NUMBERS = {
    0.0: "0",
    0.5: "0.5",
    1 / 3: "0.3333",
    2.0625: "2.063",
    -2.0625: "-2.063",
    1234.56: "1235",
    12345.6: "12350",
    1e-5 / 3: "3.33e-6",
    1234567.8: "1.23e+6",
    0.99999: "1",
    -5.0: "-5",
    1e15 - 1: "999999999999999",
    1e15: "1.00e+15",
    999999.5: "1000000",
    1e6 + 0.5: "1.00e+6",
    1e-4: "0.0001",
    9.994e-5: "9.99e-5",
    math.inf: "Infinity",
    math.nan: "NaN",
    -math.inf: "-Infinity",
}
TIMES = {0.00064: "640us", 0.0123: "12.3ms", 0.9996: "1s", 9.996: "10s", 45.6: "45s", 200: "3m20s"}
TIMES |= {0: "0us", 1e-9: "0.001us", 9e-10: "0us", 0.000999: "999us", 0.001: "1ms", 0.9994: "999ms", 1: "1s"}
TIMES |= {9.994: "9.99s", 10: "10s", 119.9: "119s", 120: "2m", 3599: "59m", 3600: "1h", 3660: "1h1m", 36060: "10h"}
TIMES |= {35999: "9h59m", 86399: "23h", 86400: "1d", 90000: "1d1h", 864000: "10d", 867600: "10d"}
SIZES = {0: "0B", 512: "512B", 1536: "1.5KiB", (1 << 20) - 100: "1MiB", 12 << 30: "12GiB", 1023: "1023B", 1024: "1KiB"}
SIZES |= {102348: "99.9KiB", 102400: "100KiB", 1023 << 10: "1023KiB", 5 << 50: "5120TiB"}


@pytest.mark.parametrize(("value", "text"), NUMBERS.items())
def test_number_has_four_digits(value: float, text: str) -> None:
    assert numbers.number(value) == text


def test_times_and_bytes_have_their_units() -> None:
    assert {each: numbers.duration(each) for each in TIMES} == TIMES
    assert {each: numbers.size(each) for each in SIZES} == SIZES
    assert (numbers.duration(None), numbers.size(None), numbers.age(None)) == ("-", "-", "-")


def in_page(code: str, given: Any) -> Any:
    """The result of JavaScript beside the page's functions; ``given`` is there as ``given``."""
    source = SCRIPT.read_text() + (
        "\nlet text = ''; for await (const part of process.stdin) text += part;"
        f"\nconst given = JSON.parse(text); console.log(JSON.stringify({code}));"
    )
    command = ["node", "--input-type=module", "-e", source]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_page_and_terminal_show_the_same_numbers() -> None:
    draw = random.Random(3)
    values = [each for each in NUMBERS if math.isfinite(each)]
    values += [draw.choice((1, -1)) * draw.random() * 10 ** draw.uniform(-9, 9) for _ in range(3000)]
    values += [draw.randrange(-(2**20), 2**20) / 2 ** draw.randrange(12) for _ in range(3000)]  # halves in every place
    sizes = [*TIMES, *SIZES, *map(abs, values)]
    shown = in_page(
        "[given[0].map((each) => number(each).replaceAll(',', '')), given[1].map(duration), given[1].map(age),"
        " given[1].map(Math.trunc).map(bytes)]",
        [values, sizes],
    )
    forms: list[tuple[Callable[[float], str], list[float]]] = [
        (numbers.number, values),
        (numbers.duration, sizes),
        (numbers.age, sizes),
        (numbers.size, [math.trunc(each) for each in sizes]),
    ]
    for (form, given), page in zip(forms, shown, strict=True):
        assert [(value, form(value)) for value in given] == list(zip(given, page, strict=True))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_page_shows_words_of_the_server_and_nothing_for_what_is_no_number() -> None:
    sent = ["NaN", "Infinity", "-Infinity", "1", None, -0.0, 1234567]
    assert in_page("given.map(number)", sent) == ["NaN", "Infinity", "-Infinity", "", "", "0", "1,234,567"]
    assert in_page("[duration, age, bytes].map((form) => form(given) + form(undefined))", None) == ["", "", ""]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (0.5, 4.9, [0.5, 1, 2]),
        (1, 1000, [1, 10, 100, 1000]),  # 1, 2 and 5 would be many
        (3, 200000, [10, 100, 1000, 10000, 100000]),
        (1, 1e8, [10**power for power in range(9)]),
        (1, 1e9, [10**power for power in range(0, 10, 2)]),
        (2.1, 4.9, [2.5, 3, 3.5, 4, 4.5]),  # even steps, where there would be no two
        (1.2, 1.8, [1.2, 1.4, 1.6, 1.8]),
    ],
)
def test_log_axis_has_lines_at_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert in_page("logTicks(...given)", [low, high]) == pytest.approx(ticks)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_log_axis_has_few_lines_in_every_range() -> None:
    draw = random.Random(5)
    lows = [0.0011804950190708041 / 1.2, 9.84e-4, 0.99, 1.0, *(10 ** draw.uniform(-12, 12) for _ in range(3000))]
    ranges = [(low, low * 1.44 * 10 ** draw.choice((0, 0, draw.uniform(0, 2), draw.uniform(0, 20)))) for low in lows]
    found = in_page("given.map(([low, high]) => logTicks(low, high))", ranges)
    for (low, high), ticks in zip(ranges, found, strict=True):
        assert 2 <= len(ticks) <= 10 and ticks == sorted(set(ticks)), (low, high, ticks)
        assert low <= ticks[0] and ticks[-1] <= high
