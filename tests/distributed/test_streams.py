"""Nothing orders two CUDA streams, so a table that one of them made is not read on
another."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from megatron_gdn.ops import host_tables
from tests.distributed.layer_laws import over_ranks, thd
from tests.ranks import on_ranks

LENGTHS = (16, 0, 40, 8)


@contextmanager
def on_stream(number: int, capturing: bool = False) -> Iterator[None]:
    with (
        patch("torch.cuda.is_initialized", lambda: True),
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch.cuda.is_current_stream_capturing", lambda: capturing),
        patch("torch._C._cuda_getCurrentRawStream", lambda device: number, create=True),
    ):
        yield


@contextmanager
def copies_to_device() -> Iterator[list[torch.Tensor]]:
    """The tables that are copied to a device meanwhile, but for messages, which nobody
    keeps."""
    copied = []
    copy = host_tables.to_device

    def note(table, device):
        copied.append(copy(table, device))
        return copied[-1]

    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("megatron_gdn")
        and not name.endswith(".agreement")
        and vars(module).get("to_device") is copy
    ]
    for module in users:
        module.to_device = note
    try:
        yield copied
    finally:
        for module in users:
            module.to_device = copy


@pytest.mark.each_value
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("cp", "mode"), [(1, "auto"), (2, "headwise"), (2, "chunkwise")]
)
@on_ranks(cp="cp")
def test_tables_belong_to_a_stream(cp, mode, packed):
    """Each stream copies every table once, and a graph reads those of the stream before
    it."""
    layer = over_ranks(linear_cp_mode=mode)
    params = thd(LENGTHS) if packed else None
    x = torch.randn(sum(LENGTHS) // cp, 1, layer.hidden_size)

    def step(stream: int, capturing: bool = False) -> int:
        with on_stream(stream, capturing), copies_to_device() as copied:
            layer(x, None, packed_seq_params=params)[0].sum().backward()
        return len(copied)

    first = step(1)
    assert first > 0 and step(1) == 0
    assert step(2) == first and step(2) == 0
    assert step(1) == 0
    if packed:
        return  # refused in a graph
    before = len(host_tables._tables_of_graphs)
    assert step(3, capturing=True) == 0
    assert len(host_tables._tables_of_graphs) > before
