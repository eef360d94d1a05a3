"""What all benchmarks share: clocks, the computer they ran on, and where raw timings go."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pfl_core.util import provenance
from pfl_core.util.version import __version__

RESULTS = Path(__file__).parent / "results"


def timed(fn: Callable[[], Any], device: Any) -> float:
    """Seconds of fn(), the device's queue emptied before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    fn()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def processor() -> str:
    """The CPU's name as the system gives it, and how many cores this process may use."""
    return f"{provenance.processor()}, {len(os.sched_getaffinity(0))} cores"


def about(device: str) -> dict[str, Any]:
    """The computer and the versions that timings belong to."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pfl_core": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def said(row: dict[str, Any]) -> list[str]:
    """What was measured, as words to print."""
    return [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]


def save(name: str, cases: dict[str, Any], device: str, about: dict[str, Any]) -> Path:
    """Write cases {key: what was measured} to results/<name>.json; returns its path.

    Those of earlier commands stay beside them, and each says what computer it is `about`.
    """
    out = RESULTS / f"{name}.json"
    kept = json.loads(out.read_text())["cases"] if out.exists() else {}
    kept |= {k: v | {"about": about} for k, v in cases.items()}
    RESULTS.mkdir(exist_ok=True)
    out.write_text(json.dumps({"device": device, "cases": kept}, indent=1))
    return out
