"""What needs packages of its own (Flower, Ray, TensorBoard), reached by name when asked for."""

# What other rooms may take from it.
__all__ = ["flower", "logging", "ray"]
