"""What papers print, as it lies in their files of numbers."""

from importlib import resources

import pandas as pd


def printed(paper: str) -> pd.DataFrame:
    """A paper's file: each value as it is printed, and its number beside it."""
    file = resources.files("pfl_papers.papers") / "published" / f"{paper}.csv"
    with file.open(encoding="utf-8") as lines:
        found = pd.read_csv(lines, dtype=str, keep_default_na=False)
    return found.assign(number=found["value"].astype(float))
