"""SGLang's released wheels, read as source: no import, because their versions of torch do not go together.

A wheel lies in EAGLE_PARITY_WHEELS or in the user's cache, where pip downloads it to. `Source.lacks` says of a contract
what `adapter.missing` says of the running SGLang.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Read = Callable[[str], "str | None"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def cache_directory() -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("EAGLE_PARITY_WHEELS") or usual / "eagle-parity" / "wheels")


@functools.cache
def source_of(version: str) -> Source:
    """A version's source: the installed SGLang's if it is this one, else its wheel's."""
    found = importlib.util.find_spec("sglang")
    if found is not None and found.origin and importlib.metadata.version("sglang") == version:
        return Source(_folder(Path(found.origin).parents[1]))
    return Source(_archive(wheel(version)))


def wheel(version: str) -> Path:
    """A version's wheel. Skips the test where there is no network; in CI a skipped test is a failed one."""
    found = _wheel(version)
    if isinstance(found, str):
        pytest.skip(f"the wheel of SGLang {version} cannot be downloaded: {found}")
    return found


@functools.cache
def _wheel(version: str) -> Path | str:
    """The file, or why there is none."""
    directory = cache_directory()
    if not list(directory.glob(f"sglang-{version}-*.whl")):
        directory.mkdir(parents=True, exist_ok=True)
        # It is read and not run, so the machine that it is for need not be this one.
        of = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *of, "-d", str(directory)]
        done = subprocess.run([*command, f"sglang=={version}"], capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip()[-400:]
    (found,) = directory.glob(f"sglang-{version}-*.whl")
    return found


def _folder(root: Path) -> Read:
    def read(name: str) -> str | None:
        path = root / name
        return path.read_text() if path.is_file() else None

    return read


def _archive(path: Path) -> Read:
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())
    return lambda name: archive.read(name).decode() if name in names else None


class Source:
    """Modules, classes and functions of a version, found without running it."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self._modules: dict[str, ast.Module | None] = {}

    def altered(self, module: str, change: Callable[[str], str]) -> Source:
        """The same version with one module's text changed."""
        files = {f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"}

        def read(name: str) -> str | None:
            text = self.read(name)
            return change(text) if text is not None and name in files else text

        return Source(read)

    def lacks(self, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
        found = []
        for path, names in needs.items():
            has = self.names(path)
            if has is None:
                found.append(path)
            else:
                found.extend(f"{name!r} in {path}" for name in names if name not in has)
        return found

    def names(self, path: str) -> set[str] | None:
        """A function's parameters, a class's members and fields; None for what is not there."""
        module, _, inside = path.partition(":")
        place = self.find(module, inside)
        if place is None:
            return None
        if isinstance(place[1], ast.ClassDef):
            return {name for cls in self.lineage(*place) for name in _members(cls)}
        arguments = place[1].args
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}

    def attributes(self, path: str) -> set[str] | None:
        """What an object of a class has: members, fields, and what its methods set on `self`."""
        module, _, inside = path.partition(":")
        place = self.find(module, inside)
        if place is None or not isinstance(place[1], ast.ClassDef):
            return None
        found = self.names(path) or set()
        for cls in self.lineage(*place):
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    found.add(node.attr)
        return found

    def find(self, module: str, inside: str) -> tuple[str, ast.ClassDef | Function] | None:
        """`Class.method` in a module, through imports and base classes: the module that defines it, and the node."""
        name, _, rest = inside.partition(".")
        tree = self.module(module)
        for node in () if tree is None else _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._member(module, node, rest) if rest else (module, node)
            if isinstance(node, Function) and node.name == name and not rest:
                return module, node
        for node in () if tree is None else _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, f"{alias.name}.{rest}" if rest else alias.name)
        return None

    def _member(self, module: str, cls: ast.ClassDef, name: str) -> tuple[str, Function] | None:
        for owner in self.lineage(module, cls):
            for node in owner.body:
                if isinstance(node, Function) and node.name == name:
                    return module, node
        return None

    def lineage(self, module: str, cls: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class and its bases, as far as they are SGLang's own."""
        yield cls
        for base in cls.bases:
            place = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if place is not None and isinstance(place[1], ast.ClassDef) and place[1] is not cls:
                yield from self.lineage(place[0], place[1])

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            base = name.replace(".", "/")
            text = self.read(f"{base}.py")
            text = self.read(f"{base}/__init__.py") if text is None else text
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _members(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, Function):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
