"""Papers' numbers beside ours: tables, verdicts, the fullest evidence, what runs would take."""

# What other rooms may take from it.
__all__ = [
    "card",
    "costs",
    "fullest",
    "judged",
    "overview",
    "parameters",
    "plan",
    "priors",
    "readable",
    "recount",
    "report",
]
