"""Megatron's source, read without importing it: the installed release, and a clone's
branch."""

import ast
import os
from functools import cache
from pathlib import Path

import megatron.core
import pytest

CLONE = os.environ.get("MEGATRON_LM")
SOURCES = [
    pytest.param(Path(megatron.core.__file__).parent, id="installed"),
    pytest.param(
        Path(CLONE or "") / "megatron/core",
        id="clone",
        marks=pytest.mark.skipif(
            CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"
        ),
    ),
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def class_of(path: Path, name: str) -> ast.ClassDef:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no class {name}")


def config_fields(core: Path) -> list[str]:
    """The fields of ``TransformerConfig`` itself."""
    body = class_of(
        core / "transformer/transformer_config.py", "TransformerConfig"
    ).body
    return [
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def choices_of(core: Path, field: str) -> set[str]:
    """What the config takes in a list: the names that it subtracts from
    ``set(self.field)``."""
    config = class_of(core / "transformer/transformer_config.py", "TransformerConfig")
    for block in ast.walk(config):
        allowed: set[str] = set()
        for node in getattr(block, "body", None) or ():
            if not isinstance(node, ast.Assign):
                continue
            said = ast.unparse(node)
            if said.startswith("allowed_modules = {"):
                allowed = ast.literal_eval(node.value)
            elif said.startswith(f"invalid_modules = set(self.{field})"):
                return allowed
    raise AssertionError(f"TransformerConfig does not check {field}")
