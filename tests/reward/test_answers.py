"""Rewards for right and wrong answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.reward.answers import as_number, final_answer, number
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.reward.math import math_verify_reward_fn
from areal.reward.pool import call_within

GOLD = "Natalia sold 48/2 = 24 clips in May.\n#### 1,072"

RIGHT = [
    ("it is 18 000", "18000"),
    # the last answer, wherever it is
    (r"The answer is \boxed{18}.", "18"),
    (r"$\boxed{18}$ dollars, which is less than 20", "18"),
    (r"\[ \boxed{18} \]", "18"),
    (r"\boxed{20}, no: \boxed{18}", "18"),
    (r"\boxed{\boxed{18}}", "18"),
    (r"$x = \boxed{18}$ or $x = \boxed{18}$", "18"),
    (r"\boxed{18}, \boxed{18}", "18"),
    (r"\fbox{18}", "18"),
    (r"\boxed {18}", "18"),
    (r"\boxed 18", "18"),
    (r"\boxed{18}<|im_end|>", "18"),
    ("#### 20\n\\boxed{18}", "18"),
    ("\\boxed{20}\n#### 18", "18"),
    ("#### 18", "18"),
    ("####18", "18"),
    ("#### 18<|im_end|>", "18"),
    ("#### 5\nno:\n#### 18", "18"),
    ("#### 18\nThat is 3 dozen and a half.", "18"),
    (r"#### \boxed{18}", "18"),
    ("#### **18**", "18"),
    ("#### Step 2\nSo it is 18", "18"),
    ("#### Final Answer\n18", "18"),
    ("The answer is 18.", "18"),
    ("first 5, then 1072", GOLD),
    ("1072.0", GOLD),
    ("She has 5 + 13 = 18 eggs", "18"),
    ("answer: $18", "18"),
    ("She pays $5 and has $18 left", "18"),
    (r"It is $\frac{36}{2}$.", "18"),
    (r"\(18\)", "18"),
    ("**18**", "18"),
    # numbers as they are written
    (r"\boxed{1,072} in all", GOLD),
    (r"\boxed{\$1,072}", GOLD),
    (r"\boxed{70{,}000}", "70000"),
    (r"\boxed{70,000}", "70000"),
    (r"\boxed{70,\!000}", "70000"),
    (r"\boxed{70\,000}", "70000"),
    (r"\boxed{70\ 000}", "70000"),
    (r"\boxed{1,00,000}", "100000"),
    (r"\boxed{1,234,567.5}", "1234567.5"),
    (r"\boxed{18.0}", "18"),
    (r"\boxed{18.}", "18"),
    (r"\boxed{18}", "18.00"),
    (r"\boxed{.5}", "0.5"),
    (r"\boxed{-18}", "-18"),
    (r"\boxed{ - 18 }", "-18"),
    (r"\boxed{−18}", "-18"),
    ("#### -5", "-5"),
    (r"\boxed{-0}", "0"),
    (r"\boxed{１８}", "18"),
    (r"\boxed{1.8e1}", "18"),
    (r"\boxed{1.8 \times 10^1}", "18"),
    (r"\boxed{10^{12}}", "1000000000000"),
    # units and typography
    (r"\boxed{\$18}", "18"),
    (r"\boxed{$18}", "18"),
    (r"\boxed{£18}", "18"),
    (r"\boxed{18\%}", "18"),
    (r"\boxed{18%}", "18%"),
    (r"\boxed{18 percent}", "18"),
    (r"\boxed{18^\circ}", "18"),
    (r"\boxed{18°C}", "18"),
    (r"\boxed{18\text{ dollars per hour}}", "18"),
    (r"\boxed{\text{18 dollars}}", "18"),
    (r"\boxed{18 eggs}", "18"),
    (r"\boxed{18\ \text{cm}^2}", "18"),
    (r"\boxed{18 km/h}", "18"),
    (r"\boxed{18\,\mathrm{kg}}", "18"),
    (r"\boxed{\text{June has }18\text{ eggs}}", "18"),
    (r"\boxed{\mathbf{18}}", "18"),
    (r"\boxed{{18}}", "18"),
    (r"\boxed{\left(18\right)}", "18"),
    (r"\boxed{\color{red}{18}}", "18"),
    # expressions
    (r"\boxed{x=18}", "18"),
    (r"\boxed{x_1 = 18}", "18"),
    (r"\boxed{\text{Tom and Jerry} = 18}", "18"),
    (r"\boxed{9 \times 2 = 18}", "18"),
    (r"\boxed{9 \times 2}", "18"),
    (r"\boxed{17+1}", "18"),
    (r"\boxed{\frac{36}{2}}", "18"),
    (r"\boxed{36/2}", "18"),
    (r"\boxed{36 \div 2}", "18"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{3/4 cup}", "3/4"),
    (r"\boxed{2^3}", "8"),
    (r"\boxed{2**3}", "8"),
    (r"\boxed{\sqrt{324}}", "18"),
    (r"\boxed{3!}", "6"),
    (r"\boxed{eighteen}", "18"),
    (r"\boxed{\text{Twenty-four}}", "24"),
    (r"\boxed{3 x 6}", "18"),
    ("\\boxed{3½}", "3.5"),
    (r"\boxed{√324}", "18"),
    (r"\boxed{0.1\overline{6}}", "1/6"),
    (r"\boxed{18^{\text{th}}}", "18"),
    ("\\boxed{1\u202f800}", "1800"),
    ("\\boxed{1\u200b8}", "18"),
    # numbers of prose
    ("it is −18", "-18"),
    ("it is -.5", "-0.5"),
    ("so it is 1.8e1", "18"),
    ("so it is 1.8 × 10^1", "18"),
    ("so it is 3½ cups", "3.5"),
    ("so it is 3 1/2", "3.5"),
    (r"so it is \frac{36}{2}", "18"),
    ("so it is 1\u202f800 g", "1800"),
    ("so it is 18 cm^2", "18"),
    ("so it is 18 cm² of CO2", "18"),
    ("so it is 18 m2", "18"),
    ("Box 2 - it is 18", "18"),
    (r"\boxed{18} and \boxed{18}", "18"),
    ("Of the 20 eggs, she has 18", "18"),
    ("between 2 and 20 there are 18", "18"),
    ("It is not 20, it is 18", "18"),
    ("at most 20 fit, so it is 18", "18"),
    ("5 or more would not do: 18", "18"),
    ("The least she needs is 18", "18"),
    ("18 students did not pass", "18"),
    ("$20 - $2 = $18", "18"),
    ("20 - 2 = <<20-2=18>>18", "18"),
    ("<b>18</b>", "18"),
    ("> so it is 18", "18"),
    ("It is about 18", "18"),
    ("1. 5 + 13\n\n18", "18"),
    # boxes in boxes, and beside a sign
    (r"\boxed{5+\boxed{13}}", "18"),
    (r"\boxed{\frac{\boxed{36}}{2}}", "18"),
    (r"\boxed{\text{Total: }\boxed{18}}", "18"),
    (r"x = -\boxed{18}", "-18"),
    ("- \\boxed{18}", "18"),
    ("\\boxed{oops\n\\boxed{18}", "18"),
    (r"\boxed{{36 \over 2}}", "18"),
    (r"\boxed{18\,\frac{\text{m}}{\text{s}}}", "18"),
    ("#### 18<end_of_turn>", "18"),
]

WRONG = [
    # several answers
    (r"\boxed{18, 19, 20}", "18"),
    (r"\boxed{18, 19, 20}", "20"),
    (r"\boxed{18 or 20}", "18"),
    (r"\boxed{18 or 20}", "20"),
    (r"\boxed{18 \text{ or } \text{20}}", "18"),
    (r"\boxed{18;20}", "18"),
    (r"\boxed{18-20}", "18"),
    (r"\boxed{18 to 20}", "18"),
    (r"\boxed{\pm 18}", "18"),
    (r"\boxed{\{18,19\}}", "18"),
    (r"\boxed{[17, 18]}", "18"),
    (r"\boxed{17 1}", "18"),
    (r"\boxed{x=20 \text{ or } x=18}", "18"),
    (r"\boxed{x=20,y=18}", "18"),
    (r"\boxed{18 \text{ out of } 20}", "18"),
    ("#### 18 19 20 21", "18"),
    ("#### 18 19 20 21", "21"),
    ("#### 18, 19", "18"),
    ("#### 18 or 19", "18"),
    ("It is 18 or 20", "20"),
    # another number
    (r"\boxed{\frac{18}{5}}", "18"),
    (r"\boxed{\frac{18}{5}}", "5"),
    (r"\boxed{-18}", "18"),
    (r"\boxed{18}", "-18"),
    (r"\boxed{18.4}", "18"),
    (r"\boxed{180}", "18"),
    (r"\boxed{1,8}", "18"),
    ("17.9999999", "18"),
    (r"\boxed{5000000}", "5000004"),
    (r"\boxed{18\pi}", "18"),
    (r"\boxed{18 pi}", "18"),
    (r"\boxed{18\text{ million}}", "18"),
    (r"\boxed{18 dozen}", "18"),
    (r"\boxed{18k}", "18"),
    (r"\boxed{18 squared}", "18"),
    (r"\boxed{18:00}", "18"),
    (r"\boxed{20 = 18}", "18"),
    ("18 then 20", "18"),
    # no number, or an unknown one
    (r"\boxed{18x}", "18"),
    (r"\boxed{18 + x}", "18"),
    (r"\boxed{x > 18}", "18"),
    (r"\boxed{\text{less than }18}", "18"),
    (r"\boxed{not 18}", "18"),
    (r"\boxed{\frac{18}{0}}", "18"),
    (r"\boxed{18/0}", "18"),
    (r"\boxed{\infty}", "18"),
    (r"\boxed{nan}", "18"),
    # an earlier answer, or one that was cut off
    (r"\boxed{18} but \boxed{20}", "18"),
    ("#### 18\n#### 20", "18"),
    ("\\boxed{18}\n#### 20", "18"),
    (r"18 \boxed{", "18"),
    (r"\boxed{18", "18"),
    (r"\boxed{}", "18"),
    ("18\n####", "18"),
    ("no idea", "18"),
    ("", "18"),
    # functions and comparisons in words
    (r"\boxed{sqrt(18)}", "18"),
    (r"\boxed{\text{log}18}", "18"),
    (r"\boxed{ln 18}", "18"),
    (r"\boxed{floor(18)}", "18"),
    (r"\boxed{18 factorial}", "18"),
    (r"\boxed{square root of 18}", "18"),
    (r"\boxed{reciprocal of 18}", "18"),
    (r"\boxed{isn't 18}", "18"),
    (r"\boxed{never 18}", "18"),
    (r"\boxed{\text{all but }18}", "18"),
    (r"\boxed{over 18}", "18"),
    (r"\boxed{up to 18}", "18"),
    (r"\boxed{hundred 18}", "18"),
    ("\\boxed{3½}", "15.5"),
    (r"\boxed{0,100}", "100"),
    (r"\boxed{(0,100)}", "100"),
    # several boxes of one answer
    (r"\boxed{20} or \boxed{18}", "18"),
    (r"$\boxed{20}$ or $\boxed{18}$", "18"),
    (r"\boxed{20}, \boxed{18}", "18"),
    (r"\boxed{20} (or \boxed{18})", "18"),
    (r"\boxed{20}\text{ or }\boxed{18}", "18"),
    (r"\boxed{20}\%\ \mathrm{or}\ \boxed{18}\%", "18"),
    (r"\boxed{20} or maybe \boxed{18}", "18"),
    (r"\boxed{20}; or else \boxed{18}", "18"),
    (r"\boxed{20} and/or \boxed{18}", "18"),
    (r"\boxed{20}/\boxed{18}", "18"),
    (r"\boxed{20} to \boxed{18}", "18"),
    (r"\boxed{20}-\boxed{18}", "18"),
    # boxes in boxes, and beside a sign
    (r"\boxed{5+\boxed{18}}", "18"),
    (r"\boxed{\frac{\boxed{18}}{2}}", "18"),
    (r"\boxed{20 \boxed{18}", "18"),
    (r"-\boxed{18}", "18"),
    (r"\boxed{-\boxed{18}}", "18"),
    # several equations
    (r"\boxed{20; x=18}", "18"),
    (r"\boxed{x=20 y=18}", "18"),
    (r"\boxed{x_1=20 \quad x_2=18}", "18"),
    (r"\boxed{\sqrt{9}=\sqrt{324}}", "18"),
    # words
    (r"\boxed{18 lakh}", "18"),
    (r"\boxed{18 bn}", "18"),
    (r"\boxed{18\text{ at most}}", "18"),
    (r"\boxed{\text{none of }18}", "18"),
    # prose that is not sure, or says something else of the number
    ("It is 20, or maybe 18", "18"),
    ("either 20 dollars or 18 dollars", "18"),
    ("It is 20. Or 18?", "18"),
    ("20 (or 18)", "18"),
    ("20 and 18", "18"),
    ("It is between 17 and 18", "18"),
    ("from 20 to 18", "18"),
    ("20 vs. 18", "18"),
    ("$20 - $18", "18"),
    ("The answers are 20, 19, 18", "18"),
    ("20 19 18", "18"),
    ("20 | 18", "18"),
    ("20 hours and 18 minutes", "18"),
    ("20 remainder 18", "18"),
    ("The answer is not 18", "18"),
    ("It isn't $18$", "18"),
    ("I don't think it is 18", "18"),
    ("20, not 18", "18"),
    ("20 rather than 18", "18"),
    ("20 instead of 18", "18"),
    ("at least $18", "18"),
    ("It is at most 18.", "18"),
    ("less than **18**", "18"),
    ("up to 18", "18"),
    ("half of 18", "18"),
    ("twice 18", "18"),
    ("x ≥ 18", "18"),
    (r"x \geq 18", "18"),
    ("x > 18", "18"),
    ("18 or more", "18"),
    ("18 eggs at most", "18"),
    ("18 is wrong", "18"),
    ("18 is not the answer", "18"),
    # digits of another number in prose
    ("it is −18", "18"),
    ("it is minus 18", "18"),
    ("2^18", "18"),
    ("18e3", "3"),
    ("1e-18", "18"),
    ("2.5 × 10^3", "3"),
    ("10⁶", "10"),
    ("3½", "3"),
    ("18 million", "18"),
    ("18 squared", "18"),
    ("3 x 18", "18"),
    ("18 and a half", "18"),
    ("17–18", "18"),
    ("20 ± 18", "18"),
    ("6:18", "18"),
    ("20,5,18", "18"),
    ("1\u202f018", "18"),
    ("it is 18 000", "0"),
    (r"\frac{36}{18}", "18"),
    ("a18", "18"),
    # what must not take long
    (r"\boxed{9^{9^{9^9}}}", "18"),
    (r"\boxed{2^{10^{10}}}", "18"),
    (r"\boxed{(10^9)!}", "18"),
    (r"\boxed{((9^{999})^{999})^{999}}", "18"),
    (r"\boxed{" + "(" * 60 + "17" + ")" * 60 + "}", "18"),
    (r"\boxed{" + "9^" * 200 + "9}", "18"),
    (r"\boxed{" + "1" * 50_000 + "}", "18"),
    ("a" * 50_000 + "!", "18"),
]


def reward_of(function: Callable[..., float], completion: str, answer: str) -> float:
    return function("q", completion, [], [], answer=answer)


def collected(prompt: str, completion: str, prompt_ids: object, completion_ids: object, answer: str) -> float:
    return number(completion, answer)


@pytest.mark.parametrize("function", [gsm8k_reward_fn, collected])
@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right_number_is_rewarded(function: Callable[..., float], completion: str, answer: str) -> None:
    assert reward_of(function, completion, answer) == 1.0


@pytest.mark.parametrize("function", [gsm8k_reward_fn, collected])
@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong_number_is_not_rewarded(function: Callable[..., float], completion: str, answer: str) -> None:
    assert reward_of(function, completion, answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        *((completion, answer, 1.0) for completion, answer in RIGHT),
        *((completion, answer, 0.0) for completion, answer in WRONG if not completion.startswith(r"\boxed{(((")),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("$x = 3$", "3", 1.0),
        (r"\boxed{1+x^2}", "$x^2+1$", 1.0),
        (r"\boxed{x^2+2}", "$x^2+1$", 0.0),
        ("so it is $x^2+1$", "x^2+1", 1.0),
        (r"\boxed{\frac{\pi}{2}}", r"\frac{\pi}{2}", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{2}, 1}", r"\frac{\sqrt{3}}{2}", 0.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{[0,1)}", "[0,1)", 1.0),
        (r"\boxed{[0,1]}", "[0,1)", 0.0),
        (r"\boxed{\binom{5}{2}}", "10", 1.0),
        (r"\boxed{\log_2 8}", "3", 1.0),
        (r"\boxed{\text{Even}}", "even", 1.0),
        (r"\boxed{neve}", "even", 0.0),
        (r"\boxed{\text{(A)}}", "(A)", 1.0),
        (r"\boxed{x^{10^{9}}}", "x^2", 0.0),
        (r"\boxed{\frac{3}{4}\text{ cm}}", r"\frac34", 1.0),
        (r"\boxed{12\sqrt3\text{ cm}^2}", r"12\sqrt{3}", 1.0),
        (r"\boxed{2\pi\text{ cm}}", r"2\pi", 1.0),
        (r"\boxed{2\pi}", r"2\pi\text{ cm}", 1.0),
        (r"\boxed{2\pi\text{ million}}", r"2\pi", 0.0),
        ("\\boxed{2√3}", r"\sqrt{12}", 1.0),
        (r"\boxed{0.\overline{3}}", r"\frac13", 1.0),
        (r"\boxed{0.3\ldots}", "0.3", 0.0),
        (r"\boxed{18\mod 20}", "18", 1.0),
        (r"\boxed{18\quad20}", "38", 0.0),
        (r"\boxed{110_2}", "110_2", 1.0),
        (r"\boxed{110_3}", "110_2", 0.0),
        (r"\boxed{A}", "(A)", 1.0),
        (r"\boxed{(B)}", "A", 0.0),
        (r"\boxed{\frac{1}{2}(C)}", r"\frac12", 1.0),
        (r"\boxed{\frac{1}{2}(C)}", "(C)", 1.0),
        (r"\boxed{\frac{1}{2}(C)}", r"(C) \frac{1}{3}", 0.0),
        (r"\boxed{1.5(C)}", "(D) 1.5", 0.0),
        (r"\boxed{3, 27(C)}", "27", 0.0),
        (r"\boxed{3:30\text{ pm}}", "15:30", 1.0),
        (r"\boxed{12:30\text{ pm}}", "12:30", 1.0),
        (r"\boxed{3:30\text{ pm}}", "3:30 am", 0.0),
        (r"\boxed{12:30\text{ pm}}", "24:30", 0.0),
        (
            r"\boxed{\begin{cases} 1, & x > 0; \\ -x, & x \le 0. \end{cases}}",
            r"\begin{cases}1&x>0\\-x&x\le 0\end{cases}",
            1.0,
        ),
        (
            r"\boxed{\begin{cases} 1, & x > 0 \\ x, & x \le 0. \end{cases}}",
            r"\begin{cases}1&x>0\\-x&x\le 0\end{cases}",
            0.0,
        ),
        (r"\boxed{AB}", "A", 0.0),
        (r"\boxed{100}", "(0,100)", 0.0),
        (r"\boxed{(0, 100)}", "(0,100)", 1.0),
        (r"\boxed{\{1200\}}", r"\{1,200\}", 0.0),
        (r"\boxed{3} and \boxed{5}", "3, 5", 1.0),
        (r"\boxed{3} and \boxed{5}", "5", 0.0),
        (r"\boxed{\pi} or \boxed{2\pi}", r"2\pi", 0.0),
        (r"it is not $2\pi$", r"2\pi", 0.0),
        (r"-\boxed{x+1}", "-(x+1)", 1.0),
        (r"\boxed{-\boxed{x}}", "x", 0.0),
        (r"\boxed{\sqrt{2}=\sqrt{3}}", r"\sqrt{3}", 0.0),
        (r"\boxed{2\pi=3\pi}", r"3\pi", 0.0),
        (r"\boxed{(2,5)}", r"\{2,5\}", 0.0),
        (r"\boxed{0}", "2x - y + 3z - 6 = 0", 0.0),
        (r"\boxed{2x-y+3z-6=0}", "2x - y + 3z - 6 = 0", 1.0),
        (r"\boxed{x+y=1}", "x-y=1", 0.0),
        (r"\boxed{3x+4y=12}", "4x+3y=12", 0.0),
        (r"\boxed{x^2+y^2=25}", "x^2-y^2=25", 0.0),
        (r"\boxed{25}", "x^2+y^2=25", 0.0),
        (r"\boxed{9}", "(x-1)^2+(y-2)^2=9", 0.0),
        (r"\boxed{y=5}", "x=5", 0.0),
        (r"\boxed{y=\frac{1}{2}}", r"x=\frac12", 0.0),
        (r"\boxed{X=5}", "x=5", 1.0),
        (r"\boxed{5}", "x=5", 1.0),
        (r"\boxed{x^2=4}", "x=4", 0.0),
        (r"\boxed{2x=36}", "36", 0.0),
        (r"\boxed{x+2=36}", "36", 0.0),
        (r"\boxed{m+n=36}", "36", 1.0),
        (r"\boxed{f(2)=36}", "36", 1.0),
        (r"\boxed{S_5 = 36}", "36", 1.0),
        (r"\boxed{a_{10}=36}", "36", 1.0),
        (r"\boxed{\text{the total cost} = 36}", "36", 1.0),
        (r"\boxed{p - q}", "p-q", 1.0),
        (r"\boxed{-q+p}", "p-q", 1.0),
        (r"\boxed{q-p}", "p-q", 0.0),
        (r"\boxed{ab}", "ba", 1.0),
        (r"\boxed{\text{odd}}", r"\text{even}", 0.0),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
        (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 0.0),
        (r"\boxed{\tan 45^\circ}", "1", 1.0),
        (r"\boxed{\tan 45^{\circ}}", "1", 1.0),
        (r"\boxed{\tan(45°)}", "1", 1.0),
        (r"\boxed{1}", r"\tan 45^\circ", 1.0),
        (r"\boxed{2\sin 60^\circ}", r"\sqrt3", 1.0),
        (r"\boxed{\cos\frac{90^\circ}{2}}", r"\frac{\sqrt2}{2}", 1.0),
        (r"\boxed{\tan 45}", "1", 0.0),
        (r"\boxed{\sin 30^\circ}", r"\sin 30", 0.0),
        (r"\boxed{\sin 30}", r"\sin 30^\circ", 0.0),
        (r"\boxed{\frac{90^\circ}{2}}", r"45^\circ", 1.0),
        (r"\boxed{x > 3}", r"(3, \infty)", 1.0),
        (r"\boxed{3 < y}", r"(3, +\infty)", 1.0),
        (r"\boxed{x \geq 3}", r"[3, \infty)", 1.0),
        (r"\boxed{x \geq 3}", r"(3, \infty)", 0.0),
        (r"\boxed{x > 4}", r"(3, \infty)", 0.0),
        (r"\boxed{2 < x \le \frac{5}{2}}", "(2, 2.5]", 1.0),
        (r"\boxed{2 < x < \frac{5}{2}}", "(2, 2.5]", 0.0),
        (r"\boxed{3 > x > 1}", "(1, 3)", 1.0),
        (r"\boxed{1 < x < 3}", "1, 3", 0.0),
        (r"\boxed{1 < x < 3}", r"\{1, 3\}", 0.0),
        (r"\boxed{x < 1 \text{ or } x > 3}", r"(-\infty, 1) \cup (3, \infty)", 1.0),
        (r"\boxed{x < 1 \text{ and } x > 3}", r"(-\infty, 1) \cup (3, \infty)", 0.0),
        (r"\boxed{x < 1 \text{ or } y > 3}", r"(-\infty, 1) \cup (3, \infty)", 0.0),
        (r"\boxed{x < 1, x > 3}", r"(-\infty, 1) \cup (3, \infty)", 0.0),
        (r"\boxed{x > 3 \text{ or } x > 4}", r"(3, \infty)", 0.0),
        (r"\boxed{5 < 3 < x}", r"(3, \infty)", 0.0),
        (r"\boxed{x < x < 3}", r"(-\infty, 3)", 0.0),
        (r"\boxed{3x > 9}", r"(3, \infty)", 0.0),
        (r"\boxed{x + y > 3}", r"(3, \infty)", 0.0),
        (r"\boxed{x > i}", r"(3, \infty)", 0.0),
        (r"\boxed{x > \frac{1}{0}}", r"(3, \infty)", 0.0),
        (r"\boxed{x \in (3, \infty)}", r"(3, \infty)", 1.0),
        (r"\boxed{2,1}", "1,2", 1.0),
        (r"\boxed{1,2,2}", "1,2", 0.0),
        (r"\boxed{1,2,\sqrt{4}}", "1,2", 0.0),
        (r"\boxed{1, 2 \text{ and } 2}", r"\{1,2\}", 0.0),
        (r"\boxed{\{1,2,2\}}", r"\{1,2\}", 1.0),
        (r"\boxed{2,1,2}", "1,2,2", 1.0),
    ],
)
def test_math_answer_is_rewarded(completion: str, answer: str, reward: float) -> None:
    assert reward_of(math_verify_reward_fn, completion, answer) == reward


@pytest.mark.parametrize("function", [gsm8k_reward_fn, math_verify_reward_fn])
def test_reward_is_computed_off_the_main_thread(function: Callable[..., float]) -> None:
    def both() -> tuple[float, float]:
        return reward_of(function, r"\boxed{\sqrt{324}}", "18"), reward_of(function, r"\boxed{2^{10^{10}}}", "18")

    assert asyncio.run(asyncio.to_thread(both)) == (1.0, 0.0)


@pytest.mark.parametrize("function", [gsm8k_reward_fn, math_verify_reward_fn, collected])
@pytest.mark.parametrize("answer", ["", None, "####"])
def test_row_without_an_answer_raises(function: Callable[..., float], answer: str) -> None:
    with pytest.raises(ValueError, match="the row has no answer"):
        reward_of(function, r"\boxed{18}", answer)


def test_call_within_interrupts_slow_call_on_any_thread() -> None:
    ended = threading.Event()

    def endless() -> None:
        try:
            while True:
                pass
        except BaseException:
            ended.set()
            raise

    def limited() -> str:
        with pytest.raises(TimeoutError, match=r"not done within 0.05 s"):
            call_within(0.05, endless)
        return call_within(60.0, lambda: "done")

    assert asyncio.run(asyncio.to_thread(limited)) == "done"
    assert ended.wait(60.0)
    with pytest.raises(KeyError):
        call_within(60.0, lambda: dict[str, str]()["no"])


@pytest.mark.parametrize("reward", [gsm8k_reward_fn, math_verify_reward_fn])
def test_values_that_are_not_text_are_refused_by_type(reward: Callable[..., float]) -> None:
    for completion in (None, b"18", ["18"], 18):
        with pytest.raises(TypeError, match=f"the completion is a {type(completion).__name__}, not a text"):
            reward("q", completion, answer="18")
    for answer in (b"18", ["18", "19"], {"a": 18}):
        with pytest.raises(ValueError, match=f"the row's answer is a {type(answer).__name__}, not a text or a number"):
            reward("q", r"\boxed{18}", answer=answer)
    assert [reward("q", r"\boxed{18}", answer=each) for each in (18, 18.0, ["18"])] == [1.0, 1.0, 1.0]


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="{}\\<>|")))
@settings(deadline=None)
def test_last_box_is_found_in_any_text(before: str, inside: str) -> None:
    assert final_answer(f"{before}\\boxed{{{inside}}} end") == inside.strip()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"x=\boxed{1}, y=\boxed{2}", "x=1, y=2"),
        (r"So $x = \boxed{1}$ and $y = \boxed{2}$.", "x=1, y=2"),
        (r"x=\boxed{1} or x=\boxed{2}", "1, 2"),
        (r"-\boxed{1}", "-(1)"),
    ],
)
def test_names_and_signs_before_boxes_belong_to_the_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@given(st.integers(-(10**9), 10**9))
@settings(deadline=None)
def test_number_is_read_with_or_without_separators(value: int) -> None:
    assert as_number(f"{value:,}") == as_number(str(value)) == value


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
@settings(deadline=None)
def test_number_is_right_only_if_equal(given_number: int, right: int) -> None:
    for written in (
        rf"\boxed{{{given_number}}}",
        f"#### {given_number:,}",
        f"so {given_number}",
        rf"\boxed{{{given_number}.0\text{{ eggs}}}}",
    ):
        assert gsm8k_reward_fn("q", written, [], [], answer=str(right)) == float(given_number == right)
        assert gsm8k_reward_fn("q", written, [], [], answer=f"{given_number}") == 1.0


@given(st.text(alphabet="0123456789,./$- \\boxed{}#^!()or"))
@settings(deadline=None)
def test_reward_accepts_any_text(text: str) -> None:
    assert gsm8k_reward_fn("q", text, [], [], answer="18") in (0.0, 1.0)
