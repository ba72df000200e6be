"""A clone's run goes on with Megatron's layer or ours, and back, in every format of
checkpoints."""

import subprocess

import pytest

from tests.launches.launching import FLAGS, SPEC, in_a_clone, launched, losses

pytestmark = in_a_clone

# its optimizer states are dp_reshardable by default
SHARDED = "--use-distributed-optimizer"
AGAIN = "--dist-ckpt-optim-fully-reshardable"
FORMATS = {
    "fully_reshardable": f"--bf16 {SHARDED} {AGAIN}",
    "plain bf16": "--bf16",
    "torch, plain bf16": "--bf16 --ckpt-format torch",
    "fp32, fully_reshardable": f"{SHARDED} {AGAIN}",
    "torch, plain fp32": "--ckpt-format torch",
}
# Files of gradient buffers, and the flags that make of each a file of named tensors.
BUFFERS = {
    "dp_reshardable": ("", AGAIN),
    "torch": (
        "--ckpt-format torch",
        f"--ckpt-format torch_dist --auto-detect-ckpt-format {AGAIN}",
    ),
}


def rounding(flags: str) -> float:
    """Of a loss of 5.5 over 128 tokens: bf16 rounds logits to 2^-9, fp32 64 channels to
    2^-24."""
    return 2.0**-9 if "--bf16" in flags else 64 * 2.0**-24


def trained(layer: str, until: int, flags: str) -> subprocess.CompletedProcess[str]:
    return launched(
        "pretrain_hybrid.py",
        2,
        "--spec",
        *SPEC[layer].split(),
        *FLAGS.split(),
        *flags.split(),
        f"--exit-interval={until}",
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_with_our_layer_and_back_with_megatrons(tmp_path, kind):
    """Steps 1-2 upstream, 3-4 ours, 5-6 upstream, beside upstream's with the same
    stops."""
    flags = FORMATS[kind]
    first, theirs, ours = (tmp_path / name for name in ("first", "theirs", "ours"))
    losses(trained("upstream", 2, f"{flags} --save {first}"))
    found, alone = (
        losses(trained(layer, 4, f"{flags} --load {first} --save {second}"))
        + losses(trained("upstream", 6, f"{flags} --load {second}"))
        for layer, second in (("ours", ours), ("upstream", theirs))
    )
    assert len(alone) == 4 and found == pytest.approx(alone, rel=rounding(flags))


@pytest.mark.parametrize(
    ("writer", "reader", "precision"),
    [
        ("upstream", "ours", "--bf16"),
        ("ours", "upstream", "--bf16"),
        ("ours", "upstream", ""),
    ],
    ids=["from upstream", "to upstream", "to upstream, fp32"],
)
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_file_of_buffers_is_refused_and_the_flags_are_named_that_make_one_that_loads(
    tmp_path, kind, writer, reader, precision
):
    """The layer that wrote it loads and saves it again with these flags, and the other
    goes on."""
    first, second, third = (tmp_path / name for name in "123")
    of_kind, again = BUFFERS[kind]
    flags = f"{precision} {SHARDED}"
    written = trained(writer, 2, f"{flags} {of_kind} --save {first}")
    losses(written)
    refused = trained(reader, 4, f"{flags} {of_kind} --load {first}")
    assert refused.returncode != 0
    said = written if writer == "ours" else refused
    assert f"save it again with {again}" in said.stderr + said.stdout
    alone = losses(
        trained(writer, 3, f"{flags} {of_kind} --load {first} --save {third}")
    )
    alone += losses(trained(writer, 4, f"{flags} {of_kind} --load {third}"))
    found = losses(
        trained(writer, 3, f"{flags} {again} --load {first} --save {second}")
    )
    found += losses(trained(reader, 4, f"{flags} {AGAIN} --load {second}"))
    assert len(alone) == 2 and found == pytest.approx(alone, rel=rounding(flags))


@pytest.mark.parametrize("kind", BUFFERS)
def test_megatrons_file_of_fp32_buffers_loads_here_and_not_with_megatrons_layer(
    tmp_path, kind
):
    """Megatron writes into a view of a parameter there, which autograd refuses."""
    first = tmp_path / "1"
    named = tmp_path / "2"
    flags = f"{SHARDED} {BUFFERS[kind][0]}"
    losses(trained("upstream", 2, f"{flags} --save {first}"))
    refused = trained("upstream", 4, f"{flags} --load {first}")
    assert "a view of a leaf Variable" in refused.stderr
    losses(trained("upstream", 2, f"{SHARDED} {AGAIN} --save {named}"))
    alone = losses(trained("upstream", 4, f"{SHARDED} {AGAIN} --load {named}"))
    found = losses(trained("ours", 4, f"{flags} --load {first}"))
    assert len(alone) == 2 and found == pytest.approx(alone, rel=rounding(flags))


@pytest.mark.parametrize("layer", SPEC)
def test_muon_that_ranks_share_takes_the_steps_of_one_on_each(layer):
    """The shares have different sizes, and with our layer different dtypes."""
    pytest.importorskip(
        "emerging_optimizers", reason="Megatron's Muon needs emerging-optimizers"
    )
    alone, shared = (
        losses(trained(layer, 4, f"--bf16 --optimizer muon {flag}"))
        for flag in ("", SHARDED)
    )
    assert len(alone) == 4 and shared == pytest.approx(alone, rel=rounding("--bf16"))
