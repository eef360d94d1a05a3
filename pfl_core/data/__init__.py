"""From a name to clients: pools of samples, rules that deal them out, and Federations."""

# What other rooms may take from it.
__all__ = [
    "augment",
    "checksum",
    "client_data",
    "federation",
    "files",
    "names",
    "partition",
    "pools",
    "shifts",
    "sources",
]
