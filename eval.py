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

import runs
import task
from kvcache import COMPRESSORS, check_settings
from model import Decoder, ModelConfig, load_config, load_model
from rollout import rollout_batches
from runs import megabytes, option, table
from task import ASSETS, Prompt, Reward, extract_answer, is_correct, load_problems

__all__ = ["evaluate", "extract_answer", "is_correct", "load_problems"]  # the last three live in task.py

# From the paper's released evaluation: temperature, nucleus, the last number where there is no box, and 32 samples of
# the two small sets, one elsewhere. It asks in plain text and stops at 8,192 or 16,384 tokens: the chat template, the
# request for a box, and 4,096 tokens as in training, are ours.
PAPER = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 4096, "extract": "last-number"}
PAPER_SAMPLES = {"aime24": 32, "amc23": 32}


@dataclass(frozen=True)
class EvalConfig:
    """What `python eval.py` measures."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    benchmark: str = option("", "a folder: every JSONL in it, sampled as the paper does where no options say otherwise")
    template: str = option("auto", task.TEMPLATE)
    max_prompt_tokens: int = option(0, task.MAX_PROMPT, at_least=0)
    limit: int = option(0, "only the first so many problems; 0 takes all", at_least=0)
    compressor: str = option("snapkv", f"KV policies of the sparse rows, by commas: {', '.join(COMPRESSORS)}")
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    samples: int = option(1, "responses to each problem; above 1: mean@k (accuracy) and unbiased pass@k", at_least=1)
    temperature: float = option(0.0, "0 is greedy; the paper evaluates at 0.8", at_least=0, below=math.inf)
    top_p: float = option(1.0, "nucleus; the paper evaluates at 0.95", at_least=1e-6, at_most=1)
    extract: str = option("boxed", "last-number takes the last number of a text without a box", choices=task.EXTRACTORS)
    max_new_tokens: int = option(1000, "longest response; what is longer is graded as it stands", at_least=1)
    rows: int = option(128, "responses sampled at a time (at least a problem's): memory against speed", at_least=1)
    reward: str = option("", "FILE.py:NAME, a function (response, answer) -> float, reported beside accuracy")
    out: str = option("", "folder for the responses and results; default runs/eval-<time>")
    seed: int = option(0, "of the sampler's random numbers", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("float32", "of weights and cache", choices=("float32", "bfloat16", "float64"))

    def __post_init__(self):
        runs.check_options(self)
        for name in names(self.compressor):
            check_settings(name, self.budget, self.buffer, self.window)
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"--temperature must be 0 (greedy) or at least 0.001, not {self.temperature}")
        if self.samples > 1 and self.temperature == 0 and not self.benchmark:  # which brings its own temperature
            raise ValueError(f"--samples {self.samples} greedy responses would all be the same: set --temperature")


SETTINGS = (
    *("compressor", "budget", "buffer", "window", "samples", "seed", "rows"),
    *("max_new_tokens", "temperature", "top_p", "extract"),
)


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

    extract: how the answer is found, one of task.EXTRACTORS. reward: its mean is reported too. settings: those of
    `rollout_batches`. The standard error is over problems, None for a single one.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [prompt.ids for prompt in prompts]
    r = rollout_batches(model, ids, group_size=samples, eos_ids=eos_ids, generator=generator, **settings)
    records = []
    for i in range(len(r.tokens)):
        prompt, text = prompts[i // samples], task.response_text(tokenizer, r.response(i), eos_ids)
        records.append(
            {
                "problem": i // samples,
                "prompt": prompt.text,
                "response": text,
                "extracted": task.EXTRACTORS[extract](text),
                "answer": prompt.answer,
                "correct": is_correct(text, prompt.answer, task.EXTRACTORS[extract]),
                **({"reward": reward(text, prompt.answer)} if reward else {}),
                "tokens": int(r.response_lengths[i]),
                "finished": bool(r.finished[i]),
            }
        )
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


def dense_and_sparse(model, tokenizer, eos_ids, prompts, *, compressor: str, budget: int, **settings) -> dict:
    """`evaluate` with dense decoding and with each compressor (names, by commas): {name: (summary, records)}."""
    modes = {"dense": "full"} | {f"{name}-{budget}": name for name in names(compressor) if name != "full"}
    return {
        name: evaluate(model, tokenizer, eos_ids, prompts, compressor=mode, budget=budget, **settings)
        for name, mode in modes.items()
    }


def beyond_context(model: ModelConfig, longest: int) -> str:
    """A warning if sequences may get longer than the model was trained for; else nothing."""
    context = model.raw.get("max_position_embeddings") or longest
    if longest <= context:
        return ""
    return (
        f"sequences may reach {longest:,} tokens, the model's max_position_embeddings are {context:,}: lower "
        "--max-new-tokens or --max-prompt-tokens"
    )


# -------------------------------------------------------------------------------------------- the command line


def benchmarks(config: EvalConfig, given: dict) -> dict[str, EvalConfig]:
    """What to evaluate, by name: the one file of --data, or each of the folder --benchmark with PAPER's settings."""
    if not config.benchmark:
        return {Path(config.data).stem: config}
    files = sorted(Path(config.benchmark).glob("*.jsonl"))
    if not files:
        raise ValueError(f"--benchmark {config.benchmark} is no folder with JSONL files")
    sets = {}
    for file in files:
        samples = 1 if config.temperature == 0 and "temperature" in given else PAPER_SAMPLES.get(file.stem, 1)
        paper = PAPER | {"samples": samples, "data": str(file)}
        chosen = {name: value for name, value in paper.items() if name not in given}
        sets[file.stem] = replace(config, benchmark="", **chosen)
    return sets


def details(results: dict[str, dict]) -> str:
    """The table of one problem set: a line per decoding mode."""
    extra = [name for name in results["dense"] if name == "reward" or name.startswith("pass@")]
    columns = ["accuracy", "stderr", *extra, "boxed", "truncated", "response_length", "kv_saved"]
    lines = [
        [name, *(s[c] for c in columns), megabytes(s["cache_bytes"]), round(s["tokens_per_second"])]
        for name, s in results.items()
    ]
    dense = [name for name, s in results.items() if name != "dense" and s["kv_saved"] == 0]
    note = f"\nnothing was evicted by {', '.join(dense)}: no row came to hold budget + buffer keys" if dense else ""
    return table(["decoding", *columns, "cache", "tokens/s"], lines) + note


def overview(results: dict[str, dict[str, dict]]) -> str:
    """The paper's table: accuracy by decoding mode (lines) and benchmark (columns), and the average."""
    lines = []
    for mode in next(iter(results.values())):
        accuracies = [by_mode[mode]["accuracy"] for by_mode in results.values()]
        lines.append([mode, *accuracies, sum(accuracies) / len(accuracies)])
    return table(["accuracy", *results, "average"], lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = runs.parse_config(
        EvalConfig, argv, "eval.py", "Accuracy of a model under dense and under compressed decoding."
    )
    with runs.one_sentence("eval.py"):
        device = runs.pick_device(config.device, config.threads)
        sets = benchmarks(config, given)
        tokenizer, eos_ids = task.load_tokenizer(config.model)
        template = task.load_template(config.model, config.template)
        architecture, prompts = load_config(config.model), {}
        for name, c in sets.items():
            problems = load_problems(c.data)[: c.limit or None]
            how = {"template": template, "longest": c.max_prompt_tokens}
            prompts[name] = task.prepare(problems, tokenizer, architecture.vocab_size, **how)
            longest = max(len(prompt.ids) for prompt in prompts[name])
            if warning := beyond_context(architecture, longest + c.max_new_tokens):
                print(warning)
        reward = task.load_reward(config.reward) if config.reward else None
        model = load_model(config.model, getattr(torch, config.dtype), device)
        folder = Path(config.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
        runs.new_folder(folder)
    results, graded = {}, task.held_to_its_promise(reward, config.reward, folder) if reward else None
    with runs.one_sentence("eval.py", (OSError, MemoryError, FloatingPointError, task.RewardError)):
        for name, c in sets.items():
            settings = {key: getattr(c, key) for key in SETTINGS}
            ends = task.all_ends(eos_ids, prompts[name])
            found = dense_and_sparse(model, tokenizer, ends, prompts[name], reward=graded, progress=True, **settings)
            results[name] = {mode: summary for mode, (summary, _) in found.items()}
            for mode, (_, records) in found.items():
                runs.append(folder / f"responses-{name}-{mode}.jsonl", records)
            everything = {"config": {key: asdict(c) for key, c in sets.items()}, "results": results}
            runs.write_json(folder / "results.json", everything)
            print(f"{c.model} on {len(prompts[name])} problems of {c.data}, {c.samples} response(s) each")
            print(details(results[name]), flush=True)
    if config.benchmark:
        print(overview(results))
    print(f"responses and results are in {folder}/")


if __name__ == "__main__":
    main()
