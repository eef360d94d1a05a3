"""What a method is, and one file for each: importing the room registers them all."""

import importlib
import pkgutil

# What other rooms may take from it; they reach methods by their names.
__all__ = ["base", "pfedla", "task"]

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
