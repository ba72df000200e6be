"""One process of Megatron, and what a framework's laws patched is undone after each."""

import pytest


@pytest.fixture
def one_process():
    import megatron_gdn
    from megatron_gdn.compat.one_process import end_one_process, start_one_process

    start_one_process()
    yield
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()


@pytest.fixture
def patched(one_process):
    import megatron_gdn

    megatron_gdn.patch_megatron()
