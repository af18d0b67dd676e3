"""What is asked and what is rewarded: problem files, the tokenizer, prompts, a reward of one's own.

The default reward is the check of answers in answers.py; any function of (response, answer) can take its place.
"""

from __future__ import annotations

import functools
import json
import math
import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from answers import extract_answer
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
    for key in ("label", "answer", "final_answer", "solution"):
        value = row.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value in (None, []):
            continue
        if type(value) not in (str, int, float):
            raise ValueError(f"`{key}` is {value!r}, an answer is text or a number")
        text = str(value).split("####")[-1].strip()
        if found := extract_answer(text) or (text if key != "solution" else None):
            return found
    return None


def prompt_of(row: dict) -> str | list[dict[str, str]]:
    """The prompt of a row: its `prompt` as it is, or its question as a message that asks for a boxed answer."""
    prompt, question = row.get("prompt"), row.get("question") or row.get("problem")
    if prompt in (None, "") and question and isinstance(question, str):
        return [{"role": "user", "content": question + INSTRUCTION}]
    if prompt and isinstance(prompt, str):
        return prompt
    if not prompt or not isinstance(prompt, list):
        raise ValueError("no `prompt` (text, or messages of role and content), `question` or `problem` in this row")
    for message in prompt:
        content, role = (message.get(key) if isinstance(message, dict) else None for key in ("content", "role"))
        if not isinstance(content, str) or role not in ("system", "user", "assistant") or len(message) > 2:
            raise ValueError(f"a message is `role` (system, user or assistant) and `content` (text), not {message}")
    if role != "user":
        raise ValueError(f"the last message is of role {role}: a prompt must end with one of role user")
    return prompt


def load_problems(path) -> list[Problem]:
    """Read a JSONL file: `prompt` (text or messages), or `question` / `problem`, and an answer in each row.

    A row without an answer is left out, and how many were is printed. Raises ValueError naming file and line for
    anything that is not such a row, and for a file without problems.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the problems in {path} as UTF-8 text ({error})") from None
    found = []
    for where, line in ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            row = json.loads(line, parse_constant=lambda nan: None)  # NaN is how some write that there is nothing
            json.dumps(row, ensure_ascii=False).encode()  # "\ud800" is half a character
            if not isinstance(row, dict):
                raise ValueError(f"a problem is a JSON object, not {type(row).__name__}")
            found.append(Problem(prompt_of(row), reference_answer(row), where))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg}); a line holds one object") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from None
    problems = [problem for problem in found if problem.answer is not None]
    if len(problems) < len(found):
        print(f"{path}: {len(found) - len(problems)} of {len(found)} rows have no answer and are left out")
    if not problems:
        raise ValueError(f'{path} holds no problem with an answer: a line is {{"prompt": ..., "answer": ...}}')
    return problems


# ------------------------------------------------------------------------------- the tokenizer and its chat template

SETTINGS = ("special_tokens_map.json", "tokenizer_config.json", "config.json", "generation_config.json")
TEMPLATE = (
    "auto: text as it is, messages through the model's chat template; FILE.jinja: through that one; or a text with "
    "{question}, which asks for the box itself"
)
LayOut = Callable[[list[dict[str, str]]], str]  # a compiled chat template: messages -> text
Template = LayOut | str | None  # a chat template, a text with {question}, or none


def model_settings(folder) -> dict:
    """What those of SETTINGS that a folder has say together, a later one before an earlier; tokens as text."""
    found = {}
    for file in (Path(folder) / name for name in SETTINGS):
        found |= {key: value for key, value in read_json(file).items() if value is not None} if file.exists() else {}
    return {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}


def load_tokenizer(folder) -> tuple[Tokenizer, list[int]]:
    """The folder's tokenizer and its EOS ids: from generation_config.json, else config.json, else its own eos_token."""
    file = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is no tokenizer ({error}): --model must be a folder with one") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = model_settings(folder)
    stored = settings.get("eos_token_id", settings.get("eos_token"))
    tokens = stored if isinstance(stored, list) else [stored]
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in tokens]
    known = {i for i in tokenizer.get_vocab().values() if i < settings.get("vocab_size", math.inf)}
    if not ids or not known.issuperset(ids):
        what = "eos_token_id, or eos_token of tokenizer_config.json,"
        raise ValueError(
            f"{folder}: {what} is {stored}: it must be a token (or several) of this model, to end responses"
        )
    return tokenizer, ids


def load_template(folder, option: str = "auto") -> Template:
    """What lays prompts out, by --template: a text with {question}, or the chat template of a file or of the model.

    The model's own is chat_template.jinja, else the one (named default) in tokenizer_config.json; None without either.
    """
    if "{question}" in option:
        return option.replace("\\n", "\n")
    if option != "auto" and not option.endswith(".jinja"):
        raise ValueError(f"--template {option!r} is none of these: {TEMPLATE} ('{{question}}' alone: no layout)")
    settings = model_settings(folder)
    file = Path(folder) / "chat_template.jinja" if option == "auto" else Path(option)
    if option == "auto" and not file.exists():
        file, source = Path(folder) / "tokenizer_config.json", settings.get("chat_template")
        if isinstance(source, list):  # of several, by name
            source = {named["name"]: named["template"] for named in source}.get("default")
        return compile_template(source, file, settings) if source else None
    try:
        return compile_template(file.read_text(encoding="utf-8"), file, settings)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {file} ({error})") from None


def compile_template(source: str, file: Path, settings: dict) -> LayOut:
    """A chat template that sees what transformers shows it: the tokens in settings (bos_token), some functions.

    The assistant's turn is begun after one of the user's. Not shown is today's date (`strftime_now`): a run that
    is resumed tomorrow must ask the same. {% generation %} ... {% endgeneration %} mark what the assistant wrote, for
    others: here they only bound what is set between them.
    """
    source = re.sub(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})", r"\1with", source)
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    tokens = {key: token for key, token in settings.items() if key.endswith("_token")}
    try:
        template = jinja.from_string(source, tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{file}: line {error.lineno} of the chat template is no jinja ({error.message})") from None

    def raise_exception(message: str) -> None:  # what templates call for messages that they do not take
        raise jinja2.TemplateError(message)

    def lay_out(messages: list[dict[str, str]]) -> str:
        how = {"add_generation_prompt": messages[-1]["role"] == "user", "raise_exception": raise_exception}
        try:
            return template.render(messages=messages, tools=None, documents=None, **how)
        except Exception as error:  # a template is a program and fails in its own way
            raise ValueError(f"the chat template of {file} does not take these messages ({error})") from None

    return lay_out


def end_of_turn(lay_out: LayOut, tokenizer: Tokenizer, special: Iterable[str]) -> list[int]:
    """The special token, in a list, with which a chat template ends an assistant's turn; [] if it is none."""
    try:
        text = lay_out([{"role": "user", "content": "?"}, {"role": "assistant", "content": "XYZZY"}])
    except ValueError:  # this one lays out questions alone
        return []
    after = text.partition("XYZZY")[2].lstrip()
    return [tokenizer.token_to_id(token) for token in special if after.startswith(token)][:1]


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
    if held := [token for token in special if any(token in content for content in contents)]:
        raise ValueError(f"its text holds {held[0]}, a control token of this model: remove it")
    if isinstance(template, str):
        return template.replace("{question}", ASKED.sub("", contents[-1]))
    return template(prompt) if template else "".join(content + "\n\n" for content in contents)


def prepare(
    problems: list[Problem], tokenizer: Tokenizer, vocabulary: int, *, template: Template = None, longest: int = 0
) -> list[Prompt]:
    """The prompts of these problems, those of more than `longest` tokens (0: any) left out, which is printed.

    ValueError, with the line, for a prompt that the template does not take, without tokens, or with ids that the model
    does not have.
    """
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    chats = sum(isinstance(problem.prompt, list) for problem in problems)
    if chats and template is None:
        print(f"the model has no chat template: {chats} prompts of messages become paragraphs (see --template)")
    ends = end_of_turn(template, tokenizer, special) if chats and callable(template) else []
    prompts = []
    for problem in problems:
        try:
            text = render(problem.prompt, template, special)
            ids = tokenizer.encode(text, add_special_tokens=False).ids  # a chat template brings its own BOS
            if not ids:
                raise ValueError(f"the prompt {problem.prompt!r} has no tokens: remove it")
            if max(ids) >= vocabulary:
                raise ValueError(f"token id {max(ids)}, but the model has {vocabulary}: is tokenizer.json another's?")
        except ValueError as error:
            raise ValueError(f"{problem.where}: {error}") from None
        prompts.append(Prompt(text, ids, problem.answer, ends if isinstance(problem.prompt, list) else []))
    short = [prompt for prompt in prompts if len(prompt.ids) <= (longest or math.inf)]
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


# ----------------------------------------------------------------------------------------------- one's own reward

Reward = Callable[[str, str], float]  # of (response, answer): any finite number


class RewardError(Exception):
    """A reward function broke its promise."""


def load_reward(name: str) -> Reward:
    """The function of "FILE.py:NAME". Raises ValueError naming what is missing, or what the file raised."""
    file, _, function = name.rpartition(":")
    try:
        return runpy.run_path(file)[function]
    except Exception as error:  # it is the user's code
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"--reward {name!r}: no function could be read from FILE.py:NAME ({fault})") from None


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
