"""The five papers reproduced with pfl_core: their settings, printed numbers, evidence, notebooks.

`python -m pfl_papers --help` is the command line; notebooks/ has a notebook a paper.
"""
