"""Problems, prompts and accuracy (eval.py); answers are in test_answers.py."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from helpers import constant_model, tiny_model
from tokenizers import Tokenizer, models

import eval as evaluation
from eval import pass_at_k
from task import Problem, Prompt, load_problems

QUESTION = "What is 6 * 7?"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": QUESTION, "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}, "42"),
        ({"problem": QUESTION, "answer": 42.0}, "42.0"),
        ({"question": QUESTION, "final_answer": ["42"]}, "42"),
        ({"problem": QUESTION, "solution": r"We get \boxed{42}."}, "42"),
        ({"prompt": QUESTION, "label": "42"}, "42"),
        ({"prompt": QUESTION, "answer": r"So it is $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
    ],
)
def test_problems_are_read_as_they_are_in_the_wild(row, answer, tmp_path):
    """The reference stands in `label`, `answer` (GSM8K's after ####), `final_answer` or boxed in `solution`."""
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n\n")
    (problem,) = load_problems(tmp_path / "p.jsonl")
    assert problem.answer == answer
    asked = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]
    assert asked.startswith(QUESTION)


def test_a_row_without_an_answer_is_counted_not_rewarded(tmp_path, capsys):
    """It leaves the set, and the count is printed; NaN, with which some fill a column, is no answer."""
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": math.nan}, {"prompt": "c"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_problems(tmp_path / "p.jsonl") == [Problem("a", "1")]
    assert "2 of 3 rows have no answer" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["", "####", "#### ", "   "])
def test_an_empty_reference_is_no_reference(answer, tmp_path):
    """Else an empty box would be rewarded."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "answer": answer}) + "\n")
    with pytest.raises(ValueError, match="holds no problem"):
        load_problems(tmp_path / "p.jsonl")


def test_lines_end_at_newlines_alone(tmp_path):
    """U+2028 and U+0085 may stand inside a JSON string; a byte order mark and CRLF do no harm."""
    text = '\ufeff{"prompt": "a\u2028b\u0085c", "answer": "1"}\r\n'
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8", newline="")
    assert load_problems(tmp_path / "p.jsonl") == [Problem("a\u2028b\u0085c", "1")]


def word_tokenizer(*tokens: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({token: i for i, token in enumerate(("?", *tokens))}, unk_token="?"))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 2), (5, 0, 3), (6, 6, 1), (6, 3, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(samples, correct, k):
    """The unbiased estimator of 2107.03374, by enumerating every subset of k responses."""
    subsets = list(itertools.combinations([i < correct for i in range(samples)], k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("samples", "ks"), [(1, []), (2, [2]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples(samples, ks):
    """What was paid for is shown: of six samples pass@6 too."""
    settings = {"rows": 8, "max_new_tokens": 1, "compressor": "full"}
    prompts = [Prompt("a", [1], "1")]
    summary, _ = evaluation.evaluate(tiny_model(), word_tokenizer("a"), [], prompts, samples=samples, **settings)
    assert [name for name in summary if name.startswith("pass@")] == [f"pass@{k}" for k in ks]


def test_accuracy_and_standard_error_are_over_problems(monkeypatch):
    """Two problems with 4 samples each: the error is that of two means, not of eight responses."""
    verdicts = iter([True] * 4 + [True, False, False, False])
    monkeypatch.setattr(evaluation, "is_correct", lambda *_: next(verdicts))
    summary, records = evaluation.evaluate(
        tiny_model(),
        word_tokenizer("a", "b"),
        [1],
        [Prompt("a", [1], "1"), Prompt("b", [2], "2")],
        samples=4,
        rows=8,
        max_new_tokens=3,
        compressor="full",
    )
    assert summary["accuracy"] == pytest.approx((1 + 0.25) / 2)
    assert summary["stderr"] == pytest.approx(0.75 / 2)  # std of (1, 0.25), which is 0.75 / sqrt(2), over sqrt(2)
    assert summary["pass@2"] == pytest.approx((1 + 0.5) / 2)
    assert [record["problem"] for record in records] == [0] * 4 + [1] * 4
    assert [record["prompt"] for record in records] == ["a"] * 4 + ["b"] * 4


def test_results_of_one_problem_are_json(tmp_path, monkeypatch, capsys):
    """A single problem has no standard error; NaN is no JSON. Blanks between the policies' names do no harm."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--limit=1", "--max-new-tokens=8", "--budget=16", "--buffer=4", "--out=e", "--threads=1"]
    evaluation.main([*arguments, "--compressor=snapkv, streaming"])

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    results = json.loads((tmp_path / "e" / "results.json").read_text(), parse_constant=refuse)["results"]
    assert results["long-heldout"].keys() == {"dense", "snapkv-16", "streaming-16"}
    assert all(mode["stderr"] is None for mode in results["long-heldout"].values())
    assert "nan" not in capsys.readouterr().out and (tmp_path / "e" / "responses-long-heldout-snapkv-16.jsonl").exists()


def test_the_dense_row_keeps_its_keys_as_they_come(monkeypatch):
    """`--kv-bits` holds for the policies alone, `full` among them."""
    monkeypatch.setattr(evaluation, "evaluate", lambda *given, **how: how)
    how = {"compressor": "full,snapkv", "budget": 16, "kv_bits": 4}
    assert evaluation.dense_and_sparse(None, None, [], [], **how) == {
        "dense": {"compressor": "full", "budget": 16},
        "full-4-bit": {"compressor": "full", "budget": 16, "kv_bits": 4},
        "snapkv-16-4-bit": {"compressor": "snapkv", "budget": 16, "kv_bits": 4},
    }


@pytest.mark.parametrize(("extract", "accuracy"), [("boxed", 0.0), ("last-number", 1.0)])
def test_evaluation_can_fall_back_to_the_last_number(extract, accuracy):
    """`--extract last-number`: a right number without a box counts; the share with a box does not change."""
    summary, _ = evaluation.evaluate(
        constant_model([0.0, 9.0]),
        word_tokenizer("7"),
        [],
        [Prompt("7", [1], "7")],
        extract=extract,
        rows=1,
        max_new_tokens=1,
        compressor="full",
    )
    assert summary["accuracy"] == accuracy and summary["boxed"] == 0
