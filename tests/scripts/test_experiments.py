"""The scripts in experiments/ and benchmarks/ at toy size."""

from __future__ import annotations

import json
import runpy
import shlex
from importlib.util import find_spec

import pytest
import torch
from helpers import VisibilityMask, seeded, tiny_model, visibility
from safetensors.torch import load_file

from experiments import caches
from kvcache import COMPRESSORS
from rollout import rollout
from task import ASSETS

ROOT = ASSETS.parent


OPTIONS = "--limit 3 --budgets 8,12 --buffer 4 --window 2 --max-new-tokens 24"


def run_map(files, folder, *options: str) -> list[dict]:
    """The lines of a map of the tiny model."""
    paths = ["--model", files / "model", "--data", files / "p-heldout.jsonl", "--out", folder / "r.jsonl"]
    caches.main([*map(str, paths), *OPTIONS.split(), *options])
    return [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]


def test_the_map_of_caches_has_a_line_for_each_cell(files, tmp_path, capsys):
    """`full` once, every other policy at every budget; full is the noise floor. The command makes one cell again."""
    cells = run_map(files, tmp_path)
    assert len({cell["name"] for cell in cells}) == len(cells) == 1 + 2 * (len(COMPRESSORS) - 1)
    full, *others = cells
    assert full["name"] == "full" and 0 <= full["kl"] < 1e-9 and full["kv_saved"] == 0 and full["sampler_kl"] < 1e-9
    assert all(cell["kv_saved"] > 0 and cell["kl"] > 0 for cell in others if cell["budget"] == 8)
    printed = capsys.readouterr().out
    assert all(cell["name"] in printed for cell in cells) and "within a half of the dense bytes: " in printed
    assert full["commit"] and full["settings"]["seed"] == 0
    if find_spec("matplotlib"):
        assert (tmp_path / "r.png").stat().st_size > 1000
    else:
        assert "no figure: pip install -r requirements-dev.txt" in printed
    again = tmp_path / "again.jsonl"
    caches.main([*shlex.split(others[4]["command"])[2:], "--out", str(again)])
    assert json.loads(again.read_text()) == others[4]


def test_the_map_of_caches_goes_on_where_it_stopped(files, tmp_path, capsys):
    """A cell that is there is not made again; a file of other settings is refused. Fewer bits take fewer bytes."""
    cells, file = run_map(files, tmp_path, "--forced", "--compressors", "snapkv", "--bits", "0,2"), tmp_path / "r.jsonl"
    assert [cell["name"] for cell in cells] == ["snapkv 8", "snapkv 8 2 bits", "snapkv 12", "snapkv 12 2 bits"]
    assert cells[1]["bytes"] < cells[0]["bytes"] and cells[1]["kl"] != cells[0]["kl"]
    assert not any("accuracy" in cell for cell in cells)
    kept, printed = file.read_text().splitlines()[:3], capsys.readouterr().out
    file.write_text("\n".join(kept) + "\n" + '{"name": "half a li')
    again = run_map(files, tmp_path, "--forced", "--compressors", "snapkv", "--bits", "0,2")
    assert file.read_text().splitlines()[:3] == kept and again == cells
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit):
        run_map(files, tmp_path, "--forced", "--seed", "1")
    assert "r.jsonl was made with another --seed: name another --out" in capsys.readouterr().err


def test_a_cache_is_led_along_texts_exactly():
    """The KL at each token is that of one forward under the mask of the evictions to one without."""
    model, prompts = tiny_model(dtype=torch.float64), [[3, 1, 4, 1, 5], [9, 2, 6]]
    cache = {"compressor": "snapkv", "budget": 6, "buffer": 3, "window": 2}
    how = {"group_size": 1, "max_new_tokens": 20, "eos_ids": [7], "generator": seeded(0)}
    r = rollout(model, prompts, record=True, **how, **cache)
    found = caches.led(model, r, **cache)
    with torch.no_grad():
        mask = VisibilityMask(visibility(r.evicted_at, r.tokens.shape[1]))
        old, sparse = model(r.tokens).log_softmax(-1), model(r.tokens, cache=mask).log_softmax(-1)  # (N, T, V)
    kl = (old.exp() * (old - sparse)).sum(-1)  # (N, T)
    before = [slice(p - 1, p + n - 1) for p, n in zip(r.prompt_lengths, r.response_lengths, strict=True)]
    expected = [float(kl[i, place].mean()) for i, place in enumerate(before)]
    assert found["kl_each"] == pytest.approx(expected, abs=1e-12) and min(expected) > 1e-4
    assert found["kl"] == pytest.approx(sum(expected) / 2)
    assert found["kl_stderr"] == pytest.approx(abs(expected[0] - expected[1]) / 2)
    assert found["kv_saved"] == pytest.approx(r.statistics["kv_saved"])
    key = 2 * 8 * 8  # K D itemsize, of a token in one of two layers
    assert found["bytes"] == 2 * (9 * 2 * key + 9 * 2 * 4 + 2 * 2 * key)  # keys and values, positions, queries
    assert found["dense_bytes"] == 2 * 2 * key * r.tokens.shape[1]


def cell(name: str, size: float, kl_each: list[float]) -> dict:
    """A cell of the map, as far as front and winner read it."""
    return {"name": name, "bytes": size, "kl": sum(kl_each) / len(kl_each), "kl_each": kl_each}


def test_the_pareto_front_leaves_out_what_is_larger_and_worse():
    """A cell is on it if nothing as small has as small a KL."""
    cells = [cell("c", 30, [1]), cell("a", 10, [5]), cell("b", 20, [6]), cell("d", 10, [7]), cell("e", 40, [1])]
    assert [c["name"] for c in caches.front(cells)] == ["a", "c"]


def test_what_cannot_be_told_from_the_winner_is_less_than_two_standard_errors_above():
    """Of the differences response by response: `sure` is above by 1 +- 0.41, `unsure` by 1 +- 0.58; both vary by 10."""
    best = cell("best", 10, [0, 10, 20, 30])
    sure, unsure = cell("sure", 10, [2, 11, 21, 30]), cell("unsure", 9, [2, 12, 20, 30])
    found, rivals = caches.winner([unsure, cell("large", 11, [0, 0, 0, 0]), sure, best], 10)
    assert found is best and rivals == [unsure]
    assert caches.winner([sure], 9.5) is None


def test_the_benchmark_of_speed_has_a_table_for_each_part(files, tmp_path, capsys):
    """Every part has a line for each case; shares of a rollout add up to the whole."""
    main = runpy.run_path(str(ROOT / "benchmarks" / "bench.py"))["main"]
    options = "--prompt 4 --lengths 12,20 --rows 1,3 --budget 8 --buffer 4 --window 2 --repeats 1 --learner-rows 2"
    main(["--model", str(files / "model"), "--out", str(tmp_path / "b.json"), *options.split()])
    results = json.loads((tmp_path / "b.json").read_text())
    lengths = {part: len(results[part]) for part in ("rollout", "decode", "shares", "learner", "memory")}
    assert lengths == {"rollout": 8, "decode": 8, "shares": 2, "learner": 2, "memory": 2}
    for record in results["shares"]:
        assert sum(v for v in record.values() if isinstance(v, float)) == pytest.approx(1)
    assert "products_share" in capsys.readouterr().out


def test_the_memory_benchmark_measures_what_it_says(tmp_path):
    """The two ways of scoring agree; dense and compressed sampling hold the bytes of the formula."""
    module = runpy.run_path(str(ROOT / "benchmarks" / "memory.py"))
    for way in ("whole", "chunks"):
        module["log_probs"](way, 300, 500, tmp_path / way)
    whole, chunks = (load_file(tmp_path / way) for way in ("whole", "chunks"))
    assert whole.keys() == {"log-probs", "entropies", "gradients", "head"}
    assert all(torch.allclose(whole[name], chunks[name], rtol=1e-5, atol=1e-5) for name in whole)
    ways = ("scoring", "update", "checkpointing", "replay")
    assert all(module["learn"](way, ASSETS / "model", 2, 16)["peak"] >= 0 for way in ways)
    for compressor, slots in (("full", 40), ("snapkv", 512 + 128)):
        report = module["sample"](compressor, rows=2, tokens=40)
        assert report["keys and values"] == 2 * 4 * 2 * 2 * slots * 32 * 4  # 2 L B K S D itemsize
