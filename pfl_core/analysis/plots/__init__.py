"""Figures: one function for each kind, which draws a data frame on the axes and returns them.

Frames are rows in the long form, or what `analysis.stats` made of them. Nothing here sees a tensor.
"""

import lazy_loader

# Words and labels need no matplotlib, which takes seconds to import.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
