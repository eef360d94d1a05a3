"""From a name to clients: pools of samples, the rules that deal them out, and the Federation that holds both."""

# What other rooms may take from it.
__all__ = ["client_data", "federation", "partition", "pools", "sources"]
