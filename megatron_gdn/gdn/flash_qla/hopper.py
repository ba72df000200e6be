"""FlashQLA's kernels on Hopper, launched in less host time, with the same results.

FlashQLA's own functions look a kernel up by some twenty arguments in each call and
allocate memory for every argument; tilelang then checks and repacks all arguments. This
module calls the compiled functions directly. Names of kernels and arguments are those
of flash-qla 0.1.3, in ``flash_qla/ops/gated_delta_rule/chunk``: ``g`` are sums of the
log-decay within chunks, ``b`` the write strengths, ``a`` the inverses A of the chunks'
triangular systems, ``h`` the states before every chunk.

Legend: P segments; N sequences, or segments if sequences are cut; other letters as in
``docs/glossary.md``. ``q`` and ``k`` are ``[B, S, G, K]``, ``v`` and ``do``
``[B, S, H, V]``, ``g`` and ``b`` ``[B, S, H]``, ``a`` ``[B, S, H, 64]``, ``h``
``[B, chunks, H, K, V]``. ``cu_seqlens``, int32 ``[N + 1]``, are offsets of sequences or
segments in one batch row; None: each batch row is one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.state_maps.segments import CHUNK

_F32 = torch.float32
# arguments of FlashQLA's kernel factories that have the same value in all calls
_ACCUM_DTYPE = "float32"
_STATE_V_FIRST = False  # states are [.., K, V], not [.., V, K]


class _Places(NamedTuple):
    """Where sequences and their chunks of 64 tokens are."""

    sequence_count: int  # the number of segments, if sequences are cut
    boundaries: Tensor  # [N + 1], first tokens of sequences, and the end of the last
    first_chunks: Tensor  # [N + 1], the number of each sequence's first chunk
    chunk_count: int  # per batch row


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class HopperKernels:
    """FlashQLA's functions on Hopper; each method launches one kernel."""

    def __init__(self, library: ModuleType, modules: dict[str, ModuleType]) -> None:
        """``library``: FlashQLA's module ``chunk``; ``modules``: the module of each
        function."""
        self._modules = modules
        self.build_cp_context = library.build_cp_context
        self.correct_initial_states = partial(self._correct_states, backward=False)
        self.correct_terminal_states = partial(self._correct_states, backward=True)
        # Each object has its own caches, so kernels and tensors are freed with the
        # object.
        self._kernel = lru_cache(maxsize=256)(self._find_kernel)
        # Tensors for arguments that a kernel neither reads nor writes, by shape, dtype
        # and device.
        self._unread_tensor = lru_cache(maxsize=64)(_zeros)

    def _find_kernel(
        self, function: str, factory: str, *args: object
    ) -> Callable[..., None]:
        """The compiled kernel of FlashQLA's ``function``: its ``factory`` makes the
        kernel for ``args``, such as sizes and dtypes.

        ``args`` are passed by position, never by name: the file's name in
        :func:`.builds.cache_entry` depends on how arguments are passed.
        """
        return compiled_function(getattr(self._modules[function], factory)(*args))

    @cached_property
    def _chunk_table_module(self) -> ModuleType:
        """FlashQLA's module that makes tables of chunks."""
        from flash_qla.utils import index  # pyright: ignore[reportMissingImports]

        return index

    def _places_of(self, like: Tensor, cu_seqlens: Tensor | None) -> _Places:
        """The boundaries and chunks of ``like [B, S, ..]``; without ``cu_seqlens`` each
        batch row is one sequence."""
        if cu_seqlens is None:
            rows, tokens = like.shape[:2]
            unread = self._unread_tensor((rows + 1,), torch.int32, like.device)
            return _Places(rows, unread, unread, -(-tokens // CHUNK))
        first_chunks, chunks = self._chunk_table_module.prepare_chunk_offsets(
            cu_seqlens, CHUNK
        )
        return _Places(
            cu_seqlens.shape[0] - 1,
            cu_seqlens,
            first_chunks.to(cu_seqlens.dtype),
            chunks,
        )

    def _chunk_states(self, k: Tensor, v: Tensor, chunks: int) -> Tensor:
        """Memory ``[B, chunks, H, K, V]`` for the states before every chunk; for 0
        chunks a tensor without elements."""
        B, _, _, K = k.shape
        H, V = v.shape[2:]
        if chunks:
            return k.new_empty(B, chunks, H, K, V)
        return self._unread_tensor((B, 0, H, K, V), k.dtype, k.device)

    def chunk_local_cumsum(
        self,
        g: Tensor,
        cu_seqlens: Tensor | None,
        reverse: bool = False,
        zero_last_chunk: bool = False,
    ) -> Tensor:
        """Running sums of ``g`` in chunks, fp32 ``[B, S, H]``; ``reverse``: from a
        chunk's end.

        Sequences must cover all S tokens, since the results of other tokens are not
        written. ``zero_last_chunk``, as in FlashQLA, writes zeros for up to 64 tokens
        after the last sequence; if sequences cover all tokens, there are none.
        """
        B, S, H = g.shape
        out = torch.empty_like(g)
        is_varlen = cu_seqlens is not None
        if cu_seqlens is None:
            seqlen_dtype = "int32"
        else:
            seqlen_dtype = cu_seqlens.dtype
        run = self._kernel(
            "chunk_local_cumsum",
            "tilelang_chunk_local_cumsum",
            H,
            CHUNK,
            _ACCUM_DTYPE,
            g.dtype,
            seqlen_dtype,
            is_varlen,
            reverse,
            zero_last_chunk,
        )
        if cu_seqlens is None:
            run(g, out, B * -(-S // CHUNK))
        else:
            run(
                g,
                cu_seqlens,
                self._chunk_table_module.prepare_chunk_indices(cu_seqlens, CHUNK),
                out,
            )
        return out

    def kkt_solve(self, k: Tensor, b: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The inverse A ``[B, S, H, 64]`` of every chunk's triangular system."""
        B, S, G, K = k.shape
        H = b.shape[2]
        a = k.new_empty(B, S, H, CHUNK)
        is_varlen = cu_seqlens is not None
        if cu_seqlens is None:
            seqlen_dtype = "int32"
        else:
            seqlen_dtype = cu_seqlens.dtype
        run = self._kernel(
            "kkt_solve",
            "tilelang_kkt_solve",
            H,
            G,
            K,
            CHUNK,
            _ACCUM_DTYPE,
            k.dtype,
            b.dtype,
            seqlen_dtype,
            is_varlen,
        )
        if cu_seqlens is None:
            run(k, b, a, B * -(-S // CHUNK))
        else:
            run(
                k,
                b,
                cu_seqlens,
                self._chunk_table_module.prepare_chunk_indices(cu_seqlens, CHUNK),
                a,
            )
        return a

    def get_warmup_chunks_bidi(
        self,
        g: Tensor,
        cu_seqlens: Tensor,
        ht_mask_fwd: Tensor,
        ht_mask_bwd: Tensor,
        threshold: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How many chunks of each segment matter for states, and which segments states
        pass.

        S reaches a chunk if the log-decay up to the chunk sums to more than
        ``threshold``. Where ``ht_mask_fwd``, bool ``[P]``, is True, S need not pass the
        segment. Where ``ht_mask_bwd`` is True, dS need not pass the segment.

        Returns:
            four tensors ``[P, H]``: how many last chunks of a segment its map needs;
            how many first chunks of the segment S_in reaches; whether S passes the
            segment; whether dS passes the segment.
        """
        P, H = ht_mask_fwd.shape[0], g.shape[2]
        force_inter_boundaries = False  # no rank holds a part of a sequence
        run = self._kernel(
            "get_warmup_chunks_bidi",
            "tilelang_get_warmup_chunks_bidi",
            H,
            CHUNK,
            threshold,
            _ACCUM_DTYPE,
            g.dtype,
            ht_mask_fwd.dtype,
            cu_seqlens.dtype,
            force_inter_boundaries,
        )
        results = (
            cu_seqlens.new_empty(P, H),
            cu_seqlens.new_empty(P, H),
            ht_mask_fwd.new_empty(P, H),
            ht_mask_fwd.new_empty(P, H),
        )
        # The second ``cu_seqlens`` is passed in place of a table of segments, which the
        # kernel reads only at boundaries between ranks. This batch has no such
        # boundaries.
        run(g, ht_mask_fwd, ht_mask_bwd, cu_seqlens, cu_seqlens, *results)
        return results

    def fused_gdr_h(
        self,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        g: Tensor,
        b: Tensor,
        *,
        output_final_state: bool,
        output_h: bool,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None = None,
        num_warmup_chunks: Tensor | None = None,
        final_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The states before every chunk if ``output_h``, else None; the final states
        ``[N, H, K, V]`` and ``through [N, H, K, K]`` if ``output_final_state``, else
        None.

        Final states and ``through`` have ``final_dtype``.

        ``num_warmup_chunks``, ``[P, H]`` or None: from how many last chunks of a
        segment its final states are computed; None: from all.
        """
        G, K = k.shape[2:]
        H, V = v.shape[2:]
        has_warmup = num_warmup_chunks is not None
        N, boundaries, first_chunks, chunks = self._places_of(k, cu_seqlens)
        if final_dtype is None:  # as in FlashQLA's own function
            final_dtype = k.dtype if has_warmup else _F32
        warmup_chunks = num_warmup_chunks
        if warmup_chunks is None:
            warmup_chunks = self._unread_tensor((N, H), boundaries.dtype, k.device)
        h = self._chunk_states(k, v, chunks if output_h else 0)
        final = None
        if output_final_state:
            final = k.new_empty(N, H, K, V, dtype=final_dtype)
        # The kernel always writes ``through``: zeros if the caller did not ask for the
        # maps.
        through = k.new_empty(N, H, K, K, dtype=final_dtype)
        initial = initial_state
        if initial is None:
            # The kernel reads no initial states; any fp32 tensor of this shape will do.
            if final is not None and final_dtype is _F32:
                initial = final
            else:
                initial = k.new_empty(N, H, K, V, dtype=_F32)
        use_initial_state = initial_state is not None
        is_varlen = cu_seqlens is not None
        is_cp = has_warmup
        run = self._kernel(
            "fused_gdr_h",
            "tilelang_prepare_h",
            H,
            G,
            K,
            V,
            CHUNK,
            _ACCUM_DTYPE,
            k.dtype,
            g.dtype,
            b.dtype,
            initial.dtype,
            final_dtype,
            k.dtype,
            boundaries.dtype,
            use_initial_state,
            output_final_state,
            output_h,
            is_varlen,
            is_cp,
            _STATE_V_FIRST,
        )
        # Without ``output_final_state`` the kernel does not write final states.
        run(
            k,
            v,
            a,
            g,
            b,
            initial,
            boundaries,
            first_chunks,
            warmup_chunks,
            h,
            initial if final is None else final,
            through,
        )
        return h if output_h else None, final, through if output_final_state else None

    def _correct_states(
        self,
        states: Tensor | None,
        local: Tensor,
        through: Tensor,
        passes: Tensor,
        first_segment: Tensor,
        *,
        backward: bool,
    ) -> Tensor:
        """The states ``[P, H, K, V]`` that enter segments or, if ``backward``, the
        gradients of the states that leave segments.

        ``states``: the states that enter sequences or, if ``backward``, the gradients
        of the states that leave sequences; None: zeros. ``passes``, bool ``[P, H]``:
        whether the state (or gradient) passes the segment. ``first_segment``, int32
        ``[N + 1]``: the number of every sequence's first segment, then P.
        """
        P, H, K, V = local.shape
        use_raw_h0 = states is not None
        if states is None:
            dtype = _F32
        else:
            dtype = states.dtype
        # gradients pass the segments in reverse order, through the transposed maps
        reverse = backward
        transpose_m = backward
        run = self._kernel(
            "correct_initial_states",
            "tilelang_correct_h0",
            H,
            K,
            V,
            dtype,
            _ACCUM_DTYPE,
            local.dtype,
            through.dtype,
            first_segment.dtype,
            passes.dtype,
            use_raw_h0,
            _STATE_V_FIRST,
            reverse,
            transpose_m,
        )
        out = local.new_empty(P, H, K, V, dtype=dtype)
        tensors = (local, through, passes, first_segment, out)
        if states is not None:
            tensors = (states,) + tensors
        run(*tensors)
        return out

    def fused_gdr_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        g: Tensor,
        b: Tensor,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        cp_seq_map: Tensor | None,
        raw_cu_seqlens: Tensor | None,
        output_h: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output, the states before every chunk if ``output_h`` and the final
        states if ``output_final_state``; else None.

        ``cu_seqlens`` are the offsets of segments, ``raw_cu_seqlens`` the offsets of
        sequences; ``cp_seq_map`` has the sequence of each segment.
        """
        G, K = k.shape[2:]
        H, V = v.shape[2:]
        P, boundaries, first_chunks, chunks = self._places_of(k, cu_seqlens)
        if raw_cu_seqlens is None:
            sequences = boundaries
        else:
            sequences = raw_cu_seqlens
        N = sequences.shape[0] - 1
        if cp_seq_map is None:
            owner = self._unread_tensor((P,), boundaries.dtype, k.device)
        else:
            owner = cp_seq_map
        if output_final_state or initial_state is None:
            final = k.new_empty(N, H, K, V, dtype=_F32)
        else:
            # The kernel writes no final states; any tensor of this shape will do.
            final = initial_state[:N]
        if initial_state is not None:
            initial = initial_state
        elif N == P:
            # The kernel reads no initial states; any tensor of this shape will do.
            initial = final
        else:
            initial = k.new_empty(P, H, K, V, dtype=_F32)
        # As in FlashQLA: if too few programs would run, each program gets fewer value
        # columns, so that more programs run.
        programs = P * H
        target = self._modules["fused_gdr_fwd"].TARGET_NUM_CTAS
        if programs >= target:
            block_DV = 128
        elif programs * 2 >= target:
            block_DV = 64
        else:
            block_DV = 32
        o = torch.empty_like(v)
        use_initial_state = initial_state is not None
        store_o = True
        is_varlen = cu_seqlens is not None
        is_cp = cp_seq_map is not None
        run = self._kernel(
            "fused_gdr_fwd",
            "tilelang_fused_chunk_gdr_fwd",
            H,
            G,
            K,
            V,
            CHUNK,
            scale,
            _ACCUM_DTYPE,
            q.dtype,
            g.dtype,
            b.dtype,
            initial.dtype,
            _F32,
            k.dtype,
            o.dtype,
            boundaries.dtype,
            use_initial_state,
            output_final_state,
            output_h,
            store_o,
            is_varlen,
            is_cp,
            _STATE_V_FIRST,
            block_DV,
        )
        h = self._chunk_states(k, v, chunks if output_h else 0)
        run(
            q,
            k,
            v,
            a,
            g,
            b,
            initial,
            boundaries,
            first_chunks,
            owner,
            sequences,
            o,
            h,
            final,
        )
        return o, h if output_h else None, final if output_final_state else None

    def fused_gdr_dh(
        self,
        q: Tensor,
        k: Tensor,
        a: Tensor,
        g: Tensor,
        b: Tensor,
        do: Tensor,
        scale: float,
        cu_seqlens: Tensor,
        num_warmup_chunks: Tensor,
        output_dh: bool,
    ) -> tuple[None, Tensor]:
        """None, and the gradients ``[P, H, K, V]`` of states that enter segments, with
        zero gradients of the states that leave segments; ``output_dh`` must be
        False."""
        assert not output_dh
        G, K = k.shape[2:]
        H, V = do.shape[2:]
        P, boundaries, first_chunks, _ = self._places_of(k, cu_seqlens)
        use_dht = False
        store_dh0 = True
        is_varlen = True
        is_cp = True
        run = self._kernel(
            "fused_gdr_dh",
            "tilelang_prepare_dh_ws",
            H,
            G,
            K,
            V,
            CHUNK,
            scale,
            _ACCUM_DTYPE,
            k.dtype,
            g.dtype,
            b.dtype,
            _F32,
            k.dtype,
            do.dtype,
            boundaries.dtype,
            use_dht,
            store_dh0,
            output_dh,
            is_varlen,
            is_cp,
            _STATE_V_FIRST,
        )
        d_states_in = k.new_empty(P, H, K, V, dtype=_F32)
        d_states_at_chunks = self._chunk_states(k, do, 0)
        # ``d_states_in`` is also passed where the kernel takes the gradients of final
        # states. The kernel does not read that argument, since ``use_dht`` is False.
        run(
            q,
            k,
            a,
            g,
            b,
            do,
            d_states_in,
            boundaries,
            first_chunks,
            num_warmup_chunks,
            d_states_at_chunks,
            d_states_in,
        )
        return None, d_states_in

    def fused_gdr_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        g: Tensor,
        b: Tensor,
        do: Tensor,
        dht: Tensor | None,
        h: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        overwrite_dht: bool,
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, g and b, and of the states that enter segments or
        uncut sequences. dq and dk have H heads.

        ``dht``: gradients of the states that leave segments or uncut sequences; None:
        zero. With ``overwrite_dht`` the entering states' gradients overwrite ``dht``;
        each program reads its values of ``dht`` before it writes.
        """
        G, K = k.shape[2:]
        H, V = v.shape[2:]
        N, boundaries, first_chunks, _ = self._places_of(k, cu_seqlens)
        # [B, S, H, K] has the shape of v, since K is V
        dq = torch.empty_like(v)
        dk = torch.empty_like(v)
        dv = torch.empty_like(v)
        dg = torch.empty_like(g)
        db = torch.empty_like(b)
        if overwrite_dht and dht is not None:
            dh0 = dht
        else:
            dh0 = k.new_empty(N, H, K, V, dtype=_F32)
        is_varlen = cu_seqlens is not None
        use_dht = dht is not None
        run = self._kernel(
            "fused_gdr_bwd",
            "tilelang_fused_chunk_gdr_bwd",
            H,
            G,
            K,
            V,
            CHUNK,
            scale,
            _ACCUM_DTYPE,
            q.dtype,
            g.dtype,
            b.dtype,
            h.dtype,
            do.dtype,
            boundaries.dtype,
            is_varlen,
            use_dht,
            _STATE_V_FIRST,
        )
        run(
            do,
            dh0 if dht is None else dht,
            q,
            k,
            v,
            a,
            g,
            b,
            h,
            boundaries,
            first_chunks,
            dq,
            dk,
            dv,
            dg,
            db,
            dh0,
        )
        return dq, dk, dv, dg, db, dh0


def compiled_function(kernel: Any) -> Callable:
    """The compiled function in a tilelang ``kernel``, or ``kernel`` if its form is
    unknown. Unlike the kernel object, the function neither checks nor repacks
    arguments."""
    adapter: Any = getattr(kernel, "adapter", None)
    # If a kernel has results, the kernel object allocates them.
    if getattr(adapter, "result_idx", True):
        return kernel
    try:
        # compiled in this process: an object whose ``jit`` gives the module; loaded
        # from tilelang's cache: the module
        executable = adapter.get_exportable_executable()
        if "jit" in dir(type(executable)):
            module = executable.jit()
        else:
            module = executable
        return module.main
    except AttributeError:
        return kernel
