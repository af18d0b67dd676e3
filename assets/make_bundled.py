"""Make the bundled model and its problems.

    python assets/make_bundled.py            # writes model/ and four JSONL files beside this script

Takes 14 minutes on two CPU cores. The model (0.8 M parameters) is then right on 0.600 +- 0.035 of 200 long held-out
problems with greedy decoding, dense and with snapkv at a budget of 512 alike (python eval.py --limit 200).

The task: run a loop program. The prompt gives the start values of five registers, a line per register and the number
of rounds as a letter; the response is the trace, a line at a time, then the last value as the answer. Arithmetic is
modulo 10. Letters count the rounds down, so that A is always the last.

    prompt      a6b6c0d4e8;a:d-c;b:d-e;c:b+c;d:b+e;e:c+c;P=
    response    Pa:d4-c0=a4;Pb:d4-e8=b6; ... Ae:c6+c6=e2;\\boxed{2}

All that the next line needs is in the text of the last round: the newest value of two registers, one copy of each
program line, and the round's letter, which stands on every line because one letter a round would lie too far back.
That is what makes a trace compressible, as real chains of thought are: nothing in the prompt is needed to the end.

The warm start is supervised learning on traces of mixed lengths, with two things on purpose:
- Tolerance to eviction. On many batches every key of every KV head draws the age at which it disappears, as keys do
  when a cache is cut: most after a window of more than one round, some after a few tokens. A model that never saw a
  gap in its context loses nearly every sparse response to rejection.
- Something for RL to fix. The teacher gets a few of the 200 digit facts wrong, half of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

ASSETS = Path(__file__).resolve().parent
sys.path.insert(0, str(ASSETS.parent))
from model import Decoder, ModelConfig, save_model  # noqa: E402

REGISTERS, ROUNDS = "abcde", "ABCDEFGHIJKLMNOP"
UNKNOWN, EOS = "<|unk|>", "<|end|>"
ALPHABET = [UNKNOWN, EOS, "\\boxed{", "}", ";", ":", "=", "+", "-", *"0123456789", *REGISTERS, *ROUNDS]
LONG, SHORT = (5, 16), (5, 4)  # registers, rounds: 1,007 and 287 tokens in all
TRAINING, HELD_OUT = 2000, 500  # problems in each file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(ALPHABET),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": ALPHABET.index(EOS),
}

# ---------------------------------------------------------------------------------------------------- programs


def run(program: dict, wrong: dict | None = None, rng: random.Random | None = None) -> list[tuple]:
    """The trace: (round, register, left, its value, sign, right, its value, result) per line.

    wrong: facts (x, sign, y) -> result that the noisy teacher gets wrong half of the time.
    """
    values, steps = dict(program["start"]), []
    for letter in reversed(ROUNDS[: program["rounds"]]):
        for target, left, sign, right in program["lines"]:
            fact = (values[left], sign, values[right])
            result = (fact[0] + fact[2] if sign == "+" else fact[0] - fact[2]) % 10
            if wrong and fact in wrong and rng.random() < 0.5:
                result = wrong[fact]
            steps.append((letter, target, left, fact[0], sign, right, fact[2], result))
            values[target] = result
    return steps


def make_program(rng: random.Random, registers: int, rounds: int) -> dict:
    """A random program whose last round has at least three distinct values (others are too easy to guess)."""
    names = REGISTERS[:registers]
    while True:
        program = {
            "start": {name: rng.randrange(10) for name in names},
            "lines": [(name, rng.choice(names), rng.choice("+-"), rng.choice(names)) for name in names],
            "rounds": rounds,
        }
        if len({result for *_, result in run(program)[-registers:]}) >= 3:
            return program


def prompt_of(program: dict) -> str:
    """The program as the model reads it."""
    start = "".join(f"{name}{value}" for name, value in program["start"].items())
    lines = "".join(f"{target}:{left}{sign}{right};" for target, left, sign, right in program["lines"])
    return f"{start};{lines}{ROUNDS[program['rounds'] - 1]}="


def response_of(steps: list[tuple]) -> str:
    """The trace and the boxed answer, as the teacher writes them."""
    trace = "".join(f"{r}{target}:{a}{x}{sign}{b}{y}={target}{z};" for r, target, a, x, sign, b, y, z in steps)
    return f"{trace}\\boxed{{{steps[-1][-1]}}}"


def write_problems(folder: Path, seed: int) -> None:
    """Four JSONL files of {"prompt", "answer"}: long and short, training and held out, no prompt twice."""
    rng, seen = random.Random(f"problems {seed}"), set()
    for name, shape in (("long", LONG), ("short", SHORT)):
        for part, count in (("train", TRAINING), ("heldout", HELD_OUT)):
            rows = []
            while len(rows) < count:
                program = make_program(rng, *shape)
                prompt = prompt_of(program)
                if prompt not in seen:
                    seen.add(prompt)
                    rows.append({"prompt": prompt, "answer": str(run(program)[-1][-1])})
            (folder / f"{name}-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> Tokenizer:
    """One token a character, but for `\\boxed{` and the special tokens."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(ALPHABET)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (UNKNOWN, EOS)])
    return tokenizer


# -------------------------------------------------------------------------------------------------- warm start


class EvictionMask:
    """Dense attention in which query i sees key j while i - j < age[j]; stands in for a cache (see model.py)."""

    def __init__(self, age: Tensor, heads: int):
        T = age.shape[-1]
        distance = torch.arange(T)[:, None] - torch.arange(T)  # (T, T)
        visible = (distance >= 0) & (distance < age[:, :, None, :])  # (B, K, T, T)
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)
        self.bias = bias.repeat_interleave(heads // age.shape[1], dim=1)  # (B, H, T, T)

    def __getitem__(self, layer: int) -> EvictionMask:
        return self

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """See model.py."""
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.bias, enable_gqa=True)


def eviction_ages(B: int, K: int, T: int, one_round: int, g: torch.Generator) -> Tensor:
    """The age in tokens at which each key goes, (B, K, T): most after a window of a round and more, some far sooner."""
    window = torch.randint(one_round + 12, 513, (B, 1, 1), generator=g).expand(B, K, T)
    early = torch.randint(8, one_round + 12, (B, K, T), generator=g)
    share = 0.3 * torch.rand(B, 1, 1, generator=g)
    return torch.where(torch.rand(B, K, T, generator=g) < share, early, window)


class Muon:
    """Momentum whose matrices are orthogonalised by Newton-Schulz (Jordan et al., 2024), in fp32.

    torch.optim.Muon iterates in bfloat16: 0.85 s a step for this model on a CPU without bf16 instructions, against
    0.04 s here, where equal shapes also share one batched product.
    """

    def __init__(self, matrices: list[Tensor], weight_decay: float = 0.1, momentum: float = 0.95):
        self.groups = [[p for p in matrices if p.shape == shape] for shape in sorted({p.shape for p in matrices})]
        self.buffers = [torch.zeros(len(group), *group[0].shape) for group in self.groups]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every matrix by a step of the size that AdamW would take at this lr."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group])  # (matrices, out, in)
            buffer.lerp_(grad, 1 - self.momentum)
            x = grad.lerp(buffer, self.momentum)  # Nesterov
            tall = x.shape[1] > x.shape[2]
            x = x.mT if tall else x
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.mT if tall else x
            scale = 0.2 * max(x.shape[1:]) ** 0.5
            for p, direction in zip(group, x, strict=True):
                p.mul_(1 - lr * self.weight_decay).sub_(direction, alpha=lr * scale)


def warm_start(args: argparse.Namespace, tokenizer: Tokenizer) -> Decoder:
    """Teach traces to a new model."""
    rng, g = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    wrong = {}
    for x, sign, y in rng.sample([(x, s, y) for x in range(10) for s in "+-" for y in range(10)], args.noisy_facts):
        right = (x + y if sign == "+" else x - y) % 10
        wrong[x, sign, y] = (right + rng.randrange(1, 10)) % 10

    decoder = Decoder(ModelConfig.from_dict(CONFIG))
    matrices = [p for name, p in decoder.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in decoder.named_parameters() if p.ndim != 2 or "embed" in name]
    for p in (*matrices, decoder.embed_tokens.weight):
        torch.nn.init.normal_(p, std=0.05)
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def batch(registers: int, rounds: int, noisy: bool = True) -> tuple[Tensor, int]:
        """Token ids (B, T) of prompts and traces of one shape, no padding, and the length of the prompts."""
        prompt = 8 * registers + 3
        rows = max(1, args.tokens // (prompt + 12 * registers * rounds + 4))
        programs = [make_program(rng, registers, rounds) for _ in range(rows)]
        texts = [prompt_of(p) + response_of(run(p, wrong if noisy else None, rng)) + EOS for p in programs]
        return torch.tensor([e.ids for e in tokenizer.encode_batch(texts)]), prompt

    bar = tqdm(range(args.updates), desc="warm start")
    for step in bar:
        lr = args.lr * min(1, (step + 1) / 50, max(0.03, (args.updates - step) / (0.4 * args.updates)))
        registers, rounds = LONG if rng.random() < 0.25 else (rng.randint(3, 5), rng.randint(1, 16))
        ids, prompt = batch(registers, rounds)
        cache = None
        if rng.random() < args.masked:
            B, T = ids.shape
            ages = eviction_ages(B, decoder.config.kv_heads, T - 1, 12 * registers, g)
            cache = EvictionMask(ages, decoder.config.heads)
        logits = decoder(ids[:, :-1], cache=cache)
        loss = F.cross_entropy(logits[:, prompt - 1 :].flatten(0, 1), ids[:, prompt:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        adam.param_groups[0]["lr"] = lr
        muon.step(lr)
        adam.step()
        decoder.zero_grad()
        if step % 100 == 99:
            right = []
            for shape in (SHORT, LONG):  # share of tokens that greedy decoding would get right after a right prefix
                with torch.no_grad():
                    ids, prompt = batch(*shape, noisy=False)
                    right.append((decoder(ids[:, :-1])[:, prompt - 1 :].argmax(-1) == ids[:, prompt:]).double().mean())
            bar.write(
                f"update {step + 1}: loss {loss.item():.4f}, tokens right {right[0]:.4f} short, {right[1]:.4f} long"
            )
    return decoder


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for model/ and the problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=2000, help="0 makes the problems only")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens an update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--masked", type=float, default=0.4, help="share of batches with evicted keys; the knob of tolerance"
    )
    parser.add_argument(
        "--noisy-facts", type=int, default=10, help="digit facts that the teacher gets wrong half of the time"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_problems(args.out, args.seed)
    if not args.updates:
        return
    began, tokenizer = time.time(), make_tokenizer()
    decoder = warm_start(args, tokenizer)
    save_model(decoder, args.out / "model")
    tokenizer.save(str(args.out / "model" / "tokenizer.json"))
    eos = {"eos_token_id": CONFIG["eos_token_id"]}
    (args.out / "model" / "generation_config.json").write_text(json.dumps(eos) + "\n")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "unk_token": UNKNOWN}
    (args.out / "model" / "tokenizer_config.json").write_text(json.dumps(names) + "\n")
    print(f"wrote {args.out}/model after {(time.time() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
