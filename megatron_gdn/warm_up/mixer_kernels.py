"""The Triton kernels of a Gated DeltaNet mixer: its launches on tensors of one shape."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from ..gdn import half_kernels
from ..gdn.front import gdn_front
from ..gdn.half import LARGEST_D_FINAL, LARGEST_D_O
from ..ops.delta_rule.base import HeadSizes, RuleGrads
from ..ops.documents import Documents
from ..ops.front.history import History, HistoryTable
from ..ops.front.history_kernels import add_rows
from ..ops.readout.kernels import TritonReadout
from ..ops.state_maps import chains, chains_kernels
from .hopper import Task, compile_triton


class MixerLaunches:
    """Tensors of one shape in bf16, and the launches of a Gated DeltaNet mixer on them.

    ``documents`` are packed into the one row; ``operands`` is the dtype of q, k, v and their
    gradients. On the meta device the tensors have no memory, which is enough to compile.
    """

    def __init__(
        self,
        tokens: int,
        sizes: HeadSizes,
        documents: int = 0,
        *,
        batch: int = 1,
        taps: int = 4,
        operands: torch.dtype = torch.bfloat16,
        device: str = "meta",
    ) -> None:
        self.sizes, self.device, normal = sizes, device, self.tensor
        (_, H, K, V), S, B = sizes, tokens, batch
        self.documents = None
        if documents:
            offsets = [n * S // documents for n in range(documents)] + [S]
            where = "cpu" if device == "meta" else device
            self.documents = Documents.from_cu_seqlens(offsets, S, device=where)
        self.operands, half = operands, operands == torch.float16
        self.proj, self.d_proj = normal(S, B, sizes.width), normal(S, B, sizes.width)
        per_head = partial(normal, H, dtype=torch.float32)
        front = gdn_front(
            device, self.proj.dtype, taps, sizes, operands if half else None, kernels="triton"
        )  # fmt: skip
        self.front = cache(partial(replace, front))  # with other options
        self.parameters = (normal(sizes.conv_width, 1, taps), None, per_head(), per_head())
        # FlashQLA gives dq and dk per value head; the front sums them.
        q, k, v = (normal(B, S, H, width, dtype=operands) for width in (K, K, V))
        g, beta = (normal(B, S, H, dtype=torch.float32) for _ in range(2))
        self.grads = RuleGrads(q, k, v, g, beta, factor=per_head() if half else None)
        self.o, self.d_out = normal(B, S, H, V, dtype=operands), normal(S, B, H * V)
        self.gamma, self.readout = normal(V), TritonReadout(sizes.layout.gate_columns)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def forward(self, only=None, history=None, **options) -> None:
        given = (self.parameters, self.documents, only, history)
        self.front(**options).forward(self.proj, *given)

    def backward(self, history=None, **options) -> None:
        given = (self.parameters, self.grads, self.d_proj, self.documents, history)
        self.front(**options).backward(self.proj, *given)

    def with_history(self, **_options) -> None:
        """Both ways, over two pieces whose history another rank holds."""
        S, B, _ = self.proj.shape
        past = self.parameters[0].shape[-1] - 1
        first, length, sent = torch.tensor([[0, S // 2], [S // 2] * 2, [0, 1]], device="cpu")
        before = torch.arange(2 * past, device="cpu").view(2, past)
        table = HistoryTable.build(first, length, before, sent, S, self.proj.device)
        history = History(self.tensor(2 * past, B, self.sizes.conv_width), table).for_backward()
        self.forward(history=history)
        self.backward(history=history)
        assert history.d_rows is not None
        add_rows(self.d_proj[..., : self.sizes.conv_width], history.d_rows, table.additions)

    def norm_forward(self) -> None:
        self.readout.forward(self.o, self.proj, self.gamma)

    def norm_backward(self, **options) -> None:
        self.readout.backward(self.d_out, self.o, self.proj, self.gamma, self.d_proj, **options)

    def norms(self, **_options) -> None:
        self.norm_forward()
        self.norm_backward()

    def to_half(self) -> None:
        """d_o from the layer's dtype to fp16; then its powers lowered for a gradient of states."""
        G, H, K, V = self.sizes
        d_o = torch.empty_like(self.o, dtype=torch.bfloat16)
        half, up, _ = half_kernels.to_half(d_o, G, LARGEST_D_O)
        states = d_o.new_empty(1, H, K, V, dtype=torch.float32)
        half_kernels.lower(half, up, states, G, LARGEST_D_FINAL)

    def chain(self) -> None:
        """States between the parts or ranks of sequences, and maps of whole sequences."""
        _, H, K, V = self.sizes
        local, through = (torch.empty(4, H, K, X, device=self.device) for X in (V, K))
        table = torch.empty(1, 4, 2, dtype=torch.int32, device=self.device)
        steps, cuts = chains.Steps(((),), table), chains.Cuts(table.new_empty(4), None)
        for start, columns, cut in (
            (None, V, None), (None, V, cuts), (local[:1], V, None), (chains.IDENTITY, V + K, None)
        ):  # fmt: skip
            out = local.new_empty(4, H, K, columns)
            chains_kernels.follow(local, through, steps, out, start, cut)


# Kernels are the same for every length except 1 and odd lengths. Lengths in a run are even.
_TOKENS = 8192
# Documents, whether the first step needs it, the launch, and its name; in the order they begin.
_LAUNCHES = (
    (0, True, MixerLaunches.backward, "front backward"),
    (0, True, MixerLaunches.forward, "front forward"),
    (0, True, MixerLaunches.norms, "norm"),
    (0, True, MixerLaunches.chain, "states"),
    (0, True, MixerLaunches.to_half, "fp16 operands"),
    (3, False, MixerLaunches.backward, "front backward, packed"),
    (3, False, MixerLaunches.forward, "front forward, packed"),
    (3, False, MixerLaunches.with_history, "history"),
)


def mixer_tasks(sizes: HeadSizes, taps: int, operands: torch.dtype) -> list[Task]:
    """The launches of ``_LAUNCHES`` that a rank with these heads has, each as a task."""
    left_out = {
        "states": sizes.key_dim > chains.MOST_ROWS, "fp16 operands": operands != torch.float16
    }  # fmt: skip
    on = {n: MixerLaunches(_TOKENS, sizes, n, taps=taps, operands=operands) for n in (0, 3)}
    heads = f"{sizes.key_heads}:{sizes.value_heads} heads"
    return [
        Task(f"{name}, {heads}", partial(compile_triton, partial(launch, on[documents])), soon=soon)
        for documents, soon, launch, name in _LAUNCHES
        if not left_out.get(name)
    ]
