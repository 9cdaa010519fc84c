"""Draft methods by name, and those of third parties by `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from spec.proposer import Proposer

PROPOSERS: Mapping[str, str] = MappingProxyType(
    {
        "mtp": "spec.mtp.proposer:MtpProposer",
        "ngram": "spec.ngram.proposer:NgramProposer",
        "stub": "spec.stub.proposer:StubProposer",
    }
)
ACCEPTED = f"accepted: {', '.join(PROPOSERS)}, or module:Class of a spec.proposer.Proposer"


def find_proposer(algorithm: str) -> type[Proposer]:
    """The class that `--speculative-algorithm` names.

    Raises:
        ValueError: an unknown name, a module that cannot be imported, or no usable class in it;
            one line that names the flag, the cause and what is accepted.
    """
    place = algorithm if ":" in algorithm else PROPOSERS.get(algorithm)
    if place is None:
        raise _refusal(algorithm, "no such draft method")
    module_name, _, class_name = place.partition(":")
    found = vars(_import(algorithm, module_name)).get(class_name)
    if found is None:
        raise _refusal(algorithm, f"{module_name} has no {class_name or 'class without a name'}")
    if not (isinstance(found, type) and issubclass(found, Proposer)):
        raise _refusal(algorithm, f"{class_name} is not a subclass of spec.proposer.Proposer")
    if found.propose is Proposer.propose:
        raise _refusal(algorithm, f"{class_name} does not define propose")
    return found


def _import(algorithm: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    # Importing runs a third party's code, which may raise anything.
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise _refusal(algorithm, f"cannot import {module_name!r} ({cause})") from error


def _refusal(algorithm: str, problem: str) -> ValueError:
    return ValueError(f"--speculative-algorithm {algorithm}: {problem}; {ACCEPTED}")
