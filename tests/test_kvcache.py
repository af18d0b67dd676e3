"""kvcache.py as a specification: replay, the right keys, what holds at every step, memory, settings."""

from __future__ import annotations

import pytest
import torch
from helpers import cut_times, replay, seeded, tiny_model

from kvcache import COMPRESSORS
from rollout import rollout

# ------------------------------------------------------------------------------------------------------- replay

PROMPTS = [[1, 2, 3], list(range(4, 30)) * 2, [5, 6, 7, 8, 9] * 4]  # below the window, beyond the cache, between
SMALL = {"budget": 16, "buffer": 5, "window": 4}


def recorded(model, compressor, *, group_size=2, max_new_tokens=32, **settings):
    """A rollout with the record of its evictions."""
    return rollout(
        model,
        PROMPTS,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        eos_ids=[2],
        compressor=compressor,
        generator=seeded(1),
        record=True,
        **(SMALL | settings),
    )


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "tolerance"),
    [(1, torch.float32, 1e-5), (2, torch.float32, 1e-5), (4, torch.float32, 1e-5), (2, torch.float64, 1e-12)],
)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_sampling_equals_one_dense_forward_under_the_mask_of_its_evictions(
    compressor, kv_heads, dtype, tolerance
):
    """The theorem of design section 4, for ragged prompts, multi-query to multi-head, several cuts, early ends."""
    model = tiny_model(kv_heads=kv_heads, dtype=dtype)
    r = recorded(model, compressor)
    logp, _ = replay(model, r)
    assert (logp - r.logp_sparse).abs().max() < tolerance

    cuts = max(len(cut_times(gone)) for gone in r.evicted_at[0].flatten(0, 1))
    assert (cuts == 0) if compressor == "full" else (cuts > 3)
    assert r.finished.any()
