"""pytest --nbval: what a kernel sees, how long it may be silent, and what is not compared."""

import os

import nbval.kernel

from tools.notebooks import over_sockets

# Kernels inherit it.
os.environ |= {"PFL_HEADLESS": "1", "PFL_OFFLINE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
os.environ.pop("MPLBACKEND", None)  # figures are shown in the notebook


nbval.kernel.KernelManager = over_sockets(nbval.kernel.KernelManager)


def pytest_collection_modifyitems(items):
    # nbval takes 5 s between two outputs of a cell for a dead kernel; ours train silently.
    for item in items:
        item.output_timeout = 600
    for notebook in {item.parent for item in items}:
        notebook.skip_compare += ("stderr",)  # progress, which tells of seconds
        # As of figures that are outputs of their own, no pixels of those that are folded.
        notebook.sanitize_patterns[r"data:image/png;base64,[\w+/=]+"] = "figure"
