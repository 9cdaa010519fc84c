"""Triton's interpreter without the work that it repeats.

A launch replaces the functions of Triton's language by interpreted ones until it ends. Each call
of a helper inside it does so again, when nothing is left to replace: up to half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Protocol

import pytest
from triton import language
from triton.runtime import interpreter


class Replacement(Protocol):
    """What one call replaced."""

    def restore(self) -> None:
        """Put everything back; only the call that began a launch is asked to."""


class OncePerLaunch:
    """Stands in for the interpreter's function that replaces what a function may call."""

    def __init__(self, replace: Callable[[FunctionType], Replacement]) -> None:
        self.replace = replace
        self.replaced: dict[frozenset[ModuleType], Replacement] = {}

    def __call__(self, function: FunctionType) -> Replacement:
        """Replace the language's modules that `function` sees, unless this launch has."""
        values = function.__globals__.values()
        modules = frozenset(v for v in values if v is language or v is language.core)
        if modules not in self.replaced:
            self.replaced[modules] = self.replace(function)
        return self

    def restore(self) -> None:
        """End the launch, in reverse order."""
        while self.replaced:
            self.replaced.popitem()[1].restore()


def replace_once_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a launch replaces a module's functions when it first needs them."""
    monkeypatch.setattr(interpreter, "_patch_lang", OncePerLaunch(interpreter._patch_lang))
