"""One entry of the catalogue of findings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What a finding code means. Texts are sentences without line breaks; `sources` name public threads."""

    code: str
    title: str
    cause: str
    looks: str
    """What the tool measures when it is this fault."""
    confirm: str
    fix: str
    sources: tuple[str, ...]
