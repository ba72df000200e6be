"""`megatron_gdn.patch_megatron`, and the three ways to have it called."""

import argparse
import copy
import importlib
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron import core as megatron_core
from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Theirs
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.spec_utils import build_module
from megatron.training import arguments, global_vars, training

import megatron_gdn
from megatron_gdn import launch
from megatron_gdn.frameworks.patch import add_flags_of_kda
from megatron_gdn.specs import kimi_delta_attention_spec
from tests.parallel import make_config, parallel
from tests.processes import ROOT, python
from tests.upstream_gdp import HAS_GDP

pytestmark = pytest.mark.usefixtures("undone")


@pytest.mark.slow
def test_megatrons_own_specs_build_our_layers():
    """Three files of laws, behind a stand-in for Transformer Engine, in a process of
    its own."""
    plugin = "-p", "tests.frameworks.behind_te_on_cpu"
    files = ("patch_laws.py", "tree_laws.py", "kimi_te_laws.py")
    laws = [f"tests/frameworks/{name}" for name in files]
    run = python("-m", "pytest", *plugin, *laws, timeout=None, TORCHDYNAMO_DISABLE="1")
    assert " passed" in run.stdout, run.stdout[-4000:]


def _with_constructor(change: Callable[[inspect.Signature], inspect.Signature]):
    def constructor(self): ...

    constructor.__signature__ = change(inspect.signature(Theirs.__init__))
    return patch.object(Theirs, "__init__", constructor)


def _replace(parameters, name, **changes):
    return [
        each.replace(**changes) if each.name == name else each for each in parameters
    ]


@pytest.mark.parametrize(
    "change, told",
    [
        (
            lambda each: [
                *each,
                inspect.Parameter("gates", inspect.Parameter.KEYWORD_ONLY),
            ],
            "gates is not known",
        ),
        (
            lambda each: [each[0], each[2], each[1], *each[3:]],
            "submodules has another place",
        ),
        (
            lambda each: _replace(each, "use_qk_l2norm", default=False),
            "use_qk_l2norm=False is True in ours",
        ),
    ],
)
def test_a_constructor_that_we_do_not_know_is_refused(change, told):
    rewritten = _with_constructor(
        lambda signature: signature.replace(
            parameters=change([*signature.parameters.values()])
        )
    )
    with rewritten, pytest.raises(TypeError, match=told):
        megatron_gdn.patch_megatron()
    assert "__new__" not in vars(MambaMixer)


def test_an_unknown_option_is_refused_before_anything_is_replaced():
    before = vars(Theirs).get("__new__")
    with pytest.raises(
        TypeError, match="has no option kernel. Its options are backend, cp_"
    ):
        megatron_gdn.patch_megatron(gdn=True, mamba={"kernel": "fla"})
    with pytest.raises(TypeError, match="has no option bias"):
        megatron_gdn.patch_megatron(gdn={"bias": True})
    assert vars(Theirs).get("__new__") is before


@pytest.mark.parametrize(
    "given, error, told",
    [
        (
            {"gdn": "fla"},
            TypeError,
            "given 'fla' for megatron_gdn.GatedDeltaNet; it takes True",
        ),
        ({"mamba": 1}, TypeError, "given 1 for megatron_gdn.Mamba2Mixer"),
        (
            {"gdn": {"backend": "triton"}},
            ValueError,
            "unknown backend 'triton' of Gated DeltaNet;",
        ),
        (
            {"mamba": {"backend": "flash_qla"}},
            ValueError,
            "'flash_qla' of Mamba2; use 'auto' or",
        ),
        (
            {"gdn": {"linear_cp_mode": "ring"}},
            ValueError,
            "linear_cp_mode 'ring'; use one of",
        ),
        (
            {"gdn": {"cp_layout": "striped"}},
            ValueError,
            "layout 'striped'; use one of 'auto'",
        ),
        (
            {"gdn": {"rule_operands": "tf32"}},
            ValueError,
            "'tf32'.* use 'fp16' or 'bf16'",
        ),
        ({"gdn": {"recompute": "all"}}, ValueError, "recompute='all' is not known"),
        ({"gdn": {"cp_ranks_per_machine": 0}}, ValueError, "cp_ranks_per_machine"),
        (
            {"gdn": {"output_gate_activation": "relu"}},
            ValueError,
            "activation='relu'; use one of",
        ),
    ],
    ids=str,
)
def test_an_illegal_value_is_refused_before_anything_is_replaced(given, error, told):
    before = [vars(cls).get("__new__") for cls in (Theirs, MambaMixer)]
    with pytest.raises(error, match=told):
        megatron_gdn.patch_megatron(**given)
    assert [vars(cls).get("__new__") for cls in (Theirs, MambaMixer)] == before


def test_a_class_that_other_code_has_changed_is_left_to_it():
    with (
        patch.object(
            MambaMixer, "__new__", lambda cls, *args, **kwargs: object.__new__(cls)
        ),
        pytest.raises(
            RuntimeError, match=r"MambaMixer.__new__ was replaced by other code"
        ),
    ):
        megatron_gdn.patch_megatron(mamba=True)


def enable(given: str) -> list[bool]:
    """Whether Gated DeltaNet and Mamba2 are ours after the import, as in a new
    process."""
    sys.modules.pop("megatron_gdn.enable", None)
    with patch.dict(os.environ, MEGATRON_GDN=given):
        importlib.import_module("megatron_gdn.enable")
    return [is_ours(cls) for cls in (Theirs, MambaMixer)]


def is_ours(cls: type) -> bool:
    """A call without what is required: our constructor, or theirs, says so."""
    with pytest.raises(TypeError) as raised:
        cls(bias=False)
    package = Path(megatron_gdn.__file__).parent
    return package in Path(raised.traceback[-1].path).parents


@pytest.mark.parametrize(
    "given, replaced",
    [("", [True, False]), ("mamba", [False, True]), ("gdn, mamba", [True, True])],
)
def test_importing_enable_is_the_call(given, replaced):
    assert enable(given) == replaced


def test_enable_imports_the_specs_which_make_the_letter_of_kda_known():
    with patch.object(
        importlib, "import_module", wraps=importlib.import_module
    ) as imported:
        enable("")
    imported.assert_any_call("megatron_gdn.specs")
    assert validate_segment_layers("K-") == ["K", "-"]


class TheirsOfKDA:
    """With the constructor of newer Megatrons' class."""

    def __init__(
        self,
        config,
        submodules,
        layer_number=None,
        bias=False,
        conv_bias=False,
        conv_init=None,
        use_qk_l2norm=True,
        A_init_range=(1, 16),
        pg_collection=None,
        *,
        name=None,
        cp_comm_type=None,
        pp_layer_offset=None,
        is_mtp_layer=False,
    ): ...


def built_by_megatrons_class(**given) -> tuple[bool, Any]:
    """Whether a call of Megatron's class builds our layer after
    ``patch_megatron(**given)``, and the layer's options."""
    made = type("KimiDeltaAttention", (), {"__init__": TheirsOfKDA.__init__})
    with (
        parallel(),
        patch.object(gated_delta_net, "KimiDeltaAttention", made, create=True),
    ):
        megatron_gdn.patch_megatron(**given)
        try:
            parts = kimi_delta_attention_spec("local").submodules
            layer: Any = made(make_config(), parts, layer_number=1)
        finally:
            megatron_gdn.patch_megatron(gdn=False)
        ours = isinstance(layer, megatron_gdn.KimiDeltaAttention)
        return ours, layer.options if ours else None


@pytest.mark.parametrize(
    ("given", "ours"),
    [({}, True), ({"gdn": False}, False), ({"gdn": False, "kda": True}, True)],
)
def test_a_megatron_with_kimi_delta_attention_builds_ours(pools, given, ours):
    assert pools(1).run(built_by_megatrons_class, **given)[0][0] is ours


def test_it_takes_the_options_of_the_call(pools):
    given = {"forget_rank": 4, "recompute": "light"}
    _, options = pools(1).run(built_by_megatrons_class, kda=given)[0]
    assert options.forget_rank == 4 and options.recompute == "light"


def test_options_of_kda_are_not_dropped_where_megatron_has_no_such_class(monkeypatch):
    monkeypatch.delattr(gated_delta_net, "KimiDeltaAttention", raising=False)
    for nothing in (True, {}):
        megatron_gdn.patch_megatron(kda=nothing)
    with pytest.raises(ValueError, match="has no KimiDeltaAttention. .* to hybrid_st"):
        megatron_gdn.patch_megatron(kda={"forget_rank": 4})


def test_nor_are_those_of_gated_deltanet_2(monkeypatch):
    monkeypatch.delattr(gated_delta_net, "GatedDeltaNet2", raising=False)
    megatron_gdn.patch_megatron(gdn2=True)
    with pytest.raises(ValueError, match="options of gdn2, .* has no GatedDeltaNet2"):
        megatron_gdn.patch_megatron(gdn2={"recompute": "light"})


@pytest.mark.skipif(HAS_GDP, reason="this Megatron has the class")
def test_nor_are_those_of_gated_delta_product():
    megatron_gdn.patch_megatron(gdp=True)
    with pytest.raises(
        ValueError, match="options of gdp, .* no GatedDeltaProductMixer"
    ):
        megatron_gdn.patch_megatron(gdp={"num_householder": 4})


def test_a_layer_that_megatron_has_built_is_copied_as_it_is():
    layer = object.__new__(Theirs)
    megatron_gdn.patch_megatron()
    assert type(copy.copy(layer)) is Theirs


def test_a_subclass_is_built_as_it_is_and_named(caplog):
    class Special(Theirs): ...

    megatron_gdn.patch_megatron()
    assert is_ours(Theirs) and not is_ours(Special)
    assert "Special is a subclass of Megatron's GatedDeltaNet" in caplog.text


@pytest.mark.skipif(find_spec("mcore_bridge") is not None, reason="is installed")
@pytest.mark.parametrize("is_installed", [False, True])
def test_mcore_bridges_subclass_is_told_of_where_it_can_be(
    monkeypatch, caplog, tmp_path, is_installed
):
    if is_installed:
        (tmp_path / "mcore_bridge.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    megatron_gdn.patch_megatron(mamba=True)
    assert caplog.text.count("mcore-bridge's subclass of it too") == is_installed


FLAGS = "--kda-f-lora-rank 4 --kda-gate-lora-rank 3 --kda-lower-bound -4.5"


def layer_of_a_launch() -> tuple[int, int, float]:
    """The ranks and the bound of a layer whose config has no fields about them."""
    with (
        parallel(),
        patch.object(arguments, "add_megatron_arguments"),
        patch.object(global_vars, "_GLOBAL_ARGS"),
    ):
        arguments.add_megatron_arguments = add_theirs
        for _ in range(2):
            add_flags_of_kda()
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        args = parser.parse_args([*FLAGS.split(), "--kda-safe-gate"])
        global_vars._GLOBAL_ARGS = args
        spec = kimi_delta_attention_spec("local")
        layer: Any = build_module(spec, make_config(), layer_number=1)
        return layer.dims.forget_rank, layer.dims.output_rank, layer.gate_lower_bound


add_theirs = arguments.add_megatron_arguments


def test_a_launch_takes_the_flags_of_newer_megatrons(pools):
    """The layer reads them, also where the config has no such fields."""
    assert pools(1).run(layer_of_a_launch) == [(4, 3, -4.5)]


@pytest.mark.parametrize("rank, lines", [("0", 1), ("3", 0)])
def test_one_rank_tells(monkeypatch, caplog, rank, lines):
    monkeypatch.setenv("RANK", rank)
    megatron_gdn.patch_megatron()
    assert len(caplog.records) == lines


def test_verl_finds_a_plugin_which_waits_for_the_environment_variable(
    monkeypatch, caplog
):
    """verl imports what stands in this group, and swallows what it raises."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    plugin = points["verl.plugins"]["megatron_gdn"]
    for given, ours in (("", False), ("gdn", True)):
        for name in (plugin, "megatron_gdn.enable"):
            sys.modules.pop(name, None)
        monkeypatch.setenv("MEGATRON_GDN", given)
        importlib.import_module(plugin)
        assert ("megatron_gdn.enable" in sys.modules) is ours
    for name in (plugin, "megatron_gdn.enable"):
        sys.modules.pop(name)
    monkeypatch.setenv("MEGATRON_GDN", "rwkv")
    said = "MEGATRON_GDN='rwkv' is not legal; it names the layers .* 'gdn,mamba'"
    with pytest.raises(ValueError, match=said):
        importlib.import_module(plugin)
    assert "this process trains Megatron's own" in caplog.text


def test_launch_says_in_one_line_that_the_environment_names_no_layer(
    monkeypatch, tmp_path, capsys
):
    (script := tmp_path / "train.py").touch()
    monkeypatch.setenv("MEGATRON_GDN", "gdm")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("megatron_gdn.enable", None)
    assert launch.main([str(script)]) == 2
    assert capsys.readouterr().err.startswith("error: MEGATRON_GDN='gdm' is not legal")


SCRIPT = """
import json, sys
from pathlib import Path
import beside
patched = "megatron_gdn.enable" in sys.modules
Path(__file__).with_name("seen").write_text(json.dumps([__name__, sys.argv, sys.path[0], patched]))
"""


def test_launch_runs_a_script_as_python_does(monkeypatch, tmp_path):
    script = tmp_path / "pretrain_my.py"
    seen = tmp_path / "seen"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    python(script, "--lr", "1")
    as_python = json.loads(seen.read_text())
    assert as_python == ["__main__", [str(script), "--lr", "1"], str(tmp_path), False]
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    for named in (str(script), "pretrain_my"):
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        seen.unlink()
        launch.main([named, "--lr", "1"])
        assert json.loads(seen.read_text()) == [*as_python[:3], True]


@pytest.mark.parametrize(
    ("imported", "ours"), [("megatron.core", False), ("megatron.training", True)]
)
def test_launched_scripts_of_megatrons_training_have_our_flops_and_flags(
    monkeypatch, tmp_path, imported, ours
):
    (script := tmp_path / "train.py").write_text(f"import {imported}")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(training, "num_floating_point_operations", lambda *_: 0)
    monkeypatch.setattr(arguments, "add_megatron_arguments", add_theirs)
    assert launch.main([str(script)]) == 0
    counter = training.num_floating_point_operations.__module__
    assert (counter == "megatron_gdn.models.stack") is ours
    assert (arguments.add_megatron_arguments is not add_theirs) is ours


READING = """
import megatron.core
from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers
letters = validate_segment_layers("K-")
from megatron.training import training
print(megatron.core.__file__, *letters, training.num_floating_point_operations.__module__)
"""


@pytest.mark.slow
def test_a_launched_script_finds_its_own_megatron_the_letter_of_kda_and_our_flops(
    tmp_path,
):
    """Not the installed Megatron, of which a clone's megatron.training may be another
    version. Megatron's scripts read the pattern before they import what ``--spec``
    names."""
    script = tmp_path / "pretrain_my.py"
    megatron = Path(megatron_core.__file__).parent
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "core").symlink_to(megatron)
    script.write_text(READING)
    counter = "megatron_gdn.models.stack"
    seen = f"{tmp_path}/megatron/core/__init__.py K - {counter}\n"
    assert python("-m", "megatron_gdn.launch", script).stdout == seen
