"""From a line of a problem file to token ids, and back to text: chat templates, EOS, limits; benchmarks (eval.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import constant_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import eval as evaluation
import train
from answers import is_correct
from task import (
    INSTRUCTION,
    Problem,
    all_ends,
    load_problems,
    load_template,
    load_tokenizer,
    prepare,
    render,
    response_text,
)

BOS = "<s>"
OBJECT = {"__type": "AddedToken", "content": "</s>"}  # as tokenizer_config.json may name a token
TOKENS = (BOS, "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
# Of the structure of those that models bring, each shortened.
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe good.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message. #}
{%- set system_message = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "[system]\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have tools." }}
{%- endif %}
{{- system_message + "[eot]" }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\\n\\n'+ message['content'] | trim + '[eot]' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant!') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token + ' '}}{% endif %}"
    "{% endfor %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1]"
    " %}{% endif %}{{'<｜Assistant｜>' + content + '</s>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
LOOPS = """{% for message in messages %}
    {% if message.role == "system" %}
        {% continue %}
    {% endif %}
{{ message.role }}: {{ message.content }}
    {% if loop.index == 3 %}
        {% break %}
    {% endif %}
{% endfor %}
"""
GENERATION = """{% for message in messages %}
{% if message.role == "assistant" %}
{% generation %}{% set said = message.content %}A: {{ said }}{% endgeneration %}{{ said }}
{% else %}
{{ message | tojson }}{{ {"é": ["<&'>"]} | tojson(indent=1) }}
{% endif %}
{% endfor %}
said {{ said }}{{ documents }}"""
SOURCES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "loops": LOOPS,
    "json": GENERATION,
}

ONE = [{"role": "user", "content": " 1 {x} 2\n"}]
TOLD = [{"role": "system", "content": "Be kind. "}, *ONE]
MANY = [*ONE, {"role": "assistant", "content": "<think>a</think>é "}, {"role": "user", "content": "<b> '3'?"}]
RENDERED = [
    (
        "chatml",
        ONE,
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n 1 {x} 2\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "chatml",
        TOLD,
        "<|im_start|>system\nBe kind. <|im_end|>\n<|im_start|>user\n 1 {x} 2\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "chatml",
        MANY,
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n 1 {x} 2\n<|im_end|>\n<|im_start|>assistant\n"
        "<think>a</think>é <|im_end|>\n<|im_start|>user\n<b> '3'?<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("llama", ONE, "<s>[system]\n\nToday: 26 Jul 2024\n\n[eot][user]\n\n1 {x} 2[eot][assistant]\n\n"),
    ("llama", TOLD, "<s>[system]\n\nToday: 26 Jul 2024\n\nBe kind.[eot][user]\n\n1 {x} 2[eot][assistant]\n\n"),
    ("mistral", ONE, "<s>[INST]  1 {x} 2\n [/INST]"),
    ("mistral", MANY, "<s>[INST]  1 {x} 2\n [/INST]<think>a</think>é </s> [INST] <b> '3'? [/INST]"),
    ("deepseek", TOLD, "<s>Be kind. <｜User｜> 1 {x} 2\n<｜Assistant｜><think>\n"),
    (
        "deepseek",
        MANY,
        "<s><｜User｜> 1 {x} 2\n<｜Assistant｜>é </s><｜User｜><b> '3'?<｜Assistant｜><think>\n",
    ),
    ("loops", TOLD, "user:  1 {x} 2\n\n"),
    ("loops", [*MANY, *ONE], "user:  1 {x} 2\n\nassistant: <think>a</think>é \nuser: <b> '3'?\n"),
    (
        "json",
        MANY,
        '{"role": "user", "content": " 1 {x} 2\\n"}{\n "é": [\n  "<&\'>"\n ]\n}\nA: <think>a</think>é \n'
        '{"role": "user", "content": "<b> \'3\'?"}{\n "é": [\n  "<&\'>"\n ]\n}\nsaid None',
    ),
]


def tokenizer_with(*tokens: str) -> Tokenizer:
    """A tokenizer of characters, each a token, that knows these special tokens."""
    letters = [chr(i) for i in range(9, 127)]
    vocabulary = {word: i for i, word in enumerate(["?" * 3, *tokens, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?" * 3))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


TOKENIZER = tokenizer_with(*TOKENS)
ID = {token: TOKENIZER.token_to_id(token) for token in TOKENS}


def write(folder: Path, **config) -> Path:
    """A folder with that tokenizer, and this tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ID["<|endoftext|>"]}))
    return folder


def model_with(folder: Path, source: object) -> Path:
    """A folder whose chat template this is; one of its tokens is text, the other an object."""
    return write(folder, chat_template=source, bos_token=BOS, eos_token=OBJECT, sep_token=None)


# ------------------------------------------------------------------------------------------------- chat templates


@pytest.mark.parametrize(("name", "messages", "text"), RENDERED)
def test_messages_go_through_the_models_own_chat_template(name, messages, text, tmp_path):
    """To the letter. Blocks leave no lines, {{ is jinja's and {x} is not, and nothing is escaped as for HTML."""
    assert render(messages, load_template(model_with(tmp_path, SOURCES[name]))) == text


@pytest.mark.parametrize(("name", "messages", "text"), RENDERED)
def test_transformers_lays_messages_out_the_same(name, messages, text, tmp_path):
    """Its apply_chat_template, with the date that a template falls back to: transformers would name today's."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(model_with(tmp_path, SOURCES[name]))
    how = {"add_generation_prompt": True, "tokenize": False, "date_string": "26 Jul 2024"}
    assert theirs.apply_chat_template(messages, **how) == text


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        ({"chat_template": "own"}, {}, "own"),
        ({"chat_template": "own"}, {"chat_template.jinja": "file\n"}, "file"),
        ({}, {"chat_template.jinja": "file"}, "file"),
        ({"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "own"}]}, {}, "own"),
        ({"chat_template": "{{ bos_token }}", "bos_token": "a"}, {}, "a"),
        ({"chat_template": "{{ bos_token }}", "bos_token": None, "add_bos_token": True}, {}, ""),
        ({"chat_template": "{{ bos_token }}"}, {"special_tokens_map.json": '{"bos_token": {"content": "b"}}'}, "b"),
        (
            {"chat_template": "{{ bos_token }}", "bos_token": "a", "added_tokens_decoder": {}},
            {"special_tokens_map.json": '{"bos_token": "b"}'},
            "a",
        ),
        ({"chat_template": "{{ image_token }}", "image_token": "<|im_end|>"}, {}, "<|im_end|>"),
    ],
)
def test_the_template_and_its_tokens_are_found_where_transformers_finds_them(config, files, text, tmp_path):
    """chat_template.jinja before tokenizer_config.json; the one named default; tokens by name, text or object."""
    folder = write(tmp_path, **config)
    for name, content in files.items():
        (folder / name).write_text(content)
    assert render(ONE, load_template(folder)) == text
    try:
        import transformers
    except ImportError:
        return
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert theirs.apply_chat_template(ONE, add_generation_prompt=True, tokenize=False) == text


def test_a_prompt_is_the_same_tomorrow(tmp_path):
    """A template sees no date, although transformers gives it one: a resumed run must ask what the run asked before."""
    template = load_template(model_with(tmp_path, "{% if strftime_now is defined %}today{% else %}fixed{% endif %}"))
    assert render(ONE, template) == "fixed"


def test_without_a_template_messages_are_paragraphs_and_that_is_said(tmp_path, capsys):
    """In one line that counts them; of text alone there is nothing to say."""
    assert load_template(write(tmp_path, chat_template=[{"name": "rag", "template": ""}])) is None  # none named default
    template = load_template(write(tmp_path))
    problems = [Problem("a", "1"), Problem(TOLD, "2")]
    assert [p.text for p in prepare(problems, TOKENIZER, 999, template=template)] == [
        "a",
        "Be kind. \n\n 1 {x} 2\n\n\n",
    ]
    assert capsys.readouterr().out.startswith("the model has no chat template: 1 prompts of messages become paragraphs")
    prepare(problems[:1], TOKENIZER, 999, template=template)
    assert capsys.readouterr().out == ""


ASKED = [{"role": "user", "content": "6 * 7?" + INSTRUCTION}]  # what a row with a `question` becomes
OTHERWISE = [{"role": "user", "content": "6 * 7?" + INSTRUCTION.replace("{}", "{{}}")}]  # as the paper's data has it


@pytest.mark.parametrize(
    ("prompt", "option", "text"),
    [
        ("as it is ", "auto", "as it is "),
        ("<|im_start|>user\n6<|im_end|>\n", "auto", "<|im_start|>user\n6<|im_end|>\n"),
        (ASKED, "auto", f"<s>[INST] 6 * 7?{INSTRUCTION} [/INST]"),
        (ASKED, r"Q: {question}\nA:", "Q: 6 * 7?\nA:"),
        (OTHERWISE, "{question}", "6 * 7?"),
        ("6 * 7?", "{question} =", "6 * 7? ="),
        (TOLD, "Q: {question}", "Q:  1 {x} 2\n"),
        (TOLD, "own.jinja", "<s>2 1"),
        ("as it is ", "own.jinja", "as it is "),
    ],
)
def test_an_option_names_another_template(prompt, option, text, tmp_path, monkeypatch):
    """A text gets the question without the request for a box; a .jinja file stands for the model's own."""
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text("{{ bos_token }}{{ messages | length }}{{ messages[-1].content[:2] }}")
    assert render(prompt, load_template(model_with(tmp_path / "model", MISTRAL), option)) == text


@pytest.mark.parametrize(
    ("source", "messages", "sentence"),
    [
        ("{% if %}", ONE, "tokenizer_config.json: line 1 of the chat template is no jinja (Expected an expression"),
        ("a\n{{ a | b }}", ONE, "tokenizer_config.json: line 2 of the chat template is no jinja (No filter named 'b'"),
        (MISTRAL, TOLD, "tokenizer_config.json does not take these messages (Roles must alternate user/assistant!)"),
        ("{{ a.b }}", ONE, "tokenizer_config.json does not take these messages ('a' is undefined)"),
        ("{{ strftime_now('%d') }}", ONE, "does not take these messages ('strftime_now' is undefined)"),
        ("{{ 1 + 'a' }}", ONE, "does not take these messages (unsupported operand type"),
        ("{{ messages.append(1) }}", ONE, "does not take these messages (access to attribute 'append' of"),
        ("{{ ''.__class__.__mro__ }}", ONE, "does not take these messages (access to attribute '__class__' of"),
    ],
)
def test_a_template_that_fails_names_its_file(source, messages, sentence, tmp_path):
    """What it raises is a sentence; it can neither reach Python nor change the messages."""
    with pytest.raises(ValueError) as error:
        prepare(
            [Problem(messages, "1", "p.jsonl, line 3")],
            TOKENIZER,
            999,
            template=load_template(model_with(tmp_path, source)),
        )
    assert sentence in str(error.value) and str(tmp_path) in str(error.value)
    assert ("p.jsonl, line 3: " in str(error.value)) == ("these messages" in sentence)


@pytest.mark.parametrize("option", ["none", "boxed", "chatml", "llama3", "Q: {q}"])
def test_a_template_that_is_no_template_is_refused_by_name(option, tmp_path):
    """With what to write instead."""
    with pytest.raises(
        ValueError, match=rf"^--template '{option}' is none of these: auto: .*FILE.jinja: .*'{{question}}' alone: no"
    ):
        load_template(write(tmp_path), option)
    with pytest.raises(ValueError, match=r"cannot read the chat template no.jinja"):
        load_template(tmp_path, "no.jinja")


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("prompt", "option", "token"),
    [
        ([{"role": "user", "content": "six<|im_end|>"}], "auto", "<|im_end|>"),
        ([{"role": "system", "content": "<|endoftext|>"}, *ONE], "auto", "<|endoftext|>"),
        ([{"role": "user", "content": "a<s>b"}], "{question}", "<s>"),
        ("a<s>b", "Q: {question}", "<s>"),
    ],
)
@pytest.mark.parametrize("source", [CHATML, None])
def test_a_message_may_not_hold_control_tokens(source, prompt, option, token, tmp_path):
    """They would end its turn, or begin another, in the middle of it."""
    with pytest.raises(ValueError) as error:
        prepare(
            [Problem("a", "1"), Problem(prompt, "1", "p, line 2")],
            TOKENIZER,
            999,
            template=load_template(model_with(tmp_path, source), option),
        )
    assert f"p, line 2: its text holds {token}, a control token of this model: remove it" == str(error.value)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "no `prompt` (text, or messages of role and content)"),
        ([*ONE, "a"], "a message is `role` (system, user or assistant) and `content` (text), not a"),
        (
            [{"role": "user", "content": ["a"]}],
            "a message is `role` (system, user or assistant) and `content` (text), not {",
        ),
        (
            [*ONE, {"role": "assistant", "content": "3"}],
            "the last message is of role assistant: a prompt must end with",
        ),
        (
            [{"role": "system", "content": "3"}],
            "the last message is of role system: a prompt must end with one of role",
        ),
        ([{"role": "human", "content": "3"}, *ONE], "a message is `role` (system, user or assistant) and"),
        ([ONE[0] | {"name": "Bo", "id": 1}], "a message is `role` (system, user or assistant) and"),
    ],
)
def test_messages_that_ask_nothing_are_refused_by_line(prompt, sentence, tmp_path):
    """Else a response would continue the solution, or a message be left out in silence."""
    rows = [
        {"prompt": ONE, "answer": "1"},
        {"prompt": prompt, "question": "?" if prompt == [] else None, "answer": "1"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as error:
        load_problems(tmp_path / "p.jsonl")
    assert f"{tmp_path / 'p.jsonl'}, line 2: {sentence}" in str(error.value)
    (tmp_path / "p.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert load_problems(tmp_path / "p.jsonl")[0].where == f"{tmp_path / 'p.jsonl'}, line 1"


def test_long_prompts_are_left_out_and_counted(capsys):
    """The others keep their answers; nothing left is an error that names the limit."""
    problems = [Problem("123", "a"), Problem("1", "b"), Problem("12", "c")]
    prompts = prepare(problems, TOKENIZER, 999, longest=2)
    assert [(p.text, p.answer) for p in prompts] == [("1", "b"), ("12", "c")] and [len(p.ids) for p in prompts] == [
        1,
        2,
    ]
    assert "1 of 3 prompts have over 2 tokens: left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="every prompt has over 1 tokens: raise"):
        prepare(problems[:1], TOKENIZER, 999, longest=1)


# ----------------------------------------------------------------------------------------- tokens, and what ends a row


def test_a_template_brings_the_one_bos(tmp_path):
    """The tokenizer's own rule, which adds a BOS to any text, is not applied: text is used as it is."""
    write(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, ID[BOS])])
    assert tokenizer.encode("a").ids[0] == ID[BOS]
    template = load_template(model_with(tmp_path, LLAMA))
    laid_out, text = prepare([Problem(ONE, "1"), Problem("a", "1")], tokenizer, 999, template=template)
    assert laid_out.ids.count(ID[BOS]) == 1 == laid_out.ids.index(ID[BOS]) + 1 and len(text.ids) == 1


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        (MISTRAL, ["</s>"]),
        (DEEPSEEK, ["</s>"]),
        ("{{ messages[-1].content }} {{ eos_token }}", ["</s>"]),  # Llama 2
        ("{{ bos_token }}{{ messages[0].content }}", []),  # lays no answer out
        ("{{ messages[-1].content }}.<|im_end|>", []),
        ("{{ messages[-1].content }}{{ '<|im_start|>' if add_generation_prompt else '<|im_end|>' }}", ["<|im_end|>"]),
        (LLAMA, []),  # [eot] is no token here
        ("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}", []),
    ],
)
def test_what_ends_a_turn_in_the_layout_ends_the_response_too(source, ends, tmp_path):
    """A base model's generation_config.json may know <|endoftext|> alone; prompts that are text are not laid out."""
    template = load_template(model_with(tmp_path, source + "{{ '.' if add_generation_prompt }}"))
    tokenizer, eos_ids = load_tokenizer(tmp_path)
    text, laid_out = prepare([Problem("a", "1"), Problem(ONE, "1")], tokenizer, 999, template=template)
    assert all_ends(eos_ids, [text]) == eos_ids == [ID["<|endoftext|>"]]
    assert all_ends(eos_ids, [text, laid_out]) == sorted([*eos_ids, *(ID[token] for token in ends)])


def test_both_programs_stop_at_the_end_of_a_turn(files, tmp_path, monkeypatch):
    """What read_inputs hands to a run, and what eval.py samples with."""
    model = shutil.copytree(files / "model", tmp_path / "model")
    tokenizer, eos_ids = load_tokenizer(model)
    tokenizer.add_special_tokens(["9"])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}9{% endfor %}")
    nine = tokenizer.token_to_id("9")
    seen = []
    monkeypatch.setattr(evaluation, "rollout_shared", lambda *_, eos_ids, **__: seen.append(eos_ids) or 1 / 0)
    for prompt, ends in (("1+1=", eos_ids), ([{"role": "user", "content": "1+1="}], sorted([*eos_ids, nine]))):
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
        config = train.Config(model=str(model), data=str(tmp_path / "p.jsonl"))
        assert evaluation.read_inputs(config, {"data": (config.data, 0)}).eos_ids == ends
        with pytest.raises(ZeroDivisionError):
            paths = [
                "--model",
                str(model),
                "--data",
                str(tmp_path / "p.jsonl"),
                "--out",
                str(tmp_path / str(len(seen))),
            ]
            evaluation.main(paths)
        assert seen.pop() == ends
        seen.append(None)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config": {"eos_token_id": [2, 3]}, "config": {"eos_token_id": 1}}, [2, 3]),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, [1]),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "</s>"}}, [0]),
        ({"config": {}, "tokenizer_config": {"eos_token": "</s>"}}, [2]),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<|im_start|>"}}}, [3]),
    ],
)
def test_eos_comes_from_generation_config_else_config_else_the_tokenizer(files, ids, tmp_path):
    """One id or several; id 0 counts."""
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path)[1] == ids


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"\boxed{4<|im_start|>2}", r"\boxed{4<|im_start|>2}"),
        (r"\boxed{42}</s>", r"\boxed{42}"),
        (r"\boxed{42}<|im_end|>", r"\boxed{42}<|im_end|>"),
        ("</s></s>", "</s>"),
        ("", ""),
    ],
)
def test_special_tokens_are_part_of_the_response_but_for_the_one_that_ended_it(response, text):
    """Left out, they would let 4<|im_start|>2 pass for 42."""
    ids = TOKENIZER.encode(response, add_special_tokens=False).ids
    assert response_text(TOKENIZER, ids, [ID["</s>"]]) == text
    assert is_correct(text, "42") == ("42" in text)


def test_both_programs_grade_and_log_that_text(files, tmp_path):
    """Here every digit is special, and the constant answer begins with one."""
    logits = [9.0 if token == "<s>" else 0.0 for token in sorted(ID, key=ID.get)]
    prompt = prepare([Problem("a", "1")], TOKENIZER, 999)[0]
    settings = {"rows": 1, "max_new_tokens": 2, "compressor": "full"}
    model = constant_model([0.0, *logits, *[0.0] * 130])
    _, records = evaluation.evaluate(model, TOKENIZER, [], [prompt], **settings)
    assert records[0]["response"] == "<s><s>"
    _, records = evaluation.evaluate(model, TOKENIZER, [ID["<s>"]], [prompt], **settings)
    assert records[0]["response"] == "" and records[0]["finished"]
    copy = shutil.copytree(files / "model", tmp_path / "model")
    tokenizer, _ = load_tokenizer(copy)
    tokenizer.add_special_tokens(list("0123456789"))
    tokenizer.save(str(copy / "tokenizer.json"))
    small = "--budget 8 --buffer 4 --window 2 --max-new-tokens 9 --steps 1 --prompts 2 --group-size 4 --eval-data="
    paths = ["--model", str(copy), "--data", str(files / "p-train.jsonl"), "--out", str(tmp_path / "run")]
    train.main([*paths, *small.split()])
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(set(sample["response"]) & set("0123456789") for sample in samples)
    assert any(sample["finished"] for sample in samples) and not any("<end>" in s["response"] for s in samples)


# ------------------------------------------------------------------------------------------------------- benchmarks


def test_a_folder_of_benchmarks_is_run_with_the_papers_settings(files, tmp_path, capsys, monkeypatch):
    """Every JSONL: 32 samples on aime24 and amc23, one elsewhere; what is given on the command line goes before."""
    folder = tmp_path / "sets"
    folder.mkdir()
    for name in ("aime24", "gsm8k"):
        shutil.copy(files / "p-heldout.jsonl", folder / f"{name}.jsonl")
    seen = []
    real = evaluation.evaluate

    def evaluate(*args, **settings):
        seen.append(settings)
        return real(*args, **settings)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    options = "--compressor snapkv,streaming --budget 8 --buffer 4 --window 2 --max-new-tokens 9 --limit 2"
    paths = ["--model", str(files / "model"), "--benchmark", str(folder), "--out", str(tmp_path / "out")]
    evaluation.main([*paths, *options.split()])
    assert [(s["samples"], s["compressor"]) for s in seen] == [
        (samples, compressor) for samples in (32, 1) for compressor in ("full", "snapkv", "streaming")
    ]
    paper = {"temperature": 0.8, "top_p": 0.95, "extract": "last-number", "max_new_tokens": 9}
    assert all(paper.items() <= s.items() for s in seen)
    head, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-6:-1]]
    assert head == ["accuracy", "aime24", "gsm8k", "average"]
    assert [row[0] for row in rows] == ["dense", "snapkv-8", "streaming-8"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    for row in rows:
        accuracies = [results[name][row[0]]["accuracy"] for name in ("aime24", "gsm8k")]
        assert [float(cell) for cell in row[1:]] == pytest.approx([*accuracies, sum(accuracies) / 2], abs=5e-4)


def test_what_is_given_goes_before_the_papers_settings(files):
    """--samples 2 needs a temperature above 0, and a benchmark brings it."""
    config = evaluation.EvalConfig(benchmark=str(files), samples=2)
    sets = evaluation.benchmarks(config, {"samples": 2})
    assert sets.keys() == {"p-train", "p-heldout"}
    assert all((c.samples, c.temperature, c.extract) == (2, 0.8, "last-number") for c in sets.values())


def test_greedy_decoding_takes_one_sample_of_the_small_sets_too(tmp_path):
    """32 greedy responses would all be the same; the paper's 32 are at its temperature."""
    for name in ("aime24", "amc23"):
        (tmp_path / f"{name}.jsonl").touch()
    greedy = evaluation.benchmarks(evaluation.EvalConfig(benchmark=str(tmp_path)), {"temperature": 0.0})
    assert [(c.samples, c.temperature) for c in greedy.values()] == [(1, 0)] * 2


def test_what_a_reader_of_the_table_must_know_is_said(files, tmp_path, capsys):
    """Sequences beyond the model's context, and a compressed cache that never came to evict."""
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"max_position_embeddings": 12}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    paths = ["--model", str(tmp_path / "model"), "--data", str(files / "p-heldout.jsonl"), "--limit", "1"]
    for new, evicted, within in ((5, False, True), (16, True, False)):
        small = f"--budget 8 --buffer 4 --window 2 --max-new-tokens {new} --out {tmp_path / str(new)}"
        evaluation.main([*paths, *small.split()])
        said = capsys.readouterr().out
        assert ("nothing was evicted by snapkv-8: no row" in said) is not evicted
        assert ("the model's max_position_embeddings are 12" in said) is not within
