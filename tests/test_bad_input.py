"""Bad input ends in one sentence that names the file, line or flag and the remedy; its nearest good neighbour is taken.

Each row of the table is a sentence, the bad input that it answers, and beside it the nearest good input. All go
through the real command lines, in a folder that holds `model/`, `p-train.jsonl`, `p-heldout.jsonl` and a finished
`run/`.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import train
from model import load_model

SMALL = "--budget 8 --buffer 4 --window 2 --max-new-tokens 6"
TRAIN = f"--model model --data p-train.jsonl --eval-data= --out out --prompts 2 --group-size 2 --steps 1 {SMALL}"
EVAL = f"--model model --data p-heldout.jsonl --out out --limit 2 {SMALL}"
COMPARE = "--model model --data p-heldout.jsonl --out out.json --limit 1 --budgets 8 --buffer 4 --window 2"
compare = runpy.run_path(str(evaluation.ASSETS.parent / "experiments" / "compressors.py"))["main"]
PROGRAMS = {
    "train": (train.main, TRAIN),
    "eval": (evaluation.main, EVAL),
    "compare": (compare, COMPARE + " --max-new-tokens 6"),
    "resume": (train.main, "--resume run"),
}

DELETED, FOLDER = object(), object()  # what a file is replaced by
Files = dict[
    str, object
]  # path -> text or bytes, a dict of changed keys of its JSON, an edit of tensors, or one of these


@dataclass(frozen=True)
class Case:
    """Input that is refused with this sentence, and its neighbour that is not."""

    sentence: str
    bad: str | list[str]
    good: str | list[str]
    bad_files: Files
    good_files: Files
    program: str


def in_flags(
    program: str, bad: str | list[str], sentence: str, good: str | list[str], files: Files | None = None
) -> Case:
    """A case of options alone; `files` are there for both."""
    return Case(sentence, bad, good, files or {}, files or {}, program)


def in_files(bad: Files, sentence: str, good: Files, program: str = "train", options: str = "") -> Case:
    """A case of what files hold; the options are the same for both."""
    return Case(sentence, options, options, bad, good, program)


def row(**keys) -> str:
    """A line of JSONL."""
    return json.dumps(keys) + "\n"


def problems(content: str | bytes) -> Files:
    return {"p-train.jsonl": content}


def config(**changes) -> Files:
    return {"model/config.json": changes}


def tokenizer(**changes) -> Files:
    return {"model/tokenizer.json": changes}


def weights(edit: Callable[[dict], object]) -> Files:
    return {"model/model.safetensors": edit}


def index(**content) -> Files:
    """The weights under another name, and an index."""
    return {"model/model.safetensors": DELETED, "model/model.safetensors.index.json": json.dumps(content)}


def stored(**changes) -> Files:
    """A setting of the run to resume."""
    return {"run/config.json": changes}


GOOD = row(prompt="1+1=", answer="2")
NORM = "model.norm.weight"  # (32,)
NO_PROMPT = "no `prompt` (text, or messages of role and content), `question` or `problem` in this row"
NESTED = "[" * 100_000 + "]" * 100_000
WORDS = {"type": "WordLevel", "vocab": {"?": 0, "<end>": 1, "1": 2, "+": 3, "=": 4, "0": 5}, "unk_token": "?"}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "original_max_position_embeddings": 64}

OPTIONS = [
    # Numbers out of bounds, or none
    in_flags(
        "train", "--group-size 1", "--group-size must be at least 2 and at most 1,000,000, not 1", "--group-size 2"
    ),
    in_flags("train", "--prompts 0", "--prompts must be at least 1 and at most 1,000,000, not 0", "--prompts 1"),
    in_flags("train", "--steps 0", "--steps must be at least 1 and at most 1,000,000, not 0", "--steps 1"),
    in_flags("train", "--updates 0", "--updates must be at least 1 and at most 1,000,000, not 0", "--updates 1"),
    in_flags("train", "--updates 3", "--updates must divide the 2 prompts of a step, not 3", "--updates 2"),
    in_flags(
        "train", "--temperature 0", "--temperature must be at least 0.001 and finite, not 0.0", "--temperature 1e-3"
    ),
    in_flags(
        "train", "--temperature nan", "--temperature must be at least 0.001 and finite, not nan", "--temperature 9"
    ),
    in_flags("train", "--epsilon 0", "--epsilon must be above 0 and below 1, not 0.0", "--epsilon 1e-9"),
    in_flags("train", "--epsilon -1", "--epsilon must be above 0 and below 1, not -1.0", "--epsilon 0.9"),
    in_flags("train", "--clip-low -0.1", "--clip-low must be at least 0 and below 1, not -0.1", "--clip-low 0"),
    in_flags(
        "train", "--clip-high -0.1", "--clip-high must be at least 0 and at most 1e+30, not -0.1", "--clip-high 0"
    ),
    in_flags("train", "--clip-high 1e308", "--clip-high must be at least 0 and at most 1e+30, not", "--clip-high 1e30"),
    in_flags("train", "--xi-cap -0.0", "--xi-cap must be above 0 and at most 1e+30, not -0.0", "--xi-cap 0.1"),
    in_flags("train", "--kl-coef -1", "--kl-coef must be at least 0 and finite, not -1.0", "--kl-coef 0"),
    in_flags("train", "--lr 1e-400", "--lr must be above 0 and at most 10, not 0.0", "--lr 1e-300"),
    in_flags("train", "--lr 1e400", "--lr must be above 0 and at most 10, not inf", "--lr 10"),
    in_flags("train", "--max-grad-norm 0", "--max-grad-norm must be above 0, not 0.0", "--max-grad-norm inf"),
    in_flags("train", "--beta1 1", "--beta1 must be at least 0 and below 1, not 1.0", "--beta1 0.999"),
    in_flags(
        "train",
        "--weight-decay inf",
        "--weight-decay must be at least 0 and at most 1,000",
        "--weight-decay 0",
    ),
    in_flags(
        "train",
        "--micro-tokens 0",
        "--micro-tokens must be at least 1 and at most 2,147,483,648, not 0",
        "--micro-tokens 1",
    ),
    in_flags(
        "train", "--save-every 0", "--save-every must be at least 1 and at most 1,000,000, not 0", "--save-every 1"
    ),
    in_flags(
        "train", "--seed -1", "--seed must be at least 0 and below 9,223,372,036,854,775,808, not -1", f"--seed {2**62}"
    ),
    in_flags("train", "--threads 99999", "--threads must be at least 0 and at most 1,024, not 99999", "--threads 1"),
    in_flags("train", "--max-new-tokens 0", "--max-new-tokens must be at least 1 and at most", "--max-new-tokens 1"),
    in_flags("train", f"--budget {10**30}", "--budget must be at most 1,000,000, not 1000", "--budget 1000000"),
    in_flags(
        "train", "--prompts 1000000", "--prompts times --group-size must be at most 1,000,000", "--prompts 500000"
    ),
    in_flags("train", "--lr big", "argument --lr: invalid float value: 'big'", "--lr 1"),
    in_flags("train", "--steps 1.5", "argument --steps: invalid int value: '1.5'", "--steps 1"),
    in_flags("train", "--lr", "argument --lr: expected one argument", "--lr 1"),
    in_flags("eval", "--samples 0", "--samples must be at least 1 and at most 1,000,000, not 0", "--samples 1"),
    in_flags(
        "eval",
        "--samples 2",
        "--samples 2 greedy responses would all be the same: set --temperature",
        "--samples 2 --temperature 1",
    ),
    in_flags("eval", "--top-p 0", "--top-p must be at least 1e-06 and at most 1, not 0.0", "--top-p 1e-6"),
    in_flags("eval", "--temperature -1", "--temperature must be at least 0 and finite, not -1.0", "--temperature 0"),
    in_flags(
        "eval",
        "--temperature 1e-4",
        "--temperature must be 0 (greedy) or at least 0.001, not 0.0001",
        "--temperature 1e-3",
    ),
    in_flags("eval", f"--seed {2**70}", "--seed must be at least 0 and below 9,223,372", f"--seed {2**63 - 1}"),
    in_flags("compare", "--limit 0", "--limit must be at least 1 and at most 1,000,000, not 0", "--limit 1"),
    in_flags("compare", "--budgets 8,", "--budgets must be numbers with commas between, not '8,'", "--budgets 8,9"),
    # Settings of the cache that cannot work together
    in_flags("train", "--budget 2", "budget 2 must exceed the window of 2: raise the budget", "--budget 3"),
    in_flags(
        "train",
        "--budget 6 --compressor streaming",
        "budget 6 must exceed the window of 2 + 4 sinks: raise the budget",
        "--budget 7 --compressor streaming",
    ),
    in_flags("train", "--buffer 0", "buffer 0 must be at least 1: a row is cut when it holds budget +", "--buffer 1"),
    in_flags("train", "--window 0", "window 0 must be at least 1: the newest token always stays in", "--window 1"),
    in_flags("eval", "--budget 2 --window 3", "budget 2 must exceed the window of 3: raise", "--budget 4 --window 3"),
    in_flags("compare", "--budgets 6", "budget 6 must exceed the window of 2 + 4 sinks: raise", "--budgets 7"),
    # Names that are unknown
    in_flags("train", "--compressor zip", "argument --compressor: invalid choice: 'zip' (choose", "--compressor rkv"),
    in_flags("train", "--correction fix", "argument --correction: invalid choice: 'fix' (choose", "--correction none"),
    in_flags("train", "--aggregation sum", "argument --aggregation: invalid choice: 'sum'", "--aggregation token"),
    in_flags("train", "--dtype float16", "argument --dtype: invalid choice: 'float16' (choose", "--dtype bfloat16"),
    in_flags("eval", "--compressor zip", "unknown compressor 'zip': choose from full, streaming", "--compressor rkv"),
    in_flags("eval", "--compressor h2o,", "unknown compressor '': choose from full, streaming", "--compressor h2o,rkv"),
    in_flags("train", "--no-such-flag 1", "unrecognized arguments: --no-such-flag 1", ""),
    in_flags("train", "--bud 9", "unrecognized arguments: --bud 9", "--budget 9"),
    in_flags("train", "--top-p 0.9", "unrecognized arguments: --top-p 0.9", ""),
    in_flags("train", "--template zip", "--template 'zip' is not auto, boxed, chatml, llama3", "--template none"),
    in_flags("train", ["--template", "Q: {q}"], "--template 'Q: {q}' is not auto", ["--template", "Q: {question}"]),
    in_flags("train", "--template chatml", "--template chatml: the tokenizer has no <|im_start|>", "--template auto"),
    in_flags("train", "--template llama3", "--template llama3: the tokenizer has no <|start_header_id|>", ""),
    in_flags("train", "--device abacus", "--device abacus is not usable here (Expected one of cpu", "--device cpu"),
    in_flags("train", "--device meta", "--device meta is not usable here (Tensor.item() cannot", "--device auto"),
    in_flags("eval", "--device hpu", "--device hpu is not usable here (No module named", "--device cpu"),
    in_flags("train", ["--device="], "--device must be text without NUL, and not empty, not ''", ""),
    in_flags("train", ["--out", "a\0"], r"--out must be text without NUL, and not empty, not 'a\x00'", ["--out", "a"]),
    # Paths
    in_flags("train", ["--model="], "--model must be text without NUL, and not empty, not ''", "--model model"),
    in_flags(
        "train", ["--data", " "], "--data must be text without NUL, and not empty, not ' '", "--data p-train.jsonl"
    ),
    in_flags("train", "--model nowhere", "nowhere/config.json does not exist", "--model model"),
    in_flags(
        "train", "--model p-train.jsonl", "cannot read p-train.jsonl/config.json: Not a directory", "--model model"
    ),
    in_flags("eval", "--model nowhere", "nowhere/tokenizer.json does not exist: --model must be a folder", ""),
    in_flags("train", "--data nowhere", "cannot read the problems in nowhere: No such file", "--data p-heldout.jsonl"),
    in_flags("train", "--data model", "cannot read the problems in model: Is a directory", "--data p-train.jsonl"),
    in_flags("train", "--eval-data no", "cannot read the problems in no: No such file", "--eval-data p-heldout.jsonl"),
    in_flags("eval", "--data no.jsonl", "cannot read the problems in no.jsonl: No such", "--data p-train.jsonl"),
    in_flags("eval", "--benchmark no", "--benchmark no is no folder with JSONL files", ["--benchmark", "."]),
    in_flags("eval", "--benchmark model", "--benchmark model is no folder with JSONL files", ["--benchmark", "."]),
    in_flags("train", "--out run", "run exists already: name another folder with --out", "--out run2"),
    in_flags("train", "--out p-train.jsonl", "p-train.jsonl exists already: name another folder", "--out p"),
    in_flags(
        "train",
        "--out p-train.jsonl/run",
        "cannot make the folder p-train.jsonl/run (Not a directory): name another one with --out",
        "--out p/run",
    ),
    in_flags(
        "eval", "--out /proc/out", "cannot make the folder /proc/out (No such file or directory)", "--out new/out"
    ),
    in_flags("eval", "--out model", "model exists already: name another folder with --out", "--out model2"),
    in_flags(
        "compare", "--out no/r.json", "cannot make the file no/r.json (No such file or directory)", "--out r.json"
    ),
    in_flags("compare", "--out p-train.jsonl", "cannot make the file p-train.jsonl (File exists)", ["--out="]),
    in_flags("train", "@no.args", "cannot read the arguments in 'no.args' ([Errno 2] No such file", "", {}),
    in_files(
        {"a.args": '--out "x'},
        "the arguments in 'a.args' (No closing quotation)",
        {"a.args": '--out "x"'},
        "train",
        "@a.args",
    ),
    in_files(
        {"b.args": b"--lr 1 # \xe9"},
        "the arguments in 'b.args' ('utf-8' codec",
        {"b.args": "--lr 1 # é"},
        "train",
        "@b.args",
    ),
    in_files({"c.args": "--lr 1 x"}, "unrecognized arguments: x", {"c.args": "--lr 1 # x"}, "train", "@c.args"),
]

PROBLEMS = [
    in_files(problems(GOOD + '{"prompt": '), "p-train.jsonl, line 2: not valid JSON (Expecting value", problems(GOOD)),
    in_files(problems(GOOD + "{}\n"), f"p-train.jsonl, line 2: {NO_PROMPT}", problems(GOOD + GOOD)),
    in_files(problems("[1]\n"), "p-train.jsonl, line 1: a problem is a JSON object, not list", problems(GOOD)),
    in_files(problems(""), "p-train.jsonl holds no problem with an answer: a line is {", problems("\n" + GOOD)),
    in_files(
        problems(row(prompt="1") * 3), "p-train.jsonl holds no problem with an answer", problems(row(prompt="1") + GOOD)
    ),
    in_files(
        problems(row(prompt="1", answer="####")), "holds no problem with", problems(row(prompt="1", answer="#### 2"))
    ),
    in_files(
        problems(GOOD.encode("utf-16")),
        "p-train.jsonl is not UTF-8 text ('utf-8' codec",
        problems(GOOD.encode("utf-8-sig")),
    ),
    in_files(
        problems(b"\0" + GOOD.encode()), "p-train.jsonl, line 1: not valid JSON", problems(row(prompt="\0", answer="1"))
    ),
    in_files(problems(f'{{"prompt": {NESTED}}}'), "line 1: not valid JSON (maximum recursion depth", problems(GOOD)),
    in_files(problems('{"answer": %s}' % ("9" * 5000)), "line 1: not valid JSON (Exceeds the limit", problems(GOOD)),
    in_files(problems(row(prompt=5, answer="1")), f"line 1: {NO_PROMPT}", problems(row(prompt="5", answer="1"))),
    in_files(problems(row(prompt=["1"], answer="1")), f"line 1: {NO_PROMPT}", problems(row(question="1", answer="1"))),
    in_files(
        problems(row(prompt=[{"content": "1"}], answer="1")),
        f"line 1: {NO_PROMPT}",
        problems(row(prompt=[{"role": "user", "content": "1"}], answer="1")),
    ),
    in_files(
        problems(row(prompt="1", answer=True)),
        "line 1: `answer` is True, an answer",
        problems(row(prompt="1", answer=1)),
    ),
    in_files(
        problems(row(prompt="1", label=["1", "2"])),
        "line 1: `label` is ['1', '2'], an",
        problems(row(prompt="1", label=["1"])),
    ),
    in_files(
        problems('{"prompt": "1", "answer": 1e400}'),
        "line 1: `answer` is inf, an answer is text",
        problems(row(prompt="1", answer=1e300)),
    ),
    in_files(
        problems('{"prompt": "1", "answer": NaN}'),
        "line 1: `answer` is nan, an answer is text",
        problems(row(prompt="1", answer="NaN")),
    ),
    in_files(
        problems(row(prompt="1", solution={"a": r"\boxed{1}"})),
        "line 1: `solution` is {'a': '\\\\boxed{1}'}, it must be text",
        problems(row(prompt="1", solution=r"\boxed{1}")),
    ),
    in_files(
        problems(row(prompt="\ud800", answer="1")),
        "line 1: half a character (a lone",
        problems(row(prompt="😀", answer="1")),
    ),
    in_files(
        {"e.jsonl": GOOD + "x"},
        "e.jsonl, line 2: not valid JSON (Expecting",
        {"e.jsonl": GOOD},
        "train",
        "--eval-data e.jsonl",
    ),
    in_files(
        {"e.jsonl": GOOD[1:]},
        "e.jsonl, line 1: not valid JSON (Extra data",
        {"e.jsonl": GOOD},
        "eval",
        "--data e.jsonl",
    ),
    in_flags(
        "train",
        "--max-prompt-tokens 3",
        "every prompt is longer than --max-prompt-tokens 3: raise it",
        "--max-prompt-tokens 4",
    ),
    in_files(
        problems(row(prompt="<|im_start|>user", answer="1")),
        "a prompt is laid out as a chat already: use --template none",
        problems(row(prompt="user", answer="1")),
        options="--template boxed",
    ),
    in_files(
        problems(row(prompt="b", answer="1"))
        | tokenizer(model={"type": "BPE", "vocab": {"a": 0, "<end>": 1}, "merges": []}),
        "the prompt 'b' has no tokens: remove it from the problems",
        problems(row(prompt="a", answer="1"))
        | tokenizer(model={"type": "BPE", "vocab": {"a": 0, "<end>": 1}, "merges": []}),
    ),
]

MODELS = [
    in_files({"model/config.json": DELETED}, "model/config.json does not exist", {}),
    in_files({"model/config.json": "{"}, "model/config.json is not valid JSON (Expecting property name", {}),
    in_files({"model/config.json": "[]"}, "model/config.json is not a JSON object", {}),
    in_files({"model/config.json": f'{{"a": {NESTED}}}'}, "model/config.json is not valid JSON (maximum recursion", {}),
    in_files({"model/config.json": FOLDER}, "cannot read model/config.json: Is a directory", {}),
    in_files(config(model_type=DELETED), "config.json has no 'model_type': is this a complete Hugging Face model", {}),
    in_files(
        config(model_type="gpt2"),
        "model: config.json: model_type = 'gpt2' is none that model.py has: llama",
        config(model_type="llama"),
    ),
    in_files(
        config(vocab_size="17"), "config.json: vocab_size = '17' must be a whole number from 1", config(vocab_size=17)
    ),
    in_files(
        config(num_hidden_layers=10**9),
        "num_hidden_layers = 1000000000 must be a whole number from 1 to 1,000",
        config(num_hidden_layers=3),
    ),
    in_files(config(head_dim=[8]), "config.json: head_dim = [8] must be a whole number from 1 to", config(head_dim=8)),
    in_files(
        config(head_dim=7),
        "config.json: head_dim = 7 must be even and above 0: RoPE turns pairs",
        config(head_dim=None),
    ),
    in_files(
        config(num_key_value_heads=3),
        "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        config(num_key_value_heads=4),
    ),
    in_files(
        config(rms_norm_eps=True),
        "config.json: rms_norm_eps = True must be a positive number",
        config(rms_norm_eps=1e-6),
    ),
    in_files(config(rope_theta=10**400), "config.json: rope_theta = 1000000", config(rope_theta=10**6)),
    in_files(
        config(rope_scaling={"rope_type": "linear", "factor": 0}),
        "config.json: factor = 0 must be a positive number",
        config(rope_scaling={"rope_type": "linear", "factor": 1}),
    ),
    in_files(
        config(rope_scaling=[2]), "rope_parameters and rope_scaling must be objects, and equal", config(rope_scaling={})
    ),
    in_files(
        config(rope_scaling={"rope_type": ["linear"]}),
        "config.json: rope_type = ['linear'] is not implemented",
        config(rope_scaling={"rope_type": "default"}),
    ),
    in_files(
        config(rope_scaling=LLAMA3 | {"high_freq_factor": 1}),
        "config.json: low_freq_factor must be below high_freq_factor",
        config(rope_scaling=LLAMA3 | {"high_freq_factor": 4}),
    ),
    in_files(
        config(partial_rotary_factor=0.5),
        "config.json: partial_rotary_factor other than 1 is not",
        config(partial_rotary_factor=1),
    ),
    in_files(
        config(rope_parameters={"full_attention": {"rope_theta": 1}}),
        "config.json: rope_parameters of 'full_attention' alone",
        config(rope_parameters={"rope_theta": 1}),
    ),
    in_files(
        config(sliding_window=4),
        "config.json: use_sliding_window or sliding_window is not implemented",
        config(sliding_window=None),
    ),
    in_files(
        config(layer_types=5),
        "config.json: layer_types = 5 is not implemented in model.py",
        config(layer_types=["full_attention"] * 2),
    ),
    in_files(
        config(tie_word_embeddings="false"),
        "config.json: tie_word_embeddings = 'false' is not implemented",
        config(tie_word_embeddings=False),
    ),
    # The tokenizer, and the token that ends a response
    in_files(
        {"model/tokenizer.json": DELETED}, "model/tokenizer.json does not exist: --model must be a folder with a", {}
    ),
    in_files({"model/tokenizer.json": "{"}, "model/tokenizer.json is not a tokenizer (EOF while parsing", {}),
    in_files(
        tokenizer(model={"type": "Magic"}),
        "model/tokenizer.json is not a tokenizer (data did not match",
        tokenizer(model=WORDS),
    ),
    in_files(
        tokenizer(model=WORDS | {"vocab": WORDS["vocab"] | {"0": 17}}),
        "token id 17 in a prompt, but the model's vocabulary has 17: its tokenizer.json belongs to another model",
        tokenizer(model=WORDS | {"vocab": WORDS["vocab"] | {"0": 16}}),
    ),
    in_files(
        config(eos_token_id=DELETED),
        "model: no eos_token_id or eos_token in generation_config.json, config",
        config(eos_token_id=[1, 2]),
    ),
    in_files(
        config(eos_token_id=99),
        "model/config.json: eos_token_id = 99 is no token, or list of tokens, of",
        config(eos_token_id=16),
    ),
    in_files(
        config(eos_token_id=True), "model/config.json: eos_token_id = True is no token, or list", config(eos_token_id=1)
    ),
    in_files(
        config(eos_token_id=16, vocab_size=16) | problems(row(prompt="1", answer="1")),
        "eos_token_id = 16 is beyond vocab_size = 16 of config.json",
        config(eos_token_id=16),
    ),
    in_files(
        {"model/generation_config.json": '{"eos_token_id": 17}'},
        "model/generation_config.json: eos_token_id = 17 is no token",
        {"model/generation_config.json": '{"eos_token_id": 16}'},
    ),
    in_files(
        config(eos_token_id=DELETED) | {"model/tokenizer_config.json": '{"eos_token": 1}'},
        "model/tokenizer_config.json: eos_token = 1 is no token",
        config(eos_token_id=DELETED) | {"model/tokenizer_config.json": '{"eos_token": {"content": "1"}}'},
    ),
]

WEIGHTS = [
    in_files(
        {"model/model.safetensors": DELETED},
        "model/model.safetensors does not exist: the weights of model are incomplete",
        {},
    ),
    in_files(
        {"model/model.safetensors": FOLDER},
        "model/model.safetensors is not a complete safetensors file (No such device",
        {},
    ),
    in_files(
        {"model/model.safetensors": b"version https://git-lfs"},
        "model/model.safetensors is not a complete safetensors",
        {},
    ),
    in_files(
        weights(lambda t: t.update({NORM: torch.ones(31)})),
        f"{NORM} has shape (31,), config.json asks for (32,)",
        weights(lambda t: t.update({NORM: torch.ones(32)})),
    ),
    in_files(
        weights(lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
        f"{NORM} has dtype torch.int8; quantized weights",
        weights(lambda t: t.update({NORM: t[NORM].half()})),
    ),
    in_files(
        weights(lambda t: t[NORM].fill_(torch.nan)),
        f"{NORM} holds values that are not finite in torch.float32",
        weights(lambda t: t[NORM].fill_(0)),
    ),
    in_files(
        weights(lambda t: t.update({NORM: torch.full((32,), 1e39, dtype=torch.float64)})),
        f"{NORM} holds values that are not",
        weights(lambda t: t[NORM].fill_(1e38)),
    ),
    in_files(
        weights(lambda t: t.update(extra=torch.ones(1))),
        "model/model.safetensors: unexpected tensor 'extra'",
        weights(lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(1)})),
    ),
    in_files(
        weights(lambda t: t.update({"norm.weight": torch.ones(32)})),
        "model/model.safetensors: second tensor 'norm.weight'",
        weights(lambda t: t.update({"norm.weight": t.pop(NORM)})),
    ),
    in_files(weights(lambda t: t.pop(NORM)), "model: 1 tensors are missing, the first is 'norm.weight'", {}),
    in_files(
        config(num_hidden_layers=3),
        "model: 9 tensors are missing, the first is 'layers.2.input",
        config(num_hidden_layers=2),
    ),
    in_files(
        config(tie_word_embeddings=True),
        "model: lm_head.weight differs from the embedding, but config.json ties them",
        config(tie_word_embeddings=None),
    ),
    in_files(index(), "model/model.safetensors.index.json has no weight_map of tensors to files", {}),
    in_files(index(weight_map={NORM: 5}), "weight_map names 5, which is not a file of this folder", {}),
    in_files(
        index(weight_map={NORM: "two.safetensors"}),
        "model/two.safetensors does not exist: the weights of model are",
        {},
    ),
]

RUNS = [
    in_flags("train", "--resume nowhere", "nowhere/config.json does not exist", "--resume run"),
    in_flags(
        "train",
        "--resume model",
        "model/config.json has no 'aggregation': name a run folder of train.py",
        "--resume run",
    ),
    in_flags(
        "resume",
        "--lr 0.5",
        "--resume run cannot change the experiment (--lr 0.01 -> 0.5): start a new run",
        "--lr 0.01",
    ),
    in_files({"run/config.json": "{"}, "run/config.json is not valid JSON (Expecting property name", {}, "resume"),
    in_files(stored(lr=DELETED), "run/config.json has no 'lr': name a run folder", stored(lr=0.01), "resume"),
    in_files(stored(learning_rate=1), "run/config.json has an unknown 'learning_rate': name a", {}, "resume"),
    in_files(
        stored(steps=True),
        "run/config.json cannot be resumed: --steps must be int, not True",
        stored(steps=1),
        "resume",
    ),
    in_files(
        stored(lr="1"), "run/config.json cannot be resumed: --lr must be float, not '1'", stored(kl_coef=0), "resume"
    ),
    in_files(stored(eval_data=5), "run/config.json cannot be resumed: --eval-data must be str, not 5", {}, "resume"),
    in_files(
        stored(compressor="x"),
        "run/config.json cannot be resumed: --compressor must be one of full, streaming",
        {},
        "resume",
    ),
    in_files(
        stored(seed=1),
        "run/checkpoints/step-000001 belongs to another run than run/config.json: move it away",
        {},
        "resume",
    ),
    in_files(
        {"run/checkpoints/step-000001/training.json": {"step": 2}}, "step-000001 belongs to another run", {}, "resume"
    ),
    in_files(
        {"run/evals.jsonl": '{"step": 9}\n', "run/samples.jsonl": "x\n"},
        "run/samples.jsonl, line 1 is damaged: the run cannot",
        {"run/samples.jsonl": '{"step": 1}\nx'},
        "resume",
    ),
    in_files(
        {"run/evals.jsonl": f'{{"step": {NESTED}}}\n'},
        "run/evals.jsonl, line 1 is damaged: the run cannot",
        {"run/evals.jsonl": "\n"[1:]},
        "resume",
    ),
]

CASES = [*OPTIONS, *PROBLEMS, *MODELS, *RUNS]


@pytest.fixture(scope="module")
def with_run(files, tmp_path_factory) -> Path:
    """The tiny model and problems, and a finished run of one step whose optimizer has moved."""
    folder = tmp_path_factory.mktemp("bad") / "files"
    shutil.copytree(files, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train, "is_correct", lambda response, answer: sum(map(ord, response)) % 2 == 0)
        train.main([*TRAIN.split(), *["--out", "run", "--prompts", "4", "--group-size", "4", "--lr", "0.01"]])
    return folder


@pytest.fixture
def place(with_run, tmp_path, monkeypatch) -> Path:
    """A copy of it that may be spoilt; relative paths start there."""
    shutil.copytree(with_run, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def put(files: Files) -> None:
    """Change files: whole contents, keys of a JSON file, tensors, or no file any more."""
    for name, content in files.items():
        path = Path(name)
        if isinstance(content, dict):
            keys = json.loads(path.read_text()) | content
            path.write_text(json.dumps({key: value for key, value in keys.items() if value is not DELETED}))
        elif callable(content):
            tensors = load_file(path)
            content(tensors)
            save_file(tensors, path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
            if content is FOLDER:
                path.mkdir()


def arguments(program: str, options: str | list[str]) -> list[str]:
    base = PROGRAMS["resume" if "--resume" in options else program][1].split()
    return [*base, *(options.split() if isinstance(options, str) else options)]


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(case: Case, place: Path, capsys) -> None:
    """Exit code 2; one line on stderr; every file as it was."""
    put(case.bad_files)
    before = contents(place)
    with pytest.raises(SystemExit) as stop:
        PROGRAMS[case.program][0](arguments(case.program, case.bad))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"(train|eval|experiments/compressors)\.py: error: ", line) and case.sentence in line
    assert contents(place) == before


def names(cases: list[Case]) -> dict:
    return {"argvalues": cases, "ids": [case.sentence[:60] for case in cases]}


@pytest.mark.parametrize("case", **names(CASES + WEIGHTS))
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_written(case, place, capsys):
    """It names the file, line or flag, and nothing else happens."""
    refused(case, place, capsys)


@pytest.mark.parametrize("case", **names(CASES))
def test_its_nearest_good_neighbour_is_accepted(case, place):
    """train.py up to its plan, but a resumed run and the other programs whole."""
    put(case.good_files)
    dry = ["--dry-run"] if case.program == "train" and "--resume" not in case.good else []
    PROGRAMS[case.program][0](arguments(case.program, case.good) + dry)


@pytest.mark.parametrize("case", **names(WEIGHTS))
def test_the_nearest_good_weights_are_loaded(case, place):
    """The dry run loads none, so here they are read directly."""
    put(case.good_files)
    assert all(parameter.isfinite().all() for parameter in load_model("model").parameters())


def test_the_table_holds_many_different_sentences():
    """At least sixty, and no row stands for another."""
    assert len({case.sentence for case in CASES + WEIGHTS}) >= 150


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("optimizer.safetensors", DELETED, "is not this run's optimizer state"),
        ("optimizer.safetensors", b"x", "is not this run's optimizer state"),
        ("optimizer.safetensors", lambda t: t.update({"norm.weight.exp_avg": torch.ones(3)}), "has shape (3,)"),
        ("optimizer.safetensors", lambda t: t["norm.weight.exp_avg"].fill_(torch.nan), "values that AdamW never has"),
        ("optimizer.safetensors", lambda t: t["norm.weight.step"].fill_(-1), "values that AdamW never has"),
        (
            "optimizer.safetensors",
            lambda t: t.pop("norm.weight.step"),
            "other entries than step, exp_avg and exp_avg_sq",
        ),
        ("model.safetensors", b"x", "is not a complete safetensors file"),
        ("training.json", f'{{"a": {NESTED}}}', "is not valid JSON"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(file, content, sentence, place, capsys):
    """Here that is the start: the step is done again."""
    put({f"run/checkpoints/step-000001/{file}": content})
    train.main(["--resume", "run"])
    said = capsys.readouterr().out
    assert f"run/checkpoints/step-000001/{file} " in said and sentence in said and "going back to /" in said


def test_samples_can_be_printed_where_the_terminal_knows_ascii_only(place, tmp_path, monkeypatch):
    """A character that it lacks is escaped; without that the run would end at the first sample."""
    put(problems(row(prompt="¿1?", answer="1")))
    with (tmp_path / "terminal").open("w", encoding="ascii") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        train.main([*TRAIN.split(), "--sample-every", "1"])
    assert r"\xbf1?" in (tmp_path / "terminal").read_text()


@pytest.mark.parametrize("program", ["train", "eval", "compare"])
def test_log_probs_that_are_not_finite_end_the_program_in_a_sentence(program, place, capsys, monkeypatch):
    """Weights can overflow although each of them is finite: they did with a learning rate of 1e308."""
    main, options = PROGRAMS[program]
    monkeypatch.setattr("model.Decoder.head", lambda self, hidden: torch.full((*hidden.shape[:-1], 17), torch.nan))
    with pytest.raises(SystemExit) as stop:
        main(options.split())
    assert stop.value.code == 2
    assert "the model's log-probs are not finite" in capsys.readouterr().err.splitlines()[-1]
