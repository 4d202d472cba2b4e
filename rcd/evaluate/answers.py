r"""The one grader of answers: finds the final answer in a model's text and compares it with the gold one.

The answer is the last \boxed{...}; else what stands behind the last "Answer:", "####" or "the answer is"; else the last
number. Plain numbers are compared here, exactly; formulas go to math-verify (rcd/evaluate/verifier.py). Rounding is no
equality: 0.33 is not 1/3, but a decimal of six or more places is what the other rounds to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rcd.errors import RCDError
from rcd.evaluate import verifier
from rcd.evaluate.spelling import NUMBER, Number, bare, is_math, number, spell, unit_of, without_units

LONGEST = 500
"""Characters of an answer; a longer one is no answer."""
SCANNED = 20_000
"""The last so many characters are searched for a number."""

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
MARK = re.compile(r"(?i:\banswers?\b[*_ \t]*(?:(?:is|are)\b[*_ \t]*:?|[:=])|####)")
DISPLAY = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]", re.S)
FORMULA = re.compile(r"(?<![\\$])\$([^$\n]{1,500})(?<!\\)\$|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]")
INTEGER = re.compile(r"[+-]?(?:[0-9]{1,60}|[0-9]{1,3}(?:,[0-9]{3}){1,19})")
BASED = re.compile(r"([0-9][0-9A-Z]{0,60}|[A-Z]{1,9}[0-9][0-9A-Z]{0,60})_\{?([0-9]{1,2})\}?")
CLOCK = re.compile(r"[0-9]{1,4}(?: ?: ?[0-9]{1,4})+(?: ?([ap])\.?m\.?)?", re.I)
NAMED = re.compile(
    r"^(?:\\text\{[^{}]*\}|\\?[A-Za-z]{1,20}(?: [a-z]{1,20}){0,5}(?:_\{?\w\}?|\([A-Za-z]\))?) ?[=:] ?(?=\S)"
)
ALTERNATIVE = re.compile(r"\s*(?:or|and|to|,|-|–|/|;)\s*\\?\$?[-0-9]")

NONE = {
    "none", "no answer", "n/a", "unknown", "cannot be determined", "not enough information", "insufficient information",
}  # fmt: skip
DECLINED = re.compile(
    r"\bnone\b|\bn/a\b|\bunknown\b|\bno answer\b|\b(?:un|in)determin|\binsufficient\b|\bunanswerable\b"
    r"|\b(?:not|n't) (?:enough|sufficient)|\bmissing (?:\w+ )?information"
    r"|(?:cannot|can ?not|can't|could not|couldn't|unable to|impossible to|not possible to) (?:be )?"
    r"(?:determin|calculat|comput|know|answer|solv|f[io]u?nd|say|tell|told|conclud|decid)"
    r"|(?:\bnot|n't) (?:\w+ )?(?:specif|mention|provide|given|state|say|tell|known)"
)
"""What a model says of a question that has no answer."""


def right(gold: str, text: str) -> bool:
    """Whether the final answer of the text equals the gold one. No text raises; an empty answer is wrong."""
    if _none(gold):
        return _declines(text)
    answer = final(text)
    return answer is not None and _equal(gold, answer, alone=bool(BOX.search(text)))


def check_gold(gold: str, where: str) -> None:
    """Refuses a gold answer that no output could equal; `where` says where it stands, such as `line 7 of FILE`."""
    if not gold.strip():
        raise RCDError(f"{where} has an empty answer; fill it in or drop the row.")
    if len(gold) > LONGEST:
        raise RCDError(f"the answer of {where} has more than {LONGEST} characters; give the final answer alone.")
    if INTEGER.fullmatch(gold.strip()) or _none(gold):
        return
    read = _read(gold)
    known = read.number or read.words or CLOCK.fullmatch(read.text) or BASED.fullmatch(_tight(read.text))
    if not known and not (is_math(read.text) and verifier.readable(read.text)):
        shown = " ".join(gold.split())  # on one line
        raise RCDError(
            f"the answer '{shown}' of {where} cannot be read as a number, a formula or a word; mend it or drop the row."
        )


def final(text: str) -> str | None:
    """The final answer as it stands in the text; None where there is none."""
    found = _boxed(text)
    found = _marked(text) if found is None else found
    found = _last_number(text[-SCANNED:]) if found is None else found
    found = "" if found is None or len(found) > LONGEST else found.strip()
    return found or None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, such as the gold answer of a solution; None where there is none."""
    return _boxed(text) or None


def _boxed(text: str) -> str | None:
    """The last box's content; "" where it is empty or never closed: nothing else stands in for it."""
    last = _last(BOX, text)
    if last is None:
        return None
    start = last.end()
    if not text.startswith("{", start):
        return re.split(r"[$\n]", text[start : start + LONGEST])[0]
    depth, place = 0, start
    for place in range(start, min(len(text), start + LONGEST + 2)):
        if text[place - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            percent = re.match(r"\$? ?\\?%", text[place + 1 :])
            return text[start + 1 : place] + (percent[0] if percent else "")
    return ""


def _marked(text: str) -> str | None:
    """The sentence behind the last marker; "" where nothing follows it or it denies."""
    last = _last(MARK, text)
    if last is None:
        return None
    rest = text[last.end() : last.end() + 4 * LONGEST].lstrip(" \t\n*_:=")
    display = DISPLAY.match(rest)
    if display:
        return display[1] or display[2]
    line = rest.partition("\n")[0]
    sentence = re.split(r"(?<=[^.\\])[.!?]+(?=[\s*]|$)", line)[0].rstrip(" *_")
    return "" if re.match(r"not\b", sentence) else sentence


def _last_number(text: str) -> str | None:
    """The last number; where it is part of a formula, that formula."""
    last = _last(NUMBER, text)
    for formula in reversed(list(FORMULA.finditer(text))):
        content = formula[1] or formula[2] or formula[3]
        if last is not None and last.end() > formula.end():
            break
        if re.search(r"[0-9]|\\pi", content) and is_math(without_units(spell(content))[0]):
            return content
    if last is None:
        return None
    before, behind = re.split(r"\s", text[: last.start()])[-1], re.split(r"\s", text[last.end() :])[0]
    around = before + last[0] + behind
    if len(around) > LONGEST:
        return None
    if "\\" in re.sub(r"\\[$%]", "", around) or re.match("[A-Za-z(]", behind):
        kept, units = without_units(spell(around))
        return around if not units or number(kept) is None else last[0]
    return last[0]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _none(gold: str) -> bool:
    return bare(gold) in NONE


def _declines(text: str) -> bool:
    """The final answer says, without a number, that there is none; unmarked, the last sentence says so."""
    marked = _boxed(text)
    marked = _marked(text) if marked is None else marked
    if marked is not None:
        return not re.search(r"[0-9]", marked) and bool(DECLINED.search(bare(marked)))
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n", text[-SCANNED:]) if part.strip()]
    return bool(sentences) and bool(DECLINED.search(bare(sentences[-1])))


@dataclass(frozen=True)
class _Reading:
    text: str
    """In one spelling, without units."""
    units: frozenset[str]
    number: Number | None
    words: str
    """Where the answer is a word or a few: these, in lower case."""


@lru_cache(maxsize=1 << 14)
def _read(answer: str) -> _Reading:
    text = spell(answer)
    words = "" if "\\" in re.sub(r"\\text\{([^{}]*)\}", r"\1", text) else bare(text)
    wrapped = re.fullmatch(r"\\text\{[^{}]*\}", text) and re.fullmatch(r"[a-z][a-z0-9 ,.'&()-]*", words)
    plain = re.fullmatch(r"[a-z][a-z ,.'&()-]*", words) and (re.search(r"[a-z]{3}", words) or words == "no")
    kept, units = without_units(text)
    found = number(kept)
    if found is None and "\\text" not in text and re.fullmatch(r"[0-9][0-9 ]* [0-9]+", kept):
        kept = ""  # two numbers are no answer, and no product
    return _Reading(kept, units, found, words if wrapped or plain else "")


def _equal(gold: str, answer: str, alone: bool) -> bool:
    if INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer):
        return int(gold.replace(",", "")) == int(answer.replace(",", ""))
    wanted, given = _read(gold), _read(_told(answer, "=" in gold, alone))
    if not given.text or _apart(wanted.units, given.units):
        return False
    if wanted.words:
        return wanted.words in (given.words, bare(answer))
    if re.search(r"[a-z]{4}", given.words):
        return False
    if wanted.number and given.number:
        return _same_number(wanted.number, given.number)
    if _tight(wanted.text) == _tight(given.text):
        return True
    if CLOCK.fullmatch(wanted.text) and CLOCK.fullmatch(given.text):
        return False
    based = BASED.fullmatch(_tight(wanted.text)), BASED.fullmatch(_tight(given.text))
    if any(based):
        return _same_digits(wanted.text, given.text, *based)
    if {_brackets(wanted.text), _brackets(given.text)} == {"{", "("}:
        return False
    if not is_math(given.text):
        return False
    return verifier.same(wanted.text, given.text)


def _told(answer: str, equation: bool, alone: bool) -> str:
    """The answer without the name it is given (x = 5) and the words around it. Of several numbers between words the
    first counts; in a box, where an answer stands `alone`, none does."""
    text = spell(answer)
    exact, near, rounded = text.partition(r"\approx")
    text = (rounded if re.fullmatch(r"(?:\\?[A-Za-z]+ ?)?", exact) else exact).strip() if near else text
    if not equation and len(re.findall("[=:]", text)) == 1:
        text = NAMED.sub("", text)
    kept, _ = without_units(text)
    if is_math(kept) or not re.search(r"[0-9]", text) or bare(text).startswith(("not ", "no ")):
        return text
    formulas = [found for found in FORMULA.finditer(answer) if re.search(r"[0-9A-Za-z]", found[0])]
    if formulas:
        return "" if ALTERNATIVE.match(answer[formulas[0].end() :]) else formulas[0][0]
    text = text.rpartition("=")[2]
    numbers = list(NUMBER.finditer(text))
    if not numbers or re.search(r"\bnot\b|n't\b", text[: numbers[0].start()]):
        return ""
    several = len(numbers) > 1 and alone
    return "" if several or ALTERNATIVE.match(text[numbers[0].end() :]) else numbers[0][0]


def _same_number(gold: Number, answer: Number) -> bool:
    if gold.percent == answer.percent:
        return _same_value(gold.value, answer.value, gold.places, answer.places)
    share, plain = (gold, answer) if gold.percent else (answer, gold)
    if abs(plain.value) >= 1 and share.value == plain.value:  # 12% for 12, as where per cent are asked for
        return True
    places = None if share.places is None else share.places + 2
    return _same_value(share.value / 100, plain.value, places, plain.places)


def _same_value(a: Fraction, b: Fraction, places_a: int | None, places_b: int | None) -> bool:
    """Exactly, or where one is a decimal of six or more places that the other rounds to."""
    if a == b:
        return True
    places = min((p for p in (places_a, places_b) if p is not None and p >= 6), default=None)
    return places is not None and round(a, places) == round(b, places) != 0


def _same_digits(gold: str, answer: str, *based: re.Match[str] | None) -> bool:
    """Numerals with a base: the same digits in the same base; an answer may leave the base of the gold one out."""
    wanted, given = based
    if wanted and given:
        return wanted.groups() == given.groups()
    if wanted:
        return wanted[1] == _tight(answer)
    return given is not None and given[2] == "10" and given[1] == _tight(gold)


def _apart(a: frozenset[str], b: frozenset[str]) -> bool:
    """Whether both name one known unit, and not the same."""
    known_a, known_b = ({unit for word in words if (unit := unit_of(word))} for words in (a, b))
    return len(known_a) == len(known_b) == 1 and known_a != known_b


def _brackets(text: str) -> str:
    """`{` for a set, `(` for a tuple or an interval, "" for anything else."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{"
    return "(" if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text else ""


def _tight(text: str) -> str:
    """Without the spaces that part nothing."""
    return re.sub(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])", "", text)
