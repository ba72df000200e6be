"""``MEGATRON_GDN_OPTIONS``, and the shell files of examples/launch with stand-ins for
Slurm."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron_gdn import GatedDeltaNet
from megatron_gdn.compat import observe
from megatron_gdn.specs import layer
from megatron_gdn.specs.layer import (
    OPTIONS_VARIABLE,
    parse_options,
    with_launch_options,
)
from tests.examples.launching import ROOT, free_port
from tests.processes import python


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("linear_cp_mode=chunkwise", {"linear_cp_mode": "chunkwise"}),
        ("cp_ranks_per_machine=4", {"cp_ranks_per_machine": 4}),
        (
            "backend=fla, allow_neg_eigval=True,",
            {"backend": "fla", "allow_neg_eigval": True},
        ),
        (
            " A_init_range=(1, 16) conv_init=0.1",
            {"A_init_range": (1, 16), "conv_init": 0.1},
        ),
    ],
)
def test_names_and_values_are_read(text, options):
    assert parse_options(text) == options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cp_layuot=zigzag", "cp_layout"),
        ("layer_number=3", "the names A_init_range, allow_neg_eigval"),
        ("chunkwise", "it must be name=value"),
        ("allow_neg_eigval=true", "allow_neg_eigval='true'; it must be True or False"),
    ],
)
def test_what_is_no_option_is_refused_and_the_legal_names_are_said(text, said):
    with pytest.raises(ValueError, match=OPTIONS_VARIABLE) as error:
        parse_options(text)
    assert said in str(error.value)


def test_what_a_launch_sets_is_said_once(monkeypatch, caplog):
    caplog.set_level("INFO")
    for text, options in (("", {}), ("backend=fla", {"backend": "fla"})):
        monkeypatch.setenv(OPTIONS_VARIABLE, text)
        monkeypatch.setattr(
            layer, "_launch_options", cache(layer._launch_options.__wrapped__)
        )
        observe.log_once.cache_clear()
        for _ in range(2):
            assert with_launch_options(GatedDeltaNet, {}) == options
    assert caplog.text.count(f"{OPTIONS_VARIABLE}: layers are built with") == 1
    assert "backend='fla'" in caplog.text


SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_gdn.specs import gpt_block_spec, hybrid_stack_spec

def options(layer):
    return layer.submodules.self_attention.params

def of_both(hybrid):
    layers = hybrid.submodules
    return options(layers.gdn_layer), layers.mamba_layer.submodules.mixer.params

def of_k(hybrid):
    return options(hybrid.params["layers"]["K"])

config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="local",
    experimental_attention_variant="gated_delta_net", linear_attention_freq=[1],
)
print(of_both(hybrid_stack_spec), options(gpt_block_spec(config, pp_rank=0).layer_specs[0]))
print(of_both(hybrid_stack_spec("local", linear_cp_mode="headwise")))
print(of_k(hybrid_stack_spec), of_k(hybrid_stack_spec("local", kda={"gate_lower_bound": -4.0})))
print(of_k(hybrid_stack_spec("local", recompute="none")))
"""


@pytest.mark.slow
def test_the_specs_of_a_launch_take_them_and_calls_go_before_them(monkeypatch):
    monkeypatch.setenv(
        OPTIONS_VARIABLE,
        "linear_cp_mode=chunkwise,recompute=full,gate_lower_bound=-5.0,backend=flash_qla",
    )
    ran = python("-c", SCRIPT)
    chunkwise = {"linear_cp_mode": "chunkwise"}
    launched = chunkwise | {"recompute": "full", "backend": "flash_qla"}
    of_k = chunkwise | {"recompute": "full"}
    named = launched | {"linear_cp_mode": "headwise"}
    assert ran.stdout.splitlines()[-4:] == [
        f"{(launched, chunkwise)} {launched}",
        f"{(named, {'linear_cp_mode': 'headwise'})}",
        f"{of_k | {'gate_lower_bound': -5.0}} {of_k | {'gate_lower_bound': -4.0}}",
        f"{chunkwise | {'gate_lower_bound': -5.0}}",
    ]
    assert (
        f"{OPTIONS_VARIABLE}: layers are built with linear_cp_mode='chunkwise'"
        in ran.stderr
    )


FILES = sorted((ROOT / "examples/launch").glob("*.sh"))
OF_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.zeros(dist.get_world_size())
ranks[dist.get_rank()] = 1
dist.all_reduce(ranks)
patched = "megatron_gdn.enable" in sys.modules
if dist.get_rank() == 0:
    Path(sys.argv[2]).write_text(f"{ranks.tolist()} {sys.argv[1:2]} {patched}")
dist.destroy_process_group()
"""
SRUN = """#!/usr/bin/env bash
shift  # the flag
SLURM_NODEID=0 "$@" &
SLURM_NODEID=1 "$@"
wait
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[0-1]" ] && echo localhost && echo other
"""


def launch(folder: Path, name: str, **environment: str) -> str:
    script = folder / "pretrain_my.py"
    seen = folder / "seen"
    script.write_text(OF_RANKS)
    path = os.pathsep.join(
        (str(folder), str(Path(sys.executable).parent), os.environ["PATH"])
    )
    more = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PORT": str(free_port()),
    }
    run = subprocess.run(
        [ROOT / "examples/launch" / name, script, "--lr", seen],
        cwd=ROOT,
        timeout=200,
        env=os.environ | more | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return seen.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_legal_bash(file):
    subprocess.run(["bash", "-n", file], check=True)
    assert os.access(file, os.X_OK)


@pytest.mark.nightly
def test_one_node_starts_a_process_for_each_gpu(tmp_path):
    assert launch(tmp_path, "one_node.sh", GPUS="2") == "[1.0, 1.0] ['--lr'] True"


@pytest.mark.nightly
def test_slurm_starts_the_processes_of_all_nodes(tmp_path):
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "7",
    }
    assert launch(tmp_path, "slurm.sh", GPUS="1", **slurm) == "[1.0, 1.0] ['--lr'] True"


def test_a_node_that_does_not_know_its_number_says_so():
    run = subprocess.run(
        [ROOT / "examples/launch/several_nodes.sh", "x.py"],
        env={"PATH": os.environ["PATH"], "NODES": "2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0 and "which of them this is, from 0" in run.stderr
