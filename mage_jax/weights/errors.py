"""Errors of this room. All are ``ValueError``s whose message names the file, the tensor or field, and the fix."""

from __future__ import annotations

from collections.abc import Sequence


class WeightsError(ValueError):
    """A checkpoint cannot be read, understood or written."""


class HfConfigError(WeightsError):
    """``config.json`` or ``generation_config.json`` lacks a field or asks for something unsupported."""


class SafetensorsError(WeightsError):
    """A safetensors file or its index is damaged or contradicts itself."""


class MismatchError(WeightsError):
    """Tensors and model geometry do not fit together. ``problems`` holds every one found, a line each."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{where}: {count} problem{'s' if count != 1 else ''} with the weights"
        super().__init__("\n  ".join([head, *self.problems]))
