"""Bad input ends in one sentence that names the file, line or flag and the remedy; its nearest good neighbour is taken.

One case for each kind of fault: a sentence, the bad input that it answers, and the nearest good input. All go through
the real command lines, in a folder that holds `model/`, `p-train.jsonl`, `p-heldout.jsonl` and a finished `run/`. What
config.json and weights may be is in test_model.py, messages and templates in test_prompts.py, damaged checkpoints in
test_faults.py, a run whose inputs changed in test_resume.py.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from runs_of_train import contents

import eval as evaluation
import train
from task import ASSETS

SMALL = "--budget 8 --buffer 4 --window 2 --max-new-tokens 6"
TRAIN = f"--model model --data p-train.jsonl --eval-data= --out out --prompts 2 --group-size 2 --steps 1 {SMALL}"
EVAL = f"--model model --data p-heldout.jsonl --out out --limit 2 {SMALL}"
COMPARE = "--model model --data p-heldout.jsonl --out out.jsonl --limit 2 --budgets 8 --buffer 4 --window 2"
compare = runpy.run_path(str(ASSETS.parent / "experiments" / "caches.py"))["main"]
PROGRAMS = {
    "train": (train.main, TRAIN),
    "eval": (evaluation.main, EVAL),
    "compare": (compare, COMPARE + " --max-new-tokens 6"),
    "resume": (train.main, "--resume run"),
}

DELETED = object()  # stands for no such file, or no such key
Files = dict[str, object]  # path: its whole content (text, bytes), the changed keys of its JSON (dict), or DELETED


@dataclass(frozen=True)
class Case:
    """Input that is refused with this sentence, and its neighbour that is not: options, and files that differ."""

    sentence: str
    bad: str = ""
    good: str = ""
    bad_files: Files = field(default_factory=dict)
    good_files: Files = field(default_factory=dict)
    program: str = "train"


def flags(bad: str, sentence: str, good: str, program: str = "train") -> Case:
    """A case of options alone."""
    return Case(sentence, bad, good, program=program)


def file(name: str, bad, sentence: str, good=None, program: str = "train", options: str = "") -> Case:
    """A case of what a file holds; by default the good neighbour is the file as it is."""
    return Case(sentence, options, options, {name: bad}, {} if good is None else {name: good}, program)


def row(**keys) -> str:
    """A line of JSONL."""
    return json.dumps(keys) + "\n"


def problems(bad: str | bytes, sentence: str, good: str | bytes) -> Case:
    return file("p-train.jsonl", bad, sentence, good)


GOOD = row(prompt="1+1=", answer="2")
NESTED = "[" * 100_000 + "]" * 100_000
WORDS = {"type": "WordLevel", "vocab": {"?": 0, "<end>": 1, "1": 2, "+": 3, "=": 4, "0": 5}, "unk_token": "?"}
ANOTHER = [{"model": WORDS | {"vocab": WORDS["vocab"] | {"0": number}}} for number in (17, 16)]  # the model has 17
LETTER = {"model": {"type": "BPE", "vocab": {"a": 0, "<end>": 1}, "merges": []}}
NO_EOS = "eos_token_id, or eos_token of tokenizer_config.json, is"

OPTIONS = [
    # Numbers
    flags("--group-size 1", "--group-size must be at least 2 and at most 1,000,000, not 1", "--group-size 2"),
    flags("--temperature nan", "--temperature must be at least 0.001 and finite, not nan", "--temperature 1e-3"),
    flags(f"--budget {10**30}", "--budget must be at most 1,000,000, not 1000", "--budget 1000000"),
    flags("--lr big", "argument --lr: invalid float value: 'big'", "--lr 1"),
    flags("--budgets 8,", "--budgets must be numbers with commas between, not '8,'", "--budgets 8,9", "compare"),
    # Numbers that do not go together
    flags("--updates 3", "--updates must divide the 2 prompts of a step, not 3", "--updates 2"),
    flags("--budget 2", "budget 2 must exceed the window of 2: raise the budget", "--budget 3"),
    flags("--kv-bits 3", "argument --kv-bits: invalid choice: 3 (choose from", "--kv-bits 4"),
    flags("--learner replay --kv-bits 4", "the sampler did not: --kv-bits 0", "--learner replay --kv-bits 0"),
    flags("--samples 2", "2 greedy responses would all be the same: set", "--samples 2 --temperature 1", "eval"),
    flags("--max-prompt-tokens 3", "every prompt has over 3 tokens: raise", "--max-prompt-tokens 4"),
    # Names. Training samples from the whole distribution: it has no --top-p
    flags("--compressor zip", "argument --compressor: invalid choice: 'zip' (choose", "--compressor rkv"),
    flags("--compressor h2o,", "unknown compressor '': choose from full, streaming", "--compressor h2o,rkv", "eval"),
    flags("--bud 9 --top-p 0.9", "unrecognized arguments: --bud 9 --top-p 0.9", "--budget 9"),
    flags("--device abacus", "--device abacus is not usable here (Expected one of cpu", "--device cpu"),
    flags("--device=", "--device is not usable here (", ""),
    # Paths
    flags("--model nowhere", "nowhere/config.json does not exist", "--model model"),
    flags("--model p-train.jsonl", "cannot read p-train.jsonl/config.json: Not a directory", "--model model"),
    flags(
        "--data nowhere", "cannot read the problems in nowhere as UTF-8 text ([Errno 2] No", "--data p-heldout.jsonl"
    ),
    flags("--benchmark model", "--benchmark model is no folder with JSONL files", "--benchmark .", "eval"),
    flags("--out run", "run exists already: name another folder with --out", "--out run2"),
    flags("--out p-train.jsonl/a", "Not a directory: 'p-train.jsonl/a'", "--out p/a"),
    flags("--out p-train.jsonl", "p-train.jsonl, line 1 is no result: delete it", "--out new.jsonl", "compare"),
    flags("--out map.png", "--out must be a file NAME.jsonl, not 'map.png'", "--out map.jsonl", "compare"),
    # Arguments in a file
    file("a.args", '--lr 1\n--out "x', "No closing quotation in the line '--out \"x'", "--lr 1", options="@a.args"),
    file("a.args", "@a.args", "maximum recursion depth exceeded", "--lr 1", options="@a.args"),
]

PROBLEMS = [
    problems(GOOD + '{"prompt": ', "p-train.jsonl, line 2: not valid JSON (Expecting value", GOOD),
    problems(f'{{"prompt": {NESTED}}}', "p-train.jsonl, line 1: maximum recursion depth", GOOD),
    problems("[1]\n", "p-train.jsonl, line 1: a problem is a JSON object, not list", GOOD),
    problems(GOOD.encode("utf-16"), "problems in p-train.jsonl as UTF-8 text ('utf-8' codec", GOOD.encode("utf-8-sig")),
    problems(row(prompt="\ud800", answer="1"), "line 1: 'utf-8' codec can't encode", row(prompt="😀", answer="1")),
    problems(row(prompt="1", answer=True), "line 1: `answer` is True, an answer", row(prompt="1", answer=1)),
    file("e.jsonl", "x", "e.jsonl, line 1: not valid JSON", GOOD, options="--eval-data e.jsonl"),
    Case(
        "p-train.jsonl, line 1: the prompt 'b' has no tokens: remove it",
        bad_files={"p-train.jsonl": row(prompt="b", answer="1"), "model/tokenizer.json": LETTER},
        good_files={"p-train.jsonl": row(prompt="a", answer="1"), "model/tokenizer.json": LETTER},
    ),
]

MODELS = [
    file("model/config.json", "{", "model/config.json is not valid JSON (Expecting property name"),
    file("model/config.json", {"model_type": DELETED}, "config.json: model_type = None is not implemented in model.py"),
    file("model/model.safetensors", DELETED, "model/model.safetensors does not exist: the weights of model are"),
    # The tokenizer, its template, and the token that ends a response
    file("model/tokenizer.json", "{", "model/tokenizer.json is no tokenizer (EOF while parsing"),
    file("model/tokenizer.json", ANOTHER[0], "line 1: token id 17, but the model has 17: is tokenizer", ANOTHER[1]),
    file("model/chat_template.jinja", "1\n{% if %}", "model/chat_template.jinja: line 2 of the chat template is", "1"),
    file("model/config.json", {"eos_token_id": DELETED}, f"{NO_EOS} None: it must be a", {"eos_token_id": [1, 2]}),
    file("model/config.json", {"eos_token_id": 16, "vocab_size": 16}, f"{NO_EOS} 16: it must", {"eos_token_id": 16}),
    file("model/generation_config.json", '{"eos_token_id": "<eos>"}', f"{NO_EOS} <eos>: it", '{"eos_token_id": 16}'),
]

RUNS = [
    flags("--resume nowhere", "nowhere/config.json does not exist", "--resume run"),
    flags("--resume model", "model/config.json has other settings than this version (aggregation)", "--resume run"),
    flags("--lr 0.5", "cannot change the experiment (--lr 0.01 -> 0.5): start a new run", "--lr 0.01", "resume"),
    file("run/config.json", {"learning_rate": 1}, "other settings than this version (learning_rate)", {}, "resume"),
    file("run/config.json", {"lr": "1"}, "--lr must be float, not '1'", {"kl_coef": 0}, "resume"),
    file("run/samples.jsonl", "x\n", "run/samples.jsonl is damaged, some line is no", '{"step": 1}\nx', "resume"),
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
    """Change files: whole contents, keys of a JSON file, or no file any more."""
    for path, content in ((Path(name), content) for name, content in files.items()):
        if content is DELETED:
            path.unlink()
        elif isinstance(content, dict):
            keys = json.loads(path.read_text()) | content
            path.write_text(json.dumps({key: value for key, value in keys.items() if value is not DELETED}))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def arguments(program: str, options: str) -> list[str]:
    return [*PROGRAMS["resume" if "--resume" in options else program][1].split(), *options.split()]


NAMES = [case.sentence[:60] for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_written(case, place, capsys):
    """Exit code 2; one line on stderr, which names the file, line or flag; every file as it was."""
    put(case.bad_files)
    before = contents(place)
    with pytest.raises(SystemExit) as stop:
        PROGRAMS[case.program][0](arguments(case.program, case.bad))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"(train|eval|experiments/caches)\.py: error: ", line) and case.sentence in line
    assert contents(place) == before


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_its_nearest_good_neighbour_is_accepted(case, place):
    """train.py up to its plan, but a resumed run and the other programs whole."""
    put(case.good_files)
    dry = ["--dry-run"] if case.program == "train" and "--resume" not in case.good else []
    PROGRAMS[case.program][0](arguments(case.program, case.good) + dry)


def test_samples_can_be_printed_where_the_terminal_knows_ascii_only(place, tmp_path, monkeypatch):
    """A character that it lacks is escaped; without that the run would end at the first sample."""
    put({"p-train.jsonl": row(prompt="¿1?", answer="1")})
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
