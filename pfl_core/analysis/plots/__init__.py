"""Figures: one function for each kind, which draws a data frame on the axes and returns them.

Frames are rows in the long form, or what `analysis.stats` made of them. Nothing here sees a tensor.
"""

from pfl_core.analysis.plots.dots import agreement, embedding, leads, points, ranges, reported
from pfl_core.analysis.plots.files import compact, save
from pfl_core.analysis.plots.lines import curves, intervals, layers, spread
from pfl_core.analysis.plots.maps import heat, heats, label_distribution
from pfl_core.analysis.plots.style import (
    COLOURS,
    DASHES,
    DATA_LABELS,
    LABELS,
    LOOKS,
    PALETTE,
    PANEL,
    STYLE,
    Look,
    colours,
    dashes,
    entitle,
    finish,
    in_words,
    label,
    looks,
    note,
    outer_labels,
    panels,
    share_legend,
)

__all__ = [
    "COLOURS",
    "DASHES",
    "DATA_LABELS",
    "LABELS",
    "LOOKS",
    "PALETTE",
    "PANEL",
    "STYLE",
    "Look",
    "agreement",
    "colours",
    "compact",
    "curves",
    "dashes",
    "embedding",
    "entitle",
    "finish",
    "heat",
    "heats",
    "in_words",
    "intervals",
    "label",
    "label_distribution",
    "layers",
    "leads",
    "looks",
    "note",
    "outer_labels",
    "panels",
    "points",
    "ranges",
    "reported",
    "save",
    "share_legend",
    "spread",
]
