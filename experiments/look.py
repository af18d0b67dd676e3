"""One page that shows where the sampler leaves the dense policy: `python experiments/look.py runs/a`.

The page is a single HTML file that needs no network: the run's curves, the responses of a step, and, of those whose
tokens were kept (train.py --record-samples n), the log-probs and what the cache held when each token was drawn.

    python experiments/look.py RUN --step 3 --out page.html
    python experiments/look.py --model FOLDER --data FILE --compressor snapkv --budget 72 --buffer 16

The second samples a few responses on the spot. look.html is the page, look.js draws it from the data put into it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from plot import PANELS, read_run, series

import grpo
from answers import is_correct
from eval import Inputs, Shared, read_inputs
from kvcache import COMPRESSORS
from model import load_model
from rollout import Rollout, rescore, rollout_shared
from runs import RECORDED, checkpoints, one_sentence, option, parse_config, pick_device, read_records, write_whole
from task import ASSETS, load_tokenizer, response_text
from train import Config, correction, recording, response_records

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Look(Shared):
    """What is looked at: a run, or, without one, responses that are sampled on the spot by the options of train.py."""

    run: str = option("", "run folder of train.py; `look.py RUN` is short for it")
    step: int = option(0, "the step whose responses are shown; 0: the last", at_least=0)
    out: str = option("look.html", "the page")
    evictions: int = option(4, "show when keys were evicted for at most so many responses, of smallest xi", at_least=0)
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "without a run: problems, JSONL; the first ones are asked")
    prompts: int = option(2, "without a run: so many of them", at_least=1)
    group_size: int = option(4, "without a run: responses to each", at_least=2)
    compressor: str = option("snapkv", "without a run: KV policy of the sampler", choices=COMPRESSORS)
    temperature: float = option(
        1.0, "without a run: of the sampler and of every log-prob", at_least=1e-3, below=math.inf
    )
    epsilon: float = option(1e-4, "without a run: a response with some xi below this is rejected", above=0, below=1)
    dtype: str = option("float32", "without a run: of weights and cache", choices=("float32", "bfloat16"))


# ------------------------------------------------------------------------------------------------- what there is to see


def from_run(look: Look) -> dict:
    """A step of a run: {"settings", "step", "metrics", "evaluations", "records", "recorded", "tokenizer"}.

    recorded: the tensors of `train.recording`, {} if none were kept. ValueError if there is no such step.
    """
    folder = Path(look.run)
    run = read_run(folder)
    samples = read_records(folder / "samples.jsonl")
    step = look.step or run["metrics"][-1]["step"]
    records = [record for record in samples if record["step"] == step]
    if not records:
        steps = sorted({record["step"] for record in samples})
        raise ValueError(f"{folder} has no responses of step {step}: --step takes {steps[0]} to {steps[-1]}")
    file, recorded, tokenizer = folder / RECORDED.format(step), {}, None
    if file.exists():
        try:
            recorded = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {file} ({error}): move it away to see the rest of the step") from None
        tokenizer, _ = load_tokenizer(next((c for _, c in checkpoints(folder)), run["settings"]["model"]))
    return run | {"step": step, "records": records, "recorded": recorded, "tokenizer": tokenizer}


def on_the_spot(look: Look) -> dict:
    """What `from_run` gives, of a few responses that are sampled and scored now; step 0, and no curves."""
    device = pick_device(look.device, look.threads)
    shared = {f.name: getattr(look, f.name) for f in fields(Config) if hasattr(look, f.name)}
    config = Config(**shared | {"eval_data": "", "out": "", "record_samples": look.prompts * look.group_size})
    inputs = read_inputs(config, {"data": (config.data, config.prompts)})
    model = load_model(config.model, getattr(torch, config.dtype), device)
    how = config.cache | config.some("group_size", "max_new_tokens", "temperature") | {"rows": config.rows}
    how |= {"eos_ids": inputs.eos_ids, "generator": torch.Generator().manual_seed(config.seed), "progress": True}
    r = rollout_shared(model, [prompt.ids for prompt in inputs.prompts["data"]], record=True, **how)
    logp_old, entropy = rescore(model, r, config.micro_tokens)  # (N, R) each
    c = correction(config, r, logp_old, torch.arange(len(r.tokens)))
    return {
        "settings": config.cache | config.some("model", "data", "group_size", "temperature", "epsilon", "correction"),
        **{"step": 0, "metrics": [], "evaluations": [], "tokenizer": inputs.tokenizer},
        "records": graded(config, inputs, r, logp_old, c.accepted),
        "recorded": recording(config.record_samples, r, logp_old, entropy, c.weights),
    }


def graded(config: Config, inputs: Inputs, r: Rollout, logp_old: Tensor, accepted: Tensor) -> list[dict]:
    """The responses of a rollout as train.py writes them to samples.jsonl."""
    asked = [prompt for prompt in inputs.prompts["data"] for _ in range(config.group_size)]  # N
    texts = [response_text(inputs.tokenizer, r.response(i), inputs.eos_ids) for i in range(len(asked))]
    rewards = torch.tensor([float(is_correct(text, p.answer)) for text, p in zip(texts, asked, strict=True)])  # (N,)
    columns = {"reward": rewards, "advantage": grpo.group_advantages(rewards, config.group_size), "accepted": accepted}
    return response_records(asked, texts, r, logp_old, columns)


# ------------------------------------------------------------------------------------------------ the data of the page


def packed(values: Tensor) -> str:
    """A tensor's bytes in base64."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds: "" for one that ends inside a character, which the next one completes."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, i) or "" for i in ids]


def response(found: dict, number: int, group: int, shown: list[int]) -> dict:
    """One response for the page; `has` 0: no more than its text, 1: tokens too, 2: evictions too (those in `shown`)."""
    names = ("response", "reward", "advantage", "accepted", "tokens", "finished", "xi_min")
    known = {"number": number, "group": group, "has": 0, "kept": None}
    known |= {name: found["records"][number][name] for name in names}
    rows = found["recorded"].get("rows", torch.zeros(0)).tolist()
    if number not in rows:
        return known
    with_evictions = number in shown
    one = {name: values[rows.index(number)] for name, values in found["recorded"].items()}
    return known | {"has": 1 + with_evictions, "kept": kept(one, found["tokenizer"], with_evictions)}


def kept(one: dict[str, Tensor], tokenizer: Tokenizer, with_evictions: bool) -> dict:
    """What was recorded of one response: the texts of prompt and response by tokens, and numbers in base64."""
    P, R = int(one["prompt_lengths"]), int(one["response_lengths"])
    found = {name: packed(one[name][:R].float()) for name in ("logp_old", "logp_sparse", "entropy", "weights")}
    found |= {"prompt": P, "pieces": pieces(tokenizer, one["tokens"][: P + R].tolist())}
    if with_evictions:
        gone = one["evicted_at"][:, :, : P + R]  # (L, K, T), the largest number of its dtype for never
        found |= {"gone": packed(gone), "bytes": gone.dtype.itemsize}
    return found


def page_data(look: Look, found: dict) -> dict:
    """All that the page shows, as JSON holds it."""
    settings, recorded, records, step = (found[name] for name in ("settings", "recorded", "records", "step"))
    rows = recorded["rows"].tolist() if recorded else []
    shown = sorted(rows, key=lambda row: records[row]["xi_min"] or 0.0)[: look.evictions]
    _, L, K, _ = recorded["evicted_at"].shape if recorded else (0, 0, 0, 0)
    G, curves = settings["group_size"], [{"title": title, "points": points(found, column)} for column, title in PANELS]
    return {
        "title": f"{look.run}, step {step}" if look.run else f"{look.model} under {look.compressor}-{look.budget}",
        "about": about(settings),
        "settings": {name: str(value) for name, value in settings.items()},
        "curves": curves if found["metrics"] else [],
        "notes": notes(len(records), rows, shown),
        **{"step": step, "epsilon": settings["epsilon"], "correction": settings["correction"]},
        "groups": [{name: record[name] for name in ("prompt", "answer")} for record in records[::G]],
        "responses": [response(found, number, number // G, shown) for number in range(len(records))],
        "cache": {"layers": L, "heads": K},
    }


def about(settings: dict) -> str:
    """The settings that matter most, in a line."""
    cache = "{compressor}, budget {budget} + buffer {buffer}, window {window}".format(**settings)
    model, data = ("/".join(Path(settings[name]).parts[-2:]) for name in ("model", "data"))
    return f"{model} on {data}; {cache}; correction {settings['correction']}"


def points(run: dict, column: str) -> list[list[float]]:
    """A curve of plot.py as [step, value], without what is not finite."""
    return [[step, value] for step, value in sorted(series(run, column).items()) if math.isfinite(value)]


def notes(count: int, rows: list[int], shown: list[int]) -> list[str]:
    """What the page lacks, and how to get it."""
    if not rows:
        return ["The tokens of this step were not kept, nor what was evicted when: train with --record-samples n."]
    said = []
    if len(rows) < count:
        said.append(
            f"Tokens were kept of {len(rows)} of the {count} responses, those of smallest xi (--record-samples)."
        )
    if len(shown) < len(rows):
        which = ", ".join(map(str, sorted(shown))) or "no response"
        said.append(f"When keys were evicted is in this page for {which}: --evictions takes more.")
    return said


def write_page(data: dict, file: Path) -> None:
    """Put the data into look.html. A browser runs the script of this hash and no other, whatever a text says."""
    text, script = ((HERE / f"look.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    inside = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"HASH": f"sha256-{digest}", "TITLE": html.escape(data["title"]), "SCRIPT": script, "DATA": inside}
    for name, part in parts.items():  # the data last: what stands in it is not looked at again
        text = text.replace("{{" + name + "}}", part)
    write_whole(file, text)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    argv = ["--run", *argv] if argv and argv[0][:1] not in ("-", "@") else argv
    look, _ = parse_config(Look, argv, "experiments/look.py", "One page that shows a run, or a model on the spot.")
    with one_sentence("experiments/look.py", (ValueError, OSError, FloatingPointError)):
        out = Path(look.out)
        if not out.parent.is_dir():
            raise ValueError(f"--out: the folder {out.parent} does not exist")
        write_page(page_data(look, from_run(look) if look.run else on_the_spot(look)), out)
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
