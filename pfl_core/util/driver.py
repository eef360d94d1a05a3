"""NVIDIA's driver, by what lies on this computer; needs no torch."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

# The oldest of NVIDIA's drivers that runs a CUDA version, with all of its minor versions.
DRIVERS = {11: 450, 12: 525, 13: 580}
LOADED = "/proc/driver/nvidia/version"
CARDS = ("/dev/nvidia[0-9]*", "/dev/dxg")  # the latter in WSL
LIBRARIES = ("/usr/lib/*/", "/usr/lib64/", "/usr/lib/wsl/lib/", "/usr/local/nvidia/lib*/")
NUMBER = r"\d{3,}\.\d+(?:\.\d+)?"


def version() -> str:
    """Version of NVIDIA's driver that runs here, such as "580.65.06"; "" where none does."""
    said = ""
    with suppress(OSError):
        said = Path(LOADED).read_text(encoding="utf-8")
    if not said and (asked := shutil.which("nvidia-smi")):
        words = [asked, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
            said = done.stdout
    if not said and any(glob.glob(card) for card in CARDS):
        said = " ".join(f for folder in LIBRARIES for f in glob.glob(f"{folder}libcuda.so.*"))
    found = re.search(NUMBER, said)
    return found[0] if found else ""
