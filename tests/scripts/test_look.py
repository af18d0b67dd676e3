"""What a run keeps for experiments/look.py, and the page that shows it, in a real browser where one is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from browser import CHROMIUM, Browser
from helpers import replay
from runs_of_train import assert_same_tensors, half_right, lines, run, timeless
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

import train
from model import load_model
from runs import RECORDED
from task import ASSETS, load_tokenizer

pytestmark = pytest.mark.usefixtures("any_digit_is_half_right")
EXPERIMENTS = ASSETS.parent / "experiments"
HOSTILE = (
    '</script><script>document.title = "run"</script><img src=x onerror="document.title = \'run\'"><!-- \u2028\u202e'
)


@pytest.fixture(scope="module")
def look() -> ModuleType:
    """experiments/look.py."""
    sys.path.insert(0, str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("look", EXPERIMENTS / "look.py")
    sys.modules["look"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(sys.modules["look"])
    return sys.modules["look"]


@pytest.fixture(scope="module")
def recorded(files, tmp_path_factory) -> Path:
    """The run of `four_steps` that also keeps five of the sixteen responses of a step; no test may change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.is_correct", half_right)
        return run(files, tmp_path_factory.mktemp("recorded") / "run", "--record-samples", "5")


@pytest.fixture(scope="module")
def strict(files, tmp_path_factory) -> Path:
    """The same with an epsilon at which some of those that are kept are rejected, and their weights 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.is_correct", half_right)
        options = ["--record-samples", "5", "--epsilon", "0.8"]
        folder = run(files, tmp_path_factory.mktemp("strict") / "run", *options)
    assert {r["accepted"] for r in step_four(folder)} == {True, False}
    return folder


def kept(folder: Path, step: int) -> dict:
    return load_file(folder / RECORDED.format(step))


def step_four(folder: Path) -> list[dict]:
    return [s for s in lines(folder / "samples.jsonl") if s["step"] == 4]


def page_of(look, *argv, out: Path) -> dict:
    """Make a page by the command line; the data in it."""
    look.main([*map(str, argv), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


# ------------------------------------------------------------------------------------------------- what a run keeps


def test_keeping_responses_changes_nothing_else(recorded, four_steps):
    """Every text, weight and optimizer state of a run that keeps none, bit for bit, and every metric but the cache's
    size, which counts the row numbers that a record needs.
    """
    assert_same_tensors(recorded, four_steps)
    for name in ("metrics.jsonl", "samples.jsonl"):
        one, other = (timeless(lines(folder / name)) for folder in (recorded, four_steps))
        assert [m | {"cache_bytes": 0} for m in one] == [m | {"cache_bytes": 0} for m in other]
    assert not (four_steps / "recorded").exists()


def test_the_responses_nearest_to_rejection_are_kept(recorded):
    """Those of smallest xi, with the tokens that were sampled, and the log-probs whose smallest ratio was reported."""
    tokenizer, (eos,) = load_tokenizer(recorded / "checkpoints" / "step-000004")
    for step in (1, 2, 3, 4):
        samples, r = [s for s in lines(recorded / "samples.jsonl") if s["step"] == step], kept(recorded, step)
        rows = r["rows"].tolist()
        others = [s["xi_min"] for i, s in enumerate(samples) if i not in rows]
        assert len(rows) == 5 and max(samples[i]["xi_min"] for i in rows) <= min(others)
        for i, (row, P, R) in enumerate(zip(rows, r["prompt_lengths"], r["response_lengths"], strict=True)):
            ids = r["tokens"][i, P : P + R].tolist()
            assert tokenizer.decode([t for t in ids if t != eos]) == samples[row]["response"]
            assert samples[row]["tokens"] == R
            smallest = (r["logp_old"] - r["logp_sparse"])[i, :R].min().exp()
            assert float(smallest) == pytest.approx(samples[row]["xi_min"], rel=1e-6)


def test_the_evictions_that_are_kept_explain_the_samplers_log_probs(recorded):
    """One dense forward pass of the step's weights under their mask gives logp_sparse; without the mask, logp_old."""
    model, r = load_model(recorded / "checkpoints" / "step-000002"), kept(recorded, 3)
    layers = list(r["evicted_at"].unbind(1))  # L times (n, K, T)
    assert any(bool((layer < torch.iinfo(layer.dtype).max).any()) for layer in layers)
    given = {name: r[name].long() for name in ("tokens", "prompt_lengths", "response_lengths")}
    for name, gone in (("logp_sparse", layers), ("logp_old", [layer * 0 + 10_000 for layer in layers])):
        found, _ = replay(model, SimpleNamespace(**given, evicted_at=gone, logp_sparse=r["logp_sparse"]))
        assert torch.allclose(found, r[name], atol=1e-5)


@pytest.mark.parametrize("correction", ["sparse-rl", "reject", "released"])
def test_the_weights_that_are_kept_are_those_of_the_update(correction, files, tmp_path):
    """Of each update by itself: xi, 1, or xi truncated and divided by its mean in the update; 0 if it was dropped."""
    options = ["--steps", "1", "--updates", "2", "--record-samples", "16", "--correction", correction]
    folder = run(files, tmp_path / "run", *options, "--epsilon", "0.7")
    r, samples = kept(folder, 1), lines(folder / "samples.jsonl")
    assert r["rows"].tolist() == list(range(16)) and {s["accepted"] for s in samples} == {True, False}
    for update in (range(8), range(8, 16)):
        xi = {(i, t): float((r["logp_old"] - r["logp_sparse"])[i, t].exp()) for i in update for t in range(24)}
        xi = {(i, t): x for (i, t), x in xi.items() if t < r["response_lengths"][i]}
        mean = sum(min(x, 1.5) for x in xi.values()) / len(xi)
        for (i, t), x in xi.items():
            expected = {"sparse-rl": x, "reject": 1.0, "released": min(x, 1.5) / mean}[correction]
            dropped = not samples[i]["accepted"] or (correction == "released" and not 0.5 <= x <= 1.5)
            assert float(r["weights"][i, t]) == pytest.approx(0 if dropped else expected, rel=1e-5)


def test_a_resumed_run_drops_what_was_kept_of_steps_that_it_does_again(files, recorded, tmp_path):
    """Keeping may be switched off by then; what was kept of earlier steps stays."""
    folder = shutil.copytree(recorded, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    train.main(["--resume", str(folder), "--record-samples", "0"])
    assert sorted(f.name for f in (folder / "recorded").iterdir()) == [
        "step-000001.safetensors",
        "step-000002.safetensors",
    ]
    assert_same_tensors(folder, recorded)


def test_the_end_of_a_run_names_the_command(files, tmp_path, capsys):
    """One line."""
    run(files, tmp_path / "run", "--steps", "1")
    assert capsys.readouterr().out.count(f"python experiments/look.py {tmp_path / 'run'}\n") == 1


# ------------------------------------------------------------------------------------------------- what the page holds


def test_the_page_has_the_curves_of_plot_and_the_responses_of_the_step(look, recorded, tmp_path):
    """The last step by default; what is kept; its tokens put together are its text."""
    data = page_of(look, recorded, "--evictions", "2", out=tmp_path / "p.html")
    metrics = lines(recorded / "metrics.jsonl")
    curves = {curve["title"]: curve["points"] for curve in data["curves"]}
    assert curves["entropy, nats a token"] == [[m["step"], m["entropy"]] for m in metrics]
    assert [point[0] for point in curves["greedy accuracy, dense"]] == [0, 4] and len(curves) == 8
    samples = [s for s in lines(recorded / "samples.jsonl") if s["step"] == 4]
    assert [r["response"] for r in data["responses"]] == [s["response"] for s in samples]
    assert [r["group"] for r in data["responses"]] == [i // 4 for i in range(16)]
    ranked = sorted(kept(recorded, 4)["rows"].tolist(), key=lambda row: samples[row]["xi_min"])
    assert [r["number"] for r in data["responses"] if r["has"]] == sorted(ranked)
    for r in data["responses"]:
        if r["kept"]:
            text = "".join(r["kept"]["pieces"]).removesuffix("<end>")
            assert text == data["groups"][r["group"]]["prompt"] + r["response"]


def test_evictions_are_shown_of_the_responses_of_smallest_xi(look, recorded, tmp_path):
    """As many as wanted."""
    for step in (1, 2, 3, 4):
        data = page_of(look, recorded, "--step", step, "--evictions", "2", out=tmp_path / "p.html")
        samples = [s for s in lines(recorded / "samples.jsonl") if s["step"] == step]
        ranked = sorted(range(16), key=lambda row: samples[row]["xi_min"])
        assert [r["number"] for r in data["responses"] if r["has"] == 2] == sorted(ranked[:2])


def test_what_is_missing_is_said(look, recorded, four_steps, tmp_path):
    """Nothing was kept; of some responses alone; evictions left out."""
    (note,) = page_of(look, four_steps, "--step", "2", out=tmp_path / "p.html")["notes"]
    assert "train with --record-samples" in note
    first, second = page_of(look, recorded, out=tmp_path / "p.html")["notes"]
    assert "5 of the 16" in first and "--evictions" in second
    assert len(page_of(look, recorded, "--evictions", "5", out=tmp_path / "p.html")["notes"]) == 1


def test_a_model_is_looked_at_without_a_run(look, files, tmp_path):
    """A few responses, sampled and scored on the spot: all are kept, and there are no curves."""
    options = "--budget 8 --buffer 4 --window 2 --prompts 2 --group-size 3 --max-new-tokens 24 --compressor streaming"
    paths = ["--model", files / "model", "--data", files / "p-train.jsonl"]
    data = page_of(look, *paths, *options.split(), out=tmp_path / "p.html")
    assert data["curves"] == [] and [r["group"] for r in data["responses"]] == [0, 0, 0, 1, 1, 1]
    assert [r["has"] for r in data["responses"]].count(2) == 4 and all(r["has"] for r in data["responses"])
    assert "streaming, budget 8 + buffer 4" in data["about"]


def test_a_token_inside_a_character_has_no_text_and_the_next_one_has_all(look):
    """Bytes that belong together are shown together; what is shown is what the whole decodes to."""
    vocabulary = {c: i for i, c in enumerate(["a", "Ã", "©", "Ġb"])}  # é is the two bytes that are written Ã ©
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert look.pieces(tokenizer, [0, 1, 2, 3]) == ["a", "", "é", " b"]


BAD = {
    "no run": (lambda folder: shutil.rmtree(folder), [], "is not the folder of a train.py run"),
    "no such step": (lambda folder: None, ["--step", "9"], "no responses of step 9: --step takes 1 to 4"),
    "a damaged file": (
        lambda folder: (folder / RECORDED.format(4)).write_bytes(b"123"),
        [],
        "step-000004.safetensors (",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence(what, look, recorded, tmp_path, capsys):
    """It names what is wrong, and no page is written."""
    spoil, options, words = BAD[what]
    folder = shutil.copytree(recorded, tmp_path / "run")
    spoil(folder)
    with pytest.raises(SystemExit) as stop:
        look.main([str(folder), *options, "--out", str(tmp_path / "p.html")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and words in said and said.count("\n") == 1 and not (tmp_path / "p.html").exists()


# ------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """A window; the tests are skipped where no Chromium is installed."""
    if not CHROMIUM:
        pytest.skip("no Chromium is installed here (Debian: apt-get install chromium): the page was not opened")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(look, strict, browser, tmp_path) -> Browser:
    """The page of a recorded run, open, with no complaint in the console; checked again at the end of the test."""
    look.main([str(strict), "--evictions", "4", "--out", str(tmp_path / "p.html")])
    browser.scheme("light")
    browser.open(tmp_path / "p.html")
    assert browser.problems == []
    yield browser
    assert browser.problems == []


def column(page: Browser, place: int) -> list[str]:
    """The cells of a column of the responses, from above."""
    return page.run(f"[...document.querySelectorAll('tr.response td:nth-child({place})')].map(td => td.textContent)")


@pytest.mark.parametrize(
    ("name", "place", "key"), [("xi_min", 5, "xi_min"), ("tokens", 7, "tokens"), ("reward", 3, "reward")]
)
def test_responses_are_sorted_by_a_click(name, place, key, page, strict):
    """By smallest xi, length or reward, in one direction and then the other; in groups at first."""
    numbers = list(map(str, range(16)))
    assert column(page, 1) == numbers and page.run("document.querySelectorAll('tr.group').length") == 4
    orders = []
    for _ in range(2):
        page.point(f"th[data-column={name}] button", click=True)
        orders.append([step_four(strict)[int(i)][key] for i in column(page, 1)])
        assert sorted(column(page, 1)) == sorted(numbers)
    assert sorted(orders, key=lambda o: o[0]) == [sorted(orders[0]), sorted(orders[0], reverse=True)]


def test_a_response_is_shown_with_the_reason_of_its_fate(page, strict):
    """A click on its row: the rule, its smallest xi, and the token that has it, framed."""
    samples, r = step_four(strict), kept(strict, 4)
    for i, row in enumerate(r["rows"].tolist()):
        page.point(f"tr[data-number='{row}']", click=True)
        P, R = int(r["prompt_lengths"][i]), int(r["response_lengths"][i])
        smallest = int((r["logp_old"] - r["logp_sparse"])[i, :R].argmin())
        assert page.run("location.hash") == f"#{row}"
        outcome = "accepted" if samples[row]["accepted"] else "rejected"
        assert page.run("$('response').firstElementChild.textContent").endswith(outcome)
        verdict = page.run("document.querySelector('.verdict').textContent")
        xi = float(verdict.split("the smallest here is ")[1].split(". ")[0].split(".It")[0].removesuffix("."))
        assert xi == pytest.approx(samples[row]["xi_min"], rel=0.05) and f"It is token {smallest}, " in verdict
        assert page.run("Number(document.querySelector('.smallest').dataset.token)") == smallest
        assert page.run("document.querySelectorAll('#tokens span').length") == P + R


def facts(page: Browser) -> dict[str, str]:
    """What the tip under the pointer says."""
    return page.run(
        "Object.fromEntries([...$('tip').querySelectorAll('tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent)))"
    )


@pytest.mark.parametrize("which", range(4))
def test_a_token_tells_its_numbers(which, page, strict):
    """Hovering: both log-probs, xi, the weight as used (0 where rejected), keys held in the layer and head chosen."""
    r, number = kept(strict, 4), page.run("page.responses.filter(x => x.has === 2).map(x => x.number)")[which]
    i = r["rows"].tolist().index(number)
    P, R = int(r["prompt_lengths"][i]), int(r["response_lengths"][i])
    page.point(f"tr[data-number='{number}']", click=True)
    for t, layer, head in ((0, 0, 0), (R // 2, 0, 1), (R // 2, 1, 0), (R - 1, 1, 1)):
        page.run(f"$('layer').value = {layer}; $('head').value = {head}; $('head').onchange()")
        page.point(f"#tokens span[data-token='{t}']")
        told = facts(page)
        for name, text in (
            ("logp_sparse", "sampler's log-prob"),
            ("logp_old", "dense log-prob"),
            ("entropy", "entropy"),
        ):
            assert float(told[text].split()[0]) == pytest.approx(float(r[name][i, t]), abs=6e-4)
        assert float(told["xi"]) == pytest.approx(math.exp(r["logp_old"][i, t] - r["logp_sparse"][i, t]), rel=0.006)
        assert float(told["weight as used"]) == pytest.approx(float(r["weights"][i, t]), rel=0.006)
        query, gone = P + t - 1, r["evicted_at"][i, layer, head]
        held = sum(bool(gone[j] > query) for j in range(query + 1))
        assert told["keys held"] == f"{held} of {query + 1}, layer {layer}, head {head}"


@pytest.mark.parametrize("layer", ["0", "1", "all"])
def test_a_click_on_a_token_strikes_out_what_its_query_did_not_see(layer, page, strict):
    """In the text of prompt and response up to there; of all heads together, what none of them held. Arrows go on."""
    r, number = kept(strict, 4), page.run("state.response.number")
    i = r["rows"].tolist().index(number)
    P, R = int(r["prompt_lengths"][i]), int(r["response_lengths"][i])
    gone = r["evicted_at"][i].flatten(0, 1).amax(0) if layer == "all" else r["evicted_at"][i, int(layer), 1]  # (T,)
    page.run(
        f"$('layer').value = '{layer}'; $('head').value = '{'all' if layer == 'all' else 1}'; $('head').onchange()"
    )
    page.point("#tokens span[data-token='0']", click=True)
    for t in range(R):
        query = P + t - 1
        shown = page.run("[...document.querySelectorAll('#context span')].map(x => [x.className, x.dataset.position])")
        struck = [int(position) for name, position in shown if name.startswith("gone")]
        assert len(shown) == query + 1 and struck == [j for j in range(query + 1) if gone[j] <= query]
        assert f"position {query} saw" in page.run("$('seen').textContent")
        page.key("ArrowRight")
    page.key("ArrowLeft")
    assert page.run("state.token") == R - 2


def test_the_map_shows_what_each_query_saw(page, strict):
    """A pixel a query (row) and key (column): opaque where held, faint where evicted, empty above the diagonal."""
    r = kept(strict, 4)
    number = page.run("state.response.number")
    i = r["rows"].tolist().index(number)
    T = int(r["prompt_lengths"][i] + r["response_lengths"][i])
    page.run("$('layer').value = 1; $('head').value = 1; $('head').onchange()")
    alpha = page.run(
        "(() => { const c = document.querySelector('.map canvas'); const n = c.width;"
        "const d = c.getContext('2d').getImageData(0, 0, n, n).data;"
        "return [...Array(n).keys()].map(q => [...Array(n).keys()].map(j => d[4 * (q * n + j) + 3])) })()"
    )
    gone = r["evicted_at"][i, 1, 1]
    assert len(alpha) == T and any(gone[j] < T for j in range(T))
    for q in range(T):
        assert alpha[q] == [0 if j > q else 255 if gone[j] > q else 46 for j in range(T)]
    page.point(".map", click=True, x=0.1, y=0.98)
    assert page.run("state.token") >= T - 2 - int(r["prompt_lengths"][i])
    assert "position" in page.run("$('tip').textContent")


def test_colours_can_be_switched(page):
    """By log xi, dense log-prob or entropy."""
    seen = set()
    for name in ("xi", "logp", "entropy"):
        page.run(f"$('measure').value = '{name}'; $('measure').onchange({{target: $('measure')}})")
        seen.add(page.run("[...document.querySelectorAll('#tokens span')].map(x => x.style.background).join()"))
    assert len(seen) == 3


def test_text_of_a_model_is_shown_and_not_run(look, recorded, browser, tmp_path):
    """In response, prompt, answer and tokens: no element comes of it, no script runs, hidden characters are seen."""
    folder = shutil.copytree(recorded, tmp_path / "run <b>&")
    samples = [s | {"response": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE} for s in lines(folder / "samples.jsonl")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().replace('"step": 4', '"step": 3'))
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    file = folder / "checkpoints" / "step-000002" / "tokenizer.json"
    for digit in "0123456789":
        file.write_text(file.read_text().replace(f'"{digit}":', json.dumps(HOSTILE + digit) + ":"))
    look.main([str(folder), "--step", "4", "--out", str(tmp_path / "p.html")])
    browser.problems.clear()
    browser.open(tmp_path / "p.html")
    for row in range(0, 16):
        browser.point(f"tr[data-number='{row}']", click=True)
        text = browser.run("$('tokens').textContent")
        assert "<img src=x onerror" in text and "⟨202e⟩" in text and "\u202e" not in text
    assert browser.run("document.title") == f"{folder}, step 4"
    assert browser.run("document.querySelectorAll('script').length, document.querySelectorAll('img, b').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 2 and browser.problems == []


def test_a_script_that_got_in_would_not_run(page):
    """The page's policy lets its own script run, known by its hash, and loads nothing."""
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.invalid/x.png'; document.body.append(i)"
    )
    assert page.run("window.ran === undefined")
    refused = [
        json.dumps(problem) for problem in page.problems if isinstance(problem, dict)
    ]  # the others: what it tried
    assert len(refused) == 2 and all("Content Security Policy" in text for text in refused)
    page.problems.clear()


def test_light_and_dark(page, tmp_path):
    """The page follows what the reader prefers, and a screenshot of each differs."""
    pictures = []
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        pictures.append(page.screenshot(tmp_path / f"{scheme}.png"))
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    assert pictures[0] != pictures[1]


def test_a_page_without_tokens_opens_too(look, four_steps, browser, tmp_path):
    """A response is its text, and what to do is said."""
    look.main([str(four_steps), "--out", str(tmp_path / "p.html")])
    browser.problems.clear()
    browser.open(tmp_path / "p.html", "#7")
    samples = step_four(four_steps)
    assert browser.run("$('tokens').textContent") == samples[7]["prompt"] + samples[7]["response"]
    assert "--record-samples" in browser.run("document.querySelector('.verdict').textContent")
    assert browser.run("$('cache').hidden && $('measures').hidden") and browser.problems == []


def test_64_responses_of_1000_tokens_are_small_and_open_at_once(look, files, browser, tmp_path):
    """At the size of SmolLM2's cache, 30 layers of 3 heads: under 5 MB with evictions of four; within two seconds."""
    n, P, R, L, K = 64, 100, 1000, 30, 3
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "rows": torch.arange(n),
        "tokens": torch.randint(4, 14, (n, P + R), generator=generator).int(),
        "prompt_lengths": torch.full((n,), P),
        "response_lengths": torch.full((n,), R),
        "evicted_at": torch.randint(P, 32767, (n, L, K, P + R), generator=generator, dtype=torch.int16),
        **{name: -torch.rand(n, R, generator=generator) for name in ("logp_sparse", "logp_old", "entropy", "weights")},
    }
    folder = run(files, tmp_path / "run", "--steps", "1", "--eval-data=")
    (folder / "recorded").mkdir()
    save_file(tensors, folder / RECORDED.format(1))
    (sample, *_) = lines(folder / "samples.jsonl")
    records = [sample | {"response": "word " * 1000, "tokens": R, "xi_min": 1 / (i + 1)} for i in range(n)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = page_of(look, folder, out=tmp_path / "p.html")
    assert [r["has"] for r in data["responses"]] == [1] * 60 + [2] * 4
    assert (tmp_path / "p.html").stat().st_size < 5e6
    assert min(browser.open(tmp_path / "p.html") for _ in range(2)) < 2  # the second one if the machine was busy
    assert browser.run("document.querySelectorAll('#context span').length") > P
    began = time.monotonic()
    browser.point("tr[data-number='62']", click=True)
    assert browser.run("document.querySelectorAll('#tokens span').length") == P + R and time.monotonic() - began < 2
