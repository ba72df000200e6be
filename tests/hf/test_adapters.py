"""A model with low-rank adapters loads Hugging Face weights and is saved with them
merged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_gdn.hf import (
    export_folder,
    load_hf_weights,
    read_hf_config,
    save_hf_weights,
)
from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from tests.hf.model_laws import (
    TOKENS,
    _compare_logits,
    _rounding_noise,
    build_megatron,
    hf_model,
    logits_of,
)
from tests.hf.test_models import assert_logits_agree
from tests.parallel import parallel

# The linears of Gated DeltaNet, of attention and of the MLP, by the names that Bridge
# matches.
TARGETS = [
    "in_proj",
    "out_proj",
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]
RANK = 4
ALPHA = 8
GDN = "decoder.layers.0.self_attention"


class Wrapper(nn.Module):
    """What an export reads of Bridge's LoRA, without tensor parallelism."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = linear, nn.Module()
        rows, columns = linear.weight.shape
        self.adapter.linear_in = nn.Linear(columns, RANK, bias=False)
        self.adapter.linear_out = nn.Linear(RANK, rows, bias=False)

    @property
    def weight(self) -> Tensor:
        delta = self.adapter.linear_out.weight @ self.adapter.linear_in.weight
        return self.to_wrap.weight + ALPHA / RANK * delta

    def forward(self, x: Tensor):
        rows, bias = self.to_wrap(x)
        return rows + ALPHA / RANK * self.adapter.linear_out(
            self.adapter.linear_in(x)
        ), bias


class WithoutWeight(nn.Module):
    """As Bridge's DoRA, which has no merged weight."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = linear, nn.Module()


def wrap_by_hand(model: nn.Module, wrapper: Callable = Wrapper) -> nn.Module:
    for layer in model.decoder.layers:
        for name in ("self_attention", "mlp"):
            owner = getattr(layer, name)
            for target in set(TARGETS) & owner._modules.keys():
                setattr(owner, target, wrapper(getattr(owner, target)))
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Adapters whose B is not zero."""
    torch.manual_seed(21)
    model = wrap_by_hand(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linear_out." in name:
                parameter.normal_(std=0.05)
    return model


def in_fp32(folder: Path, target: Path) -> Path:
    """The same Hugging Face model with every tensor in fp32, so that an export does not
    round."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors = {key: tensor.float() for key, tensor in load_file(path).items()}
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        else:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def merged_export_agrees(source, target, first):
    """The export's logits beside the adapted model's; ``first``: adapted, then
    loaded."""
    config = read_hf_config(source)
    torch.manual_seed(5)
    tokens = torch.randint(config.vocab_size, (2, TOKENS))
    with parallel(), torch.no_grad():
        model = build_megatron(config, "hybrid")
        if first:
            model = with_adapters(model)
        load_hf_weights(model, source)
        plain = logits_of(model, tokens, config.vocab_size) if not first else None
        if not first:
            model = with_adapters(model)
        model.eval()
        ours = logits_of(model, tokens, config.vocab_size)
        assert plain is None or (ours - plain).abs().max() > 0.05 * plain.abs().max()
        before = {name: p.clone() for name, p in model.named_parameters()}
        save_hf_weights(model, target, like=source)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        theirs_model = hf_model(target)
        theirs = theirs_model(tokens, use_cache=False).logits
        return _compare_logits(
            ours, theirs, _rounding_noise(theirs_model, tokens, theirs)
        )


def saving_fails(source: Path, target: Path) -> str:
    with parallel(1):
        model = wrap_by_hand(
            build_megatron(read_hf_config(source), "hybrid"), WithoutWeight
        )
        try:
            save_hf_weights(model, target, like=source)
        except NotImplementedError as error:
            return str(error)
        return f"saved {sorted(SafetensorsFolder(target).specs)}"


def loading_fails_beside_an_adapter(source: Path) -> str:
    """A layer of the user's own that is called ``adapter`` and wraps no linear."""
    with parallel(1):
        model = build_megatron(read_hf_config(source), "hybrid")
        model.decoder.layers[0].adapter = nn.Linear(2, 2, bias=False)
        with pytest.raises(ValueError) as raised:
            load_hf_weights(model, source)
    return str(raised.value)


def save_adapted_checkpoint(source: Path, target: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    with parallel(1):
        model = build_megatron(read_hf_config(source), "hybrid")
        state = model.sharded_state_dict()
        key = f"{GDN}.in_proj.adapter.linear_in.weight"
        state[key] = ShardedTensor.from_rank_offsets(key, torch.zeros(RANK, 24))
        target.mkdir()
        dist_checkpointing.save({"model": state}, str(target))


@pytest.mark.each_value
@pytest.mark.parametrize("first", [False, True], ids=["loaded first", "adapted first"])
@pytest.mark.parametrize("name", ["dense", "next dense layer"])
def test_a_merged_export_is_the_model_with_its_adapters(
    pools, hf_folder, tmp_path, name, first
):
    """fp32; W x + B (A x) is another order: tokens that one rounding moves further are
    excepted."""
    source = in_fp32(hf_folder(name), tmp_path / "fp32")
    (found,) = pools(1).run(merged_export_agrees, source, tmp_path / "saved", first)
    assert_logits_agree(found, noisy=True)


def test_an_adapter_that_cannot_be_merged_is_refused_by_name(
    pools, hf_folder, tmp_path
):
    (said,) = pools(1).run(saving_fails, hf_folder("dense"), tmp_path / "saved")
    assert said.startswith(f"{GDN}.in_proj is a WithoutWeight"), said
    assert not (tmp_path / "saved").exists()


def test_a_module_that_is_called_adapter_and_wraps_nothing_is_named(pools, hf_folder):
    (said,) = pools(1).run(loading_fails_beside_an_adapter, hf_folder("dense"))
    assert "no tensor for decoder.layers.0.adapter.weight of the model" in said


def test_a_checkpoint_with_adapters_is_not_exported_without_them(
    pools, hf_folder, tmp_path
):
    pools(1).run(save_adapted_checkpoint, hf_folder("dense"), tmp_path / "checkpoint")
    with pytest.raises(
        ValueError, match=r"has adapters, .*save_hf_weights, which merges them"
    ):
        export_folder(
            tmp_path / "checkpoint", tmp_path / "saved", like=hf_folder("dense")
        )
