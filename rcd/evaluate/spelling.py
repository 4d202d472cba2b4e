"""One spelling for the many in which an answer is written: LaTeX or plain text, units, thousands, mixed numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‒－", "-"), **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003", " "), "\u200b": "",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "∅": r"\emptyset ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "€": "$", "£": "$", "％": "%", "，": ",",
        "\n": " ", "\t": " ",
    }
)  # fmt: skip

REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:left|right)\.", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])\s*", ""),
        (r"(?<!\\)\\[()\[\]]", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\\pi|[a-z])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*\{([^{}]*)\}\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathsf|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\(?:mathbf|mathit)\s*\{([^{}]*)\}", r"\1"),
        (r"\*\*([^*]+)\*\*", r"\1"),
        (r"[\"`]|''", ""),
        (r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*", ", "),
        (r"\\text\{([^A-Za-z{}]*|[0-9A-Z]*[0-9][0-9A-Z]*)\}", r"\1"),
        (r"\\[vh]?phantom\s*(?:\{[^{}]*\}|-)", ""),
        (r"\s*(?:\\?%|\\text\{\s*per ?cent(?:age)?\s*\}|(?<![A-Za-z\\])per ?cent(?:age)?(?![A-Za-z]))", "%"),
        (r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)[\s.,;$]*$", r" \\text{degrees}"),
        (r"\{,\}", ","),
        (r"\\\{\s*\\\}|\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
        (r"\*\*", "^"),
        (r"\s*\*\s*", r" \\cdot "),
        (r"^\s*\\approx(?![A-Za-z])", ""),
        (r"\s+", " "),
    )
]
DOLLARS = re.compile(r"\\?\$")
THOUSANDS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|(?<![0-9.,/])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])"
)

DECIMAL = r"(?:[0-9]{1,60}(?:\.[0-9]{0,60})?|\.[0-9]{1,60})"
PLAIN = re.compile(rf"({DECIMAL})(?:[eE]([+-]?[0-9]{{1,3}}))?")
POWER = re.compile(rf"({DECIMAL}) ?(?:\\times|\\cdot|x) ?10 ?\^ ?(?:\{{ ?([+-]?[0-9]{{1,3}}) ?\}}|([+-]?[0-9]{{1,3}}))")
RATIO = re.compile(
    rf"(?:([0-9]{{1,60}}) ?)?\\frac ?\{{ ?(-?{DECIMAL}) ?\}} ?\{{ ?(-?{DECIMAL}) ?\}}"
    rf"|(?:([0-9]{{1,60}}) )?({DECIMAL}) ?/ ?({DECIMAL})"
)
NUMBER = re.compile(
    r"""(?<![A-Za-z0-9_^\\])(?:(?<![0-9A-Za-z)\]}%])[-−])?(?:\\?[$€£]\ ?)?-?
    (?: [0-9]{1,2}:[0-9]{2}(?![0-9])
      | [0-9]+(?:\.[0-9]+)?\ ?(?:x|×|\*|\\times|\\cdot)\ ?10\ ?\^\{?-?[0-9]+\}?
      | [0-9]+\ [0-9]+/[0-9]+
      | (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)? (?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))?
        (?:\ ?/\ ?[0-9]+(?:\.[0-9]+)?)? (?:\^\{?-?[0-9]+\}?)?
      | \.[0-9]+
    ) (?:\ ?\\?%|\ per\ ?cent|\ (?:thousand|million|billion|trillion)(?![A-Za-z]))?""",
    re.X,
)
"""A number inside a text."""

SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "s": "sec second", "min": "minute",
    "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr", "mg": "milligram", "g": "gram", "kg": "kilogram",
    "lb": "pound", "oz": "ounce", "L": "l liter litre", "ml": "mL milliliter millilitre", "gal": "gallon",
    "cent": "", "dollar": "usd", "degree": "deg", "radian": "rad", "mph": "",
}  # fmt: skip
"""Short name -> its other names; each also with an s."""
NAMES = {name + end: short for short, names in UNITS.items() for name in (short, *names.split()) for end in ("", "s")}
LINKS = {"of", "an", "the", "to", "at", "on", "by", "is", "per"}
ORDINALS = {"st", "nd", "rd", "th"}
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "inf", "infinity", "max", "min", "gcd", "lcm",
    "mod", "det", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan",
}  # fmt: skip

TEXT_TAIL = re.compile(r"\s*\\text\{([^{}]*)\}(?:\s*\^\s*\{?[0-9]\}?)?[\s.,/]*$")
TEXT_HEAD = re.compile(r"^\\text\{([^{}]*)\}\s*(?=.*[0-9])")
WORD_TAIL = re.compile(r"(?<![\\A-Za-z{])([A-Za-z]+)\.?(?:\^\{?[0-9]\}?)?[\s.,/]*$")


@dataclass(frozen=True)
class Number:
    value: Fraction
    places: int | None
    """Digits behind the point of a decimal; None for what is exact."""
    percent: bool


def spell(answer: str) -> str:
    """The answer in one spelling; a second time changes nothing."""
    text = answer.translate(CHARACTERS)
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    signs = DOLLARS.findall(text)
    text = DOLLARS.sub("", text)
    if ("\\$" in signs or len(signs) % 2) and re.search("[0-9]", text):  # money, no formula's delimiters
        text += r" \text{dollars}"
    text = THOUSANDS.sub(_joined, text).lstrip(" ,;:=").rstrip(" .,;:=")
    if text.startswith("{") and text.endswith("}") and "{" not in text[1:]:
        text = text[1:-1]
    return text.strip()


def _joined(found: re.Match[str]) -> str:
    """Thousands in one number; inside brackets a comma parts the members of a tuple."""
    before = re.sub(r"\\frac|\\sqrt", "", found.string[: found.start()])
    depth = sum(before.count(mark) for mark in ("(", "[", "\\{")) - sum(
        before.count(mark) for mark in (")", "]", "\\}")
    )
    return found[0] if depth > 0 and "," in found[0] else re.sub("[, ]", "", found[0])


def bare(text: str) -> str:
    """Words in lower case, without formatting, brackets and punctuation around them."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text.replace("’", "'"))
    return " ".join(re.sub(r"[$*_`\"\\]", "", text).lower().split()).strip(" .,;:!?()[]{}'")


def number(text: str) -> Number | None:
    """A plain number: whole, decimal, fraction, mixed, scientific or per cent; None for anything else."""
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    if found := PLAIN.fullmatch(text):
        places = None if found[2] else len(found[1].partition(".")[2]) if "." in found[1] else None
        return Number(sign * Fraction(found[1]) * Fraction(10) ** int(found[2] or 0), places, percent)
    if found := POWER.fullmatch(text):
        return Number(sign * Fraction(found[1]) * Fraction(10) ** int(found[2] or found[3]), None, percent)
    if found := RATIO.fullmatch(text):
        whole, over, under = found[1] or found[4], Fraction(found[2] or found[5]), Fraction(found[3] or found[6])
        if under == 0 or (whole and not 0 <= over < under):
            return None
        return Number(sign * (int(whole or 0) + over / under), None, percent)
    return None


def without_units(text: str) -> tuple[str, frozenset[str]]:
    """(what is left, the words that were taken off); `5 million` keeps its size."""
    words: set[str] = set()
    head = TEXT_HEAD.match(text)
    if head and not re.match(r"\s*no", head[1]):
        text = text[head.end() :]
    while True:
        tail = TEXT_TAIL.search(text)
        if tail and re.search(r"[0-9A-Za-z]", text[: tail.start()]) and not re.search(r"[0-9]", tail[1]):
            taken = tail[1].split()
        elif (tail := WORD_TAIL.search(text)) and _is_unit(text, tail):
            taken = [tail[1]]
        else:
            return text.strip(), frozenset(words)
        text = text[: tail.start()].rstrip(" ,/")
        words.update(taken)
        for word in taken:
            if word.lower() in SCALES:
                text += rf"\times 10^{{{SCALES[word.lower()]}}}"


def _is_unit(text: str, tail: re.Match[str]) -> bool:
    word, before = tail[1], text[: tail.start()]
    if word.lower() in FUNCTIONS or not re.search(r"[0-9]|\\pi", before):
        return False
    if re.search(r"[0-9%}]$", before):  # 5kg is a weight, 2ab a product
        return (len(word) > 1 and word in NAMES) or word in ORDINALS
    if len(word) > 2 or word in LINKS:
        return bool(re.search(r"[0-9A-Za-z%})\].][ /,]*$", before))
    rate = re.search(r"([A-Za-z]+) ?/ ?$", before)
    return word in NAMES and bool(re.search(r"[0-9%})] $", before) or (rate and rate[1] in NAMES))


def unit_of(word: str) -> str | None:
    """The short name of a known unit."""
    word = word.strip(".")
    return NAMES.get(word) or NAMES.get(word.lower())


def is_math(text: str) -> bool:
    """Whether the text may be a formula: no words but the names of functions."""
    if not re.search(r"[0-9A-Za-z]", text) or re.search(r"\\text\{[^{}]*[A-Za-z]{2}", text):
        return False
    return all(word.lower() in FUNCTIONS for word in re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{4,}", text))
