"""Problems, prompts, answers, and `python eval.py`: accuracy under dense and under compressed decoding.

    python eval.py --model assets/model --data assets/long-heldout.jsonl --compressor snapkv --budget 512

The check of an answer here is the reward in training: 1 if the last \\boxed{...} of the response equals the
reference, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import operator
import re
import shlex
import signal
import sys
import time
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kvcache import COMPRESSORS, check_settings
from model import Decoder, ModelConfig, load_config, load_model, read_json
from rollout import Rollout, rollout

ASSETS = Path(__file__).resolve().parent / "assets"
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASKED = re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{(\{\})?\}\.?\s*$")

# ------------------------------------------------------------------------------------------ problems and prompts


@dataclass(frozen=True)
class Problem:
    """prompt: text that is used as it is, or a list of chat messages {"role", "content"}; answer: the reference."""

    prompt: str | list[dict[str, str]]
    answer: str


def reference_answer(row: dict) -> str | None:
    """The reference in a row: `label`, `answer` (after #### if it has that), `final_answer`, or boxed in `solution`.

    A list of one stands for its element, a text with a box for what is in it. None if there is none; ValueError if it
    is neither text nor number.
    """
    for key in ("label", "answer", "final_answer"):
        value = row.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value is None or value == []:
            continue
        if type(value) not in (str, int, float) or value in (math.inf, -math.inf) or value != value:
            raise ValueError(f"`{key}` is {value!r}, an answer is text or a number")
        if text := str(value).split("####")[-1].strip():
            return extract_answer(text) or text
    solution = row.get("solution") or ""
    if not isinstance(solution, str):
        raise ValueError(f"`solution` is {solution!r}, it must be text")
    return extract_answer(solution) or None


def prompt_of(row: dict) -> str | list[dict[str, str]]:
    """The prompt of a row: its `prompt` as it is, or its question as a message that asks for a boxed answer."""
    prompt, question = row.get("prompt"), row.get("question") or row.get("problem")
    if not prompt and isinstance(question, str):
        return [{"role": "user", "content": question + INSTRUCTION}]
    texts = [prompt]
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        texts = [message.get(key) for message in prompt for key in ("role", "content")]
    if not prompt or not all(isinstance(text, str) for text in texts):
        raise ValueError("no `prompt` (text, or messages of role and content), `question` or `problem` in this row")
    return prompt


def load_problems(path) -> list[Problem]:
    """Read a JSONL file: `prompt` (text or messages), or `question` / `problem`, and an answer in each row.

    A row without an answer is left out, and how many were is printed. Raises ValueError naming file and line for
    anything that is not such a row, and for a file without problems.
    """
    path, problems, unanswered = Path(path), [], 0
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the problems in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = re.sub(": line 1 .*", "", str(error))
            raise ValueError(f"{path}, line {number}: not valid JSON ({what}); a line holds one object") from None
        try:
            if not isinstance(row, dict):
                raise ValueError(f"a problem is a JSON object, not {type(row).__name__}")
            if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
                raise ValueError("half a character (a lone surrogate such as \\ud800): remove it")
            prompt, answer = prompt_of(row), reference_answer(row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if answer is None:
            unanswered += 1
        else:
            problems.append(Problem(prompt, answer))
    if unanswered:
        print(f"{path}: {unanswered} of {unanswered + len(problems)} rows have no answer and are left out")
    if not problems:
        raise ValueError(f'{path} holds no problem with an answer: a line is {{"prompt": ..., "answer": ...}}')
    return problems


LAYOUTS = {  # before the conversation, each message, what opens the answer; known by the token that it begins with
    "chatml": ("", "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama3": (
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "none": ("", "{content}\n\n", ""),
}
OPENERS = {"chatml": "<|im_start|>", "llama3": "<|start_header_id|>"}


def render(prompt: str | list[dict[str, str]], tokenizer: Tokenizer, template: str = "auto") -> str:
    """The prompt as text.

    auto      text stays as it is; messages get the layout that the tokenizer has the tokens for, else plain paragraphs
    none      no layout: text as it is, messages as paragraphs
    chatml    Qwen, SmolLM2;  llama3: Llama 3 to 3.2. No system message is added where a row brings none
    boxed     as auto, but text is a question as well, and the request for \\boxed{} ends it (the paper's evaluation)
    other     a text of one's own; its {question} becomes the last message without the request for \\boxed{}, and
              earlier messages, a system message among them, are left out

    Raises ValueError if the layout's tokens are unknown to the tokenizer, or stand in the prompt already.
    """
    if isinstance(prompt, str) and template in ("auto", "none"):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for text in (message["content"] for message in messages):
        if any(opener in text for opener in OPENERS.values()):
            raise ValueError(
                f"a prompt is laid out as a chat already: use --template none for its file ({text[:60]!r})"
            )
    *earlier, last = messages
    question = ASKED.sub("", last["content"])
    if "{question}" in template:
        return template.replace("\\n", "\n").replace("{question}", question)
    known = [name for name, opener in OPENERS.items() if tokenizer.token_to_id(opener) is not None]
    if template in OPENERS and template not in known:
        raise ValueError(f"--template {template}: the tokenizer has no {OPENERS[template]}, so choose another")
    if template == "boxed":
        messages = [*earlier, last | {"content": question + INSTRUCTION}]
    layout = template if template in LAYOUTS else (*known, "none")[0]
    if layout == "llama3":  # its own chat template does so, ChatML's do not
        messages = [message | {"content": message["content"].strip()} for message in messages]
    start, turn, answer = LAYOUTS[layout]
    return start + "".join(turn.format(**message) for message in messages) + answer


def encode(problems: list[Problem], tokenizer: Tokenizer, template: str = "auto") -> list[list[int]]:
    """The token ids of each problem's prompt."""
    return [tokenizer.encode(render(p.prompt, tokenizer, template), add_special_tokens=False).ids for p in problems]


def usable(
    problems: list[Problem],
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    template: str = "auto",
    max_prompt_tokens: int = 0,
) -> tuple[list[Problem], list[list[int]]]:
    """The problems whose prompts have at most max_prompt_tokens tokens (0: any), and those prompts' token ids.

    How many are left out is printed. ValueError for a prompt without tokens, or with ids that the model does not have.
    """
    prompts = encode(problems, tokenizer, template)
    for ids, problem in zip(prompts, problems, strict=True):
        if not ids:
            raise ValueError(f"the prompt {problem.prompt!r} has no tokens: remove it from the problems")
        if max(ids) >= vocabulary:
            raise ValueError(
                f"token id {max(ids)} in a prompt, but the model's vocabulary has {vocabulary}: its tokenizer.json "
                "belongs to another model"
            )
    short = [i for i, ids in enumerate(prompts) if len(ids) <= (max_prompt_tokens or len(ids))]
    if len(short) < len(prompts):
        print(f"{len(prompts) - len(short)} of {len(prompts)} prompts have over {max_prompt_tokens} tokens: left out")
    if not short:
        raise ValueError(f"every prompt is longer than --max-prompt-tokens {max_prompt_tokens}: raise it")
    return [problems[i] for i in short], [prompts[i] for i in short]


EOS_KEYS = (
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("tokenizer_config.json", "eos_token"),
)


def load_tokenizer(folder) -> tuple[Tokenizer, list[int]]:
    """The folder's tokenizer and its EOS ids: from generation_config.json, else config.json, else its own eos_token."""
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist: --model must be a folder with a tokenizer in that format")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for name, key in EOS_KEYS:
        stored = eos = read_json(folder / name).get(key) if (folder / name).exists() else None
        if stored is None:
            continue
        if key == "eos_token":  # the token's text, or an object that holds it
            text = stored.get("content") if isinstance(stored, dict) else stored
            eos = tokenizer.token_to_id(text) if isinstance(text, str) else None
        ids = eos if isinstance(eos, list) else [eos]
        if not ids or not all(type(i) is int and 0 <= i < 2**32 and tokenizer.id_to_token(i) is not None for i in ids):
            raise ValueError(f"{folder / name}: {key} = {stored!r} is no token, or list of tokens, of tokenizer.json")
        size = read_json(folder / "config.json").get("vocab_size")
        if isinstance(size, int) and max(ids) >= size:
            raise ValueError(f"{folder / name}: {key} = {stored!r} is beyond vocab_size = {size} of config.json")
        return tokenizer, ids
    names = ", ".join(name for name, _ in EOS_KEYS)
    raise ValueError(f"{folder}: no eos_token_id or eos_token in {names}, so no response could end: add one")


# ------------------------------------------------------------------------------------------------------- answers

LONGEST_ANSWER = 1000  # characters; a longer answer equals only itself
DEEPEST = 8  # brackets in brackets; what lies deeper is compared as text
RELATION = r"(?s:.*)(?:[<>]|\\(?:[lg][et]|ne|equiv|(?:not)?in)(?![a-z]))"  # of two of them, `and` is not `or`
BEFORE = r"(^|[-+=(\[,]|\\pm)\s*"  # what may stand before a term
IRRATIONAL = r"(\\pi|\\sqrt\s*(?:\{[^{}]*\}|[0-9]))(?=\s*(?:[.,;]?$|[,)\]]))"  # at the end of an answer or a member
REWRITES = [  # (pattern, replacement), in this order: what only shows goes, one spelling stands for all
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|(?<!\\)\$", ""),
    (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\[,;:!> ]|~", " "),
    (r"\\(?:text(?:bf|it|rm|normal)?|[mh]box|math(?:rm|bf|it)|operatorname)\s*\{", r"\\text{"),
    (r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
    (r"\\text\{(\s*|\s*,?\s*(?:and|or)\s*)\}", r" \1 "),
    (rf"(?:,\s*|(?<=[0-9}})\]])\s*|(?<=\\circ)\s*|(?<=\\pi)\s*)(?:and|or)(?![a-zA-Z]|{RELATION})", ","),  # 5 or 9: 5,9
    (r"(?<![\\a-zA-Z])[A-Z](?=[a-z]{2})", lambda match: match[0].lower()),  # Even: even
    (r"(?<=[0-9}])\s*\\(?:cdot|times)(?![a-zA-Z])\s*(?=\\sqrt|\\pi|(?!e[-+0-9])[a-zA-Z])", ""),  # 2 \cdot \pi: 2\pi
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\\mid(?![a-zA-Z])", "|"),
    (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac\1\2"),
    (rf"{BEFORE}\\frac(?:\{{1\}}|1)(\{{[0-9]+\}}|[0-9])\s*{IRRATIONAL}", r"\1\\frac{\3}\2"),  # \frac12\pi: \frac\pi2
    (rf"{BEFORE}\\frac(?:\{{([0-9]+)\}}|([0-9]))(\{{[0-9]+\}}|[0-9])\s*{IRRATIONAL}", r"\1\\frac{\2\3\5}\4"),
    (  # \frac{-a}{b}: -\frac ab
        r"(^|[(\[,=])\s*\\frac\s*\{\s*-((?:[0-9a-zA-Z]|\\pi|\\sqrt\s*\{[^{}]*\})+)\}(\{[^{}]*\}|[0-9])(?![!^])",
        r"\1-\\frac{\2}\3",
    ),
    (r"\s*([{}])\s*", r"\1"),
    (r"(?<!\\)(?<!\\text)\{([a-zA-Z]|\\[a-zA-Z]+)\}", r" \1 "),  # \cos{x}: \cos x
    (r"(?<!\\)(?<!\\text)\{([0-9])\}", r"\1"),  # \frac{1}{2}: \frac12, x^{2}: x^2
    (r"\s+", " "),
    (r"(\\[a-zA-Z]+ (?=[a-zA-Z])|[0-9] (?=[0-9]))| ", r"\1"),  # some spaces separate: \pi r, and 1 2 is not 12
    (r"(?<![0-9.])([0-9]+)\.0+(?![0-9]|\.[0-9])", r"\1"),  # 1.0: 1
    (r"(?<![0-9.])([0-9]*\.[0-9]*[1-9])0+(?![0-9]|\.[0-9])", r"\1"),  # 1.50: 1.5
    (r"\^\\prime", "'"),
    (r"(?<![.,])[.,;]$", ""),
]
UNICODE = str.maketrans(
    {"−": "-", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "∪": r"\cup "}
    | {"∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge "}
)
SYMBOL = r"(?:[a-zA-Z]|\\[a-z]+)"
NAME = re.compile(  # x=  x_1=  f(x)=  f^{-1}(x)=  AB=  \angle ABC=  area=  (x,y)=  x\in
    rf"({SYMBOL}(?:\^\{{-1\}}(?=\())?(?:_\w|_\{{\w+\}})?(?:\([a-zA-Z]\))?|(?:\\angle ?)?[A-Z]{{1,3}}"
    rf"|(?!not|minus)[a-z]{{3,}}|\({SYMBOL}(?:,{SYMBOL})+\))(?:=|\\in(?![a-z]) ?)"
)
NO_UNITS = (  # words that change the number before them
    r"[a-z]*(?:hundred|thousand|illion|below|negative|minus|infinity)|lakh|crore|dozen|score|tens\}|half|halves|third"
    r"|quarter|(?!month|bath|path|cloth|booth)[a-z]+ths?(?:of|\})|[A-Z]*ILLION|[mM]il(?!e|li|k)|[mMbBtT]l?n|squared"
    r"|cubed|factorial|pi\}|plus|over|root|sqrt|power|double|and|or(?!ange)|base|choose|mod"
)
WORDS = "[cmk]m|kg|mph|inch(?:es)?|foot|feet|yard|mile|meter|second|minute|hour|day|week|month|year|dollar|cent"
UNIT = re.compile(  # (a constant)(units, at its end): \%, \$, or several of \text{...}, ^\circ and WORDS
    r"((?:[-+/0-9.,{}()^ ]|\\(?:frac|sqrt|pi|times|cdot)(?![a-z]))*(?:[0-9})]|\\pi))"
    rf"(\\?%|\\\$|(?:/?(?:\\text\{{(?!{NO_UNITS})(?:(?:[a-zA-Z./]|\^-?[0-9]){{2,}}|[mgshLNJWVCF])\}}"
    rf"|\^\\circ|(?:{WORDS}|degree|percent)s?)(?:\^[0-9]|\^\{{-?[0-9]\}})?)+)"
)
UNIT_NAMES = {"degree": r"^\circ", "percent": "%", r"\%": "%", r"\$": "dollar", "USD": "dollar", "rad": "radian"}
DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
NUMBER = re.compile(  # (sign)(whole of a mixed number)(top)/(bottom); the exponent has at most three digits
    rf"([+-]?)(?:([0-9]+) (?=[0-9]+/[0-9]+$))? ?([+-]?{DECIMAL}(?:[eE][+-]?[0-9]{{1,3}})?)(?:/([+-]?{DECIMAL}))?"
)


def extract_answer(response: str) -> str | None:
    """The content of the last complete \\boxed{...}, braces balanced; None if there is none. Linear in the text."""
    opened, last = [], (0, 0)  # where the content of each open box begins, 0 for other braces; the last box's content
    for brace in re.finditer(r"(\\boxed\s*)?([{}])", response):
        if brace[2] == "{":
            opened.append(brace.end() if brace[1] else 0)
        elif opened and (start := opened.pop()) > last[0]:
            last = start, brace.end() - 1
    return response[slice(*last)].strip() if last[1] else None


def box_or_last_number(response: str) -> str | None:
    """The last boxed answer, else the last number of the text: the paper's evaluation, never the reward."""
    if (boxed := extract_answer(response)) is not None:
        return boxed
    number = r"(?<![0-9a-zA-Z)}.])[-−]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    return (re.findall(number, response) or [None])[-1]


EXTRACTORS = {"boxed": extract_answer, "last-number": box_or_last_number}


def normalise(text: str) -> str:
    """The text after all REWRITES. A bare comma groups thousands outside brackets only: (1,200) is a pair."""
    text = re.sub("√ ?([0-9]+)", r"\\sqrt{\1}", text).translate(UNICODE)
    comma = r",\s*\\!\s*|\{,\}|\\," + ("" if re.search(r"[()\[\]]|\\\{", text) else "|,")
    thousands = rf"(?<![0-9,.])[1-9][0-9]{{0,2}}(?:(?:{comma})[0-9]{{3}})+(?!,?[0-9])"
    text = re.sub(thousands, lambda match: re.sub("[^0-9]", "", match[0]), text)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def number(text: str) -> Fraction | None:
    """The exact value of a normalised integer, decimal, fraction, mixed number or a*10^n; None for anything else."""
    text = re.sub(r"\\frac(?:([0-9])|\{([^{}]*)\})(?:([0-9])|\{([^{}]*)\})(?![0-9.])", r" \1\2/\3\4", text)
    text = re.sub(r"^([+-]?)10\^", r"\g<1>1\\times10^", text)
    text = re.sub(r"\\(?:times|cdot)10\^(?:\{([+-]?[0-9]+)\}|([0-9])(?![0-9]))", r"e\1\2", text)
    match = NUMBER.fullmatch(text)
    if match is None or (match[4] and not Fraction(match[4])):
        return None
    return (-1 if match[1] == "-" else 1) * (int(match[2] or 0) + Fraction(match[3]) / Fraction(match[4] or 1))


def split(text: str, separator: str) -> list[str]:
    """The pieces between separators outside all brackets; none if a bracket closes that did not open."""
    pieces, start, depth = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if depth == 0 and place >= start and text.startswith(separator, place):
            pieces.append(text[start:place])
            start = place + len(separator)
    return [*pieces, text[start:]]


class Answer(typing.NamedTuple):
    """An answer taken apart: what stands before `=`, the unit, and a value or, for this kind of group, its members.

    The order of members matters but in sets, lists and unions.
    """

    value: Fraction | str = ""
    name: str = ""
    unit: str = ""
    kind: str = ""  # "{}" set or list, "\\cup" union, "()" "[)" "(]" "[]" tuple or interval, "matrix", "row"
    members: tuple = ()


def group(kind: str, pieces: list[str], depth: int) -> Answer:
    """The pieces as members; a set of one is its member."""
    if kind == "{}":  # {1 \pm 2, 5} has three members
        pieces = [re.sub(r"\\pm ?", sign, piece) for piece in pieces for sign in "+-"[: piece.count(r"\pm") + 1]]
    members = tuple(read(piece, depth + 1) for piece in pieces)
    return members[0] if kind == "{}" and len(members) == 1 else Answer(kind=kind, members=members)


def read(text: str, depth: int = 0) -> Answer:
    """Take a normalised answer apart: the first rule that applies, then the rules again on what it leaves."""
    if depth > DEEPEST:
        return Answer(text)
    text = text.strip().removeprefix("+")
    for separator, kind in ((",", "{}"), (r"\cup", r"\cup")):
        if len(pieces := split(text, separator)) > 1:
            return group(kind, pieces, depth)
    if match := NAME.match(text):
        rest = read(text[match.end() :], depth + 1)
        return rest._replace(name=f"{match[1]}={rest.name}".removesuffix("="))
    match = re.fullmatch(r"(\\?[\[({])(.*[^\\])(\\?[\])}])", text)
    if match and (pieces := split(match[2], ",")):
        kind = match[1] + match[3]
        if kind in ("{}", r"\(\)", r"\[\]") or (kind == "()" and len(pieces) == 1):
            return read(match[2], depth + 1)
        return group("{}" if kind == r"\{\}" else kind, pieces, depth)
    if match := re.fullmatch(r"\\begin\{[pb]matrix\}(.*?)(?:\\\\)?\\end\{[pb]matrix\}", text):
        rows = [group("row", split(row, "&"), depth) for row in split(match[1], r"\\")]
        return Answer(kind="matrix", members=tuple(rows))
    if text.count(r"\pm") == 1:
        return group("{}", [text], depth)
    if match := re.fullmatch(r"(-?)(?:\\\$|\\text\{\\\$\})(.+)", text):
        return read(match[1] + match[2], depth + 1)._replace(unit="dollar")
    if match := UNIT.fullmatch(text):
        unit = re.sub(r"\\text|[{}]|(?<=[a-z]{2})s\}?$", "", match[2])
        return read(match[1], depth + 1)._replace(unit=UNIT_NAMES.get(unit, unit))
    if r"\text{" in text:
        return read(re.sub(r"\\text\{([^{}]*)\}", r"\1", text), depth + 1)
    if (value := number(text)) is not None:
        return Answer(value)
    match = re.fullmatch(r"(-?)((?:[0-9a-zA-Z^{}!]|\\pi|\\sqrt|\([^()]*\))+)/([0-9]+|[a-zA-Z]|\\[a-z]+)", text)
    return Answer(normalise(r"{}\frac{{{}}}{{{}}}".format(*match.groups())) if match else text)  # n/2: \frac n2


def same(a: Answer, b: Answer) -> bool:
    """A name or unit may be left out, not changed. 50\\% is 50 with a unit, and 1/2."""
    if a.kind != b.kind or len(a.members) != len(b.members):
        return False
    if any(x and y and x != y for x, y in ((a.name, b.name), (a.unit, b.unit))):
        return False
    if isinstance(a.value, Fraction) and isinstance(b.value, Fraction) and a.unit != b.unit:
        hundredths = a.value == 100 * b.value if a.unit == "%" else b.unit == "%" and b.value == 100 * a.value
        return hundredths or a.value == b.value
    if a.kind not in ("{}", r"\cup") or named(a) != named(b):  # x=1, y=2 is 1, 2 and not 2, 1
        return a.value == b.value and all(map(same, a.members, b.members))
    left = list(b.members)
    for member in a.members:
        match = next((i for i, other in enumerate(left) if same(member, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def named(a: Answer) -> bool:
    """Every member has a name of its own."""
    return len({member.name for member in a.members} - {""}) == len(a.members)


def is_equal(answer: str, reference: str) -> bool:
    """Equal as exact numbers, else as LaTeX without what only shows; groups member by member.

    Order matters in tuples and intervals, not in sets, unions and lists such as 1,2. Left out on purpose: symbolic
    equality. 2(n-1) is not 2n-2 here, nor 2^{10} 1024: it takes a computer algebra system, which is slow and can hang.
    """
    a, b = answer.strip(), reference.strip()
    if a in (b, re.sub(r",\s+", ",", b)) or b == re.sub(r",\s+", ",", a):  # 70,110 may be the list 70, 110
        return True
    if max(len(answer), len(reference)) > LONGEST_ANSWER:
        return False
    return same(read(normalise(answer)), read(normalise(reference)))


def is_correct(response: str, answer: str, extract=extract_answer) -> bool:
    """The reward: does the last boxed answer of the response equal the reference?"""
    found = extract(response)
    return found is not None and is_equal(found, answer)


# ---------------------------------------------------------------------------------------------------- evaluation


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, from `correct` right of `samples` (Codex, 2107.03374)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def sample_responses(
    model: Decoder, prompts: list[list[int]], *, group_size: int, rows: int, progress=False, **settings
) -> Rollout:
    """`rollout` in batches of at most `rows` rows (at least one prompt); the responses do not depend on `rows`."""
    step = max(1, rows // group_size)
    batches = [prompts[i : i + step] for i in range(0, len(prompts), step)]
    bar = tqdm(batches, desc="batches", leave=False, disable=not progress or len(batches) == 1)
    return Rollout.cat([rollout(model, batch, group_size=group_size, progress=progress, **settings) for batch in bar])


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    eos_ids: list[int],
    problems: list[Problem],
    *,
    samples=1,
    seed=0,
    template="auto",
    extract="boxed",
    **settings,
) -> tuple[dict, list[dict]]:
    """Accuracy of `samples` responses to each problem: (summary, one record a response).

    extract: how the answer is found, one of EXTRACTORS. settings: those of `sample_responses` and `rollout`.
    The standard error is over problems, None for a single one.
    """
    prompts = encode(problems, tokenizer, template)
    generator = torch.Generator().manual_seed(seed)
    r = sample_responses(model, prompts, group_size=samples, eos_ids=eos_ids, generator=generator, **settings)
    records = []
    for i in range(len(r.tokens)):
        problem, text = problems[i // samples], tokenizer.decode(r.response(i))
        records.append(
            {
                "problem": i // samples,
                "prompt": render(problem.prompt, tokenizer, template),
                "response": text,
                "extracted": EXTRACTORS[extract](text),
                "answer": problem.answer,
                "correct": is_correct(text, problem.answer, EXTRACTORS[extract]),
                "tokens": int(r.response_lengths[i]),
                "finished": bool(r.finished[i]),
            }
        )
    right = torch.tensor([record["correct"] for record in records]).view(-1, samples)  # (problems, samples)
    means = right.double().mean(1)
    summary = {
        "accuracy": float(means.mean()),
        "stderr": float(means.std() / len(means) ** 0.5) if len(means) > 1 else None,
        "problems": len(problems),
        "samples": samples,
        "boxed": sum(extract_answer(record["response"]) is not None for record in records) / len(records),
        "truncated": 1 - float(r.finished.double().mean()),
        "response_length": float(r.response_lengths.double().mean()),
        "kv_saved": r.kv_saved,
        "cache_bytes": sum(r.cache_bytes.values()),
        "dense_bytes": r.dense_bytes,
        "tokens_per_second": r.tokens_per_second,
        "seconds": r.seconds,
    }
    k = 2
    while k <= samples:
        summary[f"pass@{k}"] = sum(pass_at_k(samples, int(c), k) for c in right.sum(1)) / len(right)
        k *= 2
    return summary, records


def beyond_context(model: ModelConfig, longest: int) -> str:
    """A line of warning if sequences may get longer than the model was trained for; else nothing."""
    context = model.raw.get("max_position_embeddings") or longest
    if longest <= context:
        return ""
    return (
        f"context   sequences may reach {longest:,} tokens, the model's max_position_embeddings are {context:,}: lower "
        "--max-new-tokens or --max-prompt-tokens\n"
    )


def names(compressors: str) -> list[str]:
    """The KV policies in a text with commas between them."""
    return [name.strip() for name in compressors.split(",")]


def dense_and_sparse(model, tokenizer, eos_ids, problems, *, compressor: str, budget: int, **settings) -> dict:
    """`evaluate` with dense decoding and with each compressor (names, by commas): {name: (summary, records)}."""
    modes = {"dense": "full"} | {f"{name}-{budget}": name for name in names(compressor) if name != "full"}
    return {
        name: evaluate(model, tokenizer, eos_ids, problems, compressor=mode, budget=budget, **settings)
        for name, mode in modes.items()
    }


# ---------------------------------------------------------------------------------- command lines from dataclasses


LONGEST = 1_000_000  # of a sequence, a cache, a batch: a larger number is a slip, unless an option allows it
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default, text: str, choices=None, numbers=False, **bounds):
    """A config field: its help text, the values it may take, whether it holds numbers, its bounds (see BOUNDS)."""
    return field(default=default, metadata={"help": text, "choices": choices, "numbers": numbers, "bounds": bounds})


def numbers(text: str) -> list[int]:
    """The whole numbers of an option that holds some, with commas between."""
    return [int(word) for word in text.split(",") if word]


def check_options(config) -> None:
    """ValueError, naming the flag, for a value of another type than its field's, unknown, or out of bounds."""
    types = typing.get_type_hints(type(config))
    for f in fields(config):
        value, bounds, choices = getattr(config, f.name), f.metadata["bounds"], f.metadata["choices"]
        if type(value) is int and "below" not in bounds:
            bounds = bounds | {"at_most": bounds.get("at_most", LONGEST)}
        allowed = typing.get_args(types[f.name]) or (types[f.name],)
        if type(value) not in allowed + ((int,) if float in allowed else ()):  # a bool is no int here
            raise ValueError(f"{flag(f.name)} must be {allowed[0].__name__}, not {value!r}")
        if isinstance(value, str) and ("\0" in value or (f.default and not value.strip())):
            raise ValueError(f"{flag(f.name)} must be text without NUL, and not empty, not {value!r}")
        if f.metadata["numbers"] and value != f.default and not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
            raise ValueError(f"{flag(f.name)} must be numbers with commas between, not {value!r}")
        if choices and value not in choices:
            raise ValueError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value!r}")
        if value is not None and not all(BOUNDS[word](value, limit) for word, limit in bounds.items()):
            words = " and ".join(
                "finite" if limit == math.inf else f"{word.replace('_', ' ')} {limit:,}"
                for word, limit in bounds.items()
            )
            raise ValueError(f"{flag(f.name)} must be {words}, not {value}")


def flag(name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_config(config_class, argv: list[str] | None, prog: str, description: str):
    """Make a command line from a dataclass of `option`s and parse it: (config, names that were given).

    Bad values end the program with exit code 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a run
    parser = Parser(
        prog=prog,
        usage=f"python {prog} [--option value ...] [@file]   (--help explains every option)",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    types = typing.get_type_hints(config_class)
    for f in fields(config_class):
        kind = next(t for t in (*typing.get_args(types[f.name]), types[f.name]) if t is not type(None))
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        text = f"{f.metadata['help']} (default: {'none' if f.default in ('', None) else f.default})"
        if f.metadata["choices"]:
            how["choices"] = f.metadata["choices"]
        parser.add_argument(flag(f.name), help=text.replace("%", "%%"), **how)
    try:
        given = vars(parser.parse_args(with_files(sys.argv[1:] if argv is None else argv)))
        return config_class(**given), given
    except (ValueError, OverflowError) as error:
        parser.error(str(error))


def with_files(arguments: list[str]) -> list[str]:
    """The arguments with each `@file` replaced by those in the file: quotes as in a shell, # starts a comment."""
    expanded = []
    for argument in arguments:
        if not argument.startswith("@"):
            expanded.append(argument)
            continue
        try:
            expanded += shlex.split(Path(argument[1:]).read_text(encoding="utf-8-sig"), comments=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the arguments in {argument[1:]!r} ({error})") from None
    return expanded


def pick_device(name: str, threads: int) -> torch.device:
    """The torch device ("auto": an accelerator if there is one), after setting the CPU threads (0: all)."""
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each backend fails in its own way
        reason = str(error).split(". ")[0].split("\n")[0]
        raise ValueError(f"--device {name} is not usable here ({reason}): try --device cpu") from None
    return torch.device(name)


@contextlib.contextmanager
def one_sentence(prog: str, errors=(ValueError, OSError, MemoryError), advice: str = ""):
    """Turn what a user can mend into one line on stderr and exit code 2; Ctrl-C ends with 130."""
    try:
        with enough_memory():
            yield
    except errors as error:
        print(f"{prog}: error: {' '.join(str(error).split())}{advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def enough_memory():
    """Give the many ways in which PyTorch runs out of memory one name, MemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            "out of memory|allocate memory|not enough memory", str(error)
        ):
            raise
        raise MemoryError(
            "out of memory. While sampling, fewer rows at a time help (train.py --rollout-rows, eval.py --rows) or "
            "a smaller --budget or --max-new-tokens; while learning, --gradient-checkpointing or fewer --micro-tokens"
        ) from None


def table(head: list[str], rows: list[list]) -> str:
    """Rows as aligned text; floats with three decimals, nothing for None."""
    cells = [
        head,
        *([f"{c:.3f}" if isinstance(c, float) else str("" if c is None else c) for c in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def plus_minus(mean: float, stderr: float | None) -> str:
    """A mean and, if there is one, its standard error."""
    return f"{mean:.3f}" + ("" if stderr is None else f" +- {stderr:.3f}")


def megabytes(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"


MAX_PROMPT = "problems with a longer prompt are left out and counted; 0 takes all"
TEMPLATE = (
    "how a prompt becomes text: none, chatml, llama3, boxed (a chat with the request for \\boxed{}), or a text of your "
    "own that holds {question} and asks for the box itself; auto takes text as it is and lays messages out as the "
    "model's tokenizer asks"
)


def check_template(template: str) -> None:
    """ValueError for a template that is neither a name nor a text with a place for the question."""
    if template not in ("auto", "boxed", *LAYOUTS) and "{question}" not in template:
        raise ValueError(
            f"--template {template!r} is not auto, boxed, {', '.join(LAYOUTS)} or a text with {{question}}"
        )


# The paper's evaluation: temperature, nucleus and length for all; 32 samples on the two small sets, one elsewhere.
PAPER = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 4096, "template": "boxed", "extract": "last-number"}
PAPER_SAMPLES = {"aime24": 32, "amc23": 32}


@dataclass(frozen=True)
class EvalConfig:
    """What `python eval.py` measures."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    benchmark: str = option("", "a folder: every JSONL in it, with the paper's settings where none are given")
    template: str = option("auto", TEMPLATE)
    max_prompt_tokens: int = option(0, MAX_PROMPT, at_least=0)
    limit: int = option(0, "only the first so many problems; 0 takes all", at_least=0)
    compressor: str = option("snapkv", f"KV policies of the sparse rows, by commas: {', '.join(COMPRESSORS)}")
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    samples: int = option(1, "responses to each problem; above 1: mean@k (accuracy) and unbiased pass@k", at_least=1)
    temperature: float = option(0.0, "0 is greedy; the paper evaluates at 0.8", at_least=0, below=math.inf)
    top_p: float = option(1.0, "nucleus; the paper evaluates at 0.95", at_least=1e-6, at_most=1)
    extract: str = option("boxed", "last-number takes the last number of a text without a box", choices=EXTRACTORS)
    max_new_tokens: int = option(1000, "longest response; what is longer is graded as it stands", at_least=1)
    rows: int = option(
        128, "responses sampled at a time (at least a problem's); costs memory, changes no result", at_least=1
    )
    out: str = option("", "folder for the responses and results; default runs/eval-<time>")
    seed: int = option(0, "of the sampler's random numbers", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("float32", "of weights and cache", choices=("float32", "bfloat16", "float64"))

    def __post_init__(self):
        check_options(self)
        check_template(self.template)
        for name in names(self.compressor):
            check_settings(name, self.budget, self.buffer, self.window)
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"--temperature must be 0 (greedy) or at least 0.001, not {self.temperature}")
        if self.samples > 1 and self.temperature == 0 and not self.benchmark:  # which brings its own temperature
            raise ValueError(f"--samples {self.samples} greedy responses would all be the same: set --temperature")


SETTINGS = (
    *("compressor", "budget", "buffer", "window", "samples", "seed", "rows"),
    *("max_new_tokens", "temperature", "top_p", "template", "extract"),
)


def write_whole(path: Path, text: str) -> None:
    """Give a file this content, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def as_lines(records: list[dict]) -> str:
    """Records as JSONL."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append(path: Path, records: list[dict]) -> None:
    """Add records to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(as_lines(records))


def new_folder(folder: Path) -> None:
    """Make a folder; ValueError if it holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: name another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder} ({error.strerror}): name another one with --out") from None


def benchmarks(config: EvalConfig, given: dict) -> dict[str, EvalConfig]:
    """What to evaluate, by name: the one file of --data, or each of the folder --benchmark in the paper's way."""
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
    """The table of one problem set: a row per decoding mode."""
    passes = [name for name in results["dense"] if name.startswith("pass@")]
    columns = ["accuracy", "stderr", *passes, "boxed", "truncated", "response_length", "kv_saved"]
    rows = [
        [name, *(s[c] for c in columns), megabytes(s["cache_bytes"]), round(s["tokens_per_second"])]
        for name, s in results.items()
    ]
    dense = [name for name, s in results.items() if name != "dense" and s["kv_saved"] == 0]
    note = f"\nnothing was evicted by {', '.join(dense)}: no row came to hold budget + buffer keys" if dense else ""
    return table(["decoding", *columns, "cache", "tokens/s"], rows) + note


def overview(results: dict[str, dict[str, dict]]) -> str:
    """The paper's table: accuracy by decoding mode (rows) and benchmark (columns), and the average."""
    modes = next(iter(results.values()))
    rows = []
    for mode in modes:
        accuracies = [by_mode[mode]["accuracy"] for by_mode in results.values()]
        rows.append([mode, *accuracies, sum(accuracies) / len(accuracies)])
    return table(["accuracy", *results, "average"], rows)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(
        EvalConfig, argv, "eval.py", "Accuracy of a model under dense and under compressed decoding."
    )
    with one_sentence("eval.py"):
        device = pick_device(config.device, config.threads)
        sets = benchmarks(config, given)
        tokenizer, eos_ids = load_tokenizer(config.model)
        architecture, problems = load_config(config.model), {}
        for name, c in sets.items():
            limits = {"template": c.template, "max_prompt_tokens": c.max_prompt_tokens}
            rows = load_problems(c.data)[: c.limit or None]
            problems[name], prompts = usable(rows, tokenizer, architecture.vocab_size, **limits)
            print(beyond_context(architecture, max(map(len, prompts)) + c.max_new_tokens), end="")
        model = load_model(config.model, getattr(torch, config.dtype), device)
        folder = Path(config.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
        new_folder(folder)
    results = {}
    with one_sentence("eval.py", (OSError, MemoryError, FloatingPointError)):
        for name, c in sets.items():
            settings = {key: getattr(c, key) for key in SETTINGS}
            found = dense_and_sparse(model, tokenizer, eos_ids, problems[name], progress=True, **settings)
            results[name] = {mode: summary for mode, (summary, _) in found.items()}
            for mode, (_, records) in found.items():
                append(folder / f"responses-{name}-{mode}.jsonl", records)
            everything = {"config": {key: asdict(c) for key, c in sets.items()}, "results": results}
            write_json(folder / "results.json", everything)
            print(f"{c.model} on {len(problems[name])} problems of {c.data}, {c.samples} response(s) each")
            print(details(results[name]), flush=True)
    if config.benchmark:
        print(overview(results))
    print(f"responses and results are in {folder}/")


if __name__ == "__main__":
    main()
