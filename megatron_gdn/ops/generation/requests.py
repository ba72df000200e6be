"""Carries of many requests, for all layers of a model, in slots.

Memory is allocated once; a request is a handle to one slot. A handle that was freed, or belongs to
another pool, is refused, so that a state is never read or written by mistake.

Legend: M slots, N requests of one call, C conv channels, W conv taps, H heads with a state, K rows
of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..host_tables import to_device
from .carry import Carry, CarryShape, choose
from .shares import carry_of, stretches


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence that is being generated; made by :meth:`RequestPool.allocate`.

    Attributes:
        slot: where its carries lie.
        tokens: how many were announced; None: any number.
    """

    slot: int
    tokens: int | None
    pool: RequestPool

    def __repr__(self) -> str:
        return f"Request(slot={self.slot}, tokens={self.tokens})"


class RequestPool:
    """M slots with a :class:`.carry.Carry` for every recurrent layer.

    Args:
        shapes: what each layer carries, by a key of the caller's choice (Megatron's layer number),
            on this tensor-parallel rank. Layers may differ.
        slots: M, the most requests at a time.
        dtype: of the layers' projection rows. States are fp32 (fp64 for fp64).
        device: where the carries lie.

    Attributes:
        layers: by key, the carries of all slots: history ``[M, C, W - 1]`` (``[M, W - 1 + 64, P]``
            of an aligned mixer), state ``[M, H, K, V]``. Kernels and CUDA graphs may read and write
            them by slot numbers on the device; such tokens are not counted.
    """

    def __init__(
        self,
        shapes: Mapping[Hashable, CarryShape],
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if slots < 1 or not shapes:
            raise ValueError(
                f"a pool needs a slot and a layer, got slots={slots} and {len(shapes)} layers."
            )
        self.shapes, self.dtype, self.device = dict(shapes), dtype, torch.device(device)
        with torch.inference_mode(False):  # they are written to outside of it too
            self.layers = {
                key: shape.zeros(slots, dtype, self.device) for key, shape in self.shapes.items()
            }
        self._holder: list[Request | None] = [None] * slots
        self._seen = {key: [0] * slots for key in self.shapes}
        self._tried: dict[Hashable, tuple[list[Request], Carry, Sequence[Carry]]] = {}

    @property
    def slots(self) -> int:
        return len(self._holder)

    @property
    def free_slots(self) -> int:
        return self._holder.count(None)

    def allocate(self, tokens: int | None = None) -> Request:
        """A request without a token yet: its carries are zero.

        Args:
            tokens: how many it will have at most; more are refused when they come.

        Raises:
            RuntimeError: every slot is taken.
        """
        if tokens is not None and tokens < 0:
            raise ValueError(f"tokens={tokens} announced; use None or a number from 0.")
        if None not in self._holder:
            raise RuntimeError(
                f"all {self.slots} slots are taken; free a request, or make a larger pool."
            )
        request = Request(self._holder.index(None), tokens, self)
        self._holder[request.slot] = request
        for key, carry in self.layers.items():
            for tensor in carry:
                tensor[request.slot].zero_()
            self._seen[key][request.slot] = 0
        return request

    def free(self, request: Request) -> None:
        """Give the slot back; the handle is refused from then on."""
        self._holder[self._slot(request)] = None

    def fork(self, request: Request, tokens: int | None = None) -> Request:
        """A new request with copies of this one's carries, for a shared prefix or a beam.

        Args:
            tokens: announced for the new one, the prefix included; None: as many as for this one.
        """
        self._slot(request)
        other = self.allocate(request.tokens if tokens is None else tokens)
        try:
            self.copy(request, other)
        except ValueError:
            self.free(other)
            raise
        return other

    def copy(self, source: Request, target: Request) -> None:
        """Copy the carries and token counts of ``source`` to ``target``, bit for bit.

        If ``target`` was in the last decode step, that step cannot be rolled back any more.
        """
        at, to = self._slot(source), self._slot(target)
        if at == to:
            return
        self._require_room(target, max(seen[at] for seen in self._seen.values()), "copied")
        for key, carry in self.layers.items():
            for tensor in carry:
                tensor[to].copy_(tensor[at])
            self._seen[key][to] = self._seen[key][at]
        if any(target in tried for tried, _, _ in self._tried.values()):
            self._tried.clear()

    def tokens_of(self, request: Request) -> int:
        """How many tokens the request has had, in the layer that had the fewest."""
        slot = self._slot(request)
        return min(seen[slot] for seen in self._seen.values())

    def stands(self, layer: Hashable, requests: Sequence[Request]) -> list[int]:
        """How many tokens each of the requests has had in one layer."""
        self._layer(layer)
        return [self._seen[layer][slot] for slot in self._slots(requests)]

    def read(self, layer: Hashable, requests: Sequence[Request]) -> Carry:
        """Copies of the requests' carries in one layer, ``[N, ...]`` in their order."""
        index = self._index(self._slots(requests))
        return Carry(*(tensor.index_select(0, index) for tensor in self._layer(layer)))

    def check(self, layer: Hashable, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Refuse what :meth:`write` would refuse, before anything is computed.

        Args:
            tokens: how many each of the requests is about to have.
        """
        slots = self._slots(requests)
        self._layer(layer)
        if len(tokens) != len(requests):
            raise ValueError(
                f"{len(requests)} requests, but numbers of tokens for {len(tokens)}: {list(tokens)}"
                f". Give one number for each request."
            )
        for request, slot, more in zip(requests, slots, tokens, strict=True):
            self._require_room(request, self._seen[layer][slot] + more, "given")

    def write(
        self,
        layer: Hashable,
        requests: Sequence[Request],
        carry: Carry,
        tokens: Sequence[int],
        after: Sequence[Carry] = (),
    ) -> None:
        """Store the requests' carries after ``tokens`` more tokens each, in one layer.

        Args:
            after: the carries after each of the tokens, as :func:`.step.decode`
                gives them; they are kept until the next write, so that :meth:`roll_back` can return
                to any of them.

        Raises:
            ValueError: requests that are not this pool's, twice the same, more tokens than were
                announced, a carry of other sizes or dtypes. Nothing is written then.
        """
        self.check(layer, requests, tokens)
        self.shapes[layer].check(carry, len(requests), self.dtype)
        slots = self._slots(requests)
        index, kept = self._index(slots), self._layer(layer)
        self._tried.pop(layer, None)
        if after:
            before = Carry(*(tensor.index_select(0, index) for tensor in kept))
            self._tried[layer] = (list(requests), before, after)
        for tensor, fresh in zip(kept, carry, strict=True):
            tensor.index_copy_(0, index, fresh)
        self.count(layer, requests, tokens)

    def count(self, layer: Hashable, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Count tokens after which the carries have been written."""
        for request, more in zip(requests, tokens, strict=True):
            self._seen[layer][request.slot] += more

    def in_slots(self, layer: Hashable) -> Carry:
        """The carries of all slots in one layer, to be written by slot numbers on the device.

        The pool does not see which are written, so the last decode step cannot be rolled back.
        """
        self._tried.pop(layer, None)
        return self._layer(layer)

    def roll_back(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Keep only the first tokens of the last decode step, in every layer.

        Args:
            requests: all requests of the step, in its order.
            accepted: how many of the step's tokens stay, for each request; from 0.

        Raises:
            ValueError: other requests than the step had, a number out of range, or no step to roll
                back. Nothing is changed then.
        """
        slots = self._slots(requests)
        if set(self._tried) != set(self.layers):
            raise ValueError(
                "there is no decode step to roll back: not every layer kept the carries of its "
                "last tokens, one of its requests was copied onto since, or there was a step in "
                "slots. Roll back right after a decode step that kept them."
            )
        for tried, _, after in self._tried.values():
            if len(tried) != len(slots) or any(
                one is not other for one, other in zip(tried, requests, strict=True)
            ):
                raise ValueError(
                    f"roll_back got requests in slots {slots}, the last step had slots "
                    f"{[one.slot for one in tried]}; give the same requests in the same order."
                )
            if len(accepted) != len(slots) or not all(0 <= n <= len(after) for n in accepted):
                raise ValueError(
                    f"accepted={list(accepted)} must hold {len(slots)} numbers from 0 to "
                    f"{len(after)}, the tokens of the last step."
                )
        index, stay = self._index(slots), self._index(accepted)
        for layer, (_, before, after) in self._tried.items():
            for tensor, chosen in zip(self.layers[layer], choose(before, after, stay), strict=True):
                tensor.index_copy_(0, index, chosen)
            for slot, n in zip(slots, accepted, strict=True):
                self._seen[layer][slot] += n - len(after)
        self._tried.clear()

    def save(self, request: Request) -> dict[str, Any]:
        """Everything that this rank holds of a request, on the CPU, for ``torch.save``.

        Each layer's tensors are saved with the ranges of channels and heads that they hold, so
        that :meth:`load` can read them at another tensor-parallel size.
        """
        slot = self._slot(request)
        return {
            "tokens": request.tokens,
            "seen": {key: seen[slot] for key, seen in self._seen.items()},
            "heads": {key: stretches(shape) for key, shape in self.shapes.items()},
            "layers": {
                key: tuple(tensor[slot].to("cpu", copy=True) for tensor in carry)
                for key, carry in self.layers.items()
            },
        }

    def load(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Request:
        """A new request with the carries and token counts of a saved one, bit for bit.

        Args:
            saved: what :meth:`save` returned on this rank. If the model ran on other
                tensor-parallel ranks: a list of what it returned on each of them, in any order.

        Raises:
            ValueError: it was saved of other layers, sizes or dtypes, heads of this rank are
                missing, or the list is of several requests. No slot is taken then.
        """
        files = [saved] if isinstance(saved, Mapping) else list(saved)
        for file in files:
            if set(file["layers"]) != set(self.layers):
                raise ValueError(
                    f"the request was saved of layers {sorted(file['layers'], key=str)}, this pool "
                    f"has {sorted(self.layers, key=str)}; load it where the same model runs."
                )
            if any(file[name] != files[0][name] for name in ("tokens", "seen")):
                raise ValueError(
                    f"the files are not of one request at one place: {file['seen']} tokens were "
                    f"seen, and {files[0]['seen']}."
                )
        carries = {key: carry_of(files, key, shape) for key, shape in self.shapes.items()}
        for key, carry in carries.items():
            self.shapes[key].check(Carry(*(x[None] for x in carry)), 1, self.dtype)
        request = self.allocate(files[0]["tokens"])
        for key, carry in carries.items():
            for tensor, stored in zip(self.layers[key], carry, strict=True):
                tensor[request.slot].copy_(stored)
            self._seen[key][request.slot] = files[0]["seen"][key]
        return request

    def index(self, requests: Sequence[Request]) -> Tensor:
        """int64 ``[N]``, the requests' slots on the device."""
        return self._index(self._slots(requests))

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"), self.device)

    def _layer(self, layer: Hashable) -> Carry:
        if layer not in self.layers:
            raise ValueError(
                f"layer {layer!r} has no carries in this pool; it was made for "
                f"{sorted(self.layers, key=str)}."
            )
        return self.layers[layer]

    def _slot(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise TypeError(
                f"{request!r} is a {type(request).__name__}, not a Request; take one from "
                f"RequestPool.allocate()."
            )
        if request.pool is not self:
            raise ValueError(f"{request} belongs to another pool.")
        holder = self._holder[request.slot]
        if holder is not request:
            since = "" if holder is None else " and its slot was given to another since"
            raise ValueError(f"{request} was freed{since}; allocate a new one.")
        return request.slot

    def _slots(self, requests: Sequence[Request]) -> list[int]:
        slots = [self._slot(request) for request in requests]
        if len(set(slots)) != len(slots):
            raise ValueError(
                f"the same request is given twice in one call, slots {slots}; fork it to "
                f"continue it in two ways."
            )
        return slots

    def _require_room(self, request: Request, tokens: int, what: str) -> None:
        if request.tokens is not None and tokens > request.tokens:
            raise ValueError(
                f"{request} would have been {what} {tokens} tokens in all, but {request.tokens} "
                f"were announced; allocate it with tokens={tokens} or more."
            )
