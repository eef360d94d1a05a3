"""Where a run trains: a GPU that torch cannot use is said with both versions and the remedy, before anything is trained."""

import re
import subprocess
import warnings

import pytest
import torch

from pfl_core.experiments import run as runs
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device, run
from pfl_core.util import driver, gpu
from tools import runner

PROC = "NVRM version: NVIDIA UNIX{} x86_64  {}  Release Build\nGCC version:  gcc version 12.3.0\n"


@pytest.fixture
def computer(monkeypatch, tmp_path):
    """A function that makes this computer one with a driver, a wheel and a card."""
    for name in ("PFL_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def make(number="", wheel="2.15.0+cu130", cuda="13.0", card=None, built=("sm_80", "sm_90")):
        """number: the driver's; card: the capability of the GPU that torch sees."""
        proc = tmp_path / "version"
        proc.unlink(missing_ok=True)
        if number:
            proc.write_text(PROC.format(" Open Kernel Module for", number))
        for clear in (gpu.misfit, gpu.tried, runs._warn):
            clear.cache_clear()
        monkeypatch.setattr(driver, "LOADED", str(proc))
        monkeypatch.setattr(driver, "CARDS", ())
        monkeypatch.setattr(driver.shutil, "which", lambda name: None)
        monkeypatch.setattr(torch, "__version__", wheel)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))

        def init():
            raise RuntimeError("Error 802: system not yet initialized\nmore")

        monkeypatch.setattr(torch.cuda, "init", init)

    yield make
    for clear in (gpu.misfit, gpu.tried, runs._warn):
        clear.cache_clear()


# A computer, and what is said of it: both versions, and what to do.
UNFIT = {
    "wheel too new": (
        dict(number="550.54.15"),
        r"torch 2\.15\.0\+cu130 is built for CUDA 13\.0, which needs driver 580 or newer, and driver "
        r"550\.54\.15 is here; update the driver, or install a torch wheel for CUDA 12 \(.*\+cu12",
    ),
    "wheel of a CUDA to come": (
        dict(number="580.65.06", wheel="3.0.0+cu150", cuda="15.0"),
        r"CUDA 15\.0, which needs a newer driver, and driver 580\.65\.06 is here; update .* CUDA 13",
    ),
    "driver too old for all": (
        dict(number="390.157", wheel="2.4.0+cu118", cuda="11.8"),
        r"needs driver 450 or newer, and driver 390\.157 is here; update the driver$",
    ),
    "wheel without CUDA": (
        dict(number="535.129.03", wheel="2.15.0+cpu", cuda=None),
        r"driver 535\.129\.03 runs a GPU here, and torch 2\.15\.0\+cpu is built without CUDA; install "
        r"a torch wheel for CUDA 12",
    ),
    "both fit": (
        dict(number="580.65.06"),
        r"driver 580\.65\.06 and torch 2\.15\.0\+cu130 \(CUDA 13\.0\) fit, and yet torch reaches no GPU "
        r"\(Error 802: system not yet initialized\); see what nvidia-smi says",
    ),
    "card too old": (
        dict(number="580.65.06", card=(6, 1), built=("sm_75", "sm_80")),
        r"Some Card has compute capability 6\.1, and torch 2\.15\.0\+cu130 is built for sm_75, sm_80; "
        r"install a torch wheel",
    ),
    "card too new": (dict(number="590.1", card=(12, 0)), r"capability 12\.0, .* sm_80, sm_90"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_gpu_that_torch_cannot_use_is_said_once_and_refused_where_it_is_asked_for(case, computer):
    here, said = UNFIT[case]
    computer(**here)
    with pytest.warns(UserWarning, match=said.removesuffix("$")) as warned:
        assert pick_device("auto") == "cpu"
    (one,) = warned
    assert str(one.message).startswith("training on the CPU: ") and one.filename == __file__
    assert "device='cpu' or PFL_DEVICE=cpu says that this is meant" in str(one.message)
    with warnings.catch_warnings(action="error"):
        assert pick_device("auto") == "cpu", "said once a process"
        assert pick_device("cpu") == "cpu"
    with pytest.raises(
        ValueError, match=f"device cuda was asked for, but .*{said.removesuffix('$')}"
    ):
        pick_device("cuda")


@pytest.mark.parametrize("case", UNFIT)
def test_run_all_says_it_before_a_notebook_is_run(case, computer, capsys, monkeypatch):
    here, said = UNFIT[case]
    computer(**here)
    assert not runner._device("cuda") and runner._device("auto") and runner._device("cpu")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("run_all.sh: argument --device: ")
    assert second.startswith("run_all.sh: training on the CPU: ")
    for line in (first.removesuffix("; use cpu or auto"), second):
        assert re.search(said, line)
    monkeypatch.setenv("PFL_DEVICE", "cuda")
    assert not runner._device("auto") and runner._device("cpu")


def test_said_of_a_run_before_it_is_trained_and_not_if_a_cpu_is_meant(computer, store, monkeypatch):
    tiny = Experiment(clients=2, model="mlp", model_args={"hidden": 4}, rounds=1, max_samples=10)
    computer("550.54.15")
    with pytest.raises(ValueError, match="driver 580 or newer, and driver 550"):
        run(tiny, device="cuda")
    assert not list(store.glob("*.part"))
    monkeypatch.setenv("PFL_DEVICE", "cpu")
    assert run(tiny).ok, "a warning would have been an error"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_is_none(hidden, computer, monkeypatch):
    computer("550.54.15")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        pick_device("cuda")


def test_without_a_driver_nothing_is_looked_at(computer, monkeypatch):
    computer()
    for name in ("get_device_capability", "get_arch_list", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: pytest.fail("asked"))
    assert pick_device("auto") == "cpu" and runner._device("auto")


def test_a_card_that_fits_is_taken(computer):
    computer("580.65.06", card=(9, 0))
    assert pick_device("auto") == pick_device("cuda") == "cuda" and runner._device("cuda")


@pytest.mark.parametrize(
    ("arch", "capability", "good"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_which_code_runs_on_which_card(arch, capability, good):
    assert gpu.serves(arch, capability) is good


def test_a_card_whose_first_operation_fails_is_said_before_a_run(computer, store, monkeypatch):
    computer("580.65.06", card=(9, 0))

    def broken(*_, **how):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(
        RuntimeError, match=r"first operation \(CUDA error: no kernel image is avail"
    ):
        run(Experiment(clients=2, model="mlp", rounds=1, max_samples=10), device="cuda")
    assert not list(store.glob("*.part"))


# -- where the driver's version is read ------------------------------------------------------------------------------------


def test_the_drivers_version_is_found_in_each_place(monkeypatch, tmp_path):
    loaded = tmp_path / "version"
    monkeypatch.setattr(driver, "LOADED", str(loaded))
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    monkeypatch.setattr(driver, "CARDS", (str(tmp_path / "nvidia[0-9]"),))
    monkeypatch.setattr(driver, "LIBRARIES", (f"{tmp_path}/",))
    (tmp_path / "libcuda.so.1").touch(), (tmp_path / "libcuda.so.525.60.13").touch()
    assert driver.version() == "", "libraries without a card are no driver that runs"
    (tmp_path / "nvidia0").touch()
    assert driver.version() == "525.60.13"
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    asked.chmod(0o755)
    monkeypatch.setattr(driver.shutil, "which", lambda name: str(asked))
    assert driver.version() == "550.54.15"
    asked.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert driver.version() == "525.60.13", "it answers only where the driver runs"
    for form in (" Open Kernel Module for", ""):
        loaded.write_text(PROC.format(form, "580.159.04"))
        assert driver.version() == "580.159.04"
