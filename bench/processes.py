"""Runs a measurement in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def run_alone(
    work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """`work(...)` in a fresh process: what it allocates, compiles or traces, it takes with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()
