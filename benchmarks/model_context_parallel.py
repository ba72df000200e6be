"""How the cost of context parallelism grows: a formula, its constants from
measurements, a plot.

    python3 benchmarks/model_context_parallel.py

Prints the formula's figures beside those measured, and writes
docs/context_parallel.png. Per layer, forward + backward, of one rank with s tokens of
one sequence, cp ranks:

    layer      s * token                             the layer on one GPU
    wire       2 * bytes received / bandwidth        the backward sends as much again
    headwise   layer + wire(row_bytes) * passes
    chunkwise  layer + states + wire(exchange) + 2 * steps * step

``row_bytes``, and the bytes and steps of ``exchange`` (the cheapest way), are those of
:mod:`megatron_gdn.context_parallel.price`. Within a machine bytes go over NVLink.
Beyond one machine, the share that leaves it goes over one network card per GPU:
computed, never measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import price
from megatron_gdn.ops.delta_rule.base import HeadSizes

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first

HERE = Path(__file__).parent
SIZES = HeadSizes(16, 32, 128, 128)
BF16 = 2
PER_MACHINE = 8
STEP_MS = 0.006  # one product of a chain of maps, which waits for the one before


@dataclass(frozen=True)
class Constants:
    """What the measurements say."""

    token_ms: float  # the layer on one GPU
    nvlink: float  # bytes per second that a rank receives in bare collectives
    passes: float  # our exchange over the bare one
    # the rule with states instead of without: passes over the tokens,
    states_token_ms: float
    states_ms: float  # and what does not grow, with the halo

    @classmethod
    def measured(cls) -> Constants:
        one = by(read("layer.jsonl"), case="1x32768", layer="ours", core="flash_qla")
        cp = read("context_parallel.jsonl")
        wire = by(cp, case="131072", layer="wire")
        raw, ours = (
            by(read("exchange.jsonl"), case="131072", what=w) for w in ("raw", "ours")
        )
        s = 131072 // wire["cp"]
        ranks = wire["cp"]
        token = median(one) / 32768
        nvlink = 2 * row_bytes(s, ranks) / median(wire) * 1e3
        few, many = (
            median(by(cp, case=case, layer="chunkwise, graph"))
            - int(case) / ranks * token
            - 2 * exchange_ms(ranks, nvlink)
            for case in ("32768", "131072")
        )
        grows = (many - few) / ((131072 - 32768) / ranks)
        return cls(
            token,
            nvlink,
            ours["forward_backward"]["median"] / raw["forward_backward"]["median"],
            grows,
            many - s * grows,
        )


def read(name: str) -> list[dict]:
    lines = (HERE / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def by(records: list[dict], **what) -> dict:
    """The last record that matches."""
    return [r for r in records if all(r.get(k) == v for k, v in what.items())][-1]


def median(record: dict) -> float:
    return record["forward_backward"]["median"]


def row_bytes(s: float, cp: int) -> float:
    return price.row_bytes(SIZES.layout.share(cp), cp, int(s), BF16)


def headwise_ms(s: float, cp: int, c: Constants) -> float:
    ms = price.transfer_time(row_bytes(s, cp), cp, min(cp, PER_MACHINE), c.nvlink / 1e3)
    return s * c.token_ms + 2 * ms * c.passes


def exchange_ms(cp: int, nvlink: float) -> float:
    """Of the maps of one sequence in zigzag, one direction."""
    received, steps = price.map_exchange_traffic(
        SIZES.state, cp, SequenceLayout.ZIGZAG, 1, None
    )
    return (
        price.transfer_time(received, cp, min(cp, PER_MACHINE), nvlink / 1e3)
        + steps * STEP_MS
    )


def chunkwise_ms(s: float, cp: int, c: Constants) -> float:
    return (
        s * (c.token_ms + c.states_token_ms)
        + c.states_ms
        + 2 * exchange_ms(cp, c.nvlink)
    )


def compare(c: Constants) -> None:
    print(
        f"{c.token_ms * 1e3:.3f} us per token, wire {c.nvlink / 1e9:.0f} GB/s, "
        f"exchange {c.passes:.2f} of the bare one, states "
        f"{c.states_token_ms * 1e3:.3f} us per token and {c.states_ms:.2f} ms"
    )
    print("tokens  cp  scheme            measured ms  formula ms")
    for r in read("context_parallel.jsonl"):
        scheme = r["layer"].removesuffix(", graph")
        model = {"headwise": headwise_ms, "chunkwise": chunkwise_ms}.get(scheme)
        if model is not None and r["case"].isdigit():
            formula = model(int(r["case"]) / r["cp"], r["cp"], c)
            print(
                f"{r['case']:7} {r['cp']:2}  {r['layer']:9}  {median(r):11.2f}  "
                f"{formula:10.2f}"
            )


def draw(c: Constants, image: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    ranks = [2**n for n in range(1, 9)]
    for axis, local, title in (
        (axes[0], lambda cp: 2**20 / cp, "1,048,576 tokens over cp ranks"),
        (axes[1], lambda cp: 32768, "32,768 tokens on each of cp ranks"),
    ):
        for name, model in (("headwise", headwise_ms), ("chunkwise", chunkwise_ms)):
            legal = [
                cp for cp in ranks if name == "chunkwise" or cp <= SIZES.value_heads
            ]
            axis.plot(
                legal, [model(local(cp), cp, c) for cp in legal], marker=".", label=name
            )
        axis.plot(
            ranks, [local(cp) * c.token_ms for cp in ranks], ls=":", label="no exchange"
        )
        for r in read("context_parallel.jsonl"):
            s = int(r["case"]) / r["cp"] if r["case"].isdigit() else None
            if r["layer"] in ("headwise", "chunkwise") and s == local(r["cp"]):
                axis.plot(r["cp"], median(r), "kx")
        axis.set(xscale="log", yscale="log", xlabel="cp", title=title)
        axis.set_xticks(ranks, [str(cp) for cp in ranks])
        axis.legend()
    axes[0].set_ylabel("forward + backward of one layer, ms")
    figure.savefig(image, dpi=110)


def main() -> None:
    constants = Constants.measured()
    compare(constants)
    draw(constants, HERE.parent / "docs" / "context_parallel.png")


if __name__ == "__main__":
    main()
