"""Where a sampler with a compressed cache leaves the dense policy: at which tokens, after how many cuts, in what texts.

    python experiments/mismatch.py --model FOLDER --data FILE --budgets 48,56,64 --buffer 16 --out runs/mismatch.jsonl

One response to each problem is sampled with each cache at temperature 1, the same uniform numbers for all, and scored
by the dense policy: xi = pi_old / pi_sparse at every token. Each cache is a line of --out, named by the model (or
--label) and the cache: what the sampler is in all (`grpo.mismatch_metrics`), a histogram of log xi, and how tokens fare
by kind, by the number of cuts of the cache before them and by their place, responses by their length; last the three
responses with the smallest xi, as texts. Another model with the same --out adds its lines; a table of all is printed,
and the figure is NAME.png.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from answers import is_correct
from experiments.caches import Ground
from experiments.commas import numbers
from experiments.look import pieces
from experiments.plot import draw_if_possible, pyplot
from experiments.records import arguments, check_same, made_by, read_results
from grpo import log_ratio, mismatch_metrics
from kvcache import COMPRESSORS, check_settings
from rollout import Rollout, rescore
from runs import append, check_options, one_sentence, option, parse_config, table
from task import ASSETS, TEMPLATE, response_text

PROGRAM = "experiments/mismatch.py"
EDGES = [x / 2 for x in range(-40, 9)]  # of the histogram of log xi, nats; what lies beyond counts at its rim
LOW = 0.1  # an xi below this is called low
WORST = 3  # responses shown
FREE = {"budgets", "out", "threads", "device"}  # what may differ from a line that is there


@dataclass(frozen=True)
class Settings:
    """Whose mismatch, on what."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    label: str = option("", "the model's name in the results; else its folder's")
    data: str = option(str(ASSETS / "short-heldout.jsonl"), "problems, JSONL")
    limit: int = option(200, "the first so many problems", at_least=1)
    template: str = option("auto", TEMPLATE)
    compressor: str = option("snapkv", "policy of the cache", choices=COMPRESSORS)
    budgets: str = option("72", "budgets, with commas between")
    buffer: int = option(16, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive")
    max_new_tokens: int = option(260, "longest response", at_least=1)
    epsilon: float = option(1e-4, "a response with some xi below this counts as rejected", above=0, below=1)
    out: str = option("runs/mismatch.jsonl", "results, a line a cache; the figure is NAME.png")
    seed: int = option(0, "of the uniform numbers", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")

    def __post_init__(self):
        check_options(self)
        for budget in numbers(self, "budgets"):
            check_settings(self.compressor, budget, self.buffer, self.window)
        if Path(self.out).suffix != ".jsonl":
            raise ValueError(f"--out must be a file NAME.jsonl, not {self.out!r}")


def cuts_before(r: Rollout) -> Tensor:
    """How often some layer of the cache had been cut when each token was drawn, (N, R).

    The token at place p is drawn by the query at p - 1, which no longer sees what was evicted at or before p - 1.
    """
    query = r.prompt_lengths[:, None] - 1 + torch.arange(r.mask.shape[1])  # (N, R)
    gone = torch.stack([layer[:, 0] for layer in r.evicted_at], dim=1)  # (N, L, T): the heads are cut together
    times = (row.unique() for row in gone)  # of each response's cuts; the largest number is never
    return torch.stack([torch.searchsorted(t, q.to(t.dtype), right=True) for t, q in zip(times, query, strict=True)])


def kind(text: str, ends: bool) -> str:
    """What sort of token this is."""
    text = text.strip()
    if ends:
        return "end"
    if any(c.isdigit() for c in text):
        return "digit"
    if text[:1].isupper():
        return "capital"
    return "word" if text[:1].isalpha() else "sign"


def histogram(log_xi: Tensor) -> dict:
    """How many tokens lie between neighbours of EDGES."""
    edges = torch.tensor(EDGES, dtype=log_xi.dtype)
    return {"edges": EDGES, "counts": log_xi.clamp(edges[0], edges[-1]).histogram(edges).hist.int().tolist()}


def by(labels: list, log_xi: Tensor, epsilon: float) -> dict[str, dict]:
    """{label: its tokens, their k3 KL in nats, the share with a low xi, and with one below epsilon}, in order."""
    places = defaultdict(list)
    for place, label in enumerate(labels):
        places[label].append(place)
    found = {}
    for label in sorted(places):
        x = log_xi[places[label]]  # (tokens of this label,)
        shares = {"low": x < math.log(LOW), "fatal": x < math.log(epsilon)}
        kl = {"tokens": len(x), "kl": float((x.expm1() - x).mean())}
        found[str(label)] = kl | {name: float(share.double().mean()) for name, share in shares.items()}
    return found


def examined(ground: Ground, config: Settings, budget: int) -> dict:
    """All that a line says of one cache."""
    cache = {"compressor": config.compressor, "budget": budget, "buffer": config.buffer, "window": config.window}
    r = ground.sample(config, record=True, **cache)
    logp_old, _ = rescore(ground.model, r, micro_tokens=8192)
    every = log_ratio(logp_old, r.logp_sparse, r.mask)  # (N, R), 0 in the padding
    row, step = r.mask.nonzero(as_tuple=True)  # (M,) each, over all sampled tokens
    log_xi, cuts = every[row, step].double(), cuts_before(r)[row, step].tolist()  # (M,) each
    texts = [pieces(ground.tokenizer, r.response(i)) for i in range(len(r.tokens))]
    ends = [token in ground.eos_ids for i in range(len(r.tokens)) for token in r.response(i)]
    kinds = [kind(texts[i][t], end) for i, t, end in zip(row.tolist(), step.tolist(), ends, strict=True)]
    answers = [response_text(ground.tokenizer, r.response(i), ground.eos_ids) for i in range(len(r.tokens))]
    right = [is_correct(text, prompt.answer) for text, prompt in zip(answers, ground.prompts, strict=True)]
    smallest, place = every.masked_fill(~r.mask, math.inf).min(1)  # (N,) each
    return {
        **{"budget": budget, "kv_saved": r.statistics["kv_saved"], "accuracy": sum(right) / len(right)},
        **mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        "histogram": histogram(log_xi),
        "by_kind": by(kinds, log_xi, config.epsilon),
        "by_cuts": by(cuts, log_xi, config.epsilon),
        "by_place": by((step // 10 * 10).tolist(), log_xi, config.epsilon),
        "by_length": by((r.response_lengths // 10 * 10).tolist(), smallest.double(), config.epsilon),
        "smallest": by([kind(texts[i][t], False) for i, t in enumerate(place)], smallest.double(), config.epsilon),
        "worst": [
            {
                **{"prompt": ground.prompts[i].text, "response": answers[i], "answer": ground.prompts[i].answer},
                **{"token": texts[i][place[i]], "place": int(place[i]), "xi": math.exp(smallest[i])},
            }
            for i in smallest.argsort()[:WORST].tolist()
        ],
    }


def report(lines: list[dict]) -> str:
    """A table of the caches, and for each the share of low xi by kind of token and by cuts."""
    names = ("kv_saved", "sampler_kl", "rejected", "xi_p01", "xi_p05", "xi_p50", "accuracy")
    text = [table(["sampler", *names], [[line["name"], *(line[name] for name in names)] for line in lines])]
    for grouping in ("by_kind", "by_cuts"):
        labels = sorted({label for line in lines for label in line[grouping]}, key=lambda x: (len(x), x))
        rows = [[line["name"], *(line[grouping].get(label, {}).get("low") for label in labels)] for line in lines]
        text.append(table([f"xi < {LOW}, {grouping.replace('_', ' ')}", *labels], rows))
    return "\n\n".join(text)


def draw(lines: list[dict], epsilon: float, file: Path) -> None:
    """The histogram, low xi by kind and by cuts, rejection by length; a color a sampler."""
    figure, (spread, kinds, cuts, lengths) = pyplot().subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    labels = sorted({label for line in lines for label in line["by_kind"]})
    for i, line in enumerate(lines):
        counts = line["histogram"]["counts"]
        shares = [count / sum(counts) for count in counts]
        spread.stairs(shares, line["histogram"]["edges"], color=f"C{i}", label=line["name"])
        low = [line["by_kind"].get(label, {}).get("low", 0) for label in labels]
        kinds.bar([x + i * 0.8 / len(lines) for x in range(len(labels))], low, 0.8 / len(lines), color=f"C{i}")
        for ax, grouping, share in ((cuts, "by_cuts", "low"), (lengths, "by_length", "fatal")):
            points = [(int(label), found[share]) for label, found in line[grouping].items()]
            ax.plot(*zip(*sorted(points), strict=True), color=f"C{i}", marker="o", ms=3)
    spread.axvline(math.log(epsilon), color="gray", lw=0.8, ls=":")
    spread.set(yscale="log", title="tokens by log xi, nats (dotted: epsilon)")
    kinds.set_xticks([x + 0.4 - 0.4 / len(lines) for x in range(len(labels))], labels)
    kinds.set(title=f"share of tokens with xi < {LOW}, by kind")
    cuts.set(title=f"share of tokens with xi < {LOW}, by cuts before")
    lengths.set(title="share rejected, by response length, tokens")
    figure.legend(*spread.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(Settings, argv, PROGRAM, "Where a compressed cache's sampler leaves the dense policy.")
    file, label = Path(config.out), config.label or Path(config.model).name
    with one_sentence(PROGRAM, (ValueError, OSError, FloatingPointError)):
        names = {f"{label} {config.compressor} {budget}": budget for budget in numbers(config, "budgets")}
        finished = read_results(file, "by_cuts")
        for name in names.keys() & finished.keys():
            asked = {key: value for key, value in asdict(config).items() if key not in FREE}
            check_same(name, finished[name]["settings"], asked, file)
        missing = {name: budget for name, budget in names.items() if name not in finished}
        if missing:
            ground = Ground.load(config)
            file.parent.mkdir(parents=True, exist_ok=True)
        for name, budget in missing.items():
            how = made_by([PROGRAM, *arguments({n: x for n, x in given.items() if n != "out"} | {"budgets": budget})])
            append(file, [{"name": name, **how, "settings": asdict(config), **examined(ground, config, budget)}])
        lines = [*read_results(file).values()]
        print(report(lines))
        print(f"results are in {file}")
        draw_if_possible(partial(draw, lines, config.epsilon), file.with_suffix(".png"))


if __name__ == "__main__":
    main()
