"""Writes the tables of the pages from the JSON lines under results/, the cards of
launches, and the picture of README.

.venv/bin/python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path

import cards
from lib.pages import filled, markdown
from lib.plot import Beside, draw_beside

HERE = Path(__file__).parent
# What a line measures.
WHAT = (
    "case",
    "layer",
    "core",
    "tokens",
    "documents",
    "kernel",
    "cp",
    "part",
    "ratio",
    "layout",
    "through",
    "graphs",
    "mixer",
)


def read(name: str) -> list[dict]:
    """The lines of one file; of two lines that measure the same thing, the later."""
    found = {}
    for line in (HERE / "results" / name).read_text().splitlines():
        record = json.loads(line)
        found[tuple(str(record.get(key)) for key in WHAT)] = record
    return list(found.values())


def beside_base(value: float, base: float) -> str:
    """A time or a memory, and its ratio to another, mostly megatron-core's."""
    return f"{shown(value)} ({value / base:.2f})"


def shown(value: float) -> str:
    if value > 100:
        return f"{value:.0f}"
    return f"{value:.2f}"


def value(record: dict, key: str = "forward_backward") -> float:
    """A median in ms, or MiB."""
    found = record[key]
    if isinstance(found, dict):
        return found["median"]
    return found


def beside_table(
    records: list[dict], layers: dict[str, str], first: str = "case"
) -> list[list[str]]:
    """A row for each case: forward + backward of each layer, with the ratio to the
    first one; "" where a layer was not run.

    Args:
        layers: the headings of their columns.
    """
    rows = [[first, *layers.values()]]
    of = {(name_of(r), r["layer"]): r for r in records}
    for case in dict.fromkeys(name_of(r) for r in records):
        base = None
        cells = [case]
        for name in layers:
            record = of.get((case, name))
            if record is None:
                cells.append("")
            elif base is None:
                base = value(record)
                cells.append(shown(base))
            else:
                cells.append(beside_base(value(record), base))
        rows.append(cells)
    return rows


def name_of(record: dict) -> str:
    """The case of a record, with the delta rule if that is not FlashQLA's."""
    core = record.get("core", "flash_qla")
    if core == "flash_qla":
        return record["case"]
    return f"{record['case']}, {core}"


def layer_table(records: list[dict]) -> str:
    """Forward + backward, and the saved memory of each layer."""
    layers = {
        "upstream": "megatron-core ms",
        "ours": "ours",
        "ours-recompute": "recomputing",
        "ours-bf16": "bf16 operands",
        "floor": "floor",
    }
    rows = beside_table(records, layers)
    rows[0].append("saved MiB")
    for row in rows[1:]:
        here = [r for r in records if name_of(r) == row[0] and "saved" in r]
        of = {r["layer"]: r for r in here}
        row.append(", ".join(shown(of[name]["saved"]) for name in layers if name in of))
    return markdown(rows)


def shapes_table(records: list[dict]) -> str:
    """A row for each case: our layer beside megatron-core's."""
    measured = {
        "forward_backward": "eager ms",
        "graph": "graph ms",
        "saved": "saved MiB",
    }
    rows = [["heads, hidden, batch, linears, gates"]]
    for label in measured.values():
        rows[0] += [label, "ours"]
    of = {(r["case"], r["layer"]): r for r in records}
    for case in dict.fromkeys(r["case"] for r in records):
        cells = [case]
        for key in measured:
            base = value(of[case, "upstream"], key)
            ours = value(of[case, "ours"], key)
            cells += [shown(base), beside_base(ours, base)]
        rows.append(cells)
    return markdown(rows)


def kernel_table(records: list[dict]) -> str:
    """The kernels over one sequence."""
    rows = [["kernel", "tokens", "us", "us at copy bandwidth", "reached"]]
    for r in records:
        if not r["documents"]:
            cells = [r["kernel"], str(r["tokens"]), f"{r['us']:.0f}"]
            cells += [f"{r['floor_us']:.0f}", f"{r['floor_us'] / r['us']:.0%}"]
            rows.append(cells)
    return markdown(rows)


def context_parallel_table(records: list[dict]) -> str:
    """A row for each case, eager and as a graph."""
    layers = {"upstream": "megatron-core ms"}
    layers |= {name: name for name in ("headwise", "chunkwise", "auto", "wire")}
    parts = []
    for r in records:
        name, graph, _ = r["layer"].partition(", graph")
        parts.append({**r, "layer": name, "case": r["case"] + graph})
    timed = [r for r in parts if "forward_backward" in r]
    return markdown(beside_table(timed, layers, "tokens"))


def exchange_table(records: list[dict]) -> str:
    layers = {"raw": "raw ms", "plain": "plain", "ours": "ours"}
    return markdown(beside_table(records, layers, "tokens"))


def model_table(records: list[dict]) -> str:
    head = ["micro-batches", "graphs", "GDN layer", "step ms", "", "host ms"]
    rows = [[*head, "peak MiB"]]
    for r in records:
        base = next(b for b in records if b["case"] == r["case"])
        layer = r["mixer"].replace("upstream", "megatron-core")
        cells = [r["case"], r["graphs"], layer, f"{r['step_ms']:.1f}"]
        cells.append(f"{r['step_ms'] / base['step_ms']:.2f}")
        rows.append([*cells, f"{r['host_ms']:.1f}", f"{r['peak']:.0f}"])
    return markdown(rows)


DENSE = "1x8192"
PACKED = "thd100,63,1,3932,4096"


def repeats_table(records: list[dict]) -> str:
    """A row for each rule and ratio of heads: how many repeats, and what they gave."""
    rows = [["delta rule", "value heads per key head", "dense", "thd"]]
    of = {
        (r["layer"], r["ratio"], r["case"]): r
        for r in records
        if r["part"] == "repeats"
    }
    for layer, ratio in dict.fromkeys(key[:2] for key in of):
        cells = [layer, str(ratio)]
        for case in (DENSE, PACKED):
            r = of[layer, ratio, case]
            count = f"{r['processes']} x {r['repeats'] // r['processes']}"
            cells.append(f"{count} {r['verdict']}")
        rows.append(cells)
    return markdown(rows)


def cost_table(records: list[dict]) -> str:
    """A row for each layer, and its ratio to the layer outside of deterministic
    mode."""
    rows = [["layer", "dense ms", "thd ms", "saved MiB", "peak MiB"]]
    of = {(r["layer"], r["case"]): r for r in records}
    for layer in dict.fromkeys(r["layer"] for r in records):
        cells = [layer]
        for case in (DENSE, PACKED):
            record = of.get((layer, case))
            fast = value(of["fast", case])
            cells.append("" if record is None else beside_base(value(record), fast))
        dense = of[layer, DENSE]
        rows.append([*cells, f"{dense['saved']:.0f}", f"{dense['peak']:.0f}"])
    return markdown(rows)


def setting(record: dict) -> str:
    versions = record["environment"]
    names = ", ".join(
        f"{name} {number}" for name, number in versions.items() if name != "gpu"
    )
    return f"{versions['gpu']}, copy {record['copy_TB_s']:.2f} TB/s, {names}."


def pages() -> dict[Path, dict[str, str]]:
    """Every page that has tables of results, and its tables by the names of their
    places."""
    layer = read("layer.jsonl")
    return {
        HERE / "README.md": {
            "setting": setting(layer[0]),
            "layer": layer_table(layer),
            "shapes": shapes_table(read("shapes.jsonl")),
            "kernels": kernel_table(read("kernels.jsonl")),
            "context parallel": context_parallel_table(read("context_parallel.jsonl")),
            "exchange": exchange_table(read("exchange.jsonl")),
            "model": model_table(read("model.jsonl")),
        },
        HERE.parent / "README.md": {"figures table": figures_table(beside())},
        HERE.parent / "docs" / "determinism.md": {
            "repeats": repeats_table(read("determinism.jsonl")),
            "cost": cost_table(read("determinism_cost.jsonl")),
        },
    }


# The rows of README's picture: file, group, case or cases, whose, label.
PICTURED = {
    ("layer.jsonl", "A layer, one H200"): {
        ("1x8192", "ours"): "8192 tokens",
        ("1x32768", "ours"): "32768 tokens",
        ("8x4096", "ours"): "8 x 4096 tokens",
        ("thd32768", "ours"): "32 documents in 32768",
    },
    ("context_parallel.jsonl", "A layer, four H200"): {
        ("1x131072", "headwise"): "131072 tokens, headwise",
        ("1x131072", "chunkwise"): "131072 tokens, chunkwise",
    },
    ("model.jsonl", "A model of 16 layers, one H200"): {
        ("batch", "ours"): "2 x 8192 tokens",
        ("packed", "ours"): "8 documents in each 8192",
    },
}


def beside() -> list[Beside]:
    """The rows of the picture in the repository's README: ours, and megatron-core's of
    that run."""
    made = []
    for (file, group), cases in PICTURED.items():
        of_model = file == "model.jsonl"
        who = "mixer" if of_model else "layer"
        ms, mib = ("step_ms", "peak") if of_model else ("forward_backward", "saved")
        # Lines of models without graphs, of layers with FlashQLA's rule.
        of = {}
        for r in read(file):
            if (
                r.get("graphs", "none") == "none"
                and mib in r
                and name_of(r) == r["case"]
            ):
                of[r["case"], r[who]] = r
        for (case, ours), label in cases.items():
            pair = (of[case, ours], of[case, "upstream"])
            times = tuple(value(r, ms) for r in pair)
            memory = tuple(value(r, mib) for r in pair)
            made.append(Beside(group, label, times, memory))
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
