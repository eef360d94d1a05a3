"""What this computer cannot do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pfl_core import fetch, run
from pfl_core.engine.context import Context
from pfl_core.util import gpu
from pfl_papers.notebook.study import Study
from tests.errors.table import Case, tiny


def file_for_a_folder(name: str) -> None:
    Path(name).write_text("")


def store_is_a_file() -> None:
    file_for_a_folder("runs")
    run(tiny())


def finish_into_a_file() -> None:
    file_for_a_folder("runs")
    Study("fedper", profile="smoke").finish()


def fetch_into_a_file() -> None:
    file_for_a_folder("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_OFFLINE", "0")  # the folder is made before the network is touched
        fetch("mnist", root="data")


def without_gpu(use: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(gpu, "misfit", lambda: "")
        use()


def old_driver(use: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch, "__version__", "2.15.0+cu130")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(gpu, "misfit", lambda: gpu._unfit("550.54.15"))
        use()


def out_of_memory() -> None:
    def full(*args, **kw):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "train", full)
        run(tiny())


CASES = [
    # this computer
    Case("$PFL_RUNS is a file", store_is_a_file, "set PFL_RUNS to a folder", OSError),
    Case(
        "$PFL_RUNS is a file, at the end of a notebook",
        finish_into_a_file,
        "set PFL_RUNS to a folder",
        OSError,
    ),
    Case("$PFL_DATA is a file", fetch_into_a_file, "data.*set PFL_DATA to a folder", OSError),
    Case(
        'run(experiment, device="cuda"), no GPU',
        lambda: without_gpu(lambda: run(tiny(), device="cuda")),
        "torch sees no GPU",
    ),
    Case(
        'run(experiment, device="cuda"), a driver older than the torch wheel',
        lambda: old_driver(lambda: run(tiny(), device="cuda")),
        "needs driver 580 or newer, and driver 550.54.15 is here; update",
    ),
    Case("out of memory", out_of_memory, "batch.*participation.*resumes", torch.OutOfMemoryError),
]
