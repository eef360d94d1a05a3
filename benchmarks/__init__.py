"""Benchmarks of pfl_core: ratios measured side by side in one run. `python -m benchmarks.rounds`, `.server`, `.where`; see README.md."""
