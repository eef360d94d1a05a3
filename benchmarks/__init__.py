"""Benchmarks of pfl_core: times and ratios, measured side by side in one run (README.md)."""
