"""How well answers are judged: against labels, against math-verify, and on real data.

    python benchmarks/answers.py                        # the pairs of tests/answer_pairs.jsonl
    python benchmarks/answers.py --data FOLDER          # and worked solutions: math500.jsonl, gsm8k.jsonl, ...

Needs math-verify from requirements-dev.txt, which the project itself does not. A table counts on how many pairs two of
the three agree: the label (set by hand), `is_equal`, math-verify; then every disagreement is listed. With --data, each
worked solution that holds a box is judged against the answer of its row, and each reference in a box against itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval import EXTRACTORS, is_correct, is_equal, reference_answer, table

PAIRS = Path(__file__).resolve().parent.parent / "tests" / "answer_pairs.jsonl"


def rows(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def by_math_verify(answer: str, reference: str) -> bool:
    """math-verify's verdict, its settings untouched; both are given as inline LaTeX, which suits these pairs best."""
    inline = (re.sub(r"(?<!\\)\$", "", text) for text in (reference, answer))
    return bool(verify(*(parse(f"${text}$") for text in inline)))


def compare() -> None:
    """Print the table of agreement and list the disagreements."""
    counts, lists = {}, {"wrong, is_equal": [], "wrong, math-verify": [], "is_equal and math-verify differ": []}
    for pair in rows(PAIRS):
        label, ours, theirs = pair["equal"], is_equal(pair["b"], pair["a"]), by_math_verify(pair["b"], pair["a"])
        agree = {"pairs": True, "is_equal = label": ours == label, "math-verify = label": theirs == label}
        agree |= {"both = label": ours == theirs == label, "is_equal = math-verify": ours == theirs}
        for name in (pair["from"], "all"):
            counts.setdefault(name, Counter()).update({column: int(yes) for column, yes in agree.items()})
        for name, differs in zip(lists, (ours != label, theirs != label, ours != theirs), strict=True):
            if differs:
                kind = "equal    " if label else "different"
                lists[name].append(f"  {kind}  {pair['from']:15}{pair['a']}   |   {pair['b']}")
    names = [name for name in counts if name != "all"] + ["all"]
    columns = list(counts["all"])
    print(table(["pairs from", *columns], [[name, *(counts[name][c] for c in columns)] for name in names]))
    for name, lines in lists.items():
        print(f"\n{name}: {len(lines)}", *lines, sep="\n")


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
    compare()
    if arguments.data:
        print()
        judge(arguments.data)


if __name__ == "__main__":
    main()
