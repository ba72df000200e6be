"""Writes the tables of the pages from the JSON lines under results/, and draws the
pictures.

.venv/bin/python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path

from lib.pages import filled, markdown
from lib.plot import Beside, draw, draw_beside, draw_models

HERE = Path(__file__).parent
LAYERS = {
    "upstream": "megatron-core",
    "ours": "ours",
    "ours-recompute": "ours, recomputing",
    "ours-bf16": "ours, bf16 operands",
}
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


def layer_table(records: list[dict]) -> str:
    rows = [
        [
            "case",
            "delta rule",
            "layer",
            "forward ms",
            "",
            "forward + backward ms",
            "",
            "saved MiB",
            "",
        ]
    ]
    for case, core in dict.fromkeys((r["case"], r["core"]) for r in records):
        here = [r for r in records if (r["case"], r["core"]) == (case, core)]
        timed = [r for r in here if "layer" in r]
        base = next(r for r in timed if r["layer"] == "upstream")
        for r in timed:
            cells = [case, core, LAYERS[r["layer"]]]
            for value in (
                lambda x: x["forward"]["median"],
                lambda x: x["forward_backward"]["median"],
                lambda x: x["saved"],
            ):
                digits = 0 if value(r) > 100 else 2
                cells += [f"{value(r):.{digits}f}", f"{value(r) / value(base):.2f}"]
            rows.append(cells)
        for r in here:
            if "floor" in r:
                cells = [case, core, "floor"]
                for time, key in zip(
                    r["floor"]["total"], ("forward", "forward_backward"), strict=True
                ):
                    cells += [f"{time:.2f}", f"{time / base[key]['median']:.2f}"]
                rows.append([*cells, "", ""])
    return markdown(rows)


def floor_table(records: list[dict]) -> str:
    rows = [["case", "projections ms", "delta rule ms", "bytes around them ms"]]
    for r in records:
        if "floor" in r:
            parts = (r["floor"][part] for part in ("projections", "rule", "bytes"))
            rows.append(
                [r["case"], *(f"{forward:.2f} / {both:.2f}" for forward, both in parts)]
            )
    return markdown(rows)


SHAPE_LAYERS = {
    "upstream": "megatron-core",
    "ours": "ours",
    "ours-light": "ours, `light`",
    "ours-full": "ours, `full`",
    "ours-uncut": "ours, rows uncut",
    "floor": "floor",
}


def shapes_table(records: list[dict]) -> str:
    """Medians of each cell's layers, beside megatron-core's of the same cell."""
    rows = [
        [
            "heads, hidden, batch, linears, gates",
            "layer",
            "eager ms",
            "",
            "graph ms",
            "",
            "saved MiB",
            "",
            "peak MiB",
            "",
        ]
    ]
    for r in records:
        base = next(
            b for b in records if (b["cell"], b["layer"]) == (r["cell"], "upstream")
        )
        cells = [r["cell"] if r is base else "", SHAPE_LAYERS[r["layer"]]]
        if "failed" in r:
            rows.append([*cells, r["failed"].split(":")[0], *[""] * 7])
            continue
        for key, digits in (("eager", 2), ("graph", 2), ("saved", 0), ("peak", 0)):
            mine, other = (of_shape(x, key) for x in (r, base))
            shown = "" if mine is None else f"{mine:.{digits}f}"
            cells += [shown, f"{mine / other:.2f}" if mine and other else ""]
        rows.append(cells)
    return markdown(rows)


def of_shape(record: dict, key: str) -> float | None:
    """A median, MiB, or the floor's total where the host is away."""
    if record["layer"] == "floor":
        return record["total"][1] if key == "graph" else None
    value = record.get(key)
    return value["median"] if isinstance(value, dict) else value


def kernel_table(records: list[dict]) -> str:
    rows = [["kernel", "tokens", "documents", "us", "us at copy bandwidth", "reached"]]
    for r in records:
        rows.append(
            [
                r["kernel"],
                str(r["tokens"]),
                str(r["documents"] or 1),
                f"{r['us']:.0f}",
                f"{r['floor_us']:.0f}",
                f"{r['floor_us'] / r['us']:.0%}",
            ]
        )
    return markdown(rows)


def context_parallel_table(records: list[dict]) -> str:
    rows = [
        [
            "tokens",
            "cp",
            "layer",
            "forward ms",
            "",
            "forward + backward ms",
            "",
            "saved MiB",
        ]
    ]
    for r in records:
        base = next(
            b for b in records if (b["case"], b["layer"]) == (r["case"], "upstream")
        )
        cells = [
            r["case"],
            str(r["cp"]),
            r["layer"].replace("upstream", "megatron-core"),
        ]
        for key in ("forward", "forward_backward"):
            time = r[key]["median"]
            cells += [f"{time:.2f}", f"{time / base[key]['median']:.2f}"]
        rows.append([*cells, f"{r['saved']:.0f}" if "saved" in r else ""])
    return markdown(rows)


def exchange_table(records: list[dict]) -> str:
    rows = [["tokens", "what", "forward ms", "forward + backward ms", "to raw"]]
    for r in records:
        times = [f"{r[key]['median']:.2f}" for key in ("forward", "forward_backward")]
        rows.append([r["case"], r["what"], *times, f"{r['to_raw']:.2f}"])
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
    rows = [
        [
            "delta rule",
            "value heads per key head",
            "layout",
            "repeats",
            "output and gradients",
        ]
    ]
    for r in records:
        if r["part"] == "repeats":
            count = f"{r['processes']} x {r['repeats'] // r['processes']}"
            rows.append(
                [r["backend"], str(r["ratio"]), r["layout"], count, r["verdict"]]
            )
    return markdown(rows)


def cost_table(records: list[dict]) -> str:
    rows = [
        [
            "layer",
            "layout",
            "forward ms",
            "forward + backward ms",
            "to fast",
            "saved MiB",
            "peak MiB",
        ]
    ]
    timed = [r for r in records if r["part"] == "cost"]
    for r in timed:
        fast = next(
            b for b in timed if (b["layer"], b["layout"]) == ("fast", r["layout"])
        )
        total = r["forward_backward"]["median"]
        rows.append(
            [
                r["layer"],
                r["layout"],
                f"{r['forward']['median']:.2f}",
                f"{total:.2f}",
                f"{total / fast['forward_backward']['median']:.2f}",
                f"{r['saved']:.0f}",
                f"{r['peak']:.0f}",
            ]
        )
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
            "floor": floor_table(layer),
            "shapes": shapes_table(read("users_shapes.jsonl")),
            "kernels": kernel_table(read("kernels.jsonl")),
            "context parallel": context_parallel_table(read("context_parallel.jsonl")),
            "exchange": exchange_table(read("exchange.jsonl")),
            "model": model_table(read("model.jsonl")),
        },
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

    def total(record: dict) -> float:
        return record["forward_backward"]["median"]

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


def main() -> None:
    for page, tables in pages().items():
        page.write_text(filled(page.read_text(), tables))
    draw(read("layer.jsonl"), HERE / "results" / "layer.png")
    draw_models(read("model.jsonl"), HERE / "results" / "model.png")
    draw_beside(beside(), HERE.parent / "docs" / "figures.png")


if __name__ == "__main__":
    main()
