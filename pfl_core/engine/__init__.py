"""Trains S clients at once and runs the rounds; knows methods and data, no papers and no store."""

# What other rooms may take from it.
__all__ = ["checkpoint", "context", "engine", "finetune", "hooks", "participation", "probes"]
__all__ += ["process", "scoring", "server", "sgd", "simulate", "unvisited"]
