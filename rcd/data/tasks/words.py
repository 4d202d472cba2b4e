"""Arithmetic word problems of several steps.

A sentence's template is a combination from small lists (a lead, a phrase, a tail). Templates and the tuples of numbers
in a question are dealt to train or test by a hash, so a test problem has known words in sentences never seen before,
and numbers never seen together.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from rcd.data.tasks.lexicon import CONTAINERS, GROUPS, ITEMS, MEN, MONEY, PLACES, WOMEN

LARGEST = 99
LONGEST_QUESTION = 50
MOST_EQUATIONS = 4
OPERATIONS = (1, 2, 2, 3, 3)
"""How many things happen, drawn from these; the start and packed things have equations of their own."""
JOINED = 0.3
"""Share of the second sentences that are joined to the first with `and`, where they can be."""

TIMES = {2: ("doubles", "twice"), 3: ("triples", "three times"), 4: ("quadruples", "four times")}

PEOPLE = {**dict.fromkeys(WOMEN, ("she", "She", "her")), **dict.fromkeys(MEN, ("he", "He", "his"))}
NAMES = list(PEOPLE)
FILLERS = frozenset(
    [*NAMES, *ITEMS, *PLACES, *CONTAINERS, *MONEY, *GROUPS, *GROUPS.values()]
    + [word for forms in (*PEOPLE.values(), *TIMES.values()) for word in " ".join(forms).split()]
)
"""Words that fill a template's slots, numbers apart."""

# {p} the person, {s} the person or a pronoun, {S} the same at a sentence's start, {h} her or his, {o} someone else,
# {i} items, {c} containers, {l} a place, {n} and {k} numbers, {x} doubles, {t} twice, {m} money,
# {g} a group, {u} one of it
LEADS = [
    "", "Then ", "Later, ", "Next, ", "After that, ", "Afterwards, ", "Soon after, ", "A little later, ",
    "The next day, ", "One hour later, ", "Some time later, ", "Not long after, ",
]  # fmt: skip
WHERE = ["", " at the {l}", " near the {l}", " on the way home", " before lunch", " after school", " while {o} waits"]
GAINS = "buys,finds,receives,collects,picks up,wins,earns,gets,gathers,discovers,is given".split(",")
LOSSES = "loses,sells,gives away,throws away,drops,donates,hands out,misplaces,trades away,uses up,uses".split(",")
PASSES = "gives lends mails sends hands".split()
PACKED = [
    "{n} {c} with {k} {i} each", "{n} {c} of {k} {i}", "{n} {c} with {k} {i} in each", "{n} {c}, each with {k} {i}",
    "{n} {c} that hold {k} {i} each",
]  # fmt: skip
REMOVED = "sells them,gives them away,sends them to {o},donates them,loses them".split(",")
KEPT = "keeps only one,keeps just one,gives away all but one,sells all but one,takes home just one".split(",")
RATES = [f"{each} {time} for {{k}} {time}s" for each in ("every", "each") for time in "day week hour month".split()]
MULTIPLIED = ["{x} {h} " + noun + " of {i}" for noun in "collection number supply stock pile".split()] + [
    verb + " {t} as many {i}" for verb in ("ends up with", "comes to have", "gets enough to have")
]
OPENINGS = ["", "At first, ", "In the morning, ", "On Monday, ", "On Sunday, ", "Today ", "This week "]
OWNS = "has,owns,holds,keeps,stores,starts with,begins with".split(",")
STORED = ["", " at home", " in a cupboard", " on a shelf", " in the kitchen", " near the {l}", " under the bed"]
MEANWHILE = ["", "At that point, ", "Meanwhile, ", "By then, ", "At the same time, ", "In the meantime, "]
COMPARES = "has owns holds counts keeps stores".split()
ASKS = ["", "In the end, ", "Now ", "After all of this, ", "At the end of the story, ", "Finally, ", "So "]
HOW = ["how many ", "exactly how many ", "what number of "]
ALL = ["all {h} {i}", "{h} {i}"]
HAVE = ["have", "own", "still have", "then have"]
TOTALS = [" together", " in total", " altogether", " in all", " combined"]

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
DIVISORS = [[k for k in range(2, 13) if value % k == 0 and value // k > 1] for value in range(LARGEST + 1)]

Tables = dict[str, list[tuple[str, int]]]


def _told(leads: Iterable[str], phrases: Iterable[str], tails: Iterable[str], subject: str = "s") -> list[str]:
    capital = {"s": "S"}.get(subject, subject)
    return [
        f"{lead}{{{subject if lead else capital}}} {phrase}{tail}."
        for lead, phrase, tail in itertools.product(leads, phrases, tails)
    ]


def _asked(things: str, verbs: Iterable[str], tails: Iterable[str]) -> list[str]:
    return [
        f"{lead}{how if lead else how.capitalize()}{things} {verb}{tail}?"
        for lead, how, verb, tail in itertools.product(ASKS, HOW, verbs, tails)
    ]


def _both(*parts: Iterable[str]) -> list[str]:
    return [" ".join(part) for part in itertools.product(*parts)]


TEMPLATES = {
    "has": _told(OPENINGS, _both(OWNS, ["{n} {i}"]), STORED, "p"),
    "has packed": _told(OPENINGS, _both(OWNS, PACKED), STORED, "p"),
    "gain": _told(LEADS, _both(GAINS, ["{n} {i}", "{n} more", "{n} more {i}", "{n} new {i}"]), WHERE),
    "lose": _told(
        LEADS,
        _both(LOSSES, ["{n} {i}", "{n} of them", "{n} of {h} {i}"])
        + _both(PASSES, ["{n} {i} to {o}", "{n} of {h} {i} to {o}"]),
        WHERE[:-1],
    ),
    "gain packed": _told(LEADS, _both(GAINS, PACKED), WHERE),
    "lose packed": _told(LEADS, _both("packs fills prepares".split(), PACKED, ["and"], REMOVED), WHERE[:-1]),
    "gain rate": _told(LEADS, _both(GAINS, ["{n} {i}"], RATES), WHERE[:3]),
    "lose rate": _told(LEADS, _both(LOSSES, ["{n} {i}"], RATES), WHERE[:3]),
    "multiply": _told(LEADS, MULTIPLIED, WHERE),
    "share": _told(
        LEADS,
        _both("divides splits separates sorts arranges spreads".split(), ["{h} {i} equally into {k} {c} and"], KEPT),
        WHERE[:-1],
    ),
    "more": _told(MEANWHILE, _both(COMPARES, ["{n} more {i} than {p}"]), STORED, "o"),
    "fewer": _told(MEANWHILE, _both(COMPARES, ["{n} fewer {i} than {p}"]), STORED, "o"),
    "times": _told(MEANWHILE, _both(COMPARES, ["{t} as many {i} as {p}"]), STORED, "o"),
    "goal": _told(
        LEADS[:8],
        _both("wants to have,needs,hopes to have,plans to have,would like to have".split(","), ["{n} {i}"]),
        ["", *TOTALS[1:4]],
    ),
    "price": _told(LEADS, _both(["sells", "trades", "auctions"], ALL, ["for {k} {m} each"]), WHERE[:-1]),
    "pack": _told(LEADS, _both(["puts", "sorts", "packs", "divides"], ALL, ["into {c} of {k} each"]), WHERE[:-1]),
    "hand out": _told(
        LEADS,
        _both(["shares", "divides", "splits"], ALL, ["equally among {k} {g}", "equally between {k} {g}"]),
        WHERE[:-1],
    ),
    "how many": _asked("{i}", _both(["does {p}", "does {s}"], HAVE), ["", " now", *TOTALS[1:3]]),
    "how many has the other": _asked("{i}", _both(["does {o}"], HAVE), ["", *TOTALS[1:3]]),
    "how many together": _asked("{i}", _both(["do {p} and {o}"], HAVE), TOTALS),
    "how many more": [
        text.replace("any ", "any more ", 1).replace("number of ", "number of more ", 1)
        for text in _asked("{i}", _both(["does {p}"], ["need", "require", "have to get"]), ["", " for that", " then"])
    ],
    "how much": _asked("{m}", _both(["does {p}"], ["get", "earn", "receive"]), ["", *TOTALS[1:4]]),
    "how many packs": _asked("{c}", _both(["does {p}"], ["fill", "need", "use"]), ["", *TOTALS[1:4]]),
    "how many each": _asked("{i}", _both(["does each {u}"], ["get", "take", "receive"]), ["", *TOTALS[1:4]]),
}  # fmt: skip


def _hash(text: str, parts: int) -> int:
    return zlib.crc32(text.encode()) * 2654435761 % 2**32 * parts >> 32


@functools.cache
def tables(split: str) -> Tables:
    """The split's templates with their lengths in tokens, shortest first."""
    ours: Tables = {}
    for kind, templates in TEMPLATES.items():
        masked = ((text, re.sub(r"\{\w\}", "_", text)) for text in templates)
        fitting = [(text, mask) for text, mask in masked if (_hash(mask, 5) == 0) == (split == "test")]
        ours[kind] = sorted(((t, len(m.split()) + m.count(",") + 1) for t, m in fitting), key=lambda pair: pair[1])
    return ours


def all_words() -> set[str]:
    """Every word that a question or a solution can have."""
    text = re.sub(r"\{\w\}", "", " ".join(itertools.chain.from_iterable(TEMPLATES.values())))
    return {"Answer", *FILLERS, *re.findall("[A-Za-z]+", text)}


class Story:
    """What happens, in numbers: the sentences' kinds with their slots, and the equations so far."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator.random
        self.value = 0
        self.sentences: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.equations: list[tuple[int, str, int, int]] = []
        self.numbers: list[int] = []

    def pick(self, least: int, most: int) -> int:
        return least + int(self.random() * (most - least + 1))

    def tell(self, *kinds: str, **slots: Any) -> None:
        self.sentences.append((kinds, slots))
        self.numbers += [slots[slot] for slot in ("n", "k") if slot in slots]

    def reckon(self, left: int, sign: str, right: int) -> int:
        result = SIGNS[sign](left, right)
        self.equations.append((left, sign, right, result))
        return result


def _divisor(story: Story) -> int:
    """Of the story's value, with two or more in each part; 0 where there is none."""
    fits = DIVISORS[story.value]
    return fits[story.pick(0, len(fits) - 1)] if fits else 0


def _start(story: Story) -> None:
    if story.random() < 0.3:
        n = story.pick(2, 9)
        k = story.pick(2, min(12, LARGEST // n))
        story.tell("has packed", n=n, k=k)
        story.value = story.reckon(n, "*", k)
    else:
        story.value = story.pick(2, LARGEST)
        story.tell("has", n=story.value)


def _gain(story: Story) -> bool:
    if story.value > LARGEST - 2:
        return False
    n = story.pick(2, min(60, LARGEST - story.value))
    story.tell("gain", n=n)
    story.value = story.reckon(story.value, "+", n)
    return True


def _lose(story: Story) -> bool:
    if story.value < 4:
        return False
    n = story.pick(2, max(2, min(90, story.value * 4 // 5)))
    story.tell("lose", n=n)
    story.value = story.reckon(story.value, "-", n)
    return True


def _many(kind: str, most_k: int) -> Callable[[Story], bool]:
    """n times k gained or lost: two equations."""
    sign = "+" if kind.startswith("gain") else "-"

    def step(story: Story) -> bool:
        n, k = story.pick(2, 9), story.pick(2, most_k)
        if not 2 <= (story.value + n * k if sign == "+" else story.value - n * k) <= LARGEST:
            return False
        story.tell(kind, n=n, k=k)
        story.value = story.reckon(story.value, sign, story.reckon(n, "*", k))
        return True

    return step


def _multiply(story: Story) -> bool:
    m = story.pick(2, 4)
    if story.value * m > LARGEST:
        return False
    story.tell("multiply", x=TIMES[m][0], t=TIMES[m][1])
    story.value = story.reckon(story.value, "*", m)
    return True


def _share(story: Story) -> bool:
    k = _divisor(story)
    if k:
        story.tell("share", k=k)
        story.value = story.reckon(story.value, "/", k)
    return k > 0


STEPS = [
    *[_gain] * 3, *[_lose] * 4, *[_many("gain packed", 12)] * 2, *[_many("lose packed", 12)] * 2, _many("gain rate", 9),
    *[_many("lose rate", 9)] * 2, _multiply, *[_share] * 2,
]  # fmt: skip


def _plain(story: Story) -> bool:
    story.tell("how many")
    return True


def _compare(story: Story) -> bool:
    """A second person, and how many they have alone or together."""
    kind, value = ("more", "fewer", "times")[story.pick(0, 2)], story.value
    together = story.random() < 0.7
    question = "how many together" if together else "how many has the other"
    n, m = story.pick(2, 40), story.pick(2, 4)
    other = {"more": value + n, "fewer": value - n, "times": value * m}[kind]
    if not 2 <= other <= LARGEST - together * value:
        return False
    if kind == "times":
        story.tell(kind, question, t=TIMES[m][1])
        story.reckon(value, "*", m)
    else:
        story.tell(kind, question, n=n)
        story.reckon(value, "+" if kind == "more" else "-", n)
    story.value = story.reckon(value, "+", other) if together else other
    return True


def _goal(story: Story) -> bool:
    if story.value > LARGEST - 2:
        return False
    n = story.pick(story.value + 2, min(LARGEST, story.value + 80))
    story.tell("goal", "how many more", n=n)
    story.value = story.reckon(n, "-", story.value)
    return True


def _price(story: Story) -> bool:
    k = story.pick(2, 9)
    if story.value * k > LARGEST:
        return False
    story.tell("price", "how much", k=k)
    story.value = story.reckon(story.value, "*", k)
    return True


def _divide(*kinds: str) -> Callable[[Story], bool]:
    def end(story: Story) -> bool:
        k = _divisor(story)
        if k:
            story.tell(*kinds, k=k)
            story.value = story.reckon(story.value, "/", k)
        return k > 0

    return end


ENDS = [
    *[_plain] * 4, *[_compare] * 3, _goal, _price,
    _divide("pack", "how many packs"), _divide("hand out", "how many each"),
]  # fmt: skip


def _story(generator: random.Random) -> Story:
    story = Story(generator)
    _start(story)
    end = ENDS[story.pick(0, len(ENDS) - 1)]
    operations = OPERATIONS[story.pick(0, len(OPERATIONS) - 1)] - (end is not _plain)
    while True:
        if operations:
            operations -= STEPS[story.pick(0, len(STEPS) - 1)](story)
        elif end(story):
            return story
        else:
            operations, end = 1, _plain


def _text(story: Story, tables: Tables) -> str | None:
    """The question in words, or None where it is too long."""

    random = story.random

    def one(names: list[str]) -> str:
        return names[int(random() * len(names))]

    name, item, group, money = one(NAMES), one(ITEMS), one(list(GROUPS)), one(MONEY)
    she, capital, her = PEOPLE[name]
    share = 0.4 if len(story.sentences) > 4 else 1.0  # a long story is told in short sentences
    sentences, size = list[str](), 0
    for kinds, slots in story.sentences:
        other = one(NAMES)
        while other == name:
            other = one(NAMES)
        subject = (name, name) if random() < 0.25 else (she, capital)
        slots.update(
            p=name, s=subject[0], S=subject[1], h=her, o=other, i=item, l=one(PLACES), c=one(CONTAINERS), m=money,
            g=group, u=GROUPS[group],
        )  # fmt: skip
        for kind in kinds:
            table = tables[kind]
            template, length = table[int(random() * len(table) * share)]
            size += length
            if template.startswith("{S} ") and len(sentences) == 1 and random() < JOINED:
                joined = template.removeprefix("{S} ").format_map(slots)
                sentences[0] = f"{sentences[0][:-1]} and {joined}"
            else:
                sentences.append(template.format_map(slots))
    return " ".join(sentences) if size <= LONGEST_QUESTION else None


def draw(split: str, index: int, seed: int) -> tuple[str, str, str]:
    """(question, solution, answer)."""
    generator = random.Random(f"words {split} {index} {seed}")
    while True:
        story = _story(generator)
        mine = (_hash(repr(story.numbers), 10) == 0) == (split == "test")
        question = _text(story, tables(split)) if mine and len(story.equations) <= MOST_EQUATIONS else None
        if question is not None:
            steps = " ".join([f"{left} {sign} {right} = {result}." for left, sign, right, result in story.equations])
            return question, f"{steps} Answer: {story.value}", str(story.value)
