"""How fast it is, against what the machine could do at best. Medians; what is compared takes turns in one process.

    python benchmarks/bench.py                          # the bundled model, all parts
    python benchmarks/bench.py --model FOLDER --rows 8 --parts decode,shares

Parts (--parts):
  rollout   tokens/s of rollouts up to each of --lengths, for each policy and number of --rows
  decode    one step at the first and the last of --lengths, cuts amortised: against the bare matrix products of that
            step (by `F.linear`, and as model.py takes them), and the time to read its weights, keys and values once at
            the bandwidth measured here
  shares    where a rollout's time goes: prefill, projections, attention, compressing, MLP, head, sampling, the rest
  learner   scoring and update, tokens/s, against the same matrix products alone, and the peak memory
  memory    bytes of the cache by part, and how many rows fit into --kv-gib
  refill    4 x --rows responses of geometric lengths (mean: a fifth of the first of --lengths, its longest), so many
            rows at a time: as rows free up the next prompts take them, against one batch after the other

The rollouts are real ones of rollout.py. Their steps are timed by a clock around the model, so that one rollout gives
the speed at every length.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from memory import high_water

import rollout as sampler
from experiments.commas import numbers
from kvcache import COMPRESSORS, LayerCache, check_settings
from model import MLP, Attention, Decoder, ModelConfig, load_model, project
from rollout import cache_for, rollout, token_logprobs
from runs import check_options, megabytes, one_sentence, option, parse_config, pick_device, table, write_json
from task import ASSETS

PARTS = ("rollout", "decode", "shares", "learner", "memory", "refill")


@dataclass(frozen=True)
class Settings:
    """What is measured, on what."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    parts: str = option(",".join(PARTS), "which parts, by commas")
    compressors: str = option("full,snapkv", f"policies, by commas: {', '.join(COMPRESSORS)}")
    lengths: str = option("256,1024,4096", "tokens of a sequence, prompt included, by commas, rising")
    rows: str = option("1,8,32", "rows sampled at a time, by commas")
    prompt: int = option(64, "tokens of the prompt", at_least=1)
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive")
    learner_rows: int = option(8, "sequences of the learner's micro-batch, of the first of --lengths", at_least=1)
    kv_gib: float = option(16.0, "GiB for keys and values, to count the rows that fit", above=0, at_most=1e6)
    repeats: int = option(3, "measurements of each case", at_least=1)
    out: str = option("", "JSON file for the results")
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("float32", "of weights and cache", choices=("float32", "bfloat16"))

    def __post_init__(self):
        check_options(self)
        for name, known in (("parts", PARTS), ("compressors", COMPRESSORS)):
            if odd := [word for word in getattr(self, name).split(",") if word not in known]:
                raise ValueError(f"--{name}: {odd[0]!r} is none of {', '.join(known)}")
        lengths = [self.prompt, *numbers(self, "lengths")]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"--lengths {self.lengths} must rise, from above the --prompt of {self.prompt}")
        if 0 in numbers(self, "rows"):
            raise ValueError(f"--rows {self.rows}: at least 1 each")
        for name in self.compressors.split(","):
            check_settings(name, self.budget, self.buffer, self.window)

    @property
    def cache(self) -> dict:
        """The settings of the cache, but for the policy."""
        return {name: getattr(self, name) for name in ("budget", "buffer", "window")}


# ------------------------------------------------------------------------------------------------------- clocks


def now() -> float:
    """Seconds, after the accelerator, if there is one, has done what it was told."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    began = now()
    function()
    return now() - began


def medians(cases: dict, repeats: int) -> dict:
    """{case: median seconds}; the cases take turns, after one round that does not count."""
    found = defaultdict(list)
    for _ in range(1 + repeats):
        for case, function in cases.items():
            found[case].append(seconds(function))
    return {case: statistics.median(times[1:]) for case, times in found.items()}


class Clock:
    """A model that notes the time whenever its hidden states are asked for: at prefill and at each step."""

    def __init__(self, model: Decoder):
        self.model, self.times = model, []

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def hidden(self, *args, **kwargs) -> Tensor:
        self.times.append(now())
        return self.model.hidden(*args, **kwargs)


def steps(model: Decoder, config: Settings, rows: int, length: int, compressor: str) -> Tensor:
    """The seconds of each decode step of a rollout to `length` tokens, (steps,), sampling and cuts included."""
    clock = Clock(model)
    sample(clock, config, rows, length, compressor)
    return torch.tensor(clock.times[1:], dtype=torch.float64).diff()


def sample(model, config: Settings, rows: int, length: int, compressor: str) -> None:
    """A rollout that no EOS ends."""
    rollout(
        model,
        [[i % model.config.vocab_size for i in range(config.prompt)]],
        group_size=rows,
        max_new_tokens=length - config.prompt,
        eos_ids=[],
        compressor=compressor,
        generator=torch.Generator().manual_seed(0),
        **config.cache,
    )


# -------------------------------------------------------------------------------------------------------- parts


def measure_rollout(model: Decoder, config: Settings) -> list[dict]:
    """Tokens/s of all rows up to each length; medians over repeats, the policies taking turns."""
    lengths, names = numbers(config, "lengths"), config.compressors.split(",")
    found = []
    for rows in numbers(config, "rows"):
        turns = [{n: steps(model, config, rows, lengths[-1], n) for n in names} for _ in range(config.repeats)]
        for name in names:
            for length in lengths:
                spent = statistics.median(float(turn[name][: length - config.prompt].sum()) for turn in turns)
                speed = rows * (length - config.prompt) / spent
                found.append({"policy": name, "rows": rows, "length": length, "tokens_per_second": speed})
    return found


def linears(model: Decoder) -> list[Tensor]:
    """The weight matrices that a token passes through, the head among them."""
    matrices = [m.weight for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    return [*matrices, model.embed_tokens.weight if model.config.tied else model.lm_head.weight]


def bandwidth(device: torch.device, size: int = 2**28) -> float:
    """Bytes a second at which a large tensor is read."""
    x = torch.ones(size // 4, device=device)
    return size / medians({"sum": x.sum}, 5)["sum"]


@torch.no_grad()
def measure_decode(model: Decoder, config: Settings) -> list[dict]:
    """A step at two lengths, averaged over `buffer` steps, so that cuts are in it, against its two bounds."""
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    matrices, speed = linears(model), bandwidth(device)
    weight_bytes = sum(weight.nbytes for weight in matrices)
    found = []
    for rows in numbers(config, "rows"):
        inputs = [torch.randn(rows, 1, weight.shape[1], device=device, dtype=dtype) for weight in matrices]

        def products(product: Callable, inputs=inputs) -> None:
            for x, weight in zip(inputs, matrices, strict=True):
                product(x, weight)

        names, turns, bare = config.compressors.split(","), [], []
        ways = {"linears": partial(products, F.linear), "products": partial(products, project)}
        for _ in range(config.repeats):
            turns.append({n: steps(model, config, rows, numbers(config, "lengths")[-1], n) for n in names})
            bare.append(medians(ways, 20))
        bare = {way: statistics.median(times[way] for times in bare) for way in ways}
        for name in names:
            for length in (numbers(config, "lengths")[0], numbers(config, "lengths")[-1]):
                last = length - config.prompt - 1
                step = statistics.median(float(t[name][max(0, last - config.buffer) : last].mean()) for t in turns)
                how = {**config.cache, "dtype": dtype, "device": "meta"}
                cache = cache_for(model.config, rows, length, compressor=name, **how)
                held = min(1.0, length / cache[0].slots) * (cache.nbytes["keys"] + cache.nbytes["values"])
                reading = (weight_bytes + held) / speed
                found.append(
                    {
                        "policy": name,
                        "rows": rows,
                        "length": length,
                        "step_ms": 1e3 * step,
                        **{f"{way}_ms": 1e3 * spent for way, spent in bare.items()},
                        **{f"{way}_share": spent / step for way, spent in bare.items()},
                        "reading_share": reading / step,
                    }
                )
    return found


@contextmanager
def stopwatch(places: dict[str, tuple[object, str]]):
    """Time the calls of these functions, without those of the others inside them: yields {name: seconds}."""
    spent, open_calls = defaultdict(float), []

    def timed(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            began = now()
            open_calls.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = now() - began
                spent[name] += whole - open_calls.pop()
                if open_calls:
                    open_calls[-1] += whole

        return call

    patches = [patch.object(owner, word, timed(name, getattr(owner, word))) for name, (owner, word) in places.items()]
    for one in patches:
        one.start()
    try:
        yield spent
    finally:
        for one in patches:
            one.stop()


PLACES = {
    "prefill": (LayerCache, "_prefill"),
    "compressing": (LayerCache, "_cut"),
    "attention": (LayerCache, "_decode"),
    "projections": (Attention, "forward"),
    "MLP": (MLP, "forward"),
    "head": (Decoder, "head"),
    "sampling": (sampler, "sample"),
}


def measure_shares(model: Decoder, config: Settings) -> list[dict]:
    """Shares of a rollout's time by part; "the rest" is norms, bookkeeping and Python. The clocks cost a little too."""
    rows, length, found = numbers(config, "rows")[-1], numbers(config, "lengths")[-1], []
    for name in config.compressors.split(","):
        shares = defaultdict(list)
        for _ in range(config.repeats):
            with stopwatch(PLACES) as spent:
                whole = seconds(lambda name=name: sample(model, config, rows, length, name))
            for part in PLACES:
                shares[part].append(spent[part] / whole)
            shares["the rest"].append(1 - sum(spent.values()) / whole)
        middle = {part: statistics.median(values) for part, values in shares.items()}
        found.append({"policy": name, "rows": rows, "length": length, **middle})
    return found


def measure_learner(model: Decoder, config: Settings) -> list[dict]:
    """Tokens/s of scoring and of forward and backward, and their share of the rate of the matrix products alone.

    The peak is the whole process's until then, so it is that of these passes if no other part ran before.
    """
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    B, T = config.learner_rows, numbers(config, "lengths")[0]
    tokens = torch.randint(model.config.vocab_size, (B, T), device=device)

    def learn() -> None:
        logp, *_ = token_logprobs(model.hidden(tokens), model.head, tokens, entropy=not torch.is_grad_enabled())
        if torch.is_grad_enabled():
            logp.mean().backward()
            model.zero_grad()

    passes, peaks = {"scoring": torch.no_grad()(learn), "update": learn}, {}
    for name, function in passes.items():
        function()
        peaks[name] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else high_water()
    matrices = linears(model)
    inputs = [torch.randn(B * T, weight.shape[1], device=device, dtype=dtype) for weight in matrices]

    def products() -> None:
        for x, weight in zip(inputs, matrices, strict=True):
            y = F.linear(x, weight)
            if torch.is_grad_enabled():
                torch.mm(y, weight.detach())  # the gradient of the input
                torch.mm(y.mT, x)  # and of the weight

    cases = {
        ("scoring", "all"): passes["scoring"],
        ("scoring", "products"): torch.no_grad()(products),
        ("update", "all"): passes["update"],
        ("update", "products"): products,
    }
    spent = medians(cases, config.repeats)
    return [
        {
            "pass": name,
            "tokens": B * T,
            "tokens_per_second": B * T / spent[name, "all"],
            "products_share": spent[name, "products"] / spent[name, "all"],
            "peak_so_far": peaks[name],
        }
        for name in passes
    ]


def measure_memory(model: Decoder, config: Settings) -> list[dict]:
    """Bytes of a row's cache by part at the last length, what stands beside keys and values, and the rows that fit."""
    length, found = numbers(config, "lengths")[-1], []
    for name in config.compressors.split(","):
        how = {**config.cache, "dtype": model.embed_tokens.weight.dtype, "device": "meta"}
        parts = cache_for(model.config, 1, length, compressor=name, **how).nbytes
        held = parts["keys"] + parts["values"]
        beside = sum(parts.values()) - held
        rows = int(config.kv_gib * 2**30 // (held + beside))
        found.append(
            {"policy": name, "keys_and_values": held, "beside": beside, "beside_share": beside / held, "rows": rows}
        )
    return found


def measure_refill(model: Decoder, config: Settings) -> list[dict]:
    """Seconds of a rollout that refills rows, and of as many batches; the share of row-steps that idle in these."""
    longest, found = numbers(config, "lengths")[0] - config.prompt, []
    draw = sampler.sample

    def ends(logits: Tensor, u: Tensor, **how) -> tuple[Tensor, Tensor]:  # with token 0, at one step in longest / 5
        token, logp = draw(logits, u, **how)
        return torch.where(u < 5 / longest, 0, token.clamp(min=1)), logp

    def lengths(rows: int, batches: int, policy: str) -> Tensor:
        """Sample 4 x rows responses in so many batches: how long they are."""
        prompts = [[1 + i % (model.config.vocab_size - 1) for i in range(config.prompt)]] * (4 * rows // batches)
        how = {"group_size": 1, "max_new_tokens": longest, "eos_ids": [0], "rows": rows, "compressor": policy}
        how |= config.cache | {"generator": torch.Generator().manual_seed(0)}
        return torch.cat([rollout(model, prompts, **how).response_lengths for _ in range(batches)])

    with patch.object(sampler, "sample", ends):
        for rows, policy in product(numbers(config, "rows"), config.compressors.split(",")):
            ways = {"refilled": 1, "batches": 4}
            spent = medians({way: partial(lengths, rows, n, policy) for way, n in ways.items()}, config.repeats)
            each = lengths(rows, 1, policy).view(4, rows).double()
            case = {"policy": policy, "rows": rows, "idle": 1 - float(each.mean() / each.amax(1).mean()), **spent}
            found.append(case | {"ratio": spent["batches"] / spent["refilled"]})
    return found


def shown(record: dict) -> list[str]:
    """A line of a table: bytes in MiB, speeds in whole tokens, other floats with two digits."""
    form = dict.fromkeys(("keys_and_values", "beside", "peak_so_far"), megabytes) | {
        "tokens_per_second": "{:.0f}".format
    }
    return [
        form.get(name, "{:.2f}".format if isinstance(value, float) else str)(value) for name, value in record.items()
    ]


MEASURE = {
    "rollout": measure_rollout,
    "decode": measure_decode,
    "shares": measure_shares,
    "learner": measure_learner,
    "memory": measure_memory,
    "refill": measure_refill,
}


def describe(model: ModelConfig, config: Settings, device: torch.device) -> str:
    """What the numbers were measured on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{config.model} ({model.layers} layers, hidden {model.hidden_size}), {config.dtype}, {device.type}, {where}"


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "benchmarks/bench.py", "Speed and memory, against the machine's bounds.")
    with one_sentence("benchmarks/bench.py"):
        if config.out and not Path(config.out).parent.is_dir():
            raise ValueError(f"--out: the folder {Path(config.out).parent} does not exist")
        device = pick_device(config.device, config.threads)
        model = load_model(config.model, getattr(torch, config.dtype), device)
        results = {"settings": asdict(config), "machine": describe(model.config, config, device)}
        print(results["machine"])
        for part in config.parts.split(","):
            results[part] = MEASURE[part](model, config)
            rows = [shown(record) for record in results[part]]
            print(f"\n{part}\n" + table(list(results[part][0]), rows), flush=True)
            if config.out:
                write_json(Path(config.out), results)


if __name__ == "__main__":
    main()
