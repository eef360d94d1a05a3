"""What notebooks call: a study of a paper, its figures, what holds of it, and the report page."""

# What other rooms may take from it.
__all__ = ["benchmark", "drawing", "folded", "html_report", "rank_figures", "study", "what_holds"]
