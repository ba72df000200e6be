"""Imports of the package run in one direction and in no circle, lazy ones and types
included."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# From the bottom to the top. A file imports from its own room and from rooms below,
# never from a neighbour in the same row. A room holds what lies in it, save what has a
# row of its own.
ROOMS = [
    ["command_line", "ops"],
    ["ops.delta_rule"],
    ["context_parallel"],
    ["compat"],
    ["mixers"],
    ["mixers.attention"],
    ["gdn", "gdn2", "kda", "mamba2"],
    ["gdp"],
    ["ops.__init__"],
    ["inference"],
    ["specs"],
    ["hf"],
    ["fp32_masters", "testing", "warm_up"],
    ["doctor", "frameworks", "models"],
    ["enable"],
    ["frameworks.verl", "launch"],
    ["__init__"],
    ["__main__"],
]
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}


def modules(root: Path) -> dict[str, Path]:
    """Every file by its name within megatron_gdn; ``specs`` lies beside it."""
    found = {}
    for home in (root / "megatron_gdn", root / "specs"):
        for path in sorted(home.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[:2] != ("megatron_gdn", "specs"):  # a link to specs
                found[".".join(parts[1:] if parts[0] == "megatron_gdn" else parts)] = (
                    path
                )
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) + 1 - node.level]
        elif node.module and node.module.split(".")[0] == "megatron_gdn":
            base = []
        else:
            continue
        base = [*base, *(node.module or "").split(".")[0 if node.level else 1 :]]
        for alias in node.names:
            whole = ".".join(part for part in [*base, alias.name] if part)
            above = ".".join(part for part in base if part)
            candidates = [
                whole,
                f"{whole}.__init__",
                above,
                f"{above}.__init__".lstrip("."),
            ]
            yield next(candidate for candidate in candidates if candidate in known)


def room(name: str) -> str:
    """The longest start of a file's name that has a row."""
    within = name
    while within not in ROW:
        within = within.rpartition(".")[0]
        if not within:
            raise ValueError(f"{name} has no room: give it a row of ROOMS")
    return within


def wrong(root: Path) -> list[str]:
    known = modules(root)
    graph = {
        name: set(imports(name, path, known)) - {name} for name, path in known.items()
    }
    said = [
        f"{name} imports {other}: {room(other)} is not below {room(name)}"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if room(name) != room(other) and ROW[room(other)] >= ROW[room(name)]
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        said.append(" -> ".join(error.args[1]))
    return said


def test_imports_run_down_and_in_no_circle():
    assert wrong(ROOT) == []


MIXERS = ("gdn", "gdn2", "gdp", "kda", "mamba2")


def of_megatron(root: Path) -> list[str]:
    """Files of ``ops``, and files of a mixer other than its ``layer``, that import
    Megatron."""
    found = []
    for name, path in modules(root).items():
        home, *inner = name.split(".")
        if home == "ops" or (home in MIXERS and inner != ["layer"]):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Import(names=names):
                        imported = [alias.name for alias in names]
                    case ast.ImportFrom(module=str(module), level=0):
                        imported = [module]
                    case _:
                        continue
                found += [
                    name for other in imported if other.split(".")[0] == "megatron"
                ]
    return found


def test_one_file_of_a_mixer_knows_megatron():
    assert of_megatron(ROOT) == []


def test_ops_names_no_mixer():
    known = modules(ROOT)
    assert [
        n for n in known if n.split(".")[0] == "ops" and set(n.split(".")) & set(MIXERS)
    ] == []
