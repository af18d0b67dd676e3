"""From a row of a problem file to token ids: templates, chat layouts, EOS, limits; and benchmarks by name (eval.py)."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import eval as evaluation
from eval import INSTRUCTION, Problem, load_tokenizer, render, usable


def tokenizer_with(*tokens: str) -> Tokenizer:
    """A tokenizer of words that knows these special tokens."""
    vocabulary = {word: i for i, word in enumerate(["?", "one", "two", "three", *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


QWEN = tokenizer_with("<|im_start|>", "<|im_end|>")
LLAMA = tokenizer_with("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PLAIN = tokenizer_with()
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1 {x} 2"}]
ASKED = [{"role": "user", "content": "6 * 7?" + INSTRUCTION}]  # what a row with a `question` becomes
OTHERWISE = [{"role": "user", "content": "6 * 7?" + INSTRUCTION.replace("{}", "{{}}")}]  # as the paper's data has it

SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
CHATML = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1 {x} 2<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n1 {x} 2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "template", "text"),
    [
        ("as it is ", QWEN, "auto", "as it is "),
        ("as it is ", QWEN, "none", "as it is "),
        (CHAT, QWEN, "auto", CHATML),
        (CHAT, LLAMA, "auto", LLAMA3),
        (CHAT, PLAIN, "auto", "Be kind.\n\n1 {x} 2\n\n"),
        (CHAT, QWEN, "none", "Be kind.\n\n1 {x} 2\n\n"),
        (CHAT, QWEN, "chatml", CHATML),
        ("6 * 7?", QWEN, "chatml", "<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"),
        ("6 * 7?", QWEN, "boxed", f"<|im_start|>user\n6 * 7?{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"),
        (ASKED, QWEN, "boxed", f"<|im_start|>user\n6 * 7?{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"),
        (ASKED, PLAIN, "boxed", f"6 * 7?{INSTRUCTION}\n\n"),
        (OTHERWISE, PLAIN, "boxed", f"6 * 7?{INSTRUCTION}\n\n"),
        (OTHERWISE, PLAIN, "{question}", "6 * 7?"),
        ([{"role": "user", "content": "\n 6 "}], LLAMA, "auto", LLAMA3.replace(SYSTEM, "").replace("1 {x} 2", "6")),
        (ASKED, QWEN, r"Q: {question}\nA:", "Q: 6 * 7?\nA:"),
        ("6 * 7?", QWEN, "{question} =", "6 * 7? ="),
        (CHAT, QWEN, "Q: {question}", "Q: 1 {x} 2"),
    ],
)
def test_a_template_makes_this_text(prompt, tokenizer, template, text):
    """The layouts of Qwen and Llama 3 to the letter; a text of one's own gets the question without the request."""
    assert render(prompt, tokenizer, template) == text


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "template", "message"),
    [
        (ASKED, PLAIN, "chatml", "--template chatml: the tokenizer has no <|im_start|>"),
        (ASKED, QWEN, "llama3", "--template llama3: the tokenizer has no <|start_header_id|>"),
        (CHATML, QWEN, "boxed", "laid out as a chat already: use --template none"),
        (LLAMA3, LLAMA, "{question}", "laid out as a chat already: use --template none"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(prompt, tokenizer, template, message):
    """Unknown special tokens would be spelled out letter by letter, and a second layout stand around the first."""
    with pytest.raises(ValueError) as error:
        render(prompt, tokenizer, template)
    assert message in str(error.value)


def test_long_prompts_are_left_out_and_counted(capsys):
    """The others keep their problems; nothing left is an error that names the flag."""
    problems = [Problem("one two three", "a"), Problem("one", "b"), Problem("one two", "c")]
    kept, prompts = usable(problems, PLAIN, 10, max_prompt_tokens=2)
    assert [p.answer for p in kept] == ["b", "c"] and prompts == [[1], [1, 2]]
    assert "1 of 3 prompts have over 2 tokens: left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--max-prompt-tokens 1"):
        usable(problems[:1], PLAIN, 10, max_prompt_tokens=1)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config": {"eos_token_id": [2, 3]}, "config": {"eos_token_id": 1}}, [2, 3]),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, [1]),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "two"}}, [0]),
        ({"config": {}, "tokenizer_config": {"eos_token": "two"}}, [2]),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "three"}}}, [3]),
    ],
)
def test_eos_comes_from_generation_config_else_config_else_the_tokenizer(files, ids, tmp_path):
    """One id or several; id 0 counts."""
    PLAIN.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path)[1] == ids


def test_a_folder_of_benchmarks_is_run_with_the_papers_settings(files, tmp_path, capsys, monkeypatch):
    """Every JSONL: 32 samples on aime24 and amc23, one elsewhere; what is given on the command line goes before."""
    folder = tmp_path / "sets"
    folder.mkdir()
    for name in ("aime24", "gsm8k"):
        shutil.copy(files / "p-heldout.jsonl", folder / f"{name}.jsonl")
    seen = []
    real = evaluation.evaluate

    def evaluate(*args, **settings):
        seen.append(settings)
        return real(*args, **settings)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    options = "--compressor snapkv,streaming --budget 8 --buffer 4 --window 2 --max-new-tokens 9 --limit 2"
    paths = ["--model", str(files / "model"), "--benchmark", str(folder), "--out", str(tmp_path / "out")]
    evaluation.main([*paths, *options.split()])
    assert [(s["samples"], s["compressor"]) for s in seen] == [
        (samples, compressor) for samples in (32, 1) for compressor in ("full", "snapkv", "streaming")
    ]
    paper = {"temperature": 0.8, "top_p": 0.95, "template": "boxed", "max_new_tokens": 9}
    assert all(paper.items() <= s.items() for s in seen)
    head, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-6:-1]]
    assert head == ["accuracy", "aime24", "gsm8k", "average"]
    assert [row[0] for row in rows] == ["dense", "snapkv-8", "streaming-8"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    for row in rows:
        accuracies = [results[name][row[0]]["accuracy"] for name in ("aime24", "gsm8k")]
        assert [float(cell) for cell in row[1:]] == pytest.approx([*accuracies, sum(accuracies) / 2], abs=5e-4)


def test_what_is_given_goes_before_the_papers_settings(files):
    """--samples 2 needs a temperature above 0, and a benchmark brings it."""
    config = evaluation.EvalConfig(benchmark=str(files), samples=2)
    sets = evaluation.benchmarks(config, {"samples": 2})
    assert sets.keys() == {"p-train", "p-heldout"}
    assert all((c.samples, c.temperature, c.extract) == (2, 0.8, "last-number") for c in sets.values())


def test_greedy_decoding_takes_one_sample_of_the_small_sets_too(tmp_path):
    """32 greedy responses would all be the same; the paper's 32 are at its temperature."""
    for name in ("aime24", "amc23"):
        (tmp_path / f"{name}.jsonl").touch()
    greedy = evaluation.benchmarks(evaluation.EvalConfig(benchmark=str(tmp_path)), {"temperature": 0.0})
    assert [(c.samples, c.temperature) for c in greedy.values()] == [(1, 0)] * 2


def test_what_a_reader_of_the_table_must_know_is_said(files, tmp_path, capsys):
    """Sequences beyond the model's context, and a compressed cache that never came to evict."""
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"max_position_embeddings": 12}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    paths = ["--model", str(tmp_path / "model"), "--data", str(files / "p-heldout.jsonl"), "--limit", "1"]
    for new, evicted, within in ((5, False, True), (16, True, False)):
        small = f"--budget 8 --buffer 4 --window 2 --max-new-tokens {new} --out {tmp_path / str(new)}"
        evaluation.main([*paths, *small.split()])
        said = capsys.readouterr().out
        assert ("nothing was evicted by snapkv-8: no row" in said) is not evicted
        assert ("the model's max_position_embeddings are 12" in said) is not within
