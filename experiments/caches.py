"""A map of caches: the bytes that a row takes, against how far they move the sampler.

    python experiments/caches.py --out runs/caches.jsonl
    python experiments/caches.py --model FOLDER --data FILE --budgets 64,96,128 --forced --out runs/real.jsonl

A cell of the map is a policy at a budget, with keys and values of so many bits. One response to each problem is sampled
densely, and the cell's cache is led along them: KL(pi_old || pi_sparse) is then exact at each token (over the whole
vocabulary), and cells are compared on the same texts, without their own drift. Then the cell samples for itself, with
the same uniform numbers as every other, at temperature 1: the k3 estimate of KL(pi_sparse || pi_old), the ratio xi =
pi_old / pi_sparse, the share of responses that Sparse-RL would reject, accuracy. A KL is the mean over responses of a
response's mean over its tokens, in nats, +- its standard error. `full` is the noise floor.

Each cell is a line of --out; started again, the command goes on where it stopped, and another one on the same ground
adds its cells. It ends with a table of them all, a figure beside --out (what is below 1e-7 stands there), and what has
the smallest KL at a half and at a fifth of the dense bytes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from answers import is_correct
from eval import names as policies
from experiments.commas import numbers
from experiments.plot import draw_if_possible, pyplot
from experiments.records import arguments, check_same, made_by, mean_stderr, read_results, shown
from grpo import log_ratio, mismatch_metrics
from kvcache import COMPRESSORS, check_settings
from model import Decoder, load_model
from rollout import Rollout, cache_for, prefill, rescore, rollout_shared
from runs import append, check_options, one_sentence, option, parse_config, pick_device, table
from task import (
    ASSETS,
    TEMPLATE,
    Prompt,
    all_ends,
    load_problems,
    load_template,
    load_tokenizer,
    prepare,
    response_text,
)

PROGRAM = "experiments/caches.py"
FREE = {"compressors", "budgets", "bits", "out", "threads"}  # what may differ between the cells of one file
STYLES = {0: "-", 8: "--", 4: "-.", 2: ":"}  # of a line, by bits
SHARES = {"a half": 1 / 2, "a fifth": 1 / 5}  # of the dense bytes


@dataclass(frozen=True)
class Settings:
    """What is compared, on what."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    limit: int = option(64, "the first so many problems", at_least=2)
    compressors: str = option(",".join(COMPRESSORS), "policies, with commas between")
    budgets: str = option("128,256,512", "budgets, with commas between")
    bits: str = option("0", "bits of a cached number, with commas between; 0: not rounded")
    buffer: int = option(32, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive")
    forced: bool = option(False, "only lead the caches along the dense responses: no cell samples for itself")
    template: str = option("auto", TEMPLATE)
    max_new_tokens: int = option(1000, "longest response", at_least=1)
    epsilon: float = option(1e-4, "a response with some xi below this counts as rejected", above=0, below=1)
    out: str = option("runs/caches.jsonl", "results, a line a cell; the figure is NAME.png")
    seed: int = option(0, "of the uniform numbers", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")

    def __post_init__(self):
        check_options(self)
        if Path(self.out).suffix != ".jsonl":
            raise ValueError(f"--out must be a file NAME.jsonl, not {self.out!r}")


def planned(config: Settings) -> dict[str, dict]:
    """{name: which cell it is} of each. ValueError if the settings of one cannot work."""
    cells = {}
    for name, budget, bits in product(
        policies(config.compressors), numbers(config, "budgets"), numbers(config, "bits")
    ):
        check_settings(name, budget, config.buffer, config.window, bits)
        budget = 0 if name == "full" else budget
        words = [name, str(budget or ""), f"{bits} bits" if bits else ""]
        cells[" ".join(filter(None, words))] = {"compressor": name, "budget": budget, "bits": bits}
    return cells


def cache_settings(config: Settings, cell: dict) -> dict:
    """The cache of a cell, as KVCache takes it."""
    which = {"compressor": cell["compressor"], "budget": cell["budget"], "kv_bits": cell["bits"]}
    return which | {"buffer": config.buffer, "window": config.window}


# ------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Ground:
    """What all cells are measured on."""

    model: Decoder
    tokenizer: Tokenizer
    eos_ids: list[int]
    prompts: list[Prompt]

    @staticmethod
    def load(config: Settings) -> Ground:
        """ValueError or OSError if something cannot be used."""
        device = pick_device(config.device, config.threads)
        tokenizer, eos_ids = load_tokenizer(config.model)
        model, template = load_model(config.model, device=device), load_template(config.model, config.template)
        problems = load_problems(config.data)[: config.limit]
        prompts = prepare(problems, tokenizer, model.config.vocab_size, template=template)
        return Ground(model, tokenizer, all_ends(eos_ids, prompts), prompts)

    def sample(self, config: Settings, **cache) -> Rollout:
        """A response to each problem; the same uniform numbers for every cache."""
        ids, generator = [prompt.ids for prompt in self.prompts], torch.Generator().manual_seed(config.seed)
        how = {"group_size": 1, "rows": len(ids), "max_new_tokens": config.max_new_tokens, "eos_ids": self.eos_ids}
        return rollout_shared(self.model, ids, generator=generator, progress=True, **how, **cache)


@torch.no_grad()
def led(model: Decoder, r: Rollout, **cache) -> dict:
    """A cache led along the responses of r: the exact KL(pi_old || pi_sparse) of each, bytes, and the tokens saved."""
    (N, T), c, weight = r.tokens.shape, model.config, model.embed_tokens.weight
    prompts = [r.tokens[i, :length].tolist() for i, length in enumerate(r.prompt_lengths)]
    held = cache_for(c, N, T, seeds=torch.arange(N), dtype=weight.dtype, device=weight.device, **cache)
    tokens, row, cached = r.tokens.to(weight.device), torch.arange(N), 0.0
    dense, logits = model.hidden(tokens), prefill(model, prompts, held)  # (N, T, hidden), (N, V)
    kl = torch.zeros(r.mask.shape, dtype=torch.float64)  # (N, R)
    for t in tqdm(range(r.mask.shape[1]), desc=cache["compressor"], leave=False):
        at = (r.prompt_lengths + t).clamp(max=T - 1)  # (N,) the place of the token that the logits predict
        cached += sum(float(layer.length[r.mask[:, t]].sum()) for layer in held.layers) / c.layers
        old, sparse = (x.double().log_softmax(-1) for x in (model.head(dense[row, at - 1]), logits))  # (N, V) each
        kl[:, t] = (old.exp() * (old - sparse)).sum(-1).cpu()
        logits = model.head(model.hidden(tokens[row, at][:, None], at[:, None].to(weight.device), held))[:, 0]
    found = mean_stderr(((kl * r.mask).sum(1) / r.response_lengths).tolist())
    return {
        "bytes": sum(held.nbytes.values()) / N,
        "dense_bytes": 2 * c.layers * c.kv_heads * c.head_dim * T * weight.element_size(),
        "kv_saved": replace(r, cached_tokens=cached).statistics["kv_saved"],
        **{"kl": found["mean"], "kl_stderr": found["stderr"], "kl_each": found["values"]},
    }


def sampled(ground: Ground, r: Rollout, epsilon: float) -> dict:
    """What the responses of a cell's own sampler are."""
    logp_old, _ = rescore(ground.model, r, micro_tokens=8192)
    log_xi = log_ratio(logp_old, r.logp_sparse, r.mask)  # (N, R), 0 in the padding
    kl = mean_stderr(((log_xi.expm1() - log_xi).sum(1) / r.response_lengths).tolist())
    texts = [response_text(ground.tokenizer, r.response(i), ground.eos_ids) for i in range(len(ground.prompts))]
    right = [is_correct(text, prompt.answer) for text, prompt in zip(texts, ground.prompts, strict=True)]
    found = mismatch_metrics(logp_old, r.logp_sparse, r.mask, epsilon)
    kept = {name: found[name] for name in ("rejected", "xi_p01")}
    return {"sampler_kl": kl["mean"], "sampler_kl_stderr": kl["stderr"], **kept, "accuracy": sum(right) / len(right)}


def compared(config: Settings) -> dict:
    """The settings that all cells of a file share, with folders of the repository as seen from its root."""
    return {name: shown(x) if type(x) is str else x for name, x in asdict(config).items() if name not in FREE}


def measure(config: Settings, given: dict, cells: dict[str, dict], file: Path) -> None:
    """Add a line to the file for each of these cells."""
    with one_sentence(PROGRAM):
        ground = Ground.load(config)
        file.parent.mkdir(parents=True, exist_ok=True)
    r = ground.sample(config, compressor="full")
    for name, cell in cells.items():
        cache = cache_settings(config, cell)
        found = led(ground.model, r, **cache)
        if not config.forced:
            found |= sampled(ground, ground.sample(config, **cache), config.epsilon)
        which = {"compressors": cell["compressor"], "budgets": cell["budget"], "bits": cell["bits"]}
        how = made_by([PROGRAM, *arguments({key: x for key, x in given.items() if key not in FREE} | which)])
        append(file, [{"name": name, **how, "settings": compared(config), **cell, **found}])


# ------------------------------------------------------------------------------------------------- reporting


def front(cells: list[dict]) -> list[dict]:
    """The Pareto front, from few bytes to many: each has a smaller KL than all that take no more bytes."""
    best: list[dict] = []
    for cell in sorted(cells, key=lambda cell: (cell["bytes"], cell["kl"])):
        if not best or cell["kl"] < best[-1]["kl"]:
            best.append(cell)
    return best


def winner(cells: list[dict], most: float) -> tuple[dict, list[dict]] | None:
    """Of the cells with at most so many bytes that of smallest KL, and those that cannot be told from it.

    These are less than two standard errors above, of the differences response by response. None if no cell is so small.
    """
    within = sorted((cell for cell in cells if cell["bytes"] <= most), key=lambda cell: cell["kl"])
    if not within:
        return None
    best, *others = within
    each = [torch.tensor(cell["kl_each"], dtype=torch.float64) for cell in within]  # (N,) each
    above = [mean_stderr((kl - each[0]).tolist()) for kl in each[1:]]
    return best, [cell for cell, found in zip(others, above, strict=True) if found["mean"] < 2 * found["stderr"]]


def report(cells: list[dict]) -> str:
    """The table, and what wins at each of SHARES."""
    numbers = ("kv_saved", "bytes saved", "rejected", "xi_p01", "accuracy")
    on_front, lines = [cell["name"] for cell in front(cells)], []
    for cell in cells:
        kls = [f"{cell[n]:.2e} +- {cell[n + '_stderr']:.0e}" if n in cell else "" for n in ("kl", "sampler_kl")]
        found = cell | {"bytes saved": 1 - cell["bytes"] / cell["dense_bytes"]}
        rest = [f"{found[n]:.3f}" if n in found else "" for n in numbers]
        lines.append([cell["name"], "*" * (cell["name"] in on_front), f"{cell['bytes']:,.0f}", *kls, *rest])
    text = [table(["cell", "front", "bytes a row", "KL along dense texts", "KL of the sampler", *numbers], lines)]
    for words, share in SHARES.items():
        if found := winner(cells, share * cells[0]["dense_bytes"]):
            best, rivals = found
            others = ", ".join(cell["name"] for cell in rivals) or "none"
            text.append(f"within {words} of the dense bytes: {best['name']}; not told from it: {others}")
    return "\n".join(text)


def draw(cells: list[dict], file: Path, floor: float = 1e-7) -> None:
    """KL along dense texts over bytes, a line for each policy and number of bits, and the Pareto front.

    `full` has no budgets: its bits make one line.
    """
    figure, ax = pyplot().subplots(figsize=(9, 6), layout="constrained")
    best = [(cell["bytes"], max(cell["kl"], floor)) for cell in front(cells)]
    ax.step(*zip(*best, strict=True), "k", where="post", lw=5, alpha=0.15)
    lines: dict[tuple[str, int], list[dict]] = {}
    for cell in sorted(cells, key=lambda cell: cell["bytes"]):
        lines.setdefault((cell["compressor"], cell["bits"] if cell["budget"] else 0), []).append(cell)
    for (name, bits), line in lines.items():
        size, kl, error = zip(*((c["bytes"], max(c["kl"], floor), c["kl_stderr"]) for c in line), strict=True)
        color = "k" if name == "full" else f"C{list(COMPRESSORS).index(name) - 1}"
        how = {"color": color, "ls": STYLES[bits], "marker": "o", "ms": 4, "capsize": 2}
        ax.errorbar(size, kl, error, label=f"{name}, {bits} bits" if bits else name, **how)
    for words, share in SHARES.items():
        ax.axvline(share * cells[0]["dense_bytes"], color="gray", lw=0.8, ls=":")
        ax.annotate(words, (share * cells[0]["dense_bytes"], 1), xycoords=("data", "axes fraction"), fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="bytes a row", ylabel="KL(dense || sampler) along dense texts, nats")
    ax.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(Settings, argv, PROGRAM, "Bytes of a cache against the KL of its sampler.")
    with one_sentence(PROGRAM):
        cells, file = planned(config), Path(config.out)
        finished = read_results(file)
        for name, result in finished.items():
            check_same(name, result["settings"], compared(config), file)
    with one_sentence(PROGRAM, (OSError, FloatingPointError)):
        if missing := {name: cell for name, cell in cells.items() if name not in finished}:
            measure(config, given, missing, file)
            finished = read_results(file)
        results = [*finished.values()]
        print(report(results))
        print(f"results are in {file}")
        draw_if_possible(partial(draw, results), file.with_suffix(".png"))


if __name__ == "__main__":
    main()
