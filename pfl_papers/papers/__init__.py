"""The five papers as data: settings, rows and columns, artefacts, claims, printed numbers."""

# What other rooms may take from it.
__all__ = [
    "base",
    "claims",
    "fedaghn",
    "fedper",
    "flayer",
    "pfedhn",
    "pfedla",
    "overrides",
    "presets",
]
