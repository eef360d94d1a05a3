"""Whether torch can use this computer's GPU, and what to do where it cannot."""

from __future__ import annotations

import functools
import os
import re

import torch

from pfl_core.util import driver


def refused() -> str:
    """Why device "cuda" cannot be had here, and the remedy; "" if it can."""
    return misfit() or ("" if torch.cuda.is_available() else "torch sees no GPU here")


@functools.cache
def misfit() -> str:
    """Why torch cannot use the GPU that is here, and the remedy; "" if it can, or there is none.

    Looked for once a process. A GPU that CUDA_VISIBLE_DEVICES hides is none.
    """
    if torch.version.hip:  # AMD's GPUs have drivers and architectures of their own
        return ""
    if torch.cuda.is_available():
        return _too_old()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    return "" if hidden or not (found := driver.version()) else _unfit(found)


def _unfit(found: str) -> str:
    # The driver `found` runs, and torch sees no GPU.
    wheel, cuda, oldest = f"torch {torch.__version__}", torch.version.cuda, driver.DRIVERS
    served = max((c for c, n in oldest.items() if n <= int(found.partition(".")[0])), default=0)
    change = f"install a torch wheel for CUDA {served} (its version ends in +cu{served}...)"
    remedy = change if served else "update the driver"
    if cuda is None:
        return f"driver {found} runs a GPU here, and {wheel} is built without CUDA; {remedy}"
    built = int(cuda.partition(".")[0])
    if built > served:
        least = f"driver {oldest[built]} or newer" if built in oldest else "a newer driver"
        return (
            f"{wheel} is built for CUDA {cuda}, which needs {least}, and driver {found} is here; "
            "update the driver" + f", or {change}" * bool(served)
        )
    return (
        f"driver {found} and {wheel} (CUDA {cuda}) fit, and yet torch reaches no GPU "
        f"({_reason()}); see what nvidia-smi says, and start containers with their GPUs"
    )


def _reason() -> str:
    # What torch says when it is made to look for a GPU.
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return "it says no reason"


def _too_old() -> str:
    # Whether the wheel has code for the GPU that torch sees.
    try:
        capability = torch.cuda.get_device_capability()
        name, built = torch.cuda.get_device_name(), torch.cuda.get_arch_list()
    except RuntimeError as error:
        return f"torch cannot reach the GPU ({_first_line(error)}); see what nvidia-smi says"
    if not built or any(serves(arch, capability) for arch in built):
        return ""
    has = ".".join(map(str, capability))
    return (
        f"{name} has compute capability {has}, and torch {torch.__version__} is built for "
        f"{', '.join(built)}; install a torch wheel that is built for it"
    )


def serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` ("sm_80", "compute_90", ...) runs on a GPU of a capability."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
    if not found:
        return False
    what, own, only = found[1], (int(found[2]), int(found[3])), found[4]
    if only == "a":
        return own == capability
    older = own <= capability
    # What is compiled runs on later GPUs of its family; PTX on all later ones.
    return older if what == "compute" and not only else older and own[0] == capability[0]


@functools.cache
def tried() -> None:
    """Compute one number on the GPU, once a process; RuntimeError if that fails."""
    try:
        torch.ones(8, device="cuda").square().sum().item()
    except RuntimeError as error:
        raise RuntimeError(
            f"the GPU fails at its first operation ({_first_line(error)}); see what nvidia-smi "
            "says (another process may hold its memory), or use device='cpu'"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
