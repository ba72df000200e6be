"""Writes the tables of the pages from the JSON lines under results/, and draws the
pictures.

.venv/bin/python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path

import cards
from lib.pages import filled, markdown
from lib.plot import Beside, draw, draw_beside, draw_models

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
    "what",
    "part",
    "backend",
    "ratio",
    "layout",
    "through",
    "graphs",
    "mixer",
    "cell",
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


def total(record: dict) -> float:
    """The median of forward + backward, in ms."""
    return record["forward_backward"]["median"]


def layer_table(records: list[dict]) -> str:
    """A row for each case: forward + backward and saved memory of each layer."""
    layers = {
        "upstream": "megatron-core ms",
        "ours": "ours",
        "ours-recompute": "recomputing",
        "ours-bf16": "bf16 operands",
    }
    rows = [["case", *layers.values(), "floor", "saved MiB"]]
    for case, core in dict.fromkeys((r["case"], r["core"]) for r in records):
        here = [r for r in records if (r["case"], r["core"]) == (case, core)]
        of = {r["layer"]: r for r in here if "layer" in r}
        base = of["upstream"]
        (floor,) = (r["floor"]["total"][1] for r in here if "floor" in r)
        times = [total_beside(of.get(name), base) for name in layers]
        saved = [shown(of[name]["saved"]) for name in layers if name in of]
        cells = [case if core == "flash_qla" else f"{case}, {core}", *times]
        cells += [beside_base(floor, total(base)), ", ".join(saved)]
        rows.append(cells)
    return markdown(rows)


def total_beside(record: dict | None, base: dict) -> str:
    """Forward + backward of a layer beside another's; "" if it was not run."""
    if record is None:
        return ""
    return beside_base(total(record), total(base))


def shapes_table(records: list[dict]) -> str:
    """A row for each cell: our layer beside megatron-core's."""
    measured = {"eager": "eager ms", "graph": "graph ms"}
    measured |= {"saved": "saved MiB", "peak": "peak MiB"}
    rows = [["heads, hidden, batch, linears, gates"]]
    for label in measured.values():
        rows[0] += [label, "ours"]
    of = {(r["cell"], r["layer"]): r for r in records}
    for cell in dict.fromkeys(r["cell"] for r in records):
        cells = [cell]
        for key in measured:
            base = of_shape(of[cell, "upstream"], key)
            ours = of_shape(of[cell, "ours"], key)
            cells += [shown(base), beside_base(ours, base)]
        rows.append(cells)
    return markdown(rows)


def of_shape(record: dict, key: str) -> float:
    """A median, or MiB."""
    value = record[key]
    if isinstance(value, dict):
        return value["median"]
    return value


def kernel_table(records: list[dict]) -> str:
    """The kernels over one sequence."""
    rows = [["kernel", "tokens", "us", "us at copy bandwidth", "reached"]]
    for r in records:
        if r["documents"]:
            continue
        rows.append(
            [
                r["kernel"],
                str(r["tokens"]),
                f"{r['us']:.0f}",
                f"{r['floor_us']:.0f}",
                f"{r['floor_us'] / r['us']:.0%}",
            ]
        )
    return markdown(rows)


def context_parallel_table(records: list[dict]) -> str:
    """A row for each case, eager and as a graph: forward + backward of each layer."""
    layers = ("headwise", "chunkwise", "auto", "wire")
    rows = [["tokens", "megatron-core ms", *layers]]
    of = {(r["case"], r["layer"]): r for r in records}
    for case in dict.fromkeys(r["case"] for r in records):
        for graph in ("", ", graph"):
            base = of.get((case, f"upstream{graph}"))
            if base is None:
                continue
            cells = [case + graph, shown(total(base))]
            for name in layers:
                cells.append(total_beside(of.get((case, name + graph)), base))
            rows.append(cells)
    return markdown(rows)


def exchange_table(records: list[dict]) -> str:
    """A row for each case: forward + backward of three exchanges, and their ratio to
    the bare collective."""
    rows = [["tokens", "raw ms", "plain", "ours"]]
    of = {(r["case"], r["what"]): r for r in records}
    for case in dict.fromkeys(r["case"] for r in records):
        raw = of[case, "raw"]
        cells = [case, shown(total(raw))]
        cells += [total_beside(of[case, name], raw) for name in ("plain", "ours")]
        rows.append(cells)
    return markdown(rows)


def model_table(records: list[dict]) -> str:
    rows = [
        ["micro-batches", "graphs", "GDN layer", "step ms", "", "host ms", "peak MiB"]
    ]
    for r in records:
        base = next(b for b in records if b["case"] == r["case"])
        rows.append(
            [
                r["case"],
                r["graphs"],
                r["mixer"].replace("upstream", "megatron-core"),
                f"{r['step_ms']:.1f}",
                f"{r['step_ms'] / base['step_ms']:.2f}",
                f"{r['host_ms']:.1f}",
                f"{r['peak']:.0f}",
            ]
        )
    return markdown(rows)


def repeats_table(records: list[dict]) -> str:
    """A row for each rule and ratio of heads: how many repeats, and what they gave."""
    layouts = ("dense", "thd")
    rows = [["delta rule", "value heads per key head", *layouts]]
    of = {
        (r["backend"], r["ratio"], r["layout"]): r
        for r in records
        if r["part"] == "repeats"
    }
    for backend, ratio in dict.fromkeys(key[:2] for key in of):
        cells = [backend, str(ratio)]
        for layout in layouts:
            r = of[backend, ratio, layout]
            count = f"{r['processes']} x {r['repeats'] // r['processes']}"
            cells.append(f"{count} {r['verdict']}")
        rows.append(cells)
    return markdown(rows)


def cost_table(records: list[dict]) -> str:
    """A row for each layer: forward + backward, and its ratio to the layer outside of
    deterministic mode."""
    layouts = ("dense", "thd")
    rows = [["layer", *(f"{name} ms" for name in layouts), "saved MiB", "peak MiB"]]
    of = {(r["layer"], r["layout"]): r for r in records if r["part"] == "cost"}
    for layer in dict.fromkeys(key[0] for key in of):
        cells = [layer]
        for layout in layouts:
            cells.append(total_beside(of.get((layer, layout)), of["fast", layout]))
        dense = of[layer, "dense"]
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
    determinism = read("determinism.jsonl")
    return {
        HERE / "README.md": {
            "setting": setting(layer[0]),
            "layer": layer_table(layer),
            "shapes": shapes_table(read("users_shapes.jsonl")),
            "kernels": kernel_table(read("kernels.jsonl")),
            "context parallel": context_parallel_table(read("context_parallel.jsonl")),
            "exchange": exchange_table(read("exchange.jsonl")),
            "model": model_table(read("model.jsonl")),
        },
        HERE.parent / "README.md": {"figures table": figures_table(beside())},
        HERE.parent / "docs" / "determinism.md": {
            "repeats": repeats_table(determinism),
            "cost": cost_table(determinism),
        },
    }


def beside() -> list[Beside]:
    """The rows of the picture in the repository's README: ours, and megatron-core's of
    that run."""

    def pairs(
        name: str, group: str, who: str, cases: dict, ms, mib, **same
    ) -> list[Beside]:
        records = [r for r in read(name) if all(r[key] == x for key, x in same.items())]
        made = []
        for (case, ours), label in cases.items():
            one, other = (
                next(r for r in records if (r["case"], r.get(who)) == (case, of))
                for of in (ours, "upstream")
            )
            made.append(
                Beside(group, label, (ms(one), ms(other)), (mib(one), mib(other)))
            )
        return made

    layer = {
        ("1x8192", "ours"): "8192 tokens",
        ("1x32768", "ours"): "32768 tokens",
        ("8x4096", "ours"): "8 x 4096 tokens",
        ("thd32768", "ours"): "32 documents in 32768",
    }
    parallel = {
        ("131072", "headwise"): "131072 tokens, headwise",
        ("131072", "chunkwise"): "131072 tokens, chunkwise",
    }
    model = {
        ("batch", "ours"): "2 x 8192 tokens",
        ("packed", "ours"): "8 documents in each 8192",
    }
    return [
        *pairs(
            "layer.jsonl",
            "A layer, one H200",
            "layer",
            layer,
            total,
            lambda r: r["saved"],
            core="flash_qla",
        ),
        *pairs(
            "context_parallel.jsonl",
            "A layer, four H200",
            "layer",
            parallel,
            total,
            lambda r: r.get("saved"),
        ),
        *pairs(
            "model.jsonl",
            "A model of 16 layers, one H200",
            "mixer",
            model,
            lambda r: r["step_ms"],
            lambda r: r["peak"],
            graphs="none",
        ),
    ]


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
    draw(read("layer.jsonl"), HERE / "results" / "layer.png")
    draw_models(read("model.jsonl"), HERE / "results" / "model.png")
    draw_beside(beside(), HERE.parent / "docs" / "figures.png")


if __name__ == "__main__":
    main()
