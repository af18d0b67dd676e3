"""Wrong variants of the check of answers: each errs on one pair, or on where the answer stands. See faulty.py."""

from __future__ import annotations

import re
from fractions import Fraction

import test_answers as facts
from faulty import wrong

from answers import REWRITES, STANDARD, agree, collect, normalise, term

different = facts.test_answers_that_look_alike_are_told_apart
equal = facts.test_answers_that_look_different_are_equal
boxed = facts.test_the_answer_is_the_last_complete_box


# ------------------------------------------------------------------------------------------------- where it stands


@wrong("answers.extract_answer", boxed, r"\boxed{1}, or \boxed{2}", "2")
def greedy(response):
    """From the first box to the last brace."""
    return re.search(r"\\boxed\{(.*)\}", response)[1]


@wrong("answers.extract_answer", boxed, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")
def to_the_first_brace(response):
    """Regular expressions do not balance braces."""
    return re.findall(r"\\boxed\{(.*?)\}", response)[-1]


@wrong("answers.extract_answer", boxed, r"\boxed{1}, no, \boxed{2}", "2")
def first_box(response):
    """The first box, not the last."""
    return re.findall(r"\\boxed\{([^{}]*)\}", response)[0]


# ------------------------------------------------------------------------------------------------------- one spelling


@wrong("answers.REWRITES", different, ["1 2", "12"])
def every_space_goes():
    """Also where it parts two numbers."""
    rules = [rule for rule in REWRITES if rule[0] != "spaces but these"]
    return [("every space", r"\s+", "", ""), *rules]


@wrong("answers.normalise", different, ["1,2", "12"])
def every_comma_between_digits_goes(text):
    """Thousands, and lists."""
    return normalise(re.sub(r"(?<=\d),(?=\d)", "", text))


@wrong("answers.normalise", different, ["204_5", "204"])
def subscripts_go(text):
    """The base of a number with them."""
    return normalise(re.sub(r"_\{?\d\}?", "", text))


@wrong("answers.normalise", different, ["x^{12}", "x^12"])
def all_braces_go(text):
    """LaTeX's x^12 is x^1 2."""
    return normalise(re.sub(r"[{}]", "", text))


@wrong("answers.normalise", different, ["4<|im_start|>2", "42"])
def special_tokens_go(text):
    """A control token in the answer is overlooked."""
    return normalise(re.sub(r"<\|.*?\|>", "", text))


@wrong("answers.STANDARD", equal, [r"50\%", "0.5"])
def percent_is_a_mere_unit():
    """Half is not fifty percent."""
    return STANDARD | {r"\%": r"\text{unit}"}


# ------------------------------------------------------------------------------------------------------ taking apart


@wrong("answers.UNIT", equal, [r"5\text{ cm}", "5"])
def no_units():
    """No text is a unit."""
    return re.compile("$^")


@wrong("answers.UNITS", different, [r"3\text{ bolts}", "3"])
def every_word_is_a_known_unit():
    """Also one that could change the number."""
    return "[a-z]+"


@wrong("answers.agree", different, [r"5.4 \text{ cents}", r"\$5.4"])
def units_are_ignored(a, b):
    """Cents are dollars."""
    return agree(a._replace(unit=""), b._replace(unit=""))


@wrong("answers.agree", different, ["$x=9$", "y=9"])
def names_are_ignored(a, b):
    """x is y."""
    return agree(a._replace(name=""), b._replace(name=""))


@wrong("answers.is_statement", different, ["x=1 or y=2", "x=1, y=2"])
def or_is_a_comma(text, members):
    """Always."""
    return False


@wrong("answers.is_statement", equal, ["5 or 9", "9, 5"])
def or_is_never_a_comma(text, members):
    """Also between two solutions."""
    return r"\or" in text


@wrong("answers.term", different, ["9007199254740993", "9007199254740992"])
def numbers_are_floats(text):
    """Beyond 2^53 neighbours are one."""
    number, *rest = term(text)
    return Fraction(float(number)), *rest


@wrong("answers.term", different, [r"\frac13", "0.3333333"])
def numbers_are_rounded(text):
    """To six decimals."""
    number, *rest = term(text)
    return round(number, 6), *rest


@wrong("answers.collect", different, ["[1,2]", "[1,2)"])
def one_kind_of_bracket(kind, pieces):
    """Open and closed intervals are one."""
    return collect("()" if kind in ("[]", "[)", "(]") else kind, pieces)


@wrong("answers.collect", different, ["(-3,-6)", "(-6,-3)"])
def tuples_are_sorted(kind, pieces):
    """Order does not count anywhere."""
    return collect(kind, sorted(pieces))


@wrong("answers.collect", equal, [r"\{1,2\}", r"\{2,1\}"])
def sets_keep_their_order(kind, pieces):
    """Order counts everywhere."""
    return collect("()" if kind == "{}" else kind, pieces)
