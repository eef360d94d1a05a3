"""Benchmarks of pfl_core: ratios measured side by side in one run. `python -m benchmarks.rounds` and `.server`."""
