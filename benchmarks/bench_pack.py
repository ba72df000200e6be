"""The packing kernels of the head exchange alone, on one GPU, against its copy
bandwidth.

    python3 benchmarks/bench_pack.py --cp 4 --tokens 131072         the kernels as they
                                                                    are
    python3 benchmarks/bench_pack.py --cp 4 --tokens 131072 --tune  other tiles for one
                                                                    of them

Every kernel reads and writes each byte once, so 1.00 is the speed of a plain copy.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch
from lib.measure import copy_bandwidth, dims_of, table, time_ms

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel.headwise import pack
from megatron_gdn.context_parallel.headwise.shares import HeadShares, waves_of
from megatron_gdn.ops.documents import one_document


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument(
        "--tokens", type=int, default=131072, help="of all ranks together"
    )
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    return parser.parse_args()


class Kernels:
    """The kernels over one set of buffers, as rank 1 of ``cp`` sees them."""

    def __init__(
        self, shares: HeadShares, tokens: int, repeats: int, bandwidth: float
    ) -> None:
        share = tokens // shares.ranks
        device = torch.device("cuda")
        (wave,) = waves_of(
            one_document(tokens, device), shares.ranks, 1, SequenceLayout.ZIGZAG
        )

        def rows(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        whole = rows(share, 1, shares.whole_width)
        full = rows(tokens, 1, shares.rank_width)
        messages = rows(shares.ranks - 1, share, 1, shares.rank_width)
        own = wave.own_place
        peers = wave.peer_place
        self._moved = {"own": messages[0].nbytes, "peers": messages.nbytes}
        self._repeats = repeats
        self._bandwidth = bandwidth
        self.runs = {
            "pack_peers": partial(pack.pack_peers, whole, messages, shares, 1),
            "pack_own": partial(
                pack.copy_kept_rows, whole, full, shares, 1, own, to_full=True
            ),
            "unpack_own": partial(
                pack.copy_kept_rows, whole, full, shares, 1, own, to_full=False
            ),
            "unpack_peers": partial(
                pack.unpack_peers, messages, full, whole, shares, 1, own
            ),
            "place_rows": partial(pack.move_rows, messages, full, peers, to_full=True),
            "take_rows": partial(pack.move_rows, messages, full, peers, to_full=False),
        }

    def time(self, name: str, **options) -> list[str]:
        ms = time_ms(partial(self.runs[name], **options), repeats=self._repeats)[
            "median"
        ]
        moved = self._moved["own" if name.endswith("own") else "peers"]
        return [f"{ms:.3f}", f"{2 * moved / (ms * 1e-3) / self._bandwidth:.2f}"]


def tune(kernels: Kernels) -> list[list[str]]:
    """pack_peers and unpack_peers, alone and beside a transfer, with other tiles."""
    names = ("pack_peers", "unpack_peers")
    rows = [
        [
            "warps",
            "tile KiB",
            "per SM",
            *(
                f"{name}{beside} {unit}"
                for name in names
                for beside in ("", " beside")
                for unit in ("ms", "of copy")
            ),
        ]
    ]
    for warps, tile, per in product((4, 8, 16), (8, 16, 32), (2, 4, 8)):
        if warps * per > 32 or tile > 4 * warps:
            continue
        pack._WARPS = warps
        pack._TILE_BYTES = tile << 10
        pack._PER_PROCESSOR = per
        row = [str(x) for x in (warps, tile, per)]
        for name in names:
            for beside in (False, True):
                row += kernels.time(name, beside_transfer=beside)
        rows.append(row)
        print("  ".join(row), flush=True)
    return rows


def main() -> None:
    args = arguments()
    bandwidth = copy_bandwidth()
    dims = dims_of(*args.heads)
    proj = HeadShares(args.cp, dims.layout.widths, dims.layout.copies(args.cp))
    mixed = HeadShares.even(args.cp, (dims.v_dim,))
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, cp "
        f"{args.cp}, {args.tokens} tokens, heads {args.heads[0]} / {args.heads[1]}"
    )
    if args.tune:
        print(table(tune(Kernels(proj, args.tokens, args.repeats, bandwidth))))
        return
    rows = [["exchange", "kernel", "ms", "of copy"]]
    for exchange, shares in (("open", proj), ("close", mixed)):
        kernels = Kernels(shares, args.tokens, args.repeats, bandwidth)
        for name in kernels.runs:
            rows.append([exchange, name, *kernels.time(name)])
        for name in ("pack_peers", "unpack_peers"):
            beside = kernels.time(name, beside_transfer=True)
            rows.append([exchange, f"{name}, beside a transfer", *beside])
    print(table(rows))


if __name__ == "__main__":
    main()
