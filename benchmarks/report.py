"""Writes the tables of the pages from the JSON lines under results/, the cards of
launches, and the picture of README.

    python benchmarks/report.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cards
from lib.pages import filled, markdown
from lib.plot import Beside, draw_beside

HERE = Path(__file__).parent
# Records by what the rows and the columns of a table are called.
Records = dict[tuple[str, str], dict[str, Any]]


def shown(number: float) -> str:
    return f"{number:.0f}" if number > 100 else f"{number:.2f}"


def beside_base(number: float, base: float) -> str:
    """A time or a memory, and its ratio to another, mostly megatron-core's."""
    return f"{shown(number)} ({number / base:.2f})"


def value(record: dict[str, Any], key: str = "forward_backward") -> float:
    """A median in ms, or MiB."""
    found = record[key]
    if isinstance(found, dict):
        return found["median"]
    return found


def name_of(record: dict[str, Any]) -> str:
    """The case of a record, with the delta rule if that is not FlashQLA's."""
    core = record.get("core", "flash_qla")
    if core == "flash_qla":
        return record["case"]
    return f"{record['case']}, {core}"


def read(file: str) -> Records:
    return {(name_of(r), r["layer"]): r for r in cards.read(file)}


def beside_table(
    head: list[str],
    of: Records,
    layers: tuple[str, ...],
    measured: tuple[str, ...] = ("forward_backward",),
) -> list[list[str]]:
    """A row for each case: what was measured of each layer, with the ratio to the first
    one; "" where a layer was not run."""
    rows = [head]
    base, *others = layers
    for case in dict.fromkeys(case for case, _ in of):
        cells = [case]
        for key in measured:
            theirs = value(of[case, base], key)
            cells.append(shown(theirs))
            for name in others:
                ours = of.get((case, name))
                cells.append(beside_base(value(ours, key), theirs) if ours else "")
        rows.append(cells)
    return rows


def layer_table() -> str:
    """Forward + backward, and the saved memory of each layer."""
    layers = ("upstream", "ours", "ours-recompute", "ours-bf16", "floor")
    head = ["case", "megatron-core ms", "ours", "recomputing", "bf16 operands", "floor"]
    of = read("layer.jsonl")
    head, *rows = beside_table(head, of, layers)
    for row in rows:
        here = [of.get((row[0], name), {}) for name in layers]
        row.append(", ".join(shown(r["saved"]) for r in here if "saved" in r))
    return markdown([[*head, "saved MiB"], *rows])


def shapes_table() -> str:
    """A row for each case: our layer beside megatron-core's."""
    head = ["heads, hidden, batch, linears, gates", "eager ms", "ours"]
    head += ["graph ms", "ours", "saved MiB", "ours"]
    of = read("shapes.jsonl")
    measured = ("forward_backward", "graph", "saved")
    return markdown(beside_table(head, of, ("upstream", "ours"), measured))


def launches_table() -> str:
    """A row for each launch, and the ratio to megatron-core's of its case."""
    head = ["case", "layer", "median ms per step", "", "p10 to p90", "least"]
    rows = [[*head, "peak GiB"]]
    of = read("launches.jsonl")
    for (case, layer), r in of.items():
        times = r["step_ms"]
        ratio = ""
        if (case, "upstream") in of:
            theirs = of[case, "upstream"]["step_ms"]
            ratio = f"{times['median'] / theirs['median']:.2f}"
        cells = [case, layer.replace("upstream", "megatron-core")]
        cells += [f"{times['median']:.1f}", ratio]
        cells += [f"{times['p10']:.1f} to {times['p90']:.1f}", f"{times['least']:.1f}"]
        rows.append([*cells, f"{r['peak'] / 1024:.1f}"])
    return markdown(rows)


def kernel_table() -> str:
    """The kernels over one sequence; of two lines of one kernel, the later."""
    rows = [["kernel", "tokens", "us", "us at copy bandwidth", "reached"]]
    lines = cards.read("kernels.jsonl")
    of = {(r["kernel"], str(r["tokens"])): r for r in lines if not r["documents"]}
    for names, r in of.items():
        reached = f"{r['floor_us'] / r['us']:.0%}"
        rows.append([*names, f"{r['us']:.0f}", f"{r['floor_us']:.0f}", reached])
    return markdown(rows)


def context_parallel_table() -> str:
    """A row for each case, eager and as a graph."""
    of = {}
    for r in cards.read("context_parallel.jsonl"):
        name, graph, _ = r["layer"].partition(", graph")
        if "forward_backward" in r:
            of[r["case"] + graph, name] = r
    schemes = ("headwise", "chunkwise", "auto", "wire")
    head = ["tokens", "megatron-core ms", *schemes]
    return markdown(beside_table(head, of, ("upstream", *schemes)))


DENSE = "1x8192"
PACKED = "thd100,63,1,3932,4096"


def repeats_table() -> str:
    """A row for each rule and ratio of heads: how many repeats, and what they gave."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for r in cards.read("determinism.jsonl"):
        if r["part"] == "repeats":
            count = f"{r['processes']} x {r['repeats'] // r['processes']}"
            row = cells.setdefault((r["layer"], r["ratio"]), {})
            row[r["case"]] = f"{count} {r['verdict']}"
    rows = [["delta rule", "value heads per key head", "dense", "thd"]]
    for (layer, ratio), verdicts in cells.items():
        rows.append([layer, str(ratio), verdicts[DENSE], verdicts[PACKED]])
    return markdown(rows)


def cost_table() -> str:
    """A row for each layer, and its ratio to the layer outside of deterministic
    mode."""
    rows = [["layer", "dense ms", "thd ms", "saved MiB", "peak MiB"]]
    of = read("determinism_cost.jsonl")
    for layer in dict.fromkeys(layer for _, layer in of):
        cells = [layer]
        for case in (DENSE, PACKED):
            if (case, layer) in of:
                fast = value(of[case, "fast"])
                cells.append(beside_base(value(of[case, layer]), fast))
            else:
                cells.append("")
        dense = of[DENSE, layer]
        rows.append([*cells, f"{dense['saved']:.0f}", f"{dense['peak']:.0f}"])
    return markdown(rows)


def setting() -> str:
    record = cards.read("layer.jsonl")[0]
    versions = dict(record["environment"])
    gpu = versions.pop("gpu")
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{gpu}, copy {record['copy_TB_s']:.2f} TB/s, {names}."


def pages() -> dict[Path, dict[str, str]]:
    """Every page that has tables of results, and its tables by the names of their
    places."""
    return {
        HERE / "README.md": {
            "setting": setting(),
            "layer": layer_table(),
            "launches": launches_table(),
            "shapes": shapes_table(),
            "kernels": kernel_table(),
            "context parallel": context_parallel_table(),
        },
        HERE.parent / "README.md": {"figures table": figures_table(beside())},
        HERE.parent / "docs" / "determinism.md": {
            "repeats": repeats_table(),
            "cost": cost_table(),
        },
    }


# The rows of README's picture: file, case, whose, label.
PICTURED = (
    ("layer.jsonl", "1x8192", "ours", "8192 tokens"),
    ("layer.jsonl", "1x32768", "ours", "32768 tokens"),
    ("layer.jsonl", "8x4096", "ours", "8 x 4096 tokens"),
    ("layer.jsonl", "thd32768", "ours", "32 documents in 32768"),
    ("context_parallel.jsonl", "1x131072", "headwise", "131072 tokens, headwise"),
    ("context_parallel.jsonl", "1x131072", "chunkwise", "131072 tokens, chunkwise"),
    ("launches.jsonl", "2x4096", "ours", "4 x 4096 tokens"),
)
GROUPS = {
    "layer.jsonl": "A layer, one H200",
    "context_parallel.jsonl": "A layer, four H200",
    "launches.jsonl": "A model of 16 layers, one H200",
}
# The time and the memory of a layer and of a model.
OF_A_LAYER = ("forward_backward", "saved")
OF_A_MODEL = ("step_ms", "peak")


def beside() -> list[Beside]:
    """The rows of the picture in the repository's README: ours, and megatron-core's of
    that run."""
    made = []
    for file, case, ours, label in PICTURED:
        ms, mib = OF_A_LAYER
        if file == "launches.jsonl":
            ms, mib = OF_A_MODEL
        # Other lines measure the host, or the wire.
        of = {(name_of(r), r["layer"]): r for r in cards.read(file) if mib in r}
        mine = of[case, ours]
        theirs = of[case, "upstream"]
        times = (value(mine, ms), value(theirs, ms))
        memory = (value(mine, mib), value(theirs, mib))
        made.append(Beside(GROUPS[file], label, times, memory))
    return made


def figures_table(rows: list[Beside]) -> str:
    """The rows of README's picture in numbers."""
    table = [["", "megatron-core ms", "ours", "megatron-core MiB", "ours"]]
    for row in rows:
        cells = [f"{row.group}: {row.case}"]
        for ours, theirs in (row.ms, row.mib):
            cells += [shown(theirs), beside_base(ours, theirs)]
        table.append(cells)
    return markdown(table)


def main() -> None:
    for page, tables in pages().items():
        page.write_text(filled(page.read_text(), tables))
    cards.write()
    draw_beside(beside(), HERE.parent / "docs" / "figures.png")


if __name__ == "__main__":
    main()
