"""`python eval.py`: accuracy under dense and under compressed decoding.

python eval.py --model assets/model --data assets/long-heldout.jsonl --compressor snapkv --budget 512
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

import ranks
import runs
import task
from answers import EXTRACTORS, extract_answer, is_correct
from kvcache import BITS, COMPRESSORS, check_settings
from model import Decoder, ModelConfig, load_config, load_model
from rollout import rollout_shared
from runs import megabytes, option, table
from task import ASSETS, Prompt, Reward, load_problems

__all__ = ["evaluate", "extract_answer", "is_correct", "load_problems"]  # answers.py, task.py

# From the paper's released evaluation: temperature, nucleus, the last number where there is no box, and 32 samples of
# the two small sets, one elsewhere. It asks in plain text and stops at 8,192 or 16,384 tokens: the chat template, the
# request for a box, and 4,096 tokens as in training, are ours.
PAPER = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 4096, "extract": "last-number"}
PAPER_SAMPLES = {"aime24": 32, "amc23": 32}


@dataclass(frozen=True)
class Shared:
    """The options that train.py and eval.py share, beside `compressor`."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder to start from")
    template: str = option("auto", task.TEMPLATE)
    max_prompt_tokens: int = option(0, task.MAX_PROMPT, at_least=0)
    max_new_tokens: int = option(1000, "longest response; a longer one is graded as it stands, and counted", at_least=1)
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    kv_bits: int = option(0, "of a cached key or value: 8, 4 or 2; 0 keeps them as they come", choices=BITS)
    seed: int = option(0, "of everything random", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")

    def __post_init__(self):
        runs.check_options(self)
        for name in names(self.compressor):
            check_settings(name, self.budget, self.buffer, self.window, self.kv_bits)

    def some(self, *names: str) -> dict:
        """The settings of these names."""
        return {name: getattr(self, name) for name in names}

    @property
    def cache(self) -> dict:
        """The settings of the sampler's cache."""
        return self.some("compressor", "budget", "buffer", "window", "kv_bits")


@dataclass(frozen=True)
class EvalConfig(Shared):
    """What `python eval.py` measures."""

    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    benchmark: str = option("", "a folder: every JSONL in it, sampled as the paper does where no options say otherwise")
    limit: int = option(0, "only the first so many problems; 0 takes all", at_least=0)
    compressor: str = option("snapkv", f"KV policies of the sparse rows, by commas: {', '.join(COMPRESSORS)}")
    samples: int = option(1, "responses to each problem; above 1: mean@k (accuracy) and unbiased pass@k", at_least=1)
    temperature: float = option(0.0, "0 is greedy; the paper evaluates at 0.8", at_least=0, below=math.inf)
    top_p: float = option(1.0, "nucleus; the paper evaluates at 0.95", at_least=1e-6, at_most=1)
    extract: str = option("boxed", "last-number takes the last number of a text without a box", choices=EXTRACTORS)
    rows: int = option(128, "responses sampled at a time (at least a problem's): memory against speed", at_least=1)
    reward: str = option("", "FILE.py:NAME, a function (response, answer) -> float, reported beside accuracy")
    out: str = option("", "folder for the responses and results; default runs/eval-<time>")
    dtype: str = option("float32", "of weights and cache", choices=("float32", "bfloat16", "float64"))

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"--temperature must be 0 (greedy) or at least 0.001, not {self.temperature}")
        if self.samples > 1 and self.temperature == 0 and not self.benchmark:  # which brings its own temperature
            raise ValueError(f"--samples {self.samples} greedy responses would all be the same: set --temperature")


@dataclass(frozen=True)
class Inputs:
    """What is read before any weights."""

    model: ModelConfig
    tokenizer: Tokenizer
    eos_ids: list[int]  # each ends a response
    prompts: dict[str, list[Prompt]]


def read_inputs(config: Shared, files: dict[str, tuple[str, int]]) -> Inputs:
    """Read and check all but the weights, write nothing. Raises ValueError or OSError in a sentence for the user.

    files: {name: (problem file or "", how many of its problems are asked; 0: all)}.
    """
    model, (tokenizer, eos_ids) = load_config(config.model), task.load_tokenizer(config.model)
    how = {"template": task.load_template(config.model, config.template), "longest": config.max_prompt_tokens}
    prompts = {
        name: task.prepare(load_problems(file), tokenizer, model.vocab_size, **how)[: limit or None] if file else []
        for name, (file, limit) in files.items()
    }
    every = [prompt for asked in prompts.values() for prompt in asked]
    longest = max(len(prompt.ids) for prompt in every) + config.max_new_tokens
    if longest > (context := model.raw.get("max_position_embeddings") or longest):
        print(
            f"sequences may reach {longest:,} tokens, the model's max_position_embeddings are {context:,}: lower "
            "--max-new-tokens or --max-prompt-tokens"
        )
    return Inputs(model, tokenizer, task.all_ends(eos_ids, every), prompts)


def names(compressors: str) -> list[str]:
    """The KV policies in a text with commas between them."""
    return [name.strip() for name in compressors.split(",")]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, from `correct` right of `samples` (Codex, 2107.03374)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    eos_ids: list[int],
    prompts: list[Prompt],
    *,
    samples: int = 1,
    seed: int = 0,
    extract: str = "boxed",
    reward: Reward | None = None,
    **settings,
) -> tuple[dict, list[dict]]:
    """Accuracy of `samples` responses to each prompt: (summary, one record a response).

    extract: how the answer is found, one of answers.EXTRACTORS. reward: its mean is reported too. settings: those of
    `rollout_shared`. The standard error is over problems, None for a single one.
    """
    ids, generator = [prompt.ids for prompt in prompts], torch.Generator().manual_seed(seed)
    r = rollout_shared(model, ids, group_size=samples, eos_ids=eos_ids, generator=generator, **settings)
    records, find = [], EXTRACTORS[extract]
    for i in range(len(r.tokens)):
        prompt, text = prompts[i // samples], task.response_text(tokenizer, r.response(i), eos_ids)
        record = {"problem": i // samples, "prompt": prompt.text, "response": text, "extracted": find(text)}
        record |= {"answer": prompt.answer, "correct": is_correct(text, prompt.answer, find)}
        record |= {"reward": reward(text, prompt.answer)} if reward else {}
        records.append(record | {"tokens": int(r.response_lengths[i]), "finished": bool(r.finished[i])})
    right = torch.tensor([record["correct"] for record in records]).view(-1, samples)  # (problems, samples)
    means = right.double().mean(1)  # (problems,)
    passes = sorted({2**n for n in range(1, samples.bit_length())} | {samples} - {1})
    return {
        "accuracy": float(means.mean()),
        "stderr": float(means.std() / len(means) ** 0.5) if len(means) > 1 else None,
        "problems": len(prompts),
        "samples": samples,
        "boxed": sum(extract_answer(record["response"]) is not None for record in records) / len(records),
        **r.statistics,
        "seconds": r.seconds,
        **({"reward": sum(record["reward"] for record in records) / len(records)} if reward else {}),
        **{f"pass@{k}": sum(pass_at_k(samples, int(n), k) for n in right.sum(1)) / len(right) for k in passes},
    }, records


def dense_and_sparse(model, tokenizer, eos_ids, prompts, *, compressor: str, kv_bits: int = 0, **settings) -> dict:
    """`evaluate` with dense decoding and with each compressor (names, by commas): {name: (summary, records)}."""
    modes = {"dense": {"compressor": "full"}}
    for name in names(compressor):
        evicts, bits = name != "full", f"-{kv_bits}-bit" if kv_bits else ""
        if evicts or kv_bits:
            mode = f"{name}-{settings['budget']}{bits}" if evicts else f"full{bits}"
            modes[mode] = {"compressor": name, "kv_bits": kv_bits}
    return {name: evaluate(model, tokenizer, eos_ids, prompts, **mode, **settings) for name, mode in modes.items()}


# -------------------------------------------------------------------------------------------- the command line


def benchmarks(config: EvalConfig, given: dict) -> dict[str, EvalConfig]:
    """What to evaluate, by name: the one file of --data, or each of the folder --benchmark with PAPER's settings."""
    if not config.benchmark:
        return {Path(config.data).stem: config}
    sets = {}
    for file in sorted(Path(config.benchmark).glob("*.jsonl")):
        samples = 1 if given.get("temperature") == 0 else PAPER_SAMPLES.get(file.stem, 1)
        paper = PAPER | {"samples": samples, "data": str(file)}
        chosen = {name: value for name, value in paper.items() if name not in given}
        sets[file.stem] = replace(config, benchmark="", **chosen)
    if not sets:
        raise ValueError(f"--benchmark {config.benchmark} is no folder with JSONL files")
    return sets


def details(results: dict[str, dict]) -> str:
    """The table of one problem set: a line per decoding mode."""
    extra = [name for name in results["dense"] if name == "reward" or name.startswith("pass@")]
    columns = ["accuracy", "stderr", *extra, "boxed", "truncated", "response_length", "kv_saved"]
    lines = [
        [name, *map(s.get, columns), megabytes(s["cache_bytes"]), round(s["tokens_per_second"])]
        for name, s in results.items()
    ]
    dense = [name for name, s in results.items() if not name.startswith(("dense", "full")) and s["kv_saved"] == 0]
    note = f"\nnothing was evicted by {', '.join(dense)}: no row came to hold budget + buffer keys" if dense else ""
    return table(["decoding", *columns, "cache", "tokens/s"], lines) + note


def overview(results: dict[str, dict[str, dict]]) -> str:
    """The paper's table: accuracy by decoding mode (lines) and benchmark (columns), and the average."""
    lines = []
    for mode in next(iter(results.values())):
        accuracies = [by_mode[mode]["accuracy"] for by_mode in results.values()]
        lines.append([mode, *accuracies, sum(accuracies) / len(accuracies)])
    return table(["accuracy", *results, "average"], lines)


@ranks.joined()
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = runs.parse_config(EvalConfig, argv, "eval.py", "Accuracy under dense and compressed decoding.")
    with runs.one_sentence("eval.py"):
        device = runs.pick_device(config.device, config.threads)
        sets = benchmarks(config, given)
        inputs = read_inputs(next(iter(sets.values())), {name: (c.data, c.limit) for name, c in sets.items()})
        reward = task.load_reward(config.reward) if config.reward else None
        model = load_model(config.model, getattr(torch, config.dtype), device)
        folder = ranks.first(lambda: Path(config.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}"))
        runs.new_folder(folder)
    results, grades = {}, reward and ranks.rank() == 0
    graded = task.held_to_its_promise(reward, config.reward, folder) if grades else None
    with runs.one_sentence("eval.py", (OSError, FloatingPointError, task.RewardError)):
        for name, c in sets.items():
            how = c.some("samples", "seed", "rows", "max_new_tokens", "temperature", "top_p", "extract") | c.cache
            given = model, inputs.tokenizer, inputs.eos_ids, inputs.prompts[name]
            found = dense_and_sparse(*given, reward=graded, progress=True, **how)
            results[name] = {mode: summary for mode, (summary, _) in found.items()}
            for mode, (_, records) in found.items():
                runs.append(folder / f"responses-{name}-{mode}.jsonl", records)
            everything = {"config": {key: asdict(c) for key, c in sets.items()}, "results": results}
            runs.write_json(folder / "results.json", everything)
            print(f"{c.model} on {len(inputs.prompts[name])} problems of {c.data}, {c.samples} response(s) each")
            print(details(results[name]), flush=True)
    if config.benchmark:
        print(overview(results))
    print(f"responses and results are in {folder}/")


if __name__ == "__main__":
    main()
