"""The five papers as data, and what makes a notebook of one: its study, tables, plan and report."""

# What other rooms may take from it.
__all__ = [
    "base",
    "comparison",
    "fedaghn",
    "fedper",
    "flayer",
    "html_report",
    "overview",
    "parameters",
    "pfedhn",
    "pfedla",
    "plan",
    "presets",
    "report",
    "study",
]
