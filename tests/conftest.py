"""What every test finds: one thread, a CPU, no window, no network, no data or runs of this computer."""

import functools
import os
import sys
from pathlib import Path

import filelock
import hypothesis
import pytest
import torch

os.environ |= {"MPLBACKEND": "Agg", "PFL_HEADLESS": "1", "PFL_OFFLINE": "1"}
torch.set_num_threads(1)  # pytest -n: one worker a core
hypothesis.settings.register_profile("pfl", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("pfl")


# What these read of all papers (verdicts, tables, the report page) is worked out once in a process,
# unless tests of other results come between.
TOGETHER = ("compare/test_card", "compare/test_readable", "notebook/test_html_report", "test_cli")
TOGETHER = tuple(f"papers/{name}.py" for name in TOGETHER)
TOGETHER += ("test_browser.py", "test_frames.py", "test_pages.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadgroup` one worker takes them, and begins with them."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "together" if nodeid.removeprefix("tests/").startswith(TOGETHER) else nodeid

        def _pending_of(self, workload):
            for scope in [s for s, tests in workload.items() if all(tests.values())]:
                del workload[scope]  # else it goes through all that have ended after each test
            return super()._pending_of(workload)

    return Grouped(config, log)


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setenv("PFL_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("PFL_DEVICE", "cpu")  # whose numbers are expected; test_gpu.py asks for a GPU
        yield


@pytest.fixture(autouse=True)
def _own_names():
    """What a test registers is gone after it: a worker runs tests of many files, in no order."""
    from pfl_core import models
    from pfl_core.data import partition, pools
    from pfl_core.engine import scoring
    from pfl_core.methods.base import METHODS

    registries = models._MODELS, partition._SCHEMES, pools._ENTRIES, scoring._METRICS, METHODS
    before, modules = [dict(names) for names in registries], set(sys.modules)
    yield
    # A plugin that is named again is imported again, and so registered.
    for new in [m for name, m in METHODS.items() if name not in before[-1]]:
        if new.__module__ not in modules:
            sys.modules.pop(new.__module__, None)
    for names, known in zip(registries, before, strict=True):
        names.clear()
        names.update(known)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder for a store of the test's own, beside which runs are kept too; checkpoints after every round."""
    from pfl_core.engine import simulate

    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The test's own $PFL_RUNS, in which nothing was run."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def reported(tmp_path_factory) -> Path:
    """A folder with the committed results, figures and benchmarks, and the report page of them.

    Making it takes a minute or two: the first worker that needs it makes it for all.
    """
    from pfl_core.util import paths
    from pfl_papers.notebook import html_report

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reported"
    with filelock.FileLock(f"{root}.lock"):
        if not (root / "figures" / "report.html").exists():
            root.mkdir()
            (root / "benchmarks").symlink_to(paths.CHECKOUT / "benchmarks")
            for part in ("results", "figures"):
                (root / part).mkdir(parents=True, exist_ok=True)
                for source in (paths.CHECKOUT / part).iterdir():
                    target = root / part / source.name
                    if source.name != "report.html" and not target.is_symlink():
                        target.symlink_to(source)
            html_report.build(root)
    return root


@pytest.fixture(scope="session")
def swept():
    """(paper, profile, datasets) -> every Experiment that the paper asks for; nothing is trained."""
    from pfl_papers.papers import base

    def cells(paper, profile, datasets=()):
        sweeps = base.paper(paper).planned(base.Scope(profile, tuple(datasets)))
        return [e for s in sweeps for e in s.experiments()]

    return functools.lru_cache(cells)
