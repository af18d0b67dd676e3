"""What is asked and what is rewarded: problem files, the tokenizer, prompts, answers.

The check of an answer here is the default reward in training: 1 if the last \\boxed{...} of the response equals the
reference, else 0. Any other function of (response, answer) can take its place.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from model import read_json
from runs import write_json

ASSETS = Path(__file__).resolve().parent / "assets"
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASKED = re.compile(r"\s*Please reason step by step, and put your final answer within \\boxed\{(\{\})?\}\.?\s*$")

# ------------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True)
class Problem:
    """prompt: text that is used as it is, or a list of chat messages {"role", "content"}; answer: the reference."""

    prompt: str | list[dict[str, str]]
    answer: str
    where: str = field(default="a problem", compare=False)  # its file and line, for errors


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
    if prompt in (None, "") and question and isinstance(question, str):
        return [{"role": "user", "content": question + INSTRUCTION}]
    if prompt and isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt) else []
    if not messages or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise ValueError("no `prompt` (text, or messages of role and content), `question` or `problem` in this row")
    if more := sorted({key for message in messages for key in message} - {"role", "content"}):
        raise ValueError(f"a message holds {', '.join(more)} besides role and content, and nothing reads it: remove it")
    roles = [message["role"] for message in messages]
    if unknown := sorted(set(roles) - {"system", "user", "assistant"}):
        raise ValueError(f"a message has the role {unknown[0]!r}: it must be system, user or assistant")
    if roles[-1] != "user":
        raise ValueError(f"the last message is of role {roles[-1]}: a prompt must end with one of role user")
    return messages


def read_problem(line: str, where: str) -> Problem | None:
    """The problem in a line of JSONL, None if it has no answer. ValueError, with `where`, if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = re.sub(": line 1 .*", "", str(error))
        raise ValueError(f"{where}: not valid JSON ({what}); a line holds one object") from None
    try:
        if not isinstance(row, dict):
            raise ValueError(f"a problem is a JSON object, not {type(row).__name__}")
        if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
            raise ValueError("half a character (a lone surrogate such as \\ud800): remove it")
        prompt, answer = prompt_of(row), reference_answer(row)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    return None if answer is None else Problem(prompt, answer, where)


def load_problems(path) -> list[Problem]:
    """Read a JSONL file: `prompt` (text or messages), or `question` / `problem`, and an answer in each row.

    A row without an answer is left out, and how many were is printed. Raises ValueError naming file and line for
    anything that is not such a row, and for a file without problems.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the problems in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it") from None
    found = [read_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    problems = [problem for problem in found if problem]
    if len(problems) < len(found):
        print(f"{path}: {len(found) - len(problems)} of {len(found)} rows have no answer and are left out")
    if not problems:
        raise ValueError(f'{path} holds no problem with an answer: a line is {{"prompt": ..., "answer": ...}}')
    return problems


# ------------------------------------------------------------------------------- the tokenizer and its chat template

EOS_KEYS = (
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
    ("tokenizer_config.json", "eos_token"),
)
TEMPLATE = (
    "auto: text as it is, messages through the model's chat template; FILE.jinja: through that one; or a text with "
    "{question}, which asks for the box itself"
)
Template = jinja2.Template | str | None  # a chat template, a text with {question}, or none


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
            eos = tokenizer.token_to_id(str(stored.get("content") if isinstance(stored, dict) else stored))
        ids = eos if isinstance(eos, list) else [eos]
        if not ids or not all(type(i) is int and 0 <= i < 2**32 and tokenizer.id_to_token(i) is not None for i in ids):
            raise ValueError(f"{folder / name}: {key} = {stored!r} is no token, or list of tokens, of tokenizer.json")
        size = read_json(folder / "config.json").get("vocab_size")
        if isinstance(size, int) and max(ids) >= size:
            raise ValueError(f"{folder / name}: {key} = {stored!r} is beyond vocab_size = {size} of config.json")
        return tokenizer, ids
    names = ", ".join(name for name, _ in EOS_KEYS)
    raise ValueError(f"{folder}: no eos_token_id or eos_token in {names}, so no response could end: add one")


def load_template(folder, option: str = "auto") -> Template:
    """What lays prompts out, by --template: a text with {question}, or the chat template of a file or of the model.

    The model's own is chat_template.jinja, else the one (named default) in tokenizer_config.json; None without either.
    """
    if "{question}" in option:
        return option.replace("\\n", "\n")
    if option != "auto" and not option.endswith(".jinja"):
        raise ValueError(
            f"--template {option!r} is not auto (text as it is; messages, and a `question` with the request for a box, "
            "through the model's chat template), nor FILE.jinja (through that one), nor a text with {question} "
            "('{question}' alone: no layout)"
        )
    file, own = Path(folder) / "tokenizer_config.json", Path(folder) / "chat_template.jinja"
    config = read_json(file) if file.exists() else {}
    if option != "auto" or own.exists():
        file = own if option == "auto" else Path(option)
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template {file} ({error})") from None
    elif isinstance(source := config.get("chat_template"), list):
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{file}: chat_template is neither text nor a list with one named default: use --template")
    older = Path(folder) / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and older.exists():
        config |= read_json(older)
    return compile_template(source, str(file), config)


class Generation(jinja2.ext.Extension):
    """{% generation %} and {% endgeneration %} show others what the assistant wrote. Here they change nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """What stands between the two."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> typing.NoReturn:
    """What a chat template calls for messages that it does not take."""
    raise jinja2.TemplateError(message)


def compile_template(source: str, name: str, config: dict) -> jinja2.Template:
    """A chat template that sees what transformers shows it: the tokens that config names (bos_token), some functions.

    But not today's date (`strftime_now`): a run that is resumed tomorrow must ask the same.
    """
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [Generation, "jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options, loader=jinja2.DictLoader({name: source}))
    environment.globals |= {key: t for key, t in tokens.items() if key.endswith("_token") and isinstance(t, str)}
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    try:
        return environment.get_template(name)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{name}: line {error.lineno} of the chat template is no jinja ({error.message})") from None


def lay_out(template: jinja2.Template, messages: list[dict[str, str]], *, opened: bool) -> str:
    """The messages in the layout of a chat template; opened: and the beginning of the assistant's next one."""
    try:
        return template.render(messages=messages, add_generation_prompt=opened, tools=None, documents=None)
    except Exception as error:  # a template is a program and fails in its own way
        raise ValueError(f"the chat template of {template.name} does not take these messages ({error})") from None


def end_of_turn(template: jinja2.Template, tokenizer: Tokenizer, special: dict[int, str]) -> list[int]:
    """The special token with which a chat template ends an assistant's turn, if it is one, in a list."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "XYZZY"}]
    try:
        after = lay_out(template, turns, opened=False).partition("XYZZY")[2].lstrip()
    except ValueError:  # this one lays out questions alone
        return []
    return [i for i in tokenizer.encode(after, add_special_tokens=False).ids[:1] if i in special]


# ------------------------------------------------------------------------------------------------------- prompts

MAX_PROMPT = "problems with a longer prompt are left out and counted; 0 takes all"


@dataclass(frozen=True)
class Prompt:
    """A problem as the model is asked it: rendered and tokenised once, for sampling, grading and records alike."""

    text: str
    ids: list[int]  # token ids
    answer: str  # the reference
    ends: Sequence[int] = ()  # what ends a turn in its layout, beside the model's EOS


def render(prompt: str | list[dict[str, str]], template: Template, special: Iterable[str] = ()) -> str:
    """The prompt as text: text as it is, messages through a chat template or, without one, as paragraphs.

    A template that is text takes both. Its {question} becomes the text, or the last message, without the request for
    \\boxed{}; earlier messages, a system message among them, are left out. ValueError for messages with a `special`
    token in them, which would have the model read a layout that is not there.
    """
    if isinstance(prompt, str) and not isinstance(template, str):
        return prompt
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for token in special:
        if any(token in content for content in contents):
            raise ValueError(f"its text holds {token}, a control token of this model: remove it")
    if isinstance(template, str):
        return template.replace("{question}", ASKED.sub("", contents[-1]))
    if template is None:
        return "".join(content + "\n\n" for content in contents)
    return lay_out(template, prompt, opened=True)


def prepare(
    problems: list[Problem], tokenizer: Tokenizer, vocabulary: int, *, template: Template = None, longest: int = 0
) -> list[Prompt]:
    """The prompts of these problems, those of more than `longest` tokens (0: any) left out, which is printed.

    ValueError, with the line, for a prompt that the template does not take, without tokens, or with ids that the model
    does not have.
    """
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    chats = sum(isinstance(problem.prompt, list) for problem in problems)
    if chats and template is None:
        print(f"the model has no chat template: {chats} prompts of messages become paragraphs (see --template)")
    ends = end_of_turn(template, tokenizer, special) if chats and isinstance(template, jinja2.Template) else []
    prompts = []
    for problem in problems:
        try:
            text = render(problem.prompt, template, special.values())
        except ValueError as error:
            raise ValueError(f"{problem.where}: {error}") from None
        ids = tokenizer.encode(text, add_special_tokens=False).ids  # a chat template brings its own BOS
        if not ids:
            raise ValueError(f"{problem.where}: the prompt {problem.prompt!r} has no tokens: remove it")
        if max(ids) >= vocabulary:
            raise ValueError(
                f"token id {max(ids)} in a prompt, but the model's vocabulary has {vocabulary}: its tokenizer.json "
                "belongs to another model"
            )
        prompts.append(Prompt(text, ids, problem.answer, ends if isinstance(problem.prompt, list) else []))
    short = [prompt for prompt in prompts if len(prompt.ids) <= (longest or len(prompt.ids))]
    if len(short) < len(prompts):
        print(f"{len(prompts) - len(short)} of {len(prompts)} prompts have over {longest} tokens: left out")
    if not short:
        raise ValueError(f"every prompt has over {longest} tokens: raise that limit")
    return short


def all_ends(eos_ids: list[int], prompts: list[Prompt]) -> list[int]:
    """Every token that ends a response to one of these prompts."""
    return sorted({*eos_ids, *(i for prompt in prompts for i in prompt.ends)})


def response_text(tokenizer: Tokenizer, ids: list[int], eos_ids: list[int]) -> str:
    """What is graded and logged: the whole response, special tokens too, but for the one that ended it."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in eos_ids else ids, skip_special_tokens=False)


# ------------------------------------------------------------------------------------------------------- answers

LONGEST_ANSWER = 300  # characters; a longer answer equals only itself, and what is nested stays shallow
SPELLINGS = {  # the spelling of a token: others of it
    "": r"\left \right \displaystyle \big \bigl \bigr \Big \Bigl \Bigr \bigg \biggl \biggr \Bigg \Biggl \Biggr $",
    r"\frac": r"\dfrac \tfrac \cfrac",
    r"\text": r"\textbf \textit \textrm \textnormal \mbox \hbox \mathrm \mathbf \mathit \boldsymbol \bm \operatorname",
    r"\text{percent}": r"\% %",
    r"\and": "and",
    r"\or": "or",
    r"\{": r"\lbrace",
    r"\}": r"\rbrace",
    r"\le": r"\leq \leqslant",
    r"\ge": r"\geq \geqslant",
    r"\ne": r"\neq",
    r"\emptyset": r"\varnothing",
    "|": r"\mid",
    "dollar": "USD",
}
SIGNS = r"−- –- ±\pm ×\times ∪\cup ∞\infty π\pi ≤\le ≥\ge ≠\ne ∅\emptyset °^\circ"  # a character and what it stands for
STANDARD = {other: one for one, others in SPELLINGS.items() for other in others.split()}
STANDARD |= {sign[0]: f"{sign[1:]} " for sign in SIGNS.split()}
UNITS = (  # in the singular; SYMBOLS are units only in \text
    "[cmk]m|kg|mph|inch|foot|feet|yard|mile|(?:centi|milli|kilo)?(?:meter|gram)|pound|ounce|ton|liter|gallon|cup|acre"
    "|second|minute|hour|day|week|month|year|dollar|cent|percent|degree|unit|square|cubic|per|way|people|point"
)
SYMBOLS = "[mgshLNJWVCF]|in|ft|lb|oz|hr|min|sec|yd|mi|sq|cu|m[lLg]|gm|erg|rad|radian|Hz|Pa"
NO_UNIT = re.compile(  # words that change the number before them, and a letter that may be a factor
    r"(?i)illion|hundred|thousand|(?<!mon|.pa|.ba)ths?\b|\b(?:third|quarter|half|halve|ten|dozen|gross|score|lakh|crore"
    r"|[mb]il|[mbt]l?n|repeating|recurring|binary|octal|hex(?:adecimal)?|base|mod|squared|cubed|factorial|root|power|pi"
    r"|double|below|negative|minus|plus|over|infinity)s?(?![a-z])|percents?\W+\w|\{(?-i:[^mgshLNJWVCF])\}$"
)
THOUSANDS = r"(?<![0-9,.])[1-9][0-9]{0,2}(?:(?:,\s*\\!\s*|\{,\}|\\,|,(?!.*(?:[)\]]|\\\})))[0-9]{3})+(?!,?[0-9])"
CAPITALS = r"(?<![\\a-zA-Z])(?:[A-Z](?=[a-z]{2})|(?:YES|NO|No|TRUE|FALSE)(?![a-zA-Z]))"
SPACES = r"(\\[a-zA-Z]+ (?=\s*[a-zA-Z])|[0-9] (?=\s*[0-9])|[a-zA-Z]{2} (?=[a-zA-Z]{2}))|\s"
SCALED = r"(?<=[0-9])\\(?:times|cdot)10\^(?:\{(-?[0-9]{2,3}|-[0-9])\}|([0-9])(?![0-9]))"
CONSTANT = r"(?<![0-9a-zA-Z.}^_])((?:[0-9. ]|\\frac|\\sqrt|\{[0-9]+\})+)"
BARE_UNIT = rf"((?<=[0-9)}}])|(?<=\\pi ))((?:{UNITS})(?:e?s)?(?:[ /](?:{UNITS})(?:e?s)?)*)(?![a-zA-Z])"
REWRITES = [  # name, pattern, replacement, example; applied in this order
    ("Markdown around all", r"^(\*\*?|__?|`)(.+)\1$", r"\2", "**5** -> 5"),
    ("thousands", THOUSANDS, lambda number: re.sub("[^0-9]", "", number[0]), "1,200 -> 1200"),
    ("space", r"\\q?quad(?![a-zA-Z])|(?<!\\)\\[,;:!> ]|~", " ", r"1\quad2 -> 1 2"),
    ("root sign", "√ ?([0-9]+)", r"\\sqrt{\1}", r"√25 -> \sqrt{25}"),
    ("capitals", CAPITALS, lambda word: word[0].lower(), "Even -> even"),
    ("text of no words", r"\\text ?\{\s*(,?\s*\\(?:and|or))?\s*\}", r" \1 ", r"1\text{ }2 -> 1  2"),
    ("one in braces", r"(?<!\\)(?<!\\text)\{\s*([0-9a-zA-Z]|\\[a-zA-Z]+)\s*\}", r" \1 ", r"\cos{x}y -> \cos x y"),
    ("spaces but these", SPACES, r"\1", r"\pi r + 1 -> \pi r+1"),
    ("space after an index", r"([_^][0-9]) ", r"\1", r"\log_2 3 -> \log_23"),
    ("bare exponent", r"\^(-[0-9]+)", r"^{\1}", "10^-12 -> 10^{-12}"),
    ("power of ten", r"(?<![0-9a-zA-Z.{}^_])10\^(?=\{?-?[0-9])", r"1\\times10^", r"10^3 -> 1\times10^3"),
    ("scientific", SCALED, r"e\1\2", r"2\times10^3 -> 2e3"),
    ("product sign", rf"{CONSTANT}\\(?:cdot|times) ?(?=\\sqrt|\\pi|(?!e[-0-9])[a-zA-Z])", r"\1", r"2\cdot\pi -> 2\pi"),
    ("prime", r"\^\\prime ?", "'", r"y^\prime -> y'"),
    ("text after no number", r"(?<![0-9)}i/])\\text\{([^{}]*)\}", r"\1", r"\text{odd} -> odd"),
    ("end", r"(?<![.,])[.,;]$", "", "5. -> 5"),
    ("degree", r"\^\\circ ?", r"\\text{degree}", r"90^\circ -> 90\text{degree}"),
    ("dollar", r"\\\$([0-9.]+)|(?<=[0-9])\\\$", r"\1\\text{dollar}", r"\$5 -> 5\text{dollar}"),
    ("unit", BARE_UNIT, r"\\text{\2}", r"5cm -> 5\text{cm}"),
]
NAME = re.compile(  # x=  x_1=  f(x)=  f^{-1}(x)=  AB=  \angle ABC=  area=  (x,y)=  x\in
    r"((?:\\angle ?)?(?!not|minus)\\?[a-zA-Z]+(?:\^\{-1\}(?=\())?(?:_\w|_\{\w+\})?(?:\(-?\w+\))?|\([a-zA-Z\\, ]+\))"
    r"(?:=|\\in(?![a-z]) ?)"
)
UNIT = re.compile(  # a constant, then its unit
    r"((?:[^a-zA-Z\\]|\\(?:frac|sqrt|pi)(?![a-z])|e)+)"
    r"((?:/?\\text\{[a-zA-Z0-9./^ -]+\}(?:\^[0-9]|\^\{-[0-9]\})?)+)"
)
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
FACTOR = r"(?:(?:[a-zA-Z]|\\pi ?|\\sqrt ?(?:[0-9a-z]|\{[^{}]*\})|\([^()]*\))(?:[_^](?:\w|\{[^{}]*\}))*[!']*)"
ARGUMENT = r" ?(\{(?:[^{}]|\{[^{}]*\})*\}|[0-9a-zA-Z]|\\[a-zA-Z]+)"
TERM = re.compile(rf"(?![+-]?$)([+-]?)({NUMBER}|)(?: ?\\frac{ARGUMENT}{ARGUMENT} ?)?({FACTOR}*)")  # 1\frac{1}{2}\pi r
SLASH = re.compile(rf"^([+-]?(?:[0-9]+ )?)(\([^()]*\)|(?:[0-9.]|{FACTOR})+)/(-?[0-9.]+|[a-zA-Z]|\\[a-z]+)$")  # 1 1/2


def conclusion(response: str) -> str:
    """What stands after the last </think>; nothing if one is left open, but all if only the prompt opened one."""
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def extract_answer(response: str) -> str | None:
    """The content of the conclusion's last complete \\boxed{...}, None without one; \\{ and \\} balance nothing."""
    text = conclusion(response)
    opened, last = [], (0, 0)  # where the content of each open box begins, 0 for other braces; the last box's content
    for brace in re.finditer(r"\\\\(?!boxed)|\\[{}]|(\\boxed\s*)?([{}])", text):
        if brace[2] == "{":
            opened.append(brace.end() if brace[1] else 0)
        elif brace[2] and opened and (start := opened.pop()) > last[0]:
            last = start, brace.end() - 1
    return text[slice(*last)].strip() if last[1] else None


def box_or_last_number(response: str) -> str | None:
    """The last boxed answer, else the last number of the conclusion: the paper's evaluation, never the reward."""
    if (boxed := extract_answer(response)) is not None:
        return boxed
    number = r"(?<![0-9a-zA-Z)}.])[-−]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    return (re.findall(number, conclusion(response)) or [None])[-1]


EXTRACTORS = {"boxed": extract_answer, "last-number": box_or_last_number}


def normalise(text: str) -> str:
    """One spelling for what looks the same: SPELLINGS, then REWRITES."""
    tokens = re.findall(r"(?s)\\[a-zA-Z]+|\\.|[a-zA-Z]+|.", text)
    text = "".join(STANDARD.get(token, token) for token in tokens)
    for _, pattern, replacement, _ in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def term(text: str) -> tuple[Fraction, str, str]:
    """(number, top, bottom) for number * top / bottom: (1/2, "\\pi", ""). What is no such product is one (top)."""
    match = TERM.fullmatch(SLASH.sub(r"\1\\frac{\2}{\3}", text))
    if match is None:
        return Fraction(1), f"({text})", ""
    sign, number, *arguments, factors = match.groups()
    if arguments == [None, None]:
        return Fraction(f"{sign}{number or 1}"), factors, ""
    (a, top, above), (b, bottom, below) = (term(re.sub(r"^\{(.*)\}$", r"\1", argument)) for argument in arguments)
    mixed = re.fullmatch("[0-9]+[0-9{}]+", number + "".join(arguments))
    if above or below or b == 0 or (number and not mixed):  # \frac{x}{0}, 2\frac{x}{3}
        return Fraction(1), f"({text})", ""
    return int(sign + "1") * (int(number or 0) + a / b), top + factors, bottom


def split(text: str, separator: str) -> list[str]:
    """The pieces between separators outside all brackets; none if a bracket closes that did not open."""
    pieces, start, depth = [], 0, 0
    for token in re.finditer(rf"[(\[{{]|[)\]}}]|({separator})", text):
        if token[1] is None:
            depth += 1 if token[0] in "([{" else -1
        elif depth == 0:
            pieces.append(text[start : token.start()])
            start = token.end()
        if depth < 0:
            return []
    return [*pieces, text[start:]]


class Parsed(typing.NamedTuple):
    """An answer taken apart: what stands before `=`, the unit, and the terms of a sum or, of a group, its members."""

    terms: tuple = ()
    name: str = ""
    unit: str = ""
    kind: str = ""  # "{}" set or list, "\\cup" union, "()" "[)" "(]" "[]" tuple or interval, "matrix", "row"
    members: tuple = ()


def collect(kind: str, pieces: list[str]) -> Parsed:
    """The pieces as members; a set of one is its member."""
    if kind == "{}":  # {1 \pm 2, 5} has three members
        pieces = [re.sub(r"\\pm ?", sign, piece) for piece in pieces for sign in "+-"[: piece.count(r"\pm") + 1]]
    members = tuple(map(parse, pieces))
    return members[0] if kind == "{}" and len(members) == 1 else Parsed(kind=kind, members=members)


def is_statement(text: str, members: tuple[Parsed, ...]) -> bool:
    """Do `and`, `or` say more than a comma? Not in 5 or 9, but in x<1 or x>3, x=1 or y=2, 5 minutes and 3 seconds."""
    names, units = ({getattr(member, field) for member in members} - {""} for field in ("name", "unit"))
    symbols = "".join(top + bottom for member in members for _, top, bottom in member.terms)
    letters = re.search("[a-df-hj-zA-Z]", re.sub(r"\\pi|\\sqrt", "", symbols))  # e and i are numbers
    return bool(re.search(r"\\(?:and|or)", text) and (letters or len(units) > 1 or (len(names) > 1 and r"\or" in text)))


def parse(text: str) -> Parsed:
    """Take a normalised answer apart: the first rule that applies, then the rules again on what it leaves."""
    text = text.strip().removeprefix("+")
    if len(pieces := split(text, r",?\\and|,?\\or|,")) > 1:
        found = collect("{}", pieces)
        return Parsed(((Fraction(1), text, ""),)) if is_statement(text, found.members) else found
    if len(pieces := split(text, r"\\cup")) > 1:
        return collect(r"\cup", pieces)
    if match := NAME.match(text):
        rest = parse(text[match.end() :])
        return rest._replace(name=f"{match[1]}={rest.name}")
    match = re.fullmatch(r"(\\?[\[({])(.*[^\\])(\\?[\])}])", text)
    if match and (pieces := split(match[2], ",")):
        kind = match[1] + match[3]
        if kind in ("{}", r"\(\)", r"\[\]") or (kind == "()" and len(pieces) == 1):
            return parse(match[2])
        return collect("{}" if kind == r"\{\}" else kind, pieces)
    match = re.fullmatch(r"\\begin\{[pb]matrix\}(.*?)(?:\\\\)?\\end\{[pb]matrix\}", text)
    if match and (rows := split(match[1], r"\\\\")):
        return Parsed(kind="matrix", members=tuple(collect("row", split(row, "&")) for row in rows))
    if text.count(r"\pm") == 1:
        return collect("{}", [text])
    if (match := UNIT.fullmatch(text)) and not NO_UNIT.search(match[2]):
        unit = re.sub(r"\\text|[{}.]|(?<=ch)es\b|(?<=[a-z]{2})s\b", "", match[2])
        return parse(match[1])._replace(unit=unit)
    if (plain := re.sub(r"\\text\{([^{}]*)\}", r"\1", text)) != text:
        return parse(plain)
    whole, summands = term(text), split(text, "(?<=.)(?=[-+])")
    return Parsed(tuple(map(term, summands)) if summands and whole[1] == f"({text})" else (whole,))


def agree(a: Parsed, b: Parsed) -> bool:
    """Is the answer a the reference b? A name or a unit may be left out, not changed, and a known unit added."""
    if a.kind != b.kind or len(a.members) != len(b.members):
        return False
    if any(x and y and x != y for x, y in ((a.name, b.name), (a.unit, b.unit))):
        return False
    if not b.unit and not re.fullmatch(rf"(?:\b(?:{UNITS}|{SYMBOLS})\b|[^a-zA-Z])*", a.unit):
        return False
    scale = Fraction(100) ** ((b.unit == "percent") - (a.unit == "percent"))  # 50\% is 50, and 1/2
    if b.terms not in (a.terms, tuple((scale * number, *rest) for number, *rest in a.terms)):
        return False
    names = [len({member.name for member in x.members} - {""}) for x in (a, b)]
    if a.kind not in ("{}", r"\cup") or (max(names) > 1 and set(names) != {len(a.members)}):  # x=1, y=2 is not 2, 1
        return all(map(agree, a.members, b.members))
    left = list(b.members)
    for member in a.members:
        match = next((i for i, other in enumerate(left) if agree(member, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def is_equal(answer: str, reference: str) -> bool:
    """Equal as exact numbers, else as LaTeX without what only shows; groups member by member.

    Order matters in tuples and intervals, not in sets, unions and lists such as 1,2. Words after a number are its unit:
    the answer may leave them out if they do not change the number, and add those that are known here. Left out on
    purpose: symbolic equality. 2(n-1) is not 2n-2 here, nor 2^{10} 1024: it takes a computer algebra system, which is
    slow and can hang.
    """
    a, b = answer.strip(), reference.strip()
    if a in (b, re.sub(r",\s+", ",", b)) or b == re.sub(r",\s+", ",", a):  # 70,110 may be the list 70, 110
        return True
    return max(len(a), len(b)) <= LONGEST_ANSWER and agree(parse(normalise(a)), parse(normalise(b)))


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
