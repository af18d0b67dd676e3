"""The experiment that asks where a compressed cache's sampler leaves the dense policy."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model

from experiments import mismatch
from rollout import rollout


@pytest.mark.parametrize("prompt", [3, 12])
def test_cuts_are_counted_up_to_the_query_that_drew_the_token(prompt):
    """Budget 8 + buffer 4: cut at 12 held, so after tokens 12, 16, 20 ...; a token drawn just then saw everything."""
    how = {"compressor": "snapkv", "budget": 8, "buffer": 4, "window": 2}
    r = rollout(
        tiny_model(), [[5] * prompt, [6] * prompt], group_size=2, max_new_tokens=16, eos_ids=[], record=True, **how
    )
    expected = [sum(cut_at < prompt + t for cut_at in range(12, 40, 4)) for t in range(16)]
    assert mismatch.cuts_before(r).tolist() == [expected] * 4


def test_a_response_whose_every_xi_is_above_one_has_its_smallest_inside(files, monkeypatch):
    """Not in the padding, where log xi is 0."""
    settings = {"model": str(files / "model"), "data": str(files / "p-train.jsonl"), "limit": 6, "max_new_tokens": 12}
    config = mismatch.Settings(**settings, budgets="12", buffer=4, window=2, threads=1)
    monkeypatch.setattr(mismatch, "rescore", lambda model, r, **_: (r.logp_sparse + 1e-3 * r.mask, None))
    found = mismatch.examined(mismatch.Ground.load(config), config, 12)
    assert len(found["by_length"]) > 1 and all(w["xi"] == pytest.approx(math.exp(1e-3)) for w in found["worst"])


def test_tokens_are_counted_by_label_and_nothing_falls_out_of_the_histogram():
    """Shares of low and fatal xi of each label, by hand; an xi of 0 counts at the rim."""
    log_xi = torch.tensor([0.0, math.log(0.05), math.log(1e-5), -math.inf])
    found = mismatch.by(["a", "b", "b", "b"], log_xi, 1e-4)
    assert found["a"] == {"tokens": 1, "kl": 0, "low": 0, "fatal": 0}
    assert found["b"]["low"] == 1 and found["b"]["fatal"] == pytest.approx(2 / 3)
    counts = mismatch.histogram(log_xi)["counts"]
    assert sum(counts) == 4 and counts[0] == 1
    labels = [mismatch.kind(text, False) for text in (" 12", "Olga", " so", "=", "")]
    assert labels == ["digit", "capital", "word", "sign", "sign"] and mismatch.kind("x", True) == "end"


def test_one_line_for_each_cache_and_another_model_adds_its_own(files, tmp_path, capsys, monkeypatch):
    """Every token is in each grouping; what is there is not measured again; without eviction xi is 1."""
    paths = {"model": files / "model", "data": files / "p-train.jsonl", "out": tmp_path / "m.jsonl"}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    words += ["--buffer", "4", "--window", "2", "--limit", "4", "--max-new-tokens", "12"]
    mismatch.main([*words, "--budgets", "8,64"])
    mismatch.main([*words, "--budgets", "8", "--label", "other"])
    lines = [json.loads(line) for line in paths["out"].read_text().splitlines()]
    assert [line["name"] for line in lines] == ["model snapkv 8", "model snapkv 64", "other snapkv 8"]
    for line in lines:
        tokens = sum(line["histogram"]["counts"])
        for grouping in ("by_kind", "by_cuts", "by_place"):
            assert sum(found["tokens"] for found in line[grouping].values()) == tokens
        assert sum(found["tokens"] for found in line["by_length"].values()) == 4 == 1 + len(line["worst"])
        assert line["worst"][0]["xi"] == pytest.approx(line["xi_min"], rel=1e-4)
    assert lines[0]["sampler_kl"] > 0 == pytest.approx(lines[1]["sampler_kl"], abs=1e-9)
    assert lines[0] | {"name": "", "command": "", "settings": {}} == lines[2] | {
        "name": "",
        "command": "",
        "settings": {},
    }
    printed = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(mismatch, "Ground", SimpleNamespace())  # nothing may be measured
    mismatch.main([*words, "--budgets", "8,64"])
    again = capsys.readouterr().out.splitlines()
    assert again == printed[-len(again) :]
    with pytest.raises(SystemExit) as stop:
        mismatch.main([*words, "--budgets", "8", "--seed", "1"])
    assert stop.value.code == 2 and "was made with another --seed" in capsys.readouterr().err


def test_a_file_of_other_results_is_refused_before_anything_is_measured(files, tmp_path, capsys):
    """And left as it was."""
    (tmp_path / "m.jsonl").write_text('{"name": "full", "command": "", "kl": 0}\n')
    with pytest.raises(SystemExit) as stop:
        mismatch.main(["--model", str(files / "model"), "--out", str(tmp_path / "m.jsonl")])
    assert stop.value.code == 2 and "m.jsonl, line 1 is a result of another kind" in capsys.readouterr().err
    assert (tmp_path / "m.jsonl").read_text().count("\n") == 1
