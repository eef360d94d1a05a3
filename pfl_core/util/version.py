"""The version, where the build reads it without importing the library."""

__version__ = "0.3.0"
