"""Calls whose defaults are the process's: the dtype and device of new tensors, the ranks
of a collective."""

import ast
import re

import pytest

from tests.unit.test_directions import ROOT, modules

FACTORIES = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}
# They take the dtype of what they are given.
OF_VALUES = {"arange", "as_tensor", "randint", "tensor"}
# A module's own tensors lie where torch's default device says, as in torch's modules.
OF_MODULES = {"hf.drop_in.gates", "mixers.latent_attention"}
COLLECTIVES = re.compile(
    "P2POp|all_(gather|reduce)|all_to_all|broadcast$|broadcast_|reduce_scatter"
    r"|(copy|gather|reduce|scatter)_(to|from)_\w+_region"
)


def calls(source: str):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            home, _, name = ast.unparse(node.func).rpartition(".")
            yield node, home, name, {keyword.arg for keyword in node.keywords}


def without_dtype_or_device(source: str, names=("dtype", "device")) -> list[str]:
    found = []
    for node, home, name, keywords in calls(source):
        needed = set(names) - keywords
        if name in OF_VALUES:
            needed.discard("dtype")
        if home == "torch" and name in FACTORIES | OF_VALUES and needed:
            found.append(ast.unparse(node))
    return found


def without_group(source: str) -> list[str]:
    """Calls of torch's and Megatron's collectives. An argument that is a group ends with
    "group", or it is the group of all."""
    found = []
    for node, home, name, _ in calls(source):
        if COLLECTIVES.match(name) and home in ("", "dist", "torch.distributed"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not any(re.search(r"(group|\.WORLD)$", ast.unparse(x)) for x in given):
                found.append(ast.unparse(node))
    return found


FILES = {name: path.read_text() for name, path in modules(ROOT).items()}


def test_every_new_tensor_names_its_dtype_and_its_device():
    """Else both follow the caller's settings, and so do bits."""
    found = {
        name: without_dtype_or_device(
            source, ("dtype",) if name in OF_MODULES else ("dtype", "device")
        )
        for name, source in FILES.items()
    }
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_every_collective_names_its_ranks():
    """The default are all ranks in torch, and in Megatron the groups of the process,
    which a model with groups of its own does not use."""
    found = {name: without_group(source) for name, source in FILES.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize("name", ["group", "device", "dtype"])
def test_a_keyword_that_is_left_out_is_seen(name):
    calls = "torch.zeros(3, dtype=d, device=x); dist.all_reduce(x, group=self.group)"
    assert not without_dtype_or_device(calls) and not without_group(calls)
    left_out = re.sub(rf", {name}=[\w.]+", "", calls)
    assert without_dtype_or_device(left_out) or without_group(left_out)
