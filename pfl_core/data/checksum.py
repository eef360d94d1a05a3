"""Checksums of data that know what a model has to know of them."""

from __future__ import annotations


class Checksum(str):
    """A sha256 (hex) of samples, equal to its text, with what a model of these samples is built by.

    Attributes
    ----------
    input_shape : tuple of int
        The shape of one sample.
    classes : int
        C.
    options : dict
        Options of the model that the data decide: of texts {"vocab": size of the vocabulary}.
    """

    input_shape: tuple[int, ...]
    classes: int
    options: dict[str, int]

    def __new__(
        cls,
        text: str,
        input_shape: tuple[int, ...],
        classes: int,
        options: dict[str, int] | None = None,
    ) -> Checksum:
        made = super().__new__(cls, text)
        made.input_shape, made.classes, made.options = input_shape, classes, options or {}
        return made

    def __reduce__(self) -> tuple:
        return Checksum, (str(self), self.input_shape, self.classes, self.options)
