"""Writes the tables of the pages from the JSON lines under results/, and the plot beside them.

python3 benchmarks/report.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from plot import draw, draw_models

HERE = Path(__file__).parent
LAYERS = {
    "upstream": "megatron-core",
    "ours": "ours",
    "ours-recompute": "ours, recomputing",
    "ours-bf16": "ours, bf16 operands",
}
# What a line measures.
WHAT = ("case", "layer", "core", "tokens", "documents", "kernel", "cp", "what", "part", "backend",
        "ratio", "layout", "through", "graphs", "mixer")  # fmt: skip


def read(name: str) -> list[dict]:
    """The lines of one file; of two lines that measure the same thing, the later."""
    found = {}
    for line in (HERE / "results" / name).read_text().splitlines():
        record = json.loads(line)
        found[tuple(str(record.get(key)) for key in WHAT)] = record
    return list(found.values())


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def layer_table(records: list[dict]) -> str:
    rows = [["case", "delta rule", "layer", "forward ms", "", "forward + backward ms", "",
             "saved MiB", "", "peak MiB"]]  # fmt: skip
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
            rows.append([*cells, f"{r['peak']:.0f}"])
        for r in here:
            if "floor" in r:
                cells = [case, core, "floor"]
                for time, key in zip(
                    r["floor"]["total"], ("forward", "forward_backward"), strict=True
                ):
                    cells += [f"{time:.2f}", f"{time / base[key]['median']:.2f}"]
                rows.append([*cells, "", "", ""])
    return markdown(rows)


def floor_table(records: list[dict]) -> str:
    rows = [["case", "projections ms", "delta rule ms", "bytes around them ms"]]
    for r in records:
        if "floor" in r:
            parts = (r["floor"][part] for part in ("projections", "rule", "bytes"))
            rows.append([r["case"], *(f"{forward:.2f} / {both:.2f}" for forward, both in parts)])
    return markdown(rows)


def kernel_table(records: list[dict]) -> str:
    rows = [["kernel", "tokens", "documents", "us", "us at copy bandwidth", "reached"]]
    for r in records:
        rows.append([r["kernel"], str(r["tokens"]), str(r["documents"] or 1), f"{r['us']:.0f}",
                     f"{r['floor_us']:.0f}", f"{r['floor_us'] / r['us']:.0%}"])  # fmt: skip
    return markdown(rows)


def context_parallel_table(records: list[dict]) -> str:
    rows = [["tokens", "cp", "layer", "forward ms", "", "forward + backward ms", "", "saved MiB"]]
    for r in records:
        base = next(b for b in records if (b["case"], b["layer"]) == (r["case"], "upstream"))
        cells = [r["case"], str(r["cp"]), r["layer"].replace("upstream", "megatron-core")]
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
    rows = [["micro-batches", "graphs", "GDN layer", "step ms", "", "host ms", "peak MiB"]]
    for r in records:
        base = next(b for b in records if b["case"] == r["case"])
        rows.append([r["case"], r["graphs"], r["mixer"].replace("upstream", "megatron-core"),
                     f"{r['step_ms']:.1f}", f"{r['step_ms'] / base['step_ms']:.2f}",
                     f"{r['host_ms']:.1f}", f"{r['peak']:.0f}"])  # fmt: skip
    return markdown(rows)


def repeats_table(records: list[dict]) -> str:
    rows = [["delta rule", "value heads per key head", "layout", "repeats", "output and gradients"]]
    for r in records:
        if r["part"] == "repeats":
            count = f"{r['processes']} x {r['repeats'] // r['processes']}"
            rows.append([r["backend"], str(r["ratio"]), r["layout"], count, r["verdict"]])
    return markdown(rows)


def cost_table(records: list[dict]) -> str:
    rows = [["layer", "layout", "forward ms", "forward + backward ms", "to fast", "saved MiB",
             "peak MiB"]]  # fmt: skip
    timed = [r for r in records if r["part"] == "cost"]
    for r in timed:
        fast = next(b for b in timed if (b["layer"], b["layout"]) == ("fast", r["layout"]))
        total = r["forward_backward"]["median"]
        rows.append([r["layer"], r["layout"], f"{r['forward']['median']:.2f}", f"{total:.2f}",
                     f"{total / fast['forward_backward']['median']:.2f}",
                     f"{r['saved']:.0f}", f"{r['peak']:.0f}"])  # fmt: skip
    return markdown(rows)


def setting(record: dict) -> str:
    versions = record["environment"]
    names = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "gpu")
    return f"{versions['gpu']}, copy {record['copy_TB_s']:.2f} TB/s, {names}."


def fill(page: Path, tables: dict[str, str]) -> None:
    """Put every table in its marked place."""
    text = page.read_text()
    for name, table in tables.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(mark, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S)
        assert count == 1, f"{page.name} has {count} places for {name}"
    page.write_text(text)


def main() -> None:
    layer, kernels = read("layer.jsonl"), read("kernels.jsonl")
    made = {
        "setting": setting(layer[0]),
        "layer": layer_table(layer),
        "floor": floor_table(layer),
        "kernels": kernel_table(kernels),
        "context parallel": context_parallel_table(read("context_parallel.jsonl")),
        "exchange": exchange_table(read("exchange.jsonl")),
        "model": model_table(read("model.jsonl")),
    }
    fill(HERE / "README.md", made)
    determinism = read("determinism.jsonl")
    made = {"repeats": repeats_table(determinism), "cost": cost_table(determinism)}
    fill(HERE.parent / "docs" / "determinism.md", made)
    draw(layer, HERE / "results" / "layer.png")
    draw_models(read("model.jsonl"), HERE / "results" / "model.png")


if __name__ == "__main__":
    main()
