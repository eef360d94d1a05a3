"""What every test finds: one thread, no window, no network, no data or runs of this computer."""

import functools
import os

import hypothesis
import pytest
import torch

os.environ |= {"MPLBACKEND": "Agg", "PFL_HEADLESS": "1", "PFL_OFFLINE": "1"}
torch.set_num_threads(1)  # pytest -n: one worker a core
hypothesis.settings.register_profile("pfl", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("pfl")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setenv("PFL_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.delenv("PFL_DEVICE", raising=False)
        yield


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder for a store of the test's own, beside which runs are kept too; checkpoints after every round."""
    from pfl_core.engine import simulate

    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
    return tmp_path / "store"


@pytest.fixture(scope="session")
def swept():
    """(paper, profile, datasets) -> every Experiment that the paper's notebook asks for; nothing is trained."""
    import json

    import pandas as pd

    from pfl_core.experiments import run as runs
    from pfl_core.experiments import store
    from pfl_core.papers import study
    from tools.runner import NOTEBOOKS

    def cells(paper, profile, datasets=()):
        found, names = [], {"display": lambda *a: None}
        with pytest.MonkeyPatch.context() as patch:
            empty = pd.DataFrame(columns=store.ROW_COLUMNS)
            patch.setattr(runs, "sweep", lambda some, **how: found.extend(some) or empty)
            for name in ("show_partitions", "claims", "finish"):
                patch.setattr(study.Study, name, lambda *a, **how: None)
            for cell in json.loads((NOTEBOOKS / f"{paper}.ipynb").read_text(encoding="utf-8"))["cells"]:
                if cell["cell_type"] == "code":
                    exec("".join(cell["source"]), names)
                    if "parameters" in cell["metadata"].get("tags", []):
                        names |= dict(profile=profile, datasets=list(datasets))
        return found

    return functools.lru_cache(cells)
