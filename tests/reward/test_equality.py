"""Which answers are equal: tables of answers with their verdicts, and generated families of right and wrong ones."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal.reward import notation
from areal.reward.answers import final_answer, same_expression, same_number
from areal.reward.math import math_verify_reward_fn

FOLDER = Path(__file__).parent


def is_right(answer: str, right: str) -> bool:
    return math_verify_reward_fn("q", rf"\boxed{{{answer}}}", answer=right) == 1.0


def rows(table: str) -> list[tuple[str, str, bool]]:
    """The responses, references and verdicts of a table. Each answer is put in a box, except for those of the
    kind ``prose`` and the complete responses of ``answers_benchmarks.tsv``, in which ``⏎`` is a line break."""
    lines = [line.split("\t") for line in (FOLDER / table).read_text().splitlines()[1:]]
    is_whole = table == "answers_benchmarks.tsv"
    return [
        (answer.replace("⏎", "\n") if is_whole or kind == "prose" else rf"\boxed{{{answer}}}", right, verdict == "1")
        for kind, answer, right, verdict in lines
    ]


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("table", ["answers.tsv", "answers_hostile.tsv", "answers_benchmarks.tsv", "answers_parts.tsv"])
def test_answer_table_verdicts_hold(table: str, part: int) -> None:
    judged = [(*row, math_verify_reward_fn("q", row[0], answer=row[1])) for row in rows(table)[part::8]]
    wrong = [row for row in judged if row[3] != row[2]]
    assert wrong == []


def test_each_rewrite_is_needed_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [line.split("\t") for line in (FOLDER / "notation.tsv").read_text().splitlines()[1:]]
    rewrites = notation._TABLE
    assert len(examples) == len(rewrites)
    for i, (answer, form) in enumerate(examples):
        assert notation.render(notation.tokens(answer)) == form
        monkeypatch.setattr(notation, "_TABLE", rewrites[:i] + rewrites[i + 1 :])
        notation.tokens.cache_clear()
        assert notation.render(notation.tokens(answer)) != form, rewrites[i]
        monkeypatch.setattr(notation, "_TABLE", rewrites)
        notation.tokens.cache_clear()


@pytest.mark.parametrize(
    ("response", "right", "verdict"),
    [
        ("We get 27, so the answer is (C).", "C", 1.0),
        ("We get 27, so the answer is (C) 27.", "C", 1.0),
        ("We get 27, so the answer is (B).", "C", 0.0),
        ("The answer is (C) or (D).", "C", 0.0),
        ("Answer: C", "C", 1.0),
        ("**C**", "C", 1.0),
        ("**Answer:** C", "C", 1.0),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "0.5", 1.0),
        ("Thus the answer is yes.", "yes", 1.0),
        ("Thus the answer is no.", "yes", 0.0),
        ("The answer is $x+1$.", "1+x", 1.0),
        ("Is the answer 18? It is 20.", "18", 0.0),
        ("The answer is not 18.", "18", 0.0),
        ("Since 27 matches, the correct answer is **(C)**.", "C", 1.0),
        ("Therefore the answer is **C. 27**.", "C", 1.0),
        ("So the correct option is \\textbf{(C)}.", "C", 1.0),
        ("The answer is $\\textbf{(C)}\\ 27$.", "C", 1.0),
        ("Final answer: **(B)** 12", "B", 1.0),
        ("The answer is (C), not (D).", "D", 0.0),
        ("I choose **D**.", "C", 0.0),
        ("Answer: (A)", "B", 0.0),
        ("The answer is $\\boxed{\\textbf{(C)}\\ 27}$.", "C", 1.0),
        ("The answer is $\\boxed{\\text{C}}$.", "27", 0.0),
        ("So $\\boxed{10\\text{ am}}$.", "10 pm", 0.0),
        ("The answer is 10 pm.", "10 am", 0.0),
        ("The answer is 10 pm.", "10 \\text{ pm}", 1.0),
        ("The answer is March 3.", "May 3", 0.0),
        ("The answer is $5\\sqrt{3} \\approx 8.66$.", "5\\sqrt3", 1.0),
        ("The answer is $\\frac{1}{1000}$.", "\\frac{1}{1001}", 0.0),
        ("Hence $x \\equiv 5 \\pmod 7$.", "x\\equiv 5\\pmod{7}", 1.0),
        ("#### 20% decrease", "20\\% increase", 0.0),
        ("#### 100 million", "100000000", 1.0),
        ("The answer is 100 million.", "100000000", 1.0),
        ("The answer is a 20% decrease.", "20\\%\\text{ decrease}", 1.0),
        ("The answer is a 20% decrease.", "20\\%\\text{ increase}", 0.0),
        ("**Answer: C**", "C", 1.0),
        ("**Final Answer:** $\\emptyset$", "\\varnothing", 1.0),
        ("The answer is the empty set.", "\\emptyset", 1.0),
        ("\\[\\boxed{(2,3)}\\]", "x=2,y=3", 1.0),
        ("The answer is $x=2, y=3$.", "(3,2)", 0.0),
        ("The answer is $x=2, y=3$.", "(2,3)", 1.0),
        ("$$\\boxed{\\begin{cases}x=2\\\\y=3\\end{cases}}$$", "(2,3)", 1.0),
        ("The answer is $2^{-98}$.", "2^{-99}", 0.0),
        ("The answer is $\\angle ABC$.", "\\angle ACB", 0.0),
        ("(C)", "C", 1.0),
        ("C", "C", 1.0),
        ("C. 27", "D", 0.0),
        ("Thus the correct choice is C.", "C", 1.0),
        ("The correct answer is: C) 27", "C", 1.0),
        ("The correct answer is option C.", "C", 1.0),
        ("**Answer:** (C) 27", "C", 1.0),
        ("Answer: **C**", "C", 1.0),
        ("Answer: $\\boxed{C}$", "C", 1.0),
        ("The answer is \\(\\textbf{(C)}\\ 27\\).", "C", 1.0),
        ("The answer is (C) because B fails.", "C", 1.0),
        ("I'd go with C.", "B", 0.0),
        ("The answer is a profit of $200.", "\\$200 \\text{ loss}", 0.0),
        ("The answer is a profit of $200.", "\\$200 \\text{ profit}", 1.0),
        ("The answer is March 3.", "\\text{March } 3", 1.0),
        ("The answer is 10:30 p.m.", "10:30 \\text{ pm}", 1.0),
        ("The answer is 10:30 p.m.", "10:30 \\text{ am}", 0.0),
        ("The answer is 18, more than half.", "18", 1.0),
        ("The answer is 18 more.", "18", 1.0),
        ("She has 18 left.", "18", 1.0),
        ("The best option is to buy 18.", "18", 1.0),
        ("The cheapest option is the second one, at $18.", "18", 1.0),
        ("The answer is 40° N.", "40^\\circ\\text{ S}", 0.0),
        ("The answer is $0.\\dot{3}$.", "\\frac13", 1.0),
        ("The answer is $e^{i\\pi}$.", "-1", 1.0),
        ("The answer is $|-3|$.", "3", 1.0),
        ("The answer is $\\varnothing$.", "\\emptyset", 1.0),
        ("The answer is $\\{x \\mid x > 2\\}$.", "(2,\\infty)", 1.0),
        ("The answer is Tuesday.", "Wednesday", 0.0),
        ("The answer is Tuesday.", "Tuesday", 1.0),
        ("The answer is $9.11 \\times 10^{-31}$ kg.", "1.60 \\times 10^{-19}", 0.0),
        ("The answer is $9.11 \\times 10^{-31}$ kg.", "9.11\\times10^{-31}", 1.0),
        ("The answer is a loss of $200.", "\\$200 \\text{ loss}", 1.0),
        ("The answer is a loss of $200.", "200", 1.0),
        ("The answer is March 3.", "March 3", 1.0),
        ("The answer is an increase of 20%.", "20\\% \\text{ decrease}", 0.0),
        ("The answer is 5 km north.", "5 \\text{ km north}", 1.0),
        ("The answer is 5 km north.", "5 \\text{ km south}", 0.0),
        ("The answer is 10 am or 10 pm.", "10 \\text{ am}", 0.0),
        ("The answer is 5, and 3 are left.", "5", 0.0),
        ("The answer is 20 less than 38, which is 18.", "18", 1.0),
        ("The only choice is 18.", "18", 1.0),
        ("The answer is not 10 pm.", "10 \\text{ pm}", 0.0),
        ("The answer is at most 18 left.", "18", 0.0),
    ],
)
def test_answer_in_prose_is_found(response: str, right: str, verdict: float) -> None:
    assert math_verify_reward_fn("q", response, answer=right) == verdict


POSITIVE = st.integers(1, 10**9)
NOTATIONS = (
    r"\frac{{{p}}}{{{q}}}", r"\dfrac{{{p}}}{{{q}}}", "{p}/{q}", r"\left(\frac{{{p}}}{{{q}}}\right)", "${p}/{q}$",
    r"x = \frac{{{p}}}{{{q}}}", r"\displaystyle\tfrac{{{p}}}{{{q}}}", r"\mathbf{{\frac{{{p}}}{{{q}}}}}",
)  # fmt: skip


@given(POSITIVE, POSITIVE, st.sampled_from(NOTATIONS), st.integers(1, 1000))
@settings(deadline=None, max_examples=60)
def test_rational_equals_only_itself_in_any_notation(p: int, q: int, notation_of: str, factor: int) -> None:
    right = rf"\frac{{{p}}}{{{q}}}"
    assert is_right(notation_of.format(p=p * factor, q=q * factor), right)
    assert not is_right(notation_of.format(p=p + 1, q=q), right)
    assert not is_right(notation_of.format(p=p, q=q + 1), right)
    assert not is_right("-" + notation_of.format(p=p, q=q).removeprefix("x = "), right)


@given(st.integers(10**7, 10**8), st.integers(-300, 300), st.sampled_from((1, -1)))
@settings(deadline=None, max_examples=60)
def test_decimals_are_equal_within_relative_millionth(digits: int, exponent: int, sign: int) -> None:
    right = rf"{digits / 10**7:.7f} \times 10^{{{exponent}}}"
    near, far = digits + sign * (digits // 2_000_000), digits + sign * (digits // 500_000)
    assert is_right(rf"{near / 10**7:.7f} \times 10^{{{exponent}}}", right)
    assert not is_right(rf"{far / 10**7:.7f} \times 10^{{{exponent}}}", right)
    assert not is_right(rf"{digits / 10**7:.7f} \times 10^{{{exponent + 1}}}", right)


@given(st.integers(2, 9), st.integers(-300, 300), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_power_differs_from_adjacent_powers(base: int, exponent: int, step: int) -> None:
    assume(exponent != 0)
    assert is_right(rf"{base}^{{{exponent}}}", rf"{base}^{{{exponent}}}")
    assert not is_right(rf"{base}^{{{exponent + step}}}", rf"{base}^{{{exponent}}}")


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True))
@settings(deadline=None, max_examples=60)
def test_sets_are_unordered_and_tuples_ordered(items: list[int]) -> None:
    turned = items[1:] + items[:1]
    text, other = ", ".join(map(str, items)), ",".join(map(str, turned))
    assert is_right(rf"\{{{other}\}}", rf"\{{{text}\}}")
    assert is_right(rf"\left({text}\right)", f"({text})")
    assert not is_right(f"({other})", f"({text})")
    assert not is_right(rf"\{{{text}, 100\}}", rf"\{{{text}\}}")
    assert is_right(other, text)


CHOICES = (
    ("am", "pm"), ("north", "south", "east", "west"), ("profit", "loss"), ("increase", "decrease"), ("left", "right"),
    ("January", "February", "March", "April", "May", "June", "July"), ("Monday", "Tuesday", "Sunday"), ("more", "less"),
    ("boys", "girls"), ("wins", "losses", "draws"), ("clockwise", "counterclockwise"), ("before", "after"),
)  # fmt: skip
FORMS = (
    r"{n} {word}",
    r"{n} \text{{ {word}}}",
    r"\text{{{word} {n}}}",
    r"{n}\ \mathrm{{{word}}}",
    r"\${n}~\text{{{word}}}",
)


@given(st.integers(1, 999), st.sampled_from(CHOICES), st.sampled_from(FORMS), st.sampled_from(FORMS), st.data())
@settings(deadline=None, max_examples=150)
def test_distinguishing_words_are_part_of_answer(
    n: int, words: tuple[str, ...], form: str, other: str, data: st.DataObject
) -> None:
    word = data.draw(st.sampled_from(words))
    wrong = data.draw(st.sampled_from([each for each in words if each != word]))
    assert is_right(form.format(n=n, word=word), other.format(n=n, word=word))
    assert not is_right(form.format(n=n, word=wrong), other.format(n=n, word=word))
    assert not is_right(form.format(n=n + 1, word=word), other.format(n=n, word=word))


UNITS = ("cm", "kg", "apples", "dollars", "square units", "miles per hour", "hours")


@given(st.integers(1, 10**6), st.sampled_from(UNITS), st.sampled_from(FORMS))
@settings(deadline=None, max_examples=60)
def test_unit_is_optional(n: int, unit: str, form: str) -> None:
    assert is_right(form.format(n=n, word=unit), str(n))
    assert is_right(str(n), form.format(n=n, word=unit))
    assert is_right(f"{n:,}", form.format(n=n, word=unit))


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
@settings(deadline=None, max_examples=60)
def test_polynomial_equals_its_factors(first: Fraction, second: Fraction) -> None:
    def text(value: Fraction) -> str:
        return ("-" if value < 0 else "+") + rf"\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"

    factors = f"(x{text(-first)})(x{text(-second)})"
    assert is_right(factors, f"x^2{text(-first - second)}x{text(first * second)}")
    assert not is_right(factors, f"x^2{text(-first - second)}x{text(first * second + 1)}")


PATHOLOGICAL = [
    "9^{" * 40 + "9" + "}" * 40,
    "10^{10^{10}}",
    r"\left(10^{9}\right)!",
    "((9^{999})^{999})^{999}",
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    r"\sqrt{" * 200 + "2" + "}" * 200,
    "(" * 500 + "1" + ")" * 500,
    "{" * 5000,
    "x+" * 490 + "x",
    "1," * 499 + "1",
    "=" * 900,
    r"\text{" * 150 + "a" + "}" * 150,
    r"\begin{array}" * 60,
    "«»" * 400,
    " 1" * 500,
    r"\pm" * 300,
    "1_2" * 300,
    "x^{10^{9}}",
    r"\sum_{k=1}^{10^{9}} \frac{1}{k^2}",
    r"2^{1000}!",
    r"\binom{10^9}{5\cdot 10^8}",
    r"\prod_{n=1}^{10^{6}} n",
    r"\prod_{k=1}^{1000}\prod_{j=1}^{1000}\sum_{i=1}^{1000} i",
    r"\int_0^1\int_0^1\int_0^1 xyz dx dy dz",
    r"\Gamma(10^9)",
    "a" * 1_000_000,
    "1" * 1_000_000,
    "\\frac" * 200_000,
    "$" * 1_000_000,
]


@pytest.mark.parametrize("answer", PATHOLOGICAL, ids=range(len(PATHOLOGICAL)))
def test_oversized_answer_is_wrong_without_deadline(answer: str) -> None:
    began = time.thread_time()
    for right in ("18", "x^2+1", r"\frac{1}{3}, 2"):
        assert not is_right(answer, right)
        assert not is_right(right, answer[:5000] or "0")
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("part", ["\n", "#", "*", "**a ", "(1 ab", "1 and ", "$", " "])
def test_prose_is_read_in_bounded_time(part: str) -> None:
    began = time.thread_time()
    assert math_verify_reward_fn("q", part * 100_000, answer="18") == 0.0
    assert time.thread_time() - began < 3


@given(
    st.text(alphabet="0123456789,./$- \\boxed{}#^!()or=<>|_xtfrac%[]&~«»", max_size=300),
    st.sampled_from(("18", "(1,2)", "x=1")),
)
@settings(deadline=None, max_examples=150)
def test_comparison_accepts_any_text(text: str, right: str) -> None:
    assert math_verify_reward_fn("q", text, answer=right) in (0.0, 1.0)
    assert final_answer(text) != ""


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("5 (CDs)", "5 (CDs)", 1.0),
        ("24 (cubes)", "24", 1.0),
        ("24 (cm)", "24 (m)", 0.0),
        ("3 (mod 7)", "3 (mod 5)", 0.0),
        (r"3 \pmod 5", "3 (mod 5)", 1.0),
        ("10 (pm)", "10 (am)", 0.0),
        ("5 (north)", "5 (south)", 0.0),
        ("5 (loss)", "5 (profit)", 0.0),
        ("12 (base 8)", "12 (base 8)", 1.0),
        ("12 (base 9)", "12 (base 8)", 0.0),
    ],
)
def test_words_in_parentheses_after_number_count_unless_they_are_things(
    answer: str, right: str, expected: float
) -> None:
    assert math_verify_reward_fn("q", rf"\boxed{{{answer}}}", answer=right) == expected


@pytest.mark.parametrize(("length", "equal"), [(1000, True), (1001, False)])
def test_answers_of_up_to_a_thousand_characters_are_compared(length: int, equal: bool) -> None:
    answer = f"36{' ' * (length - 4)}/2"
    assert len(answer) == length
    assert (same_expression(answer, "18"), same_expression("18", answer), same_number(answer, "18")) == (equal,) * 3
