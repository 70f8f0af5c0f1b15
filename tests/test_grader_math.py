"""The maths grader: 143 cases with a person's mark, a table of further answers by rule, and hostile text."""

import json
import math
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graders.math import MathGrader

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "math.jsonl").read_text().splitlines()]


def grade(response, key):
    scores = MathGrader()(data_sources=["x"], solution_strs=[response], ground_truths=[key], extra_infos=[{}])
    assert len(scores) == 1
    return scores[0]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['kind']}" for case in CASES])
def test_case(case):
    started = time.process_time()
    assert grade(case["response"], case["ground_truth"]) == case["score"], case["why"]
    assert time.process_time() - started < case.get("max_seconds", 10)


# Why, key, answers in a box that are right, answers in a box that are wrong.
ANSWERS = [
    ("brackets of any depth", "3/5", [r"\frac{1}{1+\frac{1}{1+\frac{1}{2}}}", "(" * 60 + "0.6" + ")" * 60], ["5/3"]),
    ("percent is hundredths", "0.4", [r"40\%", "40%", r"\frac{2}{5}", r"40\text{ percent}"], [r"0.4\%", r"4\%", "40"]),
    ("a key in percent takes share and number", r"35\%", ["35", "0.35", r"\frac{7}{20}", r"35\ \%"], ["36", "3.5"]),
    ("percent of a mixed number", r"\frac13", [r"33\frac{1}{3}\%"], [r"33\%", r"33.3\%"]),
    ("a number above one is no share: % is a unit", "35", [r"35\%"], [r"3500\%x"]),
    ("one is a share", "1", [r"100\%"], [r"1\%"]),
    ("unit left out or spelt out", r"12\text{ cm}", ["12", r"12\,\mathrm{cm}", "12cm", r"12\text{ centimetres}"], []),
    ("another unit", r"12\text{ cm}", [], [r"12\text{ mm}", r"12\text{ cm}^2", r"12\text{ in}", r"12\text{ apples}"]),
    ("no conversion: a key in km wants km", r"5\text{ km}", [r"5\text{ kilometers}"], [r"5000\text{ m}", "5 m"]),
    ("area", r"30\text{ cm}^2", ["30", r"30\text{ sq. cm}", r"30\text{ square centimeters}"], [r"30\text{ cm}^3"]),
    ("units per unit", r"90\text{ km/h}", [r"90\text{ kilometers per hour}", "90"], [r"90\text{ mph}"]),
    ("things counted", r"12\text{ apples}", ["12", r"12\text{ red apples}"],
     [r"12\text{ oranges}", r"13\text{ apples}"]),
    ("a unit on a surd or pi", r"12\pi\text{ m}^2", [r"12\pi", r"12\pi\text{ m}^2"], [r"12\pi\text{ cm}^2", "37.7"]),
    ("money", r"\$18.50", ["18.5", "$18.50", r"18.50\text{ dollars}"], [r"€18.50", r"18.50\text{ cents}", "18.05"]),
    ("scale words", "3000000", [r"\$3\text{ million}", r"3\times 10^6"], ["3"]),
    ("degrees", r"45^\circ", ["45", "45°", r"45\degree", r"45\text{ degrees}"], ["54°", r"45\text{ radians}"]),
    ("degrees inside a function are an angle", r"\frac12", [r"\sin 30^\circ"], [r"\sin 30"]),
    ("a letter glued to a number is a symbol first", "3m", [r"3\text{ m}", "m*3"], ["3", "3s"]),
    ("thousands", "1234567", ["1,234,567", "1{,}234{,}567", r"1\,234\,567", "1 234 567"], ["1.234567", "1,234"]),
    ("a comma is not a decimal point", "2.5", [], ["2,500", "2,5"]),
    ("groups of three may be a list", r"\{100,200,300\}", ["300,200,100"], ["100,200"]),
    ("fractions in any form", "-7/12", [r"\frac{-7}{12}", r"-\dfrac{14}{24}", r"7\div(-12)"], ["-12/7", "-0.58333"]),
    ("short LaTeX fractions", "0.75", [r"\frac34", r"\frac3{4}", r"\frac{3}4", "¾", "3⁄4"], [r"\frac43"]),
    ("mixed numbers", r"\frac72", [r"3\frac12", "3 1/2", "3½", r"3\ \tfrac{1}{2}"], [r"3\cdot\frac12", r"3(\frac12)"]),
    ("a minus covers the mixed number", "-3.5", [r"-3\frac12"], [r"3\frac12"]),
    ("only a proper fraction is a mixed one", r"\frac{\sqrt2}{2}", [r"1\cdot\frac{\sqrt2}{2}"], [r"1\frac12"]),
    ("brackets side by side are a product", "6", ["(2)(3)", r"2\cdot3", "2×3"], ["23", "5"]),
    ("look-alike minus signs", "-12", ["−12", "–12", "－12", "- 12"], ["12", "+12"]),
    ("surds", r"2\sqrt3", [r"\sqrt{12}", "2√3", "sqrt(12)", "12^{1/2}", r"\frac{6}{\sqrt3}"], ["3.4641016151377544"]),
    ("nested surds", r"1+\sqrt2", [r"\sqrt{3+2\sqrt2}", r"\frac{1}{\sqrt2-1}"], ["2.414213562373095048801688724"]),
    ("real root of a negative number", "-2", [r"\sqrt[3]{-8}", "(-8)^{1/3}"], ["2"]),
    ("rounded to any length", r"\pi", ["π"],
     ["3.14159265358979323846264338327950288419716939937510582097494459230781640628"]),
    ("fractions and binomials in the middle", r"\frac34", [r"{3\over 4}", r"{3 \over {2 \over 1} \cdot 2}"],
     [r"{4\over 3}"]),
    ("an overline without braces", r"\frac13", [r"0.\overline3", r"0.\dot3"], [r"0.\overline4"]),
    ("absolute values between bounds", "(-1,1)", ["|x|<1", r"1>\lvert x\rvert"], [r"|x|\le1", "|x|>1", "|x|<2"]),
    ("and beyond them", r"(-\infty,-2]\cup[2,\infty)", [r"|x|\ge2"], ["|x|>2", r"x\ge2"]),
    ("unequal", r"x\neq 3", [r"x\not=3", "x≠3", "x!=3"], ["x=3"]),
    ("points with a name", "(3,-2)", ["A(3,-2)", r"P = (3, -2)", r"M\left(3,-2\right)"], ["A(-2,3)", "A"]),
    ("a sign of both signs alone", r"\pm5", [r"\mp 5", "-5, 5", "x=±5"], ["5", r"\pm 6"]),
    ("degrees and radians", r"30^\circ", [r"\frac{\pi}{6}", r"\pi/6"], [r"\frac{\pi}{3}", "0.5236"]),
    ("radians and degrees", r"\frac{2\pi}{3}", [r"120^\circ"], ["120", r"60^\circ"]),
    ("units with powers below zero", r"9.8\text{ m/s}^2",
     [r"9.8\ \mathrm{m\,s^{-2}}", "9.8 m/s^2", r"9.8\text{ meters per second squared}"],
     [r"9.8\text{ m/s}", "9.8 km/s^2"]),
    ("speeds without \\text", "25", ["25 km/h", "25 m/s", "25km/h"], ["25 - 1 km/h"]),
    ("a note in brackets", "42", [r"42\text{ (verified)}", "42 (forty-two)"], ["42 (wrong)", "42 (or 43)", "f(42)"]),
    ("hyphens", r"\text{forty-two}", [r"\text{forty two}", "Forty-Two"], [r"\text{forty}"]),
    ("a sentence that names it", r"\text{isosceles}", [r"\text{The triangle is isosceles}", "it is isosceles"],
     [r"\text{The triangle is not isosceles}", r"\text{It is equilateral or it is isosceles}",
      r"\text{None is isosceles}", r"\text{isosceles is not it}"]),
    ("articles", r"\text{a parabola}", [r"\text{parabola}", r"\text{the parabola}"], [r"\text{a circle}"]),
    ("nothing there", r"\emptyset", [r"\text{None}", r"\text{none}"], [r"\text{one}"]),
    ("does not exist", r"\text{does not exist}", [r"\text{DNE}", "DNE", r"\text{The limit does not exist}"],
     [r"\text{exists}", "0"]),
    ("choice with its words", "C", [r"\text{C. Mitochondria}", r"\text{C: the cell}"], [r"\text{D. Mitochondria}"]),
    ("binomials between two numbers", "10", [r"{5 \choose 2}"], [r"{5 \choose 4}"]),
    ("bounds are no values", "42", [r"\text{It has 42 sides}"],
     [r"\text{less than 42}", r"\text{42 is too large}", r"\text{more than } 42"]),
    ("offers to the grader", "42", [],
     [r"\text{Any answer is accepted as 42}", r"\text{full credit: 42}", r"\text{the key says 42}"]),
    ("interval ends", "[2,5)", [r"\left[2,5\right)", r"x\in[2,5)", "[2,5["], ["[2,5]", "(2,5)", "(2,5]", "2,5"]),
    ("an inequality is an interval", "[2,5)", [r"2\le x<5", r"5>x\geq 2", r"x<5\text{ and }x\ge2"], [r"2<x<5", "x<5"]),
    ("union in any order or words", r"(-\infty,-2)\cup(3,\infty)",
     [r"(3,\infty)\cup(-\infty,-2)", r"x<-2\text{ or }x>3", "x<-2, x>3", "(-∞,-2)∪(3,∞)"], ["x>3", r"x\le-2, x>3"]),
    ("pieces that touch", "[2,5]", [r"[2,3]\cup[3,5]"], [r"[2,3)\cup(3,5]"]),
    ("without a point", r"\mathbb{R}\setminus\{2\}", [r"x\ne2", r"(-\infty,2)\cup(2,\infty)"], [r"\mathbb{R}"]),
    ("ends in another form", r"(-2\sqrt3,0.5]", [r"(-\sqrt{12},\frac12]"], [r"(-3.46,\frac12]"]),
    ("an unsolved inequality repeats the question", "x>3", ["3<x", r"(3,\infty)"], ["2x>6", r"x\ge3", "y>3", "3"]),
    ("two variables", "y>2x+1", ["y-2x>1", "2x-y<-1"], ["y<2x+1", r"y\ge2x+1"]),
    ("sets", r"\{1,3,7\}", [r"\{7,1,3\}", "3,1,7", "1, 3 and 7", r"\{1,3,3,\sqrt{49}\}"], [r"\{1,3\}", r"\{1,3,7,9\}"]),
    ("points in any order, coordinates not", "(1,2),(3,4)", ["(3,4),(1,2)"], ["(2,1),(4,3)", "(1,4)", "(1,2)"]),
    ("tuples", "(3,-2)", ["（3，−2）", "x=3, y=-2", r"(\sqrt9,\frac{-4}{2})", "3,-2"],
     ["(-2,3)", "[3,-2]", "(3,-2,0)"]),
    ("named values are not interchangeable", "x=3,y=-2", ["y=-2, x=3", "(3,-2)"], ["x=-2,y=3", "(-2,3)"]),
    ("roots", "2,5", ["5,2", r"x=2\text{ or }x=5", "x_1=5,x_2=2", "x = 2, 5", r"\{2,5\}", "2、5"],
     ["2", "2,5,7", "2,6"]),
    ("plus-minus names both", r"1\pm\sqrt2", [r"1-\sqrt2,1+\sqrt2", r"x=1\pm\sqrt{2}"], [r"1+\sqrt2", r"\pm\sqrt2"]),
    ("candidates", "42", ["42, 42"], ["41,42,43", "42 or 43", r"42\text{ or }43", ",".join(map(str, range(100)))]),
    ("matrices", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
     [r"\begin{bmatrix}1&2\\\frac62&4\end{bmatrix}", r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]"],
     [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}", "(1,2,3,4)"]),
    ("vectors", r"\begin{pmatrix}2\\-1\end{pmatrix}", [r"(2,-1)", r"\langle2,-1\rangle"], ["(-1,2)", "2,1"]),
    ("assignment", "3", ["x=3", "3=x", r"x=\frac62=3", r"\text{Area}=3", "f(2)=3", "= 3"], ["x=4", "x>3", "5=3"]),
    ("names differ", "x=3", ["x = 3.0", "3"], ["y=3", "2x=6", "x^2=9"]),
    ("lines", "y=2x+1", ["2x-y+1=0", "y-2x=1", r"x=\frac{y-1}{2}", "2x+1"], ["y=2x", "2x-y-1=0", "f(x)=2x"]),
    ("an equation in its usual form is no zero", "0", ["x=0", "f(0)=0"], ["x^2-5x=0", "2x-y-1=0"]),
    ("exact before approximate", r"\frac13", [r"\frac13\approx0.33"], [r"x\approx0.33"]),
    ("scientific", "320000", ["3.2e5", r"3.2\cdot10^5", "3.2 x 10^5", "3.2×10⁵", "32*10**4"], ["3.2e4", "32e5"]),
    ("words", r"\text{Tuesday}", ["tuesday", r"\textbf{Tuesday}", r"\text{the answer is Tuesday}"],
     ["yadseuT", "Tues"]),
    ("letters are never factors", "even", [r"\text{Even}"], ["neve", r"\text{not even}", "odd"]),
    ("words with numbers", r"\text{June 20}", ["june 20"], [r"\text{July 20}", "20"]),
    ("choice", "B", ["(B)", "b", "B.", "B)", r"\text{(B) }14", "B: 14", r"\text{Option B}"], ["C", "(C) 14", "B or C"]),
    ("choice with its value in the key", r"\textbf{(C)}\ 14", ["C", "14", "(C) 14"], ["(C) 15", "(D) 14", "D", "15"]),
    ("full width", "(12.5,-3)", ["（１２．５，－３）"], ["（１２．５，３）"]),
    ("huge powers are compared, not expanded", "10^{10^{10}}", ["10^{10^{9}*10}", r"(10^{5})^{2\cdot10^9}"],
     ["10^{10^{10}}+1", "10^{10^{11}}", "1", r"\infty"]),
    ("huge differences", r"2\cdot3^{88888887}", [r"3^{88888888}-3^{88888887}"], ["0", "3^{88888887}"]),
    ("factorials", "720", ["6!", r"\frac{10!}{7!}", r"6\cdot5!"], ["(10^9)!", "100000!", r"\binom{10^8}{10^7}"]),
    ("long integers", "9" * 6000, ["9" * 6000, "0" + "9" * 6000], ["9" * 5999 + "8", "9" * 5999]),
    ("towers beyond any arithmetic", "9^{9^{9^{9}}}", ["9^{9^{9^9}}"], ["9^{9^{9^{8}}}"]),
    ("tiny differences", "0.3", ["0.30"], ["0.30000000000000004", "0.3000000000000000000000001"]),
    ("no value", r"\text{undefined}", [r"\text{Undefined}"], [r"\frac10", r"\text{NaN}", "0"]),
    ("division by zero is nothing", "0", ["-0", r"\frac05", r"\sin 180^\circ"],
     [r"\frac{0}{0}", r"\ln 0", r"\frac{1}{1-1}", r"\tan 90^\circ"]),
    ("infinity", r"\infty", ["∞", r"+\infty"], [r"-\infty", "10^{100}", r"\frac10"]),
    ("repeating decimals", r"\frac16", [r"0.1\overline{6}", r"0.1\bar{6}", "0.1(6)", "0.1666..."], ["0.1667"]),
    ("the dots must show a period", r"\pi", [], [r"3.14159\ldots", "3.141..."]),
    ("polynomials", "x^2+2x+1", ["(x+1)^2", "x(x+2)+1", "(1+x)(1+x)"], ["(x-1)^2", "(y+1)^2", "x^2+2x+1.0000001"]),
    ("roots keep their sign", r"\sqrt{x^2}", ["|x|"], ["x"]),
    ("both sides of an absolute value", "|x-y|", ["|y-x|", r"\sqrt{(x-y)^2}"], ["x-y", "y-x"]),
    ("domains", r"\sqrt{xy}", [r"\sqrt{x}\sqrt{y}"], [r"\sqrt{x+y}"]),
    ("functions", r"2\sin x\cos x", [r"\sin 2x", r"\sin(2x)"], [r"\sin x^2", r"2\sin x"]),
    ("slashed coefficients", r"\frac{3x}{4}", ["3/4 x", r"\frac34x"], [r"\frac{3}{4x}"]),
    ("logarithms", r"3\ln2", [r"\ln 8", r"\ln(4)+\ln 2"], [r"\ln 7", r"\log 8", "2.0794"]),
    ("log bases", "3", [r"\log_2 8", r"\log 1000", r"\frac{\ln 8}{\ln 2}"], [r"\log_3 8"]),
    ("complex", "3+4i", ["4i+3", r"3+4\mathrm{i}", r"(2+i)^2"], ["3-4i", "4+3i", "7i"]),
    ("ratio", "3:4", [r"3\text{ to }4", "6:8", "3：4", r"\frac34"], ["4:3", "3:5", "3:4:5"]),
    ("clock", "7:30", ["7{:}30", "07:30", r"7:30\text{ p.m.}"], ["7:03", "30:7", "7.30"]),
    ("halves of the day", r"7:30\text{ p.m.}", ["7:30 PM", "19:30", "7:30"], ["7:30 am", "7:31 pm"]),
    ("bases", "1011_2", ["1011_{2}", "(1011)_2", "1011", r"1011_{\text{two}}"], ["1011_3", "11", "1010_2"]),
    ("hexadecimal", "2A_{16}", ["2a_{16}"], ["2B_{16}", "42"]),
    ("empty set", r"\emptyset", [r"\varnothing", r"\{\}", r"\text{No real solutions}"], ["0", r"\{0\}"]),
    ("number in a sentence", "460", [r"\text{There are 460 ways}", r"\text{Answer: }460"],
     [r"\text{It is not 460}", r"\text{460 of 500}", "print(460)", r"\text{ignore the key; 460 is accepted}"]),
    ("decoration", "42", [r"\mathbf{42}", r"\color{red}{42}", "$42$", "**42**", r"42\,", "'42'", "42."], ["4 2"]),
    ("sums are worked out from the key", r"\sum_{k=1}^{n} k", [r"\frac{n(n+1)}{2}"], [r"\frac{n^2}{2}"]),
    ("integrals too", r"\int_0^1 2x\,dx", ["1"], ["2"]),
    ("never executed", "42", [], ["int(42)", "eval('42')", "(lambda: 42)()", "42 if True else 0", "[42][0]"]),
]  # fmt: skip
# Why, key, whole responses that are right, whole responses that are wrong.
RESPONSES = [
    ("a correction replaces", "8", [r"I had \boxed{7}, or rather \boxed{8}", "It is \\boxed{7}.\n\nNo: \\boxed{8}"],
     [r"\boxed{8}. But no, \boxed{7}"]),
    ("hedging", "6", [r"\boxed{6}, that is, \boxed{6}"],
     [r"Either \boxed{5} or \boxed{6}", r"\boxed{5}, maybe \boxed{6}", "The answer is 5 or 6."]),
    ("the same value twice is no hedge", "0.5", [r"\boxed{\frac12} or \boxed{0.5}"],
     [r"\boxed{\frac12} or \boxed{0.6}"]),
    ("boxes of one sentence", "2,3,5", [r"They are \boxed{2}, \boxed{3}, and \boxed{5}."],
     [r"\boxed{2}. And \boxed{3}"]),
    ("boxed inequalities", r"(-\infty,-2)\cup(3,\infty)", [r"\boxed{x<-2} or \boxed{x>3}"], [r"\boxed{x>3}"]),
    ("box forms", "42", ["\\boxed\n{42}", r"\fbox{42}", r"\boxed{\boxed{42}}", r"\\boxed{42}", r"}{\boxed{42}"], []),
    ("unfinished boxes", "42", [r"\boxed{4, no: \boxed{42}"],
     [r"\boxed{42", r"\boxed{42} \boxed{", r"\boxed{42}. \boxed", r"\boxed{42\}", "The answer is 42. \\boxed{ }"]),
    ("thinking", "7",
     ["<think>8</think>Answer: 7", r"8</think>\boxed{7}", r"<think>a</think><think>b</think>\boxed{7}"],
     [r"<think>\boxed{7}</think>", r"<think>\boxed{7}", r"\boxed{7}<think>or"]),
    ("hashes", "42", ["#### 42 apples", "#### $42.00", "#### **42**", "#### 41\n#### 42",
      "#### Step 3\nThe answer is 42"],
     ["#### 42\n#### 24", "The sum is 42\n####", "#### 42 or 43"]),
    ("closing phrases", "42",
     ["The answer is 42.", "**Answer:** `42`", "### Final Answer\n42", "The answer is 42 because 6*7=42.", "答案是42。",
      "Answer: 6*7 = 42", "The answer is 41. No, the answer is 42.", "<answer>42</answer>",
      "The answer is 42 and we stop."],
     ["The answer is", "The answer is not 42.", "The answer is 41. I tried 42."]),
    ("what it is not", "15",
     ["The answer should be 15, not 16.", "The answer is $15$ and not $16$.", "Answer: 15, not 16"],
     ["The answer is not 15.", "The answer is 16, not 15."]),
    ("a mixed number last", "1.5", ["It takes 1 1/2 hours.", "So $1\\frac12$ cups"], ["It takes 1/2 hours."]),
    ("phrases with other answers", r"7:30", ["The answer is 7:30 p.m."], ["The answer is 7:31 p.m."]),
    ("the last number with what belongs to it", r"\frac38",
     [r"So it is $\frac{3}{8}$.", "So it is 3/8 of it.", "37.5% of them", r"$$p = \frac38$$", r"\frac{3}{8}"],
     ["3/8 of 24"]),
    ("the last number", "-1250", ["### -1250", "It fell to -1,250 m", "1-1251 = -1250", "x = -1250"],
     ["1250", "-1250 or so, say 7"]),
    ("no answer", "42", [], ["", "  ", "None", "null", None, "I cannot say.", r"\boxed{}", "####", "\x00"]),
    ("characters that are not there", "42", ["\\boxed{4\u200b2}\x07", "\ud83d \\boxed{42}", "\ufeff\x1b[1m\\boxed{42}",
      "\\boxed{\x1b[1m42\x1b[0m}"],
     ["\\boxed{42\ufffd}"]),
    ("the key only quoted", "42", [], [r"42 is wrong, it is \boxed{43}", r"Award 42! \boxed{\text{full marks}}"]),
]  # fmt: skip


@pytest.mark.parametrize(("why", "key", "right", "wrong"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_answers(why, key, right, wrong):
    assert [answer for answer in right if grade(f"So \\boxed{{{answer}}}.", key) != 1.0] == [], why
    assert [answer for answer in wrong if grade(f"So \\boxed{{{answer}}}.", key) != 0.0] == [], why


@pytest.mark.parametrize(("why", "key", "right", "wrong"), RESPONSES, ids=[row[0] for row in RESPONSES])
def test_responses(why, key, right, wrong):
    assert [response for response in right if grade(response, key) != 1.0] == [], why
    assert [response for response in wrong if grade(response, key) != 0.0] == [], why


def test_keys_of_other_types():
    keys = [42, 42.0, "\\boxed{42}", "$42$", "6*7=42\n#### 42", ["41", 42], "x=42", "The answer is 42", "Answer: $42$"]
    assert [grade("\\boxed{42}", key) for key in keys] == [1.0] * len(keys)
    nothing = [None, "", " ", "\\boxed{}", "$$", [], [None], math.nan]
    assert [grade("\\boxed{42}", key) for key in nothing] == [0.0] * len(nothing)
    assert grade("\\boxed{12345678901234567891}", 12345678901234567890) == 0.0
    with pytest.raises(ValueError, match=r"ground_truths\[0\] is dict"):
        grade("\\boxed{42}", {"answer": 42})


def test_batch_keeps_order():
    responses = [f"\\boxed{{{i}}}" for i in range(50)]
    scores = MathGrader()(
        data_sources=["x"] * 50,
        solution_strs=responses,
        ground_truths=[str(i % 7) for i in range(50)],
        extra_infos=[{}] * 50,
    )
    assert scores == [1.0 if i < 7 else 0.0 for i in range(50)]


def test_off_the_main_thread():
    def work(seed):
        cases = random.Random(seed).sample(CASES, len(CASES))
        return [case["id"] for case in cases if grade(case["response"], case["ground_truth"]) != case["score"]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[]] * 4


def test_responses_never_reach_computer_algebra():
    code = r"""
import sys
from graders.math import MathGrader
responses = [r"\boxed{\int_0^1 e^{x^2} dx}", r"\boxed{\sum_{k=1}^{9} k}", "\\boxed{" + "{" * 100 + "5}" + "}" * 100]
print(MathGrader()(data_sources=["x"] * 3, solution_strs=responses, ground_truths=["5"] * 3, extra_infos=[{}] * 3))
print([name for name in ("sympy", "latex2sympy2_extended", "math_verify") if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.splitlines() == ["[0.0, 0.0, 1.0]", "[]"]


FRAGMENTS = (
    r"( [ { \{ | $ \boxed{ \boxed <think> </think> #### \( \[ $$ \frac \frac{ \sqrt{ √ ^ _ ! - + / . , : = < 9 "
    r"9, 1/ 1. x “ ” \text{ \begin{pmatrix} \\ & \cup {1}\cup (1,2)\cup ± ° % \$ π e^ 2^ ^2 || \left( ½ ³ \ "
    r"\sin \log_ 0. 3… 7:30 C) x= x>3, 1,000, 1e5 10^{ ∞ [1, ⟬ ⌊ → 5cm per 1\pm ] _{ 1_2 |1 \binom ; answer 1+ "
    r"** ' ` … # \! ~ 答案 \dot{ \vec{a} 2| ]1 == "
).split()


@pytest.mark.parametrize("fragment", [*FRAGMENTS, "\n", " ", "answer is ", "1 or ", "\ud800", "\x00", "\u0305"])
def test_repetition_takes_linear_time(fragment):
    for count in (300, 9_000 // len(fragment), 50_000 // len(fragment)):
        for frame in ("%s", "\\boxed{%s}", "The answer is %s", "x %s 7"):
            started = time.process_time()
            assert grade(frame.replace("%s", fragment * count), "5.5") == 0.0
            assert time.process_time() - started < 8


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=30).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=5).map("".join),
    st.sampled_from(["%s", "\\boxed{%s}", "Answer: %s"]),
)
def test_any_text_gets_a_score(response, key, frame):
    assert grade(frame.replace("%s", response), key) in (0.0, 1.0)


@settings(max_examples=300, deadline=None)
@given(st.fractions(), st.integers(2, 9))
def test_a_fraction_equals_itself_and_not_its_neighbour(value, factor):
    key = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    forms = [
        f"{value.numerator * factor}/{value.denominator * factor}",
        f"\\frac{{{-value.numerator}}}{{-{value.denominator}}}",
    ]
    assert [grade(f"\\boxed{{{form}}}", key) for form in forms] == [1.0, 1.0]
    assert grade(f"\\boxed{{\\frac{{{value.numerator + 1}}}{{{value.denominator}}}}}", key) == 0.0
