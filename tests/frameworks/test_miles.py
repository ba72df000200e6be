"""The function that miles and slime call by its path, with the arguments of their launches."""

from argparse import Namespace

import pytest
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Theirs

import megatron_gdn
from megatron_gdn.frameworks.miles import enable
from tests.frameworks.test_patch import is_ours

QWEN = ["miles_plugins.models.qwen3_5", "get_qwen3_5_spec"]


@pytest.fixture(autouse=True)
def undone():
    yield
    megatron_gdn.patch_megatron(gdn=False)


@pytest.mark.parametrize(
    "args",
    [
        Namespace(spec=None, megatron_to_hf_mode="bridge"),
        Namespace(spec=QWEN, megatron_to_hf_mode="bridge"),
        Namespace(spec=["megatron_gdn.specs", "hybrid_stack_spec"], megatron_to_hf_mode="raw"),
        Namespace(spec=["megatron_gdn.frameworks.slime", "get_qwen3_5_spec"]),
        Namespace(),
    ],
)
def test_what_bridge_or_megatron_builds_is_ours(args):
    enable(args)
    assert is_ours(Theirs)


@pytest.mark.parametrize("plugins", ["miles", "slime"])
def test_a_spec_with_layers_of_its_own_is_refused(plugins):
    spec = [QWEN[0].replace("miles", plugins), QWEN[1]]
    said = f"--spec {spec[0]} builds .* slime: give --spec megatron_gdn.frameworks.slime"
    with pytest.raises(ValueError, match=said):
        enable(Namespace(spec=spec, megatron_to_hf_mode="raw"))
    assert not is_ours(Theirs)
