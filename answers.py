"""What a right answer is: taking it out of a response, and comparing it with the reference.

`is_correct` is the default reward of training: 1 if the last \\boxed{...} of a response equals the reference, else 0.
Nothing of the method depends on it: who brings a reward of their own (task.py) need not read this file.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST_ANSWER = 300  # characters; a longer answer equals only itself, and what is nested stays shallow
SPELLINGS = (  # of tokens, by semicolons: the standard one, then others
    r"\frac \dfrac \tfrac \cfrac; \text \textbf \textit \textrm \textnormal \mbox \hbox \mathrm \mathbf \mathit"
    r" \boldsymbol \bm \operatorname; \text{percent} \% %; dollar USD; \and and; \or or; \{ \lbrace; \} \rbrace"
    r"; \emptyset \varnothing ∅; \le \leq \leqslant ≤; \ge \geq \geqslant ≥; \ne \neq ≠; | \mid; - − –; \pm ±; \times ×"
    r"; \cup ∪; \infty ∞; \pi π; ^\circ °"
)
GROUPS = [group.split() for group in SPELLINGS.split(";")]
STANDARD = {other: one + " " * (not other.isascii()) for one, *others in GROUPS for other in others}  # πr is \pi r
UNITS = (  # in the singular; SYMBOLS are units only in \text
    "[cmk]m|kg|mph|inch|foot|feet|yard|mile|(?:centi|milli|kilo)?(?:meter|gram)|pound|ounce|ton|liter|gallon|cup|acre"
    "|second|minute|hour|day|week|month|year|dollar|cent|percent|degree|unit|square|cubic|per|way|people|point"
)
SYMBOLS = "[mgshLNJWVCF]|in|ft|lb|oz|hr|min|sec|yd|mi|sq|cu|m[lLg]|gm|erg|rad|radian|Hz|Pa"
THOUSANDS = r"(?<![0-9,.])[1-9][0-9]{0,2}(?:(?:,\s*\\!\s*|\{,\}|\\,|,(?!.*(?:[)\]]|\\\})))[0-9]{3})+(?!,?[0-9])"
SPACES = r"(\\[a-zA-Z]+ (?=\s*[a-zA-Z])|[0-9] (?=\s*[0-9])|[a-zA-Z]{2} (?=[a-zA-Z]{2}))|\s"
SCIENTIFIC = r"(?<![0-9a-zA-Z.{}^_])(?:([0-9.]+)\\(?:times|cdot))?10\^(?:\{(-?[0-9]+)\}|(-[0-9]+|[0-9])(?![0-9]))"
BARE_UNIT = rf"((?<=[0-9)}}])|(?<=\\pi ))((?:{UNITS})(?:e?s)?(?:[ /](?:{UNITS})(?:e?s)?)*)(?![a-zA-Z])"
REWRITES = [  # name, pattern, replacement, example; applied in this order
    ("only looks", r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|(?<!\\)\$", "", r"\left(5\right) -> (5)"),
    ("Markdown around all", r"^(\*\*?|__?|`)(.+)\1$", r"\2", "**5** -> 5"),
    ("thousands", THOUSANDS, lambda number: re.sub("[^0-9]", "", number[0]), "1,200 -> 1200"),
    ("space", r"\\q?quad(?![a-zA-Z])|(?<!\\)\\[,;:!> ]|~", " ", r"1\quad2 -> 1 2"),
    ("root sign", "√ ?([0-9]+)", r"\\sqrt{\1}", r"√25 -> \sqrt{25}"),
    ("capital", r"(?<![\\a-zA-Z])[A-Z](?=[a-z]{2}|o\b)", lambda letter: letter[0].lower(), "Even -> even"),
    ("text of no words", r"\\text ?\{\s*(,?\s*\\(?:and|or))?\s*\}", r" \1 ", r"1\text{ }2 -> 1  2"),
    ("one in braces", r"(?<!\\)(?<!\\text)\{\s*([0-9a-zA-Z]|\\[a-zA-Z]+)\s*\}", r" \1 ", r"\cos{x}y -> \cos x y"),
    ("spaces but these", SPACES, r"\1", r"\pi r + 1 -> \pi r+1"),
    ("scientific", SCIENTIFIC, lambda m: f"{m[1] or 1}e{m[2] or m[3]}", r"2\times10^3 -> 2e3"),
    ("product sign", r"(?<=[0-9}])\\(?:cdot|times) ?(?=\\sqrt|\\pi)", "", r"2\cdot\pi -> 2\pi"),
    ("prime", r"\^\\prime ?", "'", r"y^\prime -> y'"),
    ("text after no number", r"(?<![0-9)}i/])\\text\{([^{}]*)\}", r"\1", r"\text{odd} -> odd"),
    ("end", r"(?<![.,])[.,;]$", "", "5. -> 5"),
    ("degree", r"\^\\circ ?", r"\\text{degree}", r"90^\circ -> 90\text{degree}"),
    ("dollar", r"\\\$([0-9.]+)|(?<=[0-9])\\\$", r"\1\\text{dollar}", r"\$5 -> 5\text{dollar}"),
    ("unit", BARE_UNIT, r"\\text{\2}", r"5cm -> 5\text{cm}"),
]
NAME = re.compile(  # x=  x_1=  f(x)=  f^{-1}(x)=  AB=  \angle ABC=  area=  (x,y)=  x\in
    r"((?:\\angle ?)?(?!not|minus)\\?[a-zA-Z]+(?:\^\{-1\}(?=\())?(?:_\w|_\{\w+\})?(?:\(-?\w+\))?|\([a-zA-Z\\, ]+\))"
    r"(?:=|\\in(?![a-z]) ?)"
)
UNIT = re.compile(  # a constant, then its unit
    r"((?:[^a-zA-Z\\]|\\(?:frac|sqrt|pi)(?![a-z])|e)+)"
    r"((?:/?\\text\{[a-zA-Z0-9./^ -]+\}(?:\^[0-9]|\^\{-[0-9]\})?)+)"
)
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
FACTOR = r"(?:(?:[a-zA-Z]|\\pi ?|\\sqrt ?(?:[0-9a-z]|\{[^{}]*\})|\([^()]*\))(?:[_^](?:\w|\{[^{}]*\}))*[!']*)"
ARGUMENT = r" ?(\{(?:[^{}]|\{[^{}]*\})*\}|[0-9a-zA-Z]|\\[a-zA-Z]+)"
TERM = re.compile(rf"(?![+-]?$)([+-]?)({NUMBER}|)(?: ?\\frac{ARGUMENT}{ARGUMENT} ?)?({FACTOR}*)")  # 1\frac{1}{2}\pi r
SLASH = re.compile(rf"^([+-]?(?:[0-9]+ )?)(\([^()]*\)|(?:[0-9.]|{FACTOR})+)/(-?[0-9.]+|[a-zA-Z]|\\[a-z]+)$")  # 1 1/2


def conclusion(response: str) -> str:
    """What stands after the last </think>; nothing if one is left open, but all if only the prompt opened one."""
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def extract_answer(response: str) -> str | None:
    """The content of the conclusion's last complete \\boxed{...}, None without one; \\{ and \\} balance nothing."""
    text = conclusion(response)
    opened, last = [], (0, 0)  # where the content of each open box begins, 0 for other braces; the last box's content
    for brace in re.finditer(r"\\\\(?!boxed)|\\[{}]|(\\boxed\s*)?([{}])", text):
        if brace[2] == "{":
            opened.append(brace.end() if brace[1] else 0)
        elif brace[2] and opened and (start := opened.pop()) > last[0]:
            last = start, brace.end() - 1
    return text[slice(*last)].strip() if last[1] else None


def box_or_last_number(response: str) -> str | None:
    """The last boxed answer, else the last number of the conclusion: the paper's evaluation, never the reward."""
    if (boxed := extract_answer(response)) is not None:
        return boxed
    number = r"(?<![0-9a-zA-Z)}.])[-−]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    return (re.findall(number, conclusion(response)) or [None])[-1]


EXTRACTORS = {"boxed": extract_answer, "last-number": box_or_last_number}


def normalise(text: str) -> str:
    """One spelling for what looks the same: SPELLINGS, then REWRITES."""
    tokens = re.findall(r"(?s)\\[a-zA-Z]+|\\.|[a-zA-Z]+|.", text)
    text = "".join(STANDARD.get(token, token) for token in tokens)
    for _, pattern, replacement, _ in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def term(text: str) -> tuple[Fraction, str, str]:
    """(number, top, bottom) for number * top / bottom: (1/2, "\\pi", ""). What is no such product is one (top)."""
    match = TERM.fullmatch(SLASH.sub(r"\1\\frac{\2}{\3}", text))
    if match is None:
        return Fraction(1), f"({text})", ""
    sign, number, *arguments, factors = match.groups()
    if arguments == [None, None]:
        return Fraction(f"{sign}{number or 1}"), factors, ""
    (a, top, above), (b, bottom, below) = (term(re.sub(r"^\{(.*)\}$", r"\1", argument)) for argument in arguments)
    mixed = re.fullmatch("[0-9]+[0-9{}]+", number + "".join(arguments))
    if above or below or b == 0 or (number and not mixed):  # \frac{x}{0}, 2\frac{x}{3}
        return Fraction(1), f"({text})", ""
    return int(sign + "1") * (int(number or 0) + a / b), top + factors, bottom


def split(text: str, separator: str) -> list[str]:
    """The pieces between separators outside all brackets; none if a bracket closes that did not open."""
    pieces, start, depth = [], 0, 0
    for token in re.finditer(rf"([(\[{{])|([)\]}}])|{separator}", text):
        depth += bool(token[1]) - bool(token[2])
        if depth < 0:
            return []
        if depth == 0 and not token[1] and not token[2]:
            pieces.append(text[start : token.start()])
            start = token.end()
    return [*pieces, text[start:]]


class Parsed(NamedTuple):
    """An answer taken apart: what stands before `=`, the unit, and the terms of a sum or, of a group, its members."""

    terms: tuple = ()
    name: str = ""
    unit: str = ""
    kind: str = ""  # "{}" set or list, "\\cup" union, "()" "[)" "(]" "[]" tuple or interval, "matrix", "row"
    members: tuple = ()


def collect(kind: str, pieces: list[str]) -> Parsed:
    """The pieces as members; a set of one is its member."""
    if kind == "{}":  # {1 \pm 2, 5} has three members
        pieces = [re.sub(r"\\pm ?", sign, piece) for piece in pieces for sign in "+-"[: piece.count(r"\pm") + 1]]
    members = tuple(map(parse, pieces))
    return members[0] if kind == "{}" and len(members) == 1 else Parsed(kind=kind, members=members)


def is_statement(text: str, members: tuple[Parsed, ...]) -> bool:
    """Do `and`, `or` say more than a comma? Not in 5 or 9, but in x<1 or x>3, x=1 or y=2, 5 minutes and 3 seconds."""
    names, units = ({getattr(member, field) for member in members} - {""} for field in ("name", "unit"))
    symbols = "".join(top + bottom for member in members for _, top, bottom in member.terms)
    letters = re.search("[a-df-hj-zA-Z]", re.sub(r"\\pi|\\sqrt", "", symbols))  # e and i are numbers
    return bool(re.search(r"\\(?:and|or)", text) and (letters or len(units) > 1 or (len(names) > 1 and r"\or" in text)))


def parse(text: str) -> Parsed:
    """Take a normalised answer apart: the first rule that applies, then the rules again on what it leaves."""
    text = text.strip().removeprefix("+")
    if len(pieces := split(text, r",?\\and|,?\\or|,")) > 1:
        found = collect("{}", pieces)
        return Parsed(((Fraction(1), text, ""),)) if is_statement(text, found.members) else found
    if len(pieces := split(text, r"\\cup")) > 1:
        return collect(r"\cup", pieces)
    if match := NAME.match(text):
        rest = parse(text[match.end() :])
        return rest._replace(name=f"{match[1]}={rest.name}")
    match = re.fullmatch(r"(\\?[\[({])(.*[^\\])(\\?[\])}])", text)
    if match and (pieces := split(match[2], ",")):
        kind = match[1] + match[3]
        if kind in ("{}", r"\(\)", r"\[\]") or (kind == "()" and len(pieces) == 1):
            return parse(match[2])
        return collect("{}" if kind == r"\{\}" else kind, pieces)
    match = re.fullmatch(r"\\begin\{[pb]matrix\}(.*?)(?:\\\\)?\\end\{[pb]matrix\}", text)
    if match and (rows := split(match[1], r"\\\\")):
        return Parsed(kind="matrix", members=tuple(collect("row", split(row, "&")) for row in rows))
    if text.count(r"\pm") == 1:
        return collect("{}", [text])
    if match := UNIT.fullmatch(text):
        return parse(match[1])._replace(unit=re.sub(r"\\text|[{}.]|(?<=ch)es\b|(?<=[a-z]{2})s\b", "", match[2]))
    whole, summands = term(text), split(text, "(?<=.)(?=[-+])")
    return Parsed(tuple(map(term, summands)) if summands and whole[1] == f"({text})" else (whole,))


def agree(a: Parsed, b: Parsed) -> bool:
    """Is the answer a the reference b? A name or a known unit may be left out or added, not changed."""
    if a.kind != b.kind or len(a.members) != len(b.members):
        return False
    if any(x and y and x != y for x, y in ((a.name, b.name), (a.unit, b.unit))):
        return False
    if a.unit != b.unit and not re.fullmatch(rf"(?:\b(?:{UNITS}|{SYMBOLS})\b|[^a-zA-Z])*", a.unit + b.unit):
        return False
    scale = Fraction(100) ** ((b.unit == "percent") - (a.unit == "percent"))  # 50\% is 50, and 1/2
    if b.terms not in (a.terms, tuple((scale * number, *rest) for number, *rest in a.terms)):
        return False
    names = [len({member.name for member in x.members} - {""}) for x in (a, b)]
    if a.kind not in ("{}", r"\cup") or (max(names) > 1 and set(names) != {len(a.members)}):  # x=1, y=2 is not 2, 1
        return all(map(agree, a.members, b.members))
    left = list(b.members)
    for member in a.members:
        same = next((other for other in left if agree(member, other)), None)
        if same is None:
            return False
        left.remove(same)
    return True


def is_equal(answer: str, reference: str) -> bool:
    """Equal as exact numbers, else as LaTeX without what only shows; groups member by member.

    Order matters in tuples and intervals, not in sets, unions and lists such as 1,2. A known unit may be left out.
    No algebra, on purpose: 2(n-1) is not 2n-2 here, nor 2^{10} 1024: it takes a slow computer algebra system.
    """
    a, b = answer.strip(), reference.strip()
    if a in (b, re.sub(r",\s+", ",", b)) or b == re.sub(r",\s+", ",", a):  # 70,110 may be the list 70, 110
        return True
    return max(len(a), len(b)) <= LONGEST_ANSWER and agree(parse(normalise(a)), parse(normalise(b)))


def is_correct(response: str, answer: str, extract=extract_answer) -> bool:
    """The reward: does the last boxed answer of the response equal the reference?"""
    found = extract(response)
    return found is not None and is_equal(found, answer)
