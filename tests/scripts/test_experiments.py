"""The scripts in experiments/ and benchmarks/ at toy size."""

from __future__ import annotations

import json
import runpy

import pytest
import torch
from safetensors.torch import load_file

from kvcache import COMPRESSORS
from task import ASSETS

ROOT = ASSETS.parent


def test_the_comparison_of_policies_has_a_line_for_each(files, tmp_path, capsys):
    """`full` once, every other policy at every budget; full is the noise floor. The file is one line."""
    main = runpy.run_path(str(ROOT / "experiments" / "compressors.py"))["main"]
    options = "--limit 3 --budgets 8,12 --buffer 4 --window 2 --max-new-tokens 24"
    paths = ["--model", files / "model", "--data", files / "p-heldout.jsonl", "--out", tmp_path / "r.jsonl"]
    main([*map(str, paths), *options.split()])
    (record,) = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert record["command"] == f"python experiments/compressors.py {' '.join(map(str, paths[:4]))} {options}"
    assert record["commit"] and record["settings"]["seed"] == 0
    results = record["results"]
    assert len(results) == 1 + 2 * (len(COMPRESSORS) - 1)
    assert results[0]["compressor"] == "full" and results[0]["kv_saved"] == 0 and results[0]["sampler_kl"] < 1e-9
    assert all(r["kv_saved"] > 0 for r in results[1:] if r["budget"] == 8)
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMPRESSORS)


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
