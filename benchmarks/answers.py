"""How well answers are judged: against labels, against math-verify, and on real data.

    python benchmarks/answers.py                        # the pairs of tests/answer_pairs.jsonl
    python benchmarks/answers.py --data FOLDER          # and real references: math500.jsonl, gsm8k.jsonl, ...

Needs math-verify from requirements-dev.txt, which the project itself does not. A table counts on how many pairs two of
the three agree: the label (set by hand), `is_equal`, math-verify; then every disagreement is listed, the reference
before the answer. With --data, each worked solution that holds a box is judged against the answer of its row, and each
reference in a box against itself; then each reference is respelled and changed by the RULES below, and the same table
is made of those pairs, by rule.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from answers import EXTRACTORS, is_correct, is_equal
from runs import table
from task import reference_answer

PAIRS = Path(__file__).resolve().parent.parent / "tests" / "answer_pairs.jsonl"


def rows(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def by_math_verify(answer: str, reference: str) -> bool:
    """math-verify's verdict, its settings untouched; both are given as inline LaTeX, which suits these pairs best."""
    plain = (re.sub(r"(?<!\\)\$", "", text) for text in (reference, answer))
    inline = (re.sub(r"(?<=[0-9])e(-?[0-9]+)$", r"\\times10^{\1}", text) for text in plain)  # 1e-3 is not LaTeX
    return bool(verify(*(parse(f"${text}$") for text in inline)))


def compare(pairs: list[dict]) -> None:
    """Print the table of agreement and list the disagreements."""
    counts, lists = {}, {"wrong, is_equal": [], "wrong, math-verify": [], "is_equal and math-verify differ": []}
    for pair in pairs:
        label, ours, theirs = pair["equal"], is_equal(pair["b"], pair["a"]), by_math_verify(pair["b"], pair["a"])
        agree = {"pairs": True, "is_equal = label": ours == label, "math-verify = label": theirs == label}
        agree |= {"both = label": ours == theirs == label, "is_equal = math-verify": ours == theirs}
        for name in (pair["from"], "all"):
            counts.setdefault(name, Counter()).update({column: int(yes) for column, yes in agree.items()})
        for name, differs in zip(lists, (ours != label, theirs != label, ours != theirs), strict=True):
            if differs:
                kind = "equal    " if label else "different"
                lists[name].append(f"  {kind}  {pair['from']:21}{pair['a']}   |   {pair['b']}")
    names = [name for name in counts if name != "all"] + ["all"]
    columns = list(counts["all"])
    print(table(["pairs from", *columns], [[name, *(counts[name][c] for c in columns)] for name in names]))
    for name, lines in lists.items():
        print(f"\n{name}: {len(lines)}", *lines, sep="\n")


INTEGER, DECIMAL, FRACTION = r"(-?[0-9]+)", r"(-?[0-9]*)\.([0-9]+)", r"(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"
TUPLE = r"\(([^()\[\]{}]+),([^()\[\]{}]+)\)"
LATEX = r"(.*\\.*)"
# What becomes of a reference that is wholly of a form: (form, equal, its groups -> another spelling if equal, else
# another answer; None where there is nothing to say). The labels hold by construction.
RULES = {
    "integer: n.0": (INTEGER, True, lambda n: f"{n}.0"),
    "integer: thousands": (INTEGER, True, lambda n: f"{int(n):,}" if abs(int(n)) >= 1000 else None),
    "integer: 2n/2": (INTEGER, True, lambda n: rf"\frac{{{2 * int(n)}}}{{2}}"),
    "integer: n + 1": (INTEGER, False, lambda n: f"{int(n) + 1}"),
    "integer: -n": (INTEGER, False, lambda n: f"{-int(n)}" if int(n) else None),
    "integer: 10 n": (INTEGER, False, lambda n: f"{10 * int(n)}" if int(n) else None),
    "decimal: a zero more": (DECIMAL, True, lambda a, b: f"{a}.{b}0"),
    "decimal: fraction": (DECIMAL, True, lambda a, b: rf"\frac{{{int(a + b)}}}{{{10 ** len(b)}}}"),
    "decimal: point moved": (DECIMAL, False, lambda a, b: f"{a}{b[0]}.{b[1:]}5" if int(a + b) else None),
    "fraction: a/b": (FRACTION, True, lambda s, a, b: f"{s}{a}/{b}"),
    "fraction: 3a/3b": (FRACTION, True, lambda s, a, b: rf"{s}\dfrac{{{3 * int(a)}}}{{{3 * int(b)}}}"),
    "fraction: decimal": (FRACTION, True, lambda s, a, b: as_decimal(s, Fraction(int(a), int(b)))),
    "fraction: b/a": (FRACTION, False, lambda s, a, b: rf"{s}\frac{{{b}}}{{{a}}}" if a != b and int(a) else None),
    "fraction: (a + 1)/b": (FRACTION, False, lambda s, a, b: rf"{s}\frac{{{int(a) + 1}}}{{{b}}}"),
    "tuple: spaces": (TUPLE, True, lambda a, b: rf"\left( {a} , {b} \right)"),
    "tuple: (b,a)": (TUPLE, False, lambda a, b: f"({b},{a})" if a.strip() != b.strip() else None),
    "LaTeX: \\dfrac": (LATEX, True, lambda t: t.replace(r"\frac", r"\dfrac") if r"\frac" in t else None),
    "LaTeX: \\displaystyle": (LATEX, True, lambda t: r"\displaystyle " + t),
    "LaTeX: thin space": (LATEX, True, lambda t: re.sub(r"(?<=[0-9])(?=\\(sqrt|pi))", r"\,", t)),
    "LaTeX: next digit": (LATEX, False, lambda t: re.sub("[0-9]", lambda m: str((int(m[0]) + 1) % 10), t, count=1)),
    "LaTeX: minus": (LATEX, False, lambda t: None if re.search(r"[-(\[,=]|\\(pm|text|begin|{)|^0", t) else "-" + t),
}  # fmt: skip


def as_decimal(sign: str, x: Fraction) -> str | None:
    """The sign and x as a decimal, None where it does not end."""
    return f"{sign}{float(x)}" if not 10**6 % x.denominator else None


def by_rule(folder: Path) -> list[dict]:
    """The RULES on every reference of the benchmarks in the folder, each distinct pair once."""
    pairs = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in rows(path):
            text = (reference_answer(row) or "").strip().removeprefix("$").removesuffix("$")
            for name, (form, equal, change) in RULES.items():
                match = re.fullmatch(form, text)
                other = change(*match.groups()) if match else None
                if other and other != text:
                    pairs[text, other] = {"from": name, "equal": equal, "a": text, "b": other}
    return list(pairs.values())


def judge(folder: Path) -> None:
    """Print, for each file, how many worked solutions and references are judged right."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        answered = [(row, answer) for row in rows(path) if (answer := reference_answer(row))]
        itself = [is_correct("\\boxed{" + answer + "}", answer) for _, answer in answered]
        boxed = [
            is_correct(row["solution"], answer) for row, answer in answered if "\\boxed" in str(row.get("solution"))
        ]
        last = [  # GSM8K's worked text ends in the answer
            is_correct(row["answer"], answer, EXTRACTORS["last-number"])
            for row, answer in answered
            if "####" in str(row.get("answer"))
        ]
        lines.append([path.name, *(f"{sum(right)} of {len(right)}" for right in (itself, boxed, last))])
    print(table(["file", "references", "solutions with a box", "last number"], lines))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of JSONL files with worked solutions")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # math-verify reports each text that it cannot parse
    compare(rows(PAIRS))
    if arguments.data:
        print()
        judge(arguments.data)
        print()
        compare(by_rule(arguments.data))


if __name__ == "__main__":
    main()
