r"""The one grader: hand-labelled pairs of a gold answer and a model's text."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest

from rcd.errors import RCDError
from rcd.evaluate import answers, spelling, verifier
from rcd.evaluate.answers import check_gold, final, right

CPU_SECONDS = 5
"""Of the test's own thread, so that a busy machine takes nothing of it; over a hundred times what is needed."""
RIGHT = [
    # where the answer stands
    ("18", r"There are 9 pens in a box, so 9 * 2 = \boxed{18} pens."),
    ("18", r"First \boxed{7}, but that forgets the second box: \boxed{18}."),
    ("18", r"$$\boxed{18}$$"),
    ("18", r"\boxed 18$"),
    ("18", r"\fbox{18}"),
    ("18", r"\boxed { 18 }"),
    ("18", r"\boxed{\boxed{18}}"),
    ("18", r"The answer is 12. No: \boxed{18}"),
    ("18", "9 * 2 = 18\n#### 18"),
    ("18", "Answer: 18"),
    ("18", "**Answer:** 18"),
    ("18", "Final Answer: **18**"),
    ("18", "The answer is **18 pens**."),
    ("18", "Answer:\n\n18\n\nIt took 16 steps."),
    ("18", "Answer: 7. Wait. Answer: 18."),
    ("18", "The final answer is $18$. I hope it is correct."),
    ("18", "So the answer is: 18!"),
    ("18", "The answer is that Tom paid 18 dollars."),
    ("18", "The answer is 18, since 9 * 2 = 18."),
    ("18", "The answer is\n\\[\n18\n\\]"),
    ("18", "At $2 a ticket, 9 tickets cost $18 on any day."),
    ("18", "Nine tickets at 2 dollars cost 18."),
    ("18", "answer = 18"),
    # whole numbers and decimals
    ("1234", r"\boxed{1,234}"),
    ("1,234", r"\boxed{1234}"),
    ("1234", r"\boxed{1{,}234}"),
    ("1234567", r"\boxed{1\,234\,567}"),
    ("32348", r"\boxed{\$32,\!348}"),
    ("5", r"\boxed{5.00}"),
    ("5", r"\boxed{5.}"),
    ("0.5", r"\boxed{.5}"),
    ("7", r"\boxed{+7}"),
    ("7", r"\boxed{007}"),
    ("-3", r"\boxed{−3}"),
    ("-3", "The temperature is -3."),
    ("5", "10 - 5 leaves 5"),
    ("0", r"\boxed{-0}"),
    ("3/8", r"\boxed{0.375}"),
    # fractions, mixed numbers
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{\frac12}"),
    (r"\frac{1}{2}", r"\boxed{1/2}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}"),
    (r"\frac{1}{2}", r"\boxed{½}"),
    (r"-\frac{2}{3}", r"\boxed{\frac{-2}{3}}"),
    (r"-\frac{2}{3}", r"\boxed{\frac{2}{-3}}"),
    (r"\frac{3}{4}", r"and so we are left with $\frac{3}{4}$."),
    (r"\frac{1}{3}", r"\boxed{0.333333}"),
    ("3.5", r"\boxed{3\frac{1}{2}}"),
    (r"3\frac{1}{2}", r"\boxed{\frac{7}{2}}"),
    ("3.5", "Answer: 3 1/2 cups"),
    ("-2.25", r"\boxed{-2\tfrac14}"),
    (r"\frac{x+1}{2}", r"\boxed{\frac{1}{2}x + \frac{1}{2}}"),
    # per cent
    ("25", r"\boxed{25\%}"),
    (r"25\%", r"\boxed{25}"),
    (r"25\%", r"\boxed{0.25}"),
    ("0.25", r"\boxed{25\%}"),
    (r"25\%", r"\boxed{\frac{1}{4}}"),
    ("25", "Answer: 25 percent"),
    ("12.5", r"\boxed{12.5}\%"),
    # units, degrees, currency
    ("15", r"\boxed{15\text{ cm}}"),
    (r"15\mbox{ cm}^2", r"\boxed{15}"),
    (r"15\text{ cm}^2", r"\boxed{15\ \mathrm{cm}^2}"),
    (r"5\text{ centimeters}", r"\boxed{5\text{ cm}}"),
    ("60", r"\boxed{60 \text{ miles per hour}}"),
    ("60", "The answer is 60 km/h."),
    ("9", r"\boxed{9kg}"),
    ("24", r"\boxed{24 \text{ apples}}"),
    ("24", "Answer: 24 square feet."),
    ("90", r"\boxed{90^\circ}"),
    (r"90^\circ", r"\boxed{90}"),
    (r"90^{\circ}", "The answer is 90°."),
    (r"90^\circ", r"\boxed{90\text{ degrees}}"),
    ("70000", r"\boxed{\$70{,}000}"),
    (r"\$18.90", r"\boxed{18.9}"),
    (r"\$18.90", "Answer: $18.90"),
    ("5", r"\boxed{5 \text{ dollars}}"),
    ("2000000", "The answer is 2 million dollars."),
    # scientific notation, roots, pi
    ("1500", r"\boxed{1.5 \times 10^3}"),
    (r"6.02\times 10^{23}", r"\boxed{6.02 \cdot 10^{23}}"),
    ("0.0025", r"\boxed{2.5e-3}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}"),
    (r"11\sqrt2", r"\boxed{11\sqrt{2}}"),
    (r"\sqrt{3}", r"\boxed{√3}"),
    (r"2\sqrt{3}", r"which is $2\sqrt{3}$."),
    (r"\sqrt[3]{16}", r"\boxed{2\sqrt[3]{2}}"),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}"),
    (r"12\pi", r"\boxed{12π}"),
    (r"12\pi", r"\boxed{12 \pi \text{ cm}^2}"),
    ("1024", r"\boxed{2^{10}}"),
    (r"\frac{1}{2^{98}}", r"\boxed{2^{-98}}"),
    # sets, tuples, intervals
    (r"\{1, 2, 3\}", r"\boxed{\{3, 1, 2\}}"),
    ("3, 5, 7", r"\boxed{7, 3, 5}"),
    ("1,-2", r"\boxed{x = -2 \text{ or } x = 1}"),
    ("1,-2", r"\boxed{1 \text{ and } -2}"),
    ("1,-2", "The answer is $1$ and $-2$."),
    (r"3 \pm \sqrt{2}", r"\boxed{3 - \sqrt{2}, 3 + \sqrt{2}}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
    ("(6,31,-1)", r"\boxed{(6,\ 31,\ -1)}"),
    ("(2,5]", r"\boxed{\left(2, 5\right]}"),
    ("(2,5]", r"\boxed{2 < x \le 5}"),
    (r"x \in [-2,7]", r"\boxed{[-2, 7]}"),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(3, \infty) \cup (-\infty, 2)}"),
    (r"(3,\infty)", "Answer: (3, infinity)"),
    (r"\emptyset", r"\boxed{\{\}}"),
    (r"\begin{pmatrix} 1/5 \\ -2 \end{pmatrix}", r"\boxed{\begin{bmatrix} \frac{1}{5} \\ -2 \end{bmatrix}}"),
    # formulas and equations
    ("x=5", r"\boxed{5}"),
    ("5", r"\boxed{x = 5}"),
    ("5", r"\boxed{\text{Total} = 5}"),
    ("y = 2x + 3", r"\boxed{y = 3 + 2x}"),
    (r"x^2 - 1", r"\boxed{(x-1)(x+1)}"),
    ("6 - 5i", r"\boxed{-5i + 6}"),
    ("p - q", r"\boxed{-q + p}"),
    (r"\frac{22}{7}", r"\boxed{\frac{22}{7} \approx 3.14}"),
    ("4210_{5}", r"\boxed{4210_5}"),
    ("4210_5", r"\boxed{4210}"),
    # words
    (r"\text{Evelyn}", r"\boxed{Evelyn}"),
    (r"\text{(C)}", r"\boxed{C}"),
    (r"\text{even}", "The answer is even."),
    (r"\text{June 20}", r"\boxed{\textbf{June 20}}"),
    ("3:30", r"\boxed{3:30}"),
    # no answer (the critical thinking of GSM-Plus)
    ("None", r"\boxed{\text{None}}"),
    ("None", "Answer: none"),
    ("None", r"\boxed{\text{cannot be determined}}"),
    ("None", "The price of a pen is missing, so the question cannot be answered."),
    ("None", "We don’t have enough to go on: 3 boxes are named.\nThe problem does not say how many pens are in one."),
]

WRONG = [
    # nothing to compare
    ("18", ""),
    ("18", " \n"),
    ("18", "I am not sure."),
    ("18", r"\boxed{}"),
    ("18", r"The sum is 18, so \boxed{}"),
    ("18", r"\boxed{18"),
    ("18", r"\boxed{7}, that is 18"),
    ("18", "18. Answer:"),
    ("18", "Answer: 18 Answer: 19"),
    ("18", "#### "),
    ("18", r"\boxed{\frac{18}{}}"),
    ("18", r"\boxed{???}"),
    ("18", r"\boxed{18}, or rather \boxed{19}"),
    ("18", r"\boxed{eighteen}"),
    ("18", "1" * 10_000),
    ("18", r"\boxed{" + "18 + 0" * 200 + "}"),
    # more than one answer, or a denial
    ("18", r"\boxed{18 \text{ or } 19}"),
    ("18", r"\boxed{18, 19}"),
    ("18", r"\boxed{18 \text{ apples and } 3 \text{ pears}}"),
    ("18", "Answer: 18 19"),
    ("18", "The answer is 18 or 19."),
    ("18", "The answer is between 18 and 19."),
    ("18", "The answer is not 18."),
    ("600", r"\boxed{24 25}"),
    ("49", r"\boxed{24 25}"),
    # another number
    ("18", r"\boxed{-18}"),
    ("18", r"\boxed{181}"),
    ("18", r"\boxed{1.8}"),
    ("18", r"\boxed{18.1}"),
    ("1234", r"\boxed{1.234}"),
    ("1234", r"\boxed{1, 234}"),
    ("0.5", r"\boxed{5}"),
    ("5", r"\boxed{.5}"),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{1}}"),
    (r"\frac{1}{2}", r"\boxed{-\frac{1}{2}}"),
    (r"\frac{1}{3}", r"\boxed{0.33}"),
    ("4.33", r"\boxed{4.34}"),
    (r"3\frac{1}{2}", r"\boxed{\frac{3}{2}}"),
    (r"3\frac{1}{2}", r"\boxed{31/2}"),
    ("0", r"\boxed{0.0000001}"),
    (r"\frac{1}{2^{98}}", r"\boxed{-\frac{1}{2^{98}}}"),
    (r"\frac{1}{2^{98}}", r"\boxed{\frac{1}{2^{99}}}"),
    ("10", "the result is 2^10"),
    ("30", "They meet at 3:30"),
    ("3", r"and that is $2\sqrt{3}$."),
    ("2", "so y = 2x"),
    ("4", r"so we get $\frac{3}{4}$."),
    # per cent, units, currency
    ("25", r"\boxed{0.25}"),
    (r"25\%", r"\boxed{2.5}"),
    ("0.5", r"\boxed{0.5\%}"),
    (r"5\text{ cm}", r"\boxed{5\text{ m}}"),
    (r"5.4\text{ cents}", r"\boxed{\$5.4}"),
    ("5", r"\boxed{5 \text{ million}}"),
    ("2t", r"\boxed{2}"),
    ("2ab", r"\boxed{2}"),
    ("3 + m", r"\boxed{3}"),
    ("2", r"\boxed{2t}"),
    # notation, roots, pi
    ("1500", r"\boxed{1.5 \times 10^2}"),
    (r"\sqrt{3}", r"\boxed{3}"),
    (r"2\sqrt{3}", r"\boxed{3\sqrt{2}}"),
    (r"\pi", r"\boxed{3.14}"),
    (r"12\pi", r"\boxed{12}"),
    (r"\sqrt{2}", r"\boxed{1.41}"),
    # sets, tuples, intervals
    (r"\{1,2\}", r"\boxed{(1,2)}"),
    (r"\{1,2\}", r"\boxed{\{1,2,3\}}"),
    ("1,-2", r"\boxed{1}"),
    ("1,-2", r"\boxed{1, 2}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("(1,2)", r"\boxed{[1,2]}"),
    ("[0,1)", r"\boxed{[0,1]}"),
    (r"(3,\infty)", r"\boxed{x \ge 3}"),
    ("(100,200)", r"\boxed{100200}"),
    (r"3 \pm \sqrt{2}", r"\boxed{3 + \sqrt{2}}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}"),
    # formulas
    ("x=5", r"\boxed{x=6}"),
    ("x=5", r"\boxed{y=5}"),
    ("p - q", r"\boxed{q - p}"),
    ("6 - 5i", r"\boxed{6 + 5i}"),
    ("x^2 - 1", r"\boxed{x^2 + 1}"),
    ("4210_5", r"\boxed{4210_6}"),
    ("52", r"\boxed{52_8}"),
    # words
    (r"\text{Evelyn}", r"\boxed{Evan}"),
    (r"\text{(C)}", r"\boxed{B}"),
    (r"\text{even}", r"\boxed{8}"),
    ("yes", r"\boxed{\text{no}}"),
    ("east", r"\boxed{\text{seat}}"),
    ("3:30", r"\boxed{3:45}"),
    # no answer
    ("None", ""),
    ("None", r"\boxed{}"),
    ("None", r"\boxed{0}"),
    ("None", "Answer: 5"),
    ("None", r"There is not enough information, so I take 4 boxes: \boxed{12}"),
    ("None", "It is not said how many there are. We take 5. Then the sum is 10."),
    ("5", r"\boxed{\text{None}}"),
    ("0", r"\boxed{\text{None}}"),
    ("5", r"\boxed{\text{cannot be determined}}"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right(gold: str, text: str) -> None:
    assert right(gold, text), final(text)


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong(gold: str, text: str) -> None:
    assert not right(gold, text), final(text)


def test_every_gold_answer_of_the_pairs_can_be_read_and_equals_itself() -> None:
    golds = sorted({gold for gold, _ in RIGHT + WRONG})
    for gold in golds:
        check_gold(gold, "line 1 of a file")
        assert right(gold, rf"\boxed{{{gold}}}"), gold


@pytest.mark.parametrize("gold", ["", "  ", r"\frac{1}{", "???", "5 ) (", "+", "24 25", "x^", "()", "$", r"\sqrt{"])
def test_a_gold_answer_that_cannot_be_read_is_refused_by_place(gold: str) -> None:
    with pytest.raises(RCDError, match=r"line 7 of set\.jsonl") as error:
        check_gold(gold, "line 7 of set.jsonl")
    assert str(error.value).count("\n") == 0
    with pytest.raises(RCDError, match="500 characters"):
        check_gold("1+" * 400 + "1", "line 7 of set.jsonl")


def test_the_last_box_counts_even_when_it_is_empty_or_cut_off() -> None:
    assert final(r"\boxed{1} \boxed{2}") == "2"
    assert final(r"\boxed{1} \boxed{}") is None and final(r"\boxed{1} \boxed{2") is None
    assert answers.boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}" and answers.boxed("none") is None


def test_one_spelling_stays_as_it_is() -> None:
    for text in [text for pair in RIGHT + WRONG for text in pair if len(text) < 200]:
        assert spelling.spell(spelling.spell(text)) == spelling.spell(text)


def test_whole_numbers_need_no_process_and_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier._PROCESS, "ask", lambda *_: pytest.fail("a whole number was sent to math-verify"))
    began = time.thread_time()
    for value in range(3000):
        assert right(str(value), rf"Some text before. \boxed{{{value}}}")
        assert not right(str(value), f"Some text before.\n#### {value + 1}")
    assert time.thread_time() - began < CPU_SECONDS


def test_a_formula_that_hangs_is_wrong_and_the_next_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier._PROCESS.stop()
    with monkeypatch.context() as patch:
        patch.setattr(verifier, "SECONDS", 0.5)
        assert not right(r"\sqrt{5}", r"\boxed{9^{9^{9^{9}}} \pi}")
    assert verifier._PROCESS.child is None
    assert right(r"\sqrt{20}", r"\boxed{2\sqrt{5}}")


def test_a_process_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier._PROCESS.stop()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RCDError, match="pip install math-verify"):
        right(r"\sqrt{28}", r"\boxed{2\sqrt{7}}")
    assert right("18", r"\boxed{18}")


def test_it_works_in_threads() -> None:
    found: list[bool] = []

    def ask(n: int) -> None:
        found.append(right(rf"{n}\sqrt{{7}}", rf"\boxed{{\sqrt{{{7 * n * n}}}}}"))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_no_text_raises() -> None:
    draw = random.Random(0)
    pieces = [
        r"\boxed", "{", "}", "18", "Answer:", "####", "the answer is", "$", r"\frac", r"\text", r"\left(", ",", "^",
        "_", "%", "-", " ", "\n", ".", "=", "\x00", "é", "²", "\ud800", r"\begin{pmatrix}", "x", "and", "cm", "1/0",
        "9" * 50,
    ]  # fmt: skip
    for gold in ("18", r"\frac{1}{2}", "None", r"\text{east}"):
        for _ in range(40):
            assert right(gold, "".join(draw.choices(pieces, k=draw.randrange(30)))) in (True, False)


@pytest.mark.parametrize(
    "piece", ["(", "$", r"\(", "answer is ", "1", "a", "1,", "**", r"\boxed{", "√(", "9 ", " ", "-"]
)
def test_a_long_text_is_read_in_little_time(piece: str) -> None:
    began = time.thread_time()
    assert not right("18", piece * (100_000 // len(piece)))
    assert time.thread_time() - began < CPU_SECONDS
