"""train.py, some times in a row, by each of torchrun's ranks: `as_ranks.py` with the command lines as JSON.

In the last of these runs rank 1 is killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

import torch
from runs_of_train import half_right
from torch import Tensor

import ranks
import train


def gradients_of(argv: list[str]) -> list[Tensor]:
    """Train so: the gradient of each update, as one long vector, as the optimizer is given it."""
    found, step = [], torch.optim.AdamW.step

    def recorded(optimizer: torch.optim.Optimizer) -> None:
        found.append(torch.cat([ranks.full(p.grad).flatten() for p in optimizer.param_groups[0]["params"]]))
        step(optimizer)

    torch.optim.AdamW.step = recorded
    try:
        train.main(argv, reward=half_right)
    finally:
        torch.optim.AdamW.step = step
    return found


def die_in(folder: Path, *_, **__) -> None:
    """As if the machine had run out of memory."""
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    with ranks.joined():  # once, for all of them
        for argv in runs:
            if argv is runs[-1] and ranks.rank() == 1:
                train.rescore = functools.partial(die_in, Path(argv[1]))
            found = gradients_of(argv)
            if ranks.rank() == 0 and "--out" in argv:
                torch.save(found, Path(argv[argv.index("--out") + 1]) / "gradients.pt")
