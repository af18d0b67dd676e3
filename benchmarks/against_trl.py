"""Whole training steps against TRL's GRPOTrainer, on one model folder: seconds by part and peak memory.

    python3 -m venv TRL && TRL/bin/pip install torch==2.13.0 trl==1.16.0     # an environment of its own
    python benchmarks/against_trl.py --model FOLDER --trl TRL/bin/python

GRPO with one update a step, no KL. Both get the same prompts, as text, and sample as many tokens for each response: no
EOS ends one. The reward is a hash of the text, so every group teaches; with --teaching 0.5 that of every second prompt
is 0. Each measurement is a process of its own, the two take turns; medians over the steps of all turns, the peak is the
resident memory. In bf16 ours holds fp32 weights and a copy, TRL bf16 weights (--autocast: fp32 weights under autocast,
its own default). TRL goes through --trl-rows responses at a time, by default its own default of 8.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
PARTS = ("rollout", "scoring", "update", "whole")
SENTENCE = "Add the first number to the second, then write down their sum. "  # four times: about 60 tokens


def problems(args: argparse.Namespace) -> list[dict]:
    """The prompts of all steps, and by their answer which of them teach."""
    teaching = ["no" if args.teaching == 0.5 and i % 2 else "teaches" for i in range(args.prompts)]
    return [{"prompt": f"{i}. " + 4 * SENTENCE, "answer": answer} for i, answer in enumerate(teaching)]


def reward(response: str, answer: str) -> float:
    """A number that differs between responses, or 0."""
    return float(sum(map(ord, response)) % 997) if answer == "teaches" else 0.0


def ours(args: argparse.Namespace, folder: Path) -> list[dict]:
    """The seconds of each step of train.py."""
    import train

    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems(args)))
    options = f"--data {data} --eval-data= --model {args.model} --out {folder}/run --compressor {args.compressor}"
    options += f" --budget {args.budget} --steps {args.steps} --prompts {args.prompts} --group-size {args.group}"
    options += f" --max-new-tokens {args.new} --dtype {args.dtype} --lr 1e-6 --sample-every 0 --save-every 1000"
    options += f" --threads {args.threads}" + " --gradient-checkpointing" * args.gradient_checkpointing
    options += f" --micro-tokens {args.micro_tokens}" if args.micro_tokens else ""
    read = train.read_inputs
    with patch.object(train, "read_inputs", lambda *given: replace(read(*given), eos_ids=[])):
        train.main(options.split(), reward=reward)
    found = []
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        spent = {part: metrics[f"{part}_seconds"] for part in PARTS[:3]}
        found.append(spent | {"whole": sum(spent.values())})
    return found


def trl(args: argparse.Namespace, folder: Path) -> list[dict]:
    """The seconds of each step of GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if args.threads:
        torch.set_num_threads(args.threads)
    rows, half = args.prompts * args.group, args.dtype == "bfloat16"
    config = GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs={"dtype": "float32" if args.autocast else args.dtype},
        bf16=half and args.autocast,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=args.trl_rows,
        gradient_accumulation_steps=rows // args.trl_rows,
        num_generations=args.group,
        max_completion_length=args.new,
        generation_kwargs={"min_new_tokens": args.new},
        gradient_checkpointing=args.gradient_checkpointing,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    found, began = [], {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            began["step"], began["rollout"] = time.perf_counter(), 0.0

        def on_step_end(self, *_, **__):
            whole = time.perf_counter() - began["step"]
            found.append({"rollout": began["rollout"], "update": whole - began["rollout"], "whole": whole})

    def rewards(completions: list[str], answer: list[str], **_) -> list[float]:
        return [reward(text, right) for text, right in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        args.model, rewards, args=config, train_dataset=Dataset.from_list(problems(args)), callbacks=[Clock()]
    )
    generate = trainer._generate

    def timed(*given, **named):
        start = time.perf_counter()
        result = generate(*given, **named)
        began["rollout"] += time.perf_counter() - start
        return result

    trainer._generate = timed
    trainer.train()
    return found


def measured(side: str, args: argparse.Namespace) -> dict:
    """The report of one side in a process of its own."""
    python = args.trl if side == "trl" else sys.executable
    command = [python, __file__, *sys.argv[1:], "--one", side]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{side} failed:\n{result.stderr[-3000:]}")
    report = json.loads(result.stdout.splitlines()[-1])
    spent = "; ".join(", ".join(f"{part} {value:.1f}" for part, value in step.items()) for step in report["steps"])
    print(f"{side}: {spent} s; peak {report['peak'] / 1e9:.1f} GB", file=sys.stderr, flush=True)
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--trl", required=True, help="the Python of an environment with trl")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--new", type=int, default=192, help="tokens of a response")
    parser.add_argument("--teaching", type=float, default=1.0, choices=(0.5, 1.0), help="share of groups with signal")
    parser.add_argument("--compressor", default="full", help="of our rollouts")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="on both sides")
    parser.add_argument("--micro-tokens", type=int, help="ours at a time; default that of train.py")
    parser.add_argument("--trl-rows", type=int, default=8, help="responses at a time in TRL")
    parser.add_argument("--autocast", action="store_true", help="bf16 in TRL by autocast over fp32 weights")
    parser.add_argument("--steps", type=int, default=2, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all")
    parser.add_argument("--one", choices=("ours", "trl"), help=argparse.SUPPRESS)  # what this process measures
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            steps = {"ours": ours, "trl": trl}[args.one](args, Path(folder))
        unit = 1 if sys.platform == "darwin" else 1024
        print("\n" + json.dumps({"steps": steps, "peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
        return
    turns = [{side: measured(side, args) for side in ("ours", "trl")} for _ in range(args.turns)]
    show(turns)


def show(turns: list[dict]) -> None:
    """Print medians over all steps, the peaks, and TRL's over ours."""
    from runs import table

    middle, lines = {}, []
    for side in ("ours", "trl"):
        steps = [step for turn in turns for step in turn[side]["steps"]]
        middle[side] = {part: statistics.median(step.get(part, 0) for step in steps) for part in PARTS}
        middle[side]["peak GB"] = max(turn[side]["peak"] for turn in turns) / 1e9
        lines.append([side, *(f"{value:.1f}" for value in middle[side].values())])
    ratios = {name: middle["trl"][name] / value if value else 0 for name, value in middle["ours"].items()}
    lines.append(["ratio", *(f"{ratio:.2f}" if ratio else "" for ratio in ratios.values())])
    print(table(["seconds a step", *middle["ours"]], lines))


if __name__ == "__main__":
    main()
