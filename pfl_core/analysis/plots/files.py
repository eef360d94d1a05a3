"""Figures as files and as pictures in notebooks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

_CROPPED: dict[str, Any] = dict(bbox_inches="tight", pad_inches=0.04)


def save(fig: Figure, frame: pd.DataFrame, path: Path) -> Path:
    """Write path.png, path.pdf, and path.csv with the plotted numbers; returns the PNG's path.

    The files hold no dates or versions, so that the same figure is the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_suffix(".png")
    png.write_bytes(compact(fig))
    fig.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None}, **_CROPPED)
    frame.round(4).to_csv(path.with_suffix(".csv"), index=False)
    return png


def compact(fig: Figure, dpi: int = 144) -> bytes:
    """The figure as a PNG without margins, packed as tightly as it goes.

    It has 256 colours where that cannot be seen (`same`), which is less than half the size, and
    all its colours otherwise.
    """
    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, dpi=dpi, format="png", metadata={"Software": None}, **_CROPPED)
    whole = Image.open(raw).convert("RGB")
    ways = Image.Quantize.MEDIANCUT, Image.Quantize.MAXCOVERAGE  # the second keeps colour scales
    tried = (whole.quantize(256, way, kmeans=1, dither=Image.Dither.NONE) for way in ways)
    chosen = next((few for few in tried if same(whole, few)), whole)
    chosen.save(small, "PNG", optimize=True)
    return small.getvalue()


def same(one: Image.Image, other: Image.Image) -> bool:
    """Whether two pictures look alike: one pixel in a thousand may differ by more than 8 of 255."""
    a, b = (np.asarray(picture.convert("RGB"), dtype=int) for picture in (one, other))
    return bool((np.abs(a - b).max(-1) > 8).mean() <= 1e-3)
