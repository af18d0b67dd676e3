"""A supervised warm start: teach a model the layout of worked solutions before reinforcement learning.

    python experiments/warm_start.py --model FOLDER --data runs/words/words-warm.jsonl --out runs/warm

Any model folder that train.py takes, and any JSONL with a `solution` beside the problem (task.py says what a row may
be). A prompt is laid out as train.py and eval.py lay it out, the solution follows with the token that ends a turn, and
the loss is the mean of -log p over the solution's tokens alone, one mean an update. AdamW, its learning rate falling in
a line to nothing; with --dtype bfloat16 the model computes in it and the weights that move are fp32, as in train.py.

Few updates leave the model soft: it knows the layout, and still explores when it samples. Many make it nearly
deterministic, and reinforcement learning finds nothing to choose from.

In --out: model/, a Hugging Face folder for --model of train.py and eval.py; and while it lasts checkpoints/. Started
again with the same settings, a run that was stopped or killed goes on from its newest checkpoint, to the same weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import runs
import task
from model import Decoder, load_model, read_json, weight_files
from rollout import micro_batches, token_logprobs
from runs import check_options, one_sentence, option, parse_config, pick_device
from train import compute_copy, pick_problems


@dataclass(frozen=True)
class Settings:
    """What is taught to what, and how far."""

    model: str = option("", "Hugging Face folder to start from")
    data: str = option("runs/words/words-warm.jsonl", "problems with a `solution`, JSONL")
    template: str = option("auto", task.TEMPLATE)
    out: str = option("runs/warm", "folder for the model")
    updates: int = option(50, "optimizer updates", at_least=1)
    batch: int = option(8, "solutions an update", at_least=1)
    lr: float = option(1e-4, "AdamW learning rate of the first update", above=0, at_most=10)
    micro_tokens: int = option(8192, "padded tokens in one forward and backward pass", at_least=1, at_most=2**31)
    save_every: int = option(20, "write a checkpoint after every so many updates", at_least=1)
    seed: int = option(0, "of the order of the solutions", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("bfloat16", "bfloat16 computes in it, over float32 weights", choices=("float32", "bfloat16"))

    def __post_init__(self):
        check_options(self)


def read_examples(config: Settings, vocabulary: int) -> list[tuple[list[int], int]]:
    """(token ids of prompt and solution and the end of the turn, length of the prompt) of every row."""
    tokenizer, eos_ids = task.load_tokenizer(config.model)
    problems = task.load_problems(config.data)  # says what is wrong with a file
    lines = Path(config.data).read_text(encoding="utf-8-sig").split("\n")
    solutions = [json.loads(line).get("solution") for line in lines if line.strip()]
    if len(solutions) > len(problems) or not all(isinstance(text, str) and text for text in solutions):
        raise ValueError(f"{config.data}: every row must hold an answer and its worked `solution`, as text")
    template = task.load_template(config.model, config.template)
    prompts = task.prepare(problems, tokenizer, vocabulary, template=template)
    written = [tokenizer.encode(text, add_special_tokens=False).ids for text in solutions]
    ends = [[*prompt.ends, *eos_ids][:1] for prompt in prompts]
    return [(p.ids + ids + end, len(p.ids)) for p, ids, end in zip(prompts, written, ends, strict=True)]


def learn(decoder: Decoder, examples: list[tuple[list[int], int]], micro_tokens: int) -> float:
    """Add the gradient of the mean of -log p over the solutions' tokens; returns that mean, in nats."""
    device = decoder.embed_tokens.weight.device
    lengths, starts = (torch.tensor(x) for x in zip(*((len(ids), start) for ids, start in examples), strict=True))
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in examples], batch_first=True)  # (B, T)
    total, loss = int((lengths - starts).sum()), 0.0
    place = torch.arange(tokens.shape[1])
    solution = (place >= starts[:, None]) & (place < lengths[:, None])  # (B, T)
    for rows in micro_batches(torch.arange(len(examples)), lengths, micro_tokens):
        row, t = solution[rows].nonzero(as_tuple=True)  # (M,) each
        hidden = decoder.hidden(tokens[rows].to(device))  # (b, T, hidden)
        (logp,) = token_logprobs(hidden[row, t - 1], decoder.head, tokens[rows][row, t].to(device))  # (M,)
        part = -logp.sum() / total
        part.backward()
        loss += part.item()
    return loss


def start(config: Settings, own: dict) -> tuple[Decoder, torch.optim.Optimizer, int]:
    """Weights, optimizer and updates done: of the newest checkpoint in --out, else of the model folder."""
    done, source = next(iter(runs.checkpoints(Path(config.out))), (0, Path(config.model)))
    begun = Path(config.out) / "begun.json"
    if done and read_json(begun) != own:
        raise ValueError(f"{config.out} was begun with other settings or inputs: name another --out")
    begun.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(begun, own)
    master = load_model(source, device=pick_device(config.device, config.threads))
    optimizer = torch.optim.AdamW(master.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    if done:
        runs.load_optimizer(optimizer, master, source)
    return master, optimizer, done


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/warm_start.py", "A supervised warm start.")
    with one_sentence("experiments/warm_start.py"):
        out, final = Path(config.out), Path(config.out) / "model"
        if final.exists():
            raise ValueError(f"{final} exists already: name another folder with --out")
        examples = read_examples(config, read_json(Path(config.model) / "config.json")["vocab_size"])
        files = [Path(config.model) / "config.json", *weight_files(Path(config.model))]
        kept = {name: v for name, v in asdict(config).items() if name not in ("model", "data", "out", "save_every")}
        own = {"settings": kept, "inputs": runs.fingerprint(examples, *files)}
        master, optimizer, done = start(config, own)
        decoder = compute_copy(master, getattr(torch, config.dtype))
    with one_sentence("experiments/warm_start.py"), runs.stop_signals() as stopping:
        bar = tqdm(range(done, config.updates), "warm start", initial=done, total=config.updates)
        for step in bar:
            chosen = [examples[i] for i in pick_problems(len(examples), config.batch, step, config.seed)]
            optimizer.zero_grad()
            loss = learn(decoder, chosen, config.micro_tokens)
            torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = config.lr * (1 - step / config.updates)
            optimizer.step()
            if decoder is not master:
                decoder.load_state_dict(master.state_dict())  # rounded to the copy's dtype
            bar.set_postfix_str(f"loss {loss:.3f} nats a token")
            done = step + 1
            if stopping or done % config.save_every == 0 or done == config.updates:
                runs.save_checkpoint(out, done, master, optimizer, Path(config.model), keep=1)
            if stopping:
                raise SystemExit(f"stopped after {done} updates; the same command goes on")
        last = runs.checkpoints(out)[0][1]
        shutil.rmtree(last / "training")
        last.rename(final)
        shutil.rmtree(out / "checkpoints")
        (out / "begun.json").unlink()
    print(f"wrote {final}/, the last loss was {loss:.3f} nats a token")


if __name__ == "__main__":
    main()
