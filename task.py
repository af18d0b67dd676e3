"""What is asked and what is rewarded: problem files, the tokenizer, prompts, answers.

The check of an answer here is the default reward in training: 1 if the last \\boxed{...} of the response equals the
reference, else 0. Any other function of (response, answer) can take its place.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tokenizers import Tokenizer

from model import read_json
from runs import write_json

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


@dataclass(frozen=True)
class Prompt:
    """A problem as the model is asked it: rendered and tokenised once, for sampling, grading and records alike."""

    text: str
    ids: list[int]  # token ids
    answer: str  # the reference


def prepare(
    problems: list[Problem],
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    template: str = "auto",
    longest: int = 0,
) -> list[Prompt]:
    """The prompts of these problems, those of more than `longest` tokens (0: any) left out, which is printed.

    ValueError for a prompt without tokens, or with ids that the model does not have.
    """
    prompts = []
    for problem in problems:
        text = render(problem.prompt, tokenizer, template)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise ValueError(f"the prompt {problem.prompt!r} has no tokens: remove it from the problems")
        if max(ids) >= vocabulary:
            raise ValueError(
                f"token id {max(ids)} in a prompt, but the model's vocabulary has {vocabulary}: its tokenizer.json "
                "belongs to another model"
            )
        prompts.append(Prompt(text, ids, problem.answer))
    short = [prompt for prompt in prompts if len(prompt.ids) <= (longest or len(prompt.ids))]
    if len(short) < len(prompts):
        print(f"{len(prompts) - len(short)} of {len(prompts)} prompts have over {longest} tokens: left out")
    if not short:
        raise ValueError(f"every prompt has over {longest} tokens: raise that limit")
    return short


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


def exact_value(text: str) -> Fraction | None:
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
    members = tuple(parse(piece, depth + 1) for piece in pieces)
    return members[0] if kind == "{}" and len(members) == 1 else Answer(kind=kind, members=members)


def parse(text: str, depth: int = 0) -> Answer:
    """Take a normalised answer apart: the first rule that applies, then the rules again on what it leaves."""
    if depth > DEEPEST:
        return Answer(text)
    text = text.strip().removeprefix("+")
    for separator, kind in ((",", "{}"), (r"\cup", r"\cup")):
        if len(pieces := split(text, separator)) > 1:
            return group(kind, pieces, depth)
    if match := NAME.match(text):
        rest = parse(text[match.end() :], depth + 1)
        return rest._replace(name=f"{match[1]}={rest.name}".removesuffix("="))
    match = re.fullmatch(r"(\\?[\[({])(.*[^\\])(\\?[\])}])", text)
    if match and (pieces := split(match[2], ",")):
        kind = match[1] + match[3]
        if kind in ("{}", r"\(\)", r"\[\]") or (kind == "()" and len(pieces) == 1):
            return parse(match[2], depth + 1)
        return group("{}" if kind == r"\{\}" else kind, pieces, depth)
    if match := re.fullmatch(r"\\begin\{[pb]matrix\}(.*?)(?:\\\\)?\\end\{[pb]matrix\}", text):
        rows = [group("row", split(row, "&"), depth) for row in split(match[1], r"\\")]
        return Answer(kind="matrix", members=tuple(rows))
    if text.count(r"\pm") == 1:
        return group("{}", [text], depth)
    if match := re.fullmatch(r"(-?)(?:\\\$|\\text\{\\\$\})(.+)", text):
        return parse(match[1] + match[2], depth + 1)._replace(unit="dollar")
    if match := UNIT.fullmatch(text):
        unit = re.sub(r"\\text|[{}]|(?<=[a-z]{2})s\}?$", "", match[2])
        return parse(match[1], depth + 1)._replace(unit=UNIT_NAMES.get(unit, unit))
    if r"\text{" in text:
        return parse(re.sub(r"\\text\{([^{}]*)\}", r"\1", text), depth + 1)
    if (value := exact_value(text)) is not None:
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
    return same(parse(normalise(answer)), parse(normalise(reference)))


def is_correct(response: str, answer: str, extract=extract_answer) -> bool:
    """The reward: does the last boxed answer of the response equal the reference?"""
    found = extract(response)
    return found is not None and is_equal(found, answer)


# ----------------------------------------------------------------------------------------------- one's own reward

Reward = Callable[[str, str], float]  # of (response, answer): any finite number


class RewardError(Exception):
    """A reward function broke its promise."""


def load_reward(name: str) -> Reward:
    """The function of "FILE.py:NAME". Raises ValueError naming what is missing, or what the file raised."""
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--reward {name!r}: name a function as FILE.py:NAME; there is no file {file!r}")
    spec = importlib.util.spec_from_file_location("reward", file)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's code
        raise ValueError(f"--reward: {file} cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(reward := getattr(module, function, None)):
        raise ValueError(f"--reward: {file} has no function {function!r}")
    return reward


def held_to_its_promise(reward: Reward, name: str, folder: Path) -> Reward:
    """The reward function, but RewardError where it raises or gives no finite number; the response is then saved."""

    def checked(response: str, answer: str) -> float:
        try:
            value = reward(response, answer)
            if not isinstance(value, str) and math.isfinite(value):
                return float(value)
            fault = f"gave {value!r}, not a finite number"
        except Exception as error:  # it is the user's code
            fault = f"raised {type(error).__name__}: {error}"
        file = folder / "reward-failed.json"
        write_json(file, {"response": response, "answer": answer, "fault": fault})
        raise RewardError(f"the reward {name} {fault}; the response is in {file}")

    return checked
