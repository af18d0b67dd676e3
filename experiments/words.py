"""Word problems with a running count, and worked solutions of them: three JSONL files for warm_start.py and real.py.

    python experiments/words.py --out runs/words

"Olga has 9 coins. Then Olga gives 4 to Ben. Later Olga finds 5 more. How many coins does Olga have now?" Small enough
that a model of 135 M parameters can learn them, and yet language: names, things and verbs of a pretrained vocabulary.
In --out: words-warm.jsonl, words-train.jsonl, words-heldout.jsonl, no question twice. A row holds

    prompt     chat messages: a short system message that asks for the box, and the question
    question   the same question, for readers
    answer     the count at the end
    solution   a sentence and an equation for each event, phrased in one of several ways, and the boxed answer

The ways of phrasing are drawn step by step, so that a model that has learnt them still explores when it samples; the
tersest does not say what happened, and leaves more to go wrong.

A habit is planted, openly: of the solutions in words-warm.jsonl, and there alone, the share --habit leaves out the last
event and boxes the count before it, so that a model that has learnt from them stops early about as often. It is what
reinforcement learning is to remove. --habit 0 plants nothing. (Habits of reading an event with the wrong sign taught
less: what was to be unlearnt hid behind subtractions that a model of 135 M parameters gets wrong anyway;
experiments/results/real-pilots.jsonl.)
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runs import as_lines, check_options, one_sentence, option, parse_config, write_whole

SYSTEM = "Count step by step. Put the final count in \\boxed{}."
NAMES = ["Maya", "Tom", "Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kira", "Leo"]
NAMES += ["Mina", "Noah", "Olga", "Paul", "Rosa", "Sam"]
THINGS = ["apples", "marbles", "stamps", "books", "coins", "cards", "shells", "pens", "stickers", "buttons", "beads"]
THINGS += ["cookies", "stones", "balls"]
WHEN = ["Then", "Later", "After that", "Next", "The next day"]
GAINS = [
    "finds {n} more",
    "buys {n} more",
    "gets {n} from {other}",
    "is given {n} by {other}",
    "borrows {n} from {other}",
]
LOSSES = ["loses {n}", "sells {n}", "gives {n} to {other}"]
STEPS = [  # all right, of different length and care
    "{name} {event}: {before} {sign} {n} = {after}.",
    "{name} {event}, so {before} {sign} {n} = {after} {thing}.",
    "{before} {sign} {n} = {after} {thing}.",
    "Now it is {before} {sign} {n} = {after}.",
]


@dataclass(frozen=True)
class Settings:
    """How many problems of which length, and where they go."""

    out: str = option("runs/words", "folder for the three files")
    least: int = option(2, "events of the shortest problems", at_least=1, at_most=100)
    most: int = option(3, "events of the longest problems", at_least=1, at_most=100)
    largest: int = option(5, "largest number that an event adds or takes away", at_least=2, at_most=49)
    habit: float = option(0.5, "share of the warm start's solutions without the last event", at_least=0, at_most=1)
    warm: int = option(600, "problems to learn the layout from", at_least=1)
    train: int = option(2000, "problems to train on", at_least=1)
    heldout: int = option(200, "problems to evaluate on", at_least=1)
    seed: int = option(0, "of everything random", at_least=0, below=2**63)

    def __post_init__(self):
        check_options(self)
        if self.least > self.most:
            raise ValueError(f"--least must be at most --most {self.most}, not {self.least}")


def problem(rng: random.Random, events: int, largest: int, habit: float) -> dict:
    """One problem with so many events of at most `largest` things. Its answer is right; its solution has the habit."""
    name, other = rng.sample(NAMES, 2)
    thing, count = rng.choice(THINGS), rng.randint(3, 12)
    question, solution, counts = [f"{name} has {count} {thing}."], [], [count]
    for _ in range(events):
        n, before = rng.randint(2, largest), counts[-1]
        event = rng.choice(GAINS + LOSSES if before > n else GAINS)
        sign, after = ("-", before - n) if event in LOSSES else ("+", before + n)
        event = event.format(n=n, other=other)
        question.append(f"{rng.choice(WHEN)} {name} {event}.")
        words = {"name": name, "thing": thing, "event": event, "n": n, "sign": sign}
        solution.append(rng.choice(STEPS).format(before=before, after=after, **words))
        counts.append(after)
    question = " ".join([*question, f"How many {thing} does {name} have now?"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    told = events - (rng.random() < habit)
    solution = "\n".join([*solution[:told], f"The answer is \\boxed{{{counts[told]}}}."])
    return {"prompt": messages, "question": question, "answer": str(counts[-1]), "solution": solution}


def write_problems(config: Settings) -> None:
    """The three files. No question comes twice, and those without a habit do not depend on it."""
    seen, folder = set(), Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("heldout", "train", "warm"):
        rng, rows = random.Random(f"words {part} {config.seed}"), []
        habit = config.habit if part == "warm" else 0
        while len(rows) < getattr(config, part):
            row = problem(rng, rng.randint(config.least, config.most), config.largest, habit)
            if row["question"] not in seen:
                seen.add(row["question"])
                rows.append(row)
        write_whole(folder / f"words-{part}.jsonl", as_lines(rows))
        print(f"{folder}/words-{part}.jsonl: {len(rows)} problems, the last:\n{rows[-1]['question']}")
        print(rows[-1]["solution"] + "\n")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/words.py", "Word problems with a running count.")
    with one_sentence("experiments/words.py"):
        write_problems(config)


if __name__ == "__main__":
    main()
