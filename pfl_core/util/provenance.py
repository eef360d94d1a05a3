"""Where numbers come from: the commit of this checkout and the processor they were computed on."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

from pfl_core.util.paths import PACKAGE


@functools.cache
def commit() -> str:
    """The commit of the checkout that pfl_core runs from, in 12 digits; "" outside of one.

    A "+" says that the package's code has changed since.
    """
    home = PACKAGE
    # Git's hooks set GIT_DIR and the like, which name another repository.
    clean = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> str:
        call = ["git", "-C", str(home), *words]
        done = subprocess.run(call, capture_output=True, text=True, timeout=20, env=clean)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        top = git("rev-parse", "--show-toplevel")
        if not top or Path(top).resolve() != home.parent.resolve():
            return ""
        found = git("rev-parse", "--short=12", "HEAD")
        return found + "+" * bool(found and git("status", "--porcelain", "--", str(home)))
    except (OSError, subprocess.SubprocessError):  # no git here
        return ""


@functools.cache
def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
