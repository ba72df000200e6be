"""What Megatron's layers pass to a mixer and call on it, from their source (or
MEGATRON_LM's)."""

import ast
import inspect
from pathlib import Path

import pytest

from megatron_gdn import GatedDeltaNet, Mamba2Mixer
from megatron_gdn.mixers.arguments import refuse_unsupported
from tests.megatron_sources import SOURCES, class_of, tree_of

pytestmark = pytest.mark.parametrize("core", SOURCES)

# Looked up in fused inference, which is attention's alone.
_OF_ATTENTION = {"linear_qkv", "linear_proj"}
_FOLDERS = (
    "transformer",
    "ssm",
    "models/common",
    "models/gpt",
    "models/hybrid",
    "inference",
)


def calls(scope: ast.AST, function: str, first: str = "") -> list[ast.Call]:
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == function
        and (not first or (bool(node.args) and ast.unparse(node.args[0]) == first))
    ]


def keywords(call: ast.Call, scope: ast.AST) -> set[str]:
    """A call's keywords; of ``**name`` the keys that ``scope`` writes into it."""
    named = {keyword.arg for keyword in call.keywords if keyword.arg}
    starred = {
        ast.unparse(keyword.value) for keyword in call.keywords if not keyword.arg
    }
    for node in ast.walk(scope):
        written = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if written and ast.unparse(node.value) in starred:
            named.add(ast.literal_eval(node.slice))
    return named


def parameters(core: Path, file: str, name: str, method: str) -> set[str]:
    for node in class_of(core / file, name).body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            of = node.args
            return {a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)} - {
                "self"
            }
    raise AssertionError(f"{name} has no {method}")


def looked_up(core: Path, place: str) -> set[str]:
    """The attributes that Megatron looks up on a built layer's mixer."""
    found = set()
    for folder in _FOLDERS:
        for path in (core / folder).rglob("*.py"):
            if f".{place}." not in path.read_text() or "ops" in path.parts:
                continue
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Attribute):
                    owner = ast.unparse(node.value)
                    if owner.endswith(f".{place}") and "spec" not in owner:
                        found.add(node.attr)
    return found


def test_a_transformer_layer_builds_the_layer(core):
    layer = class_of(core / "transformer/transformer_layer.py", "TransformerLayer")
    (call,) = calls(layer, "build_module", "submodules.self_attention")
    given = keywords(call, layer)
    assert {"config", "layer_number", "pg_collection", "cp_comm_type"} <= given
    assert given <= set(inspect.signature(GatedDeltaNet).parameters)


def test_a_transformer_layer_calls_the_layer(core):
    file = tree_of(core / "transformer/transformer_layer.py")
    ours = inspect.signature(GatedDeltaNet.forward).parameters
    for call in calls(file, "self.self_attention"):
        assert len(call.args) == 1
        for name in keywords(call, file) - set(ours):
            try:
                refuse_unsupported(None, {name: object()})
            except NotImplementedError as refused:
                assert name in str(refused)


def test_a_mamba_layer_builds_and_calls_the_mixer(core):
    layer = class_of(core / "ssm/mamba_layer.py", "MambaLayer")
    (built,) = calls(layer, "build_module", "submodules.mixer")
    positional = [None] * (len(built.args) - 1)
    given = keywords(built, layer)
    ours = inspect.signature(Mamba2Mixer)
    assert given <= set(ours.parameters)
    ours.bind(*positional, submodules=None, **dict.fromkeys(given))
    (called,) = calls(layer, "self.mixer")
    given = dict.fromkeys(keywords(called, layer))
    inspect.signature(Mamba2Mixer.forward).bind(
        None, *[None] * len(called.args), **given
    )


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_layers_take_what_megatrons_own_mixers_take(core, method):
    file, name = "ssm/gated_delta_net.py", "GatedDeltaNet"  # before 0.19
    if not (core / file).exists():
        file = "ssm/gated_delta_net/gdn.py"
        if method == "__init__":
            file = "ssm/gated_delta_net/common.py"
            name = "_GDNBase"
    theirs = parameters(core, file, name, method)
    assert theirs <= set(inspect.signature(getattr(GatedDeltaNet, method)).parameters)
    theirs = parameters(core, "ssm/mamba_mixer.py", "MambaMixer", method)
    assert theirs <= set(inspect.signature(getattr(Mamba2Mixer, method)).parameters)


def test_the_layers_have_what_megatron_looks_up_on_them(core):
    names = looked_up(core, "self_attention")
    assert "backward_dw" in names
    lacking = {name for name in names if not hasattr(GatedDeltaNet, name)}
    assert lacking <= _OF_ATTENTION
    names = looked_up(core, "mixer")
    assert "mamba_state_shapes_per_request" in names
    source = inspect.getsource(Mamba2Mixer)
    assert {name for name in names if not hasattr(Mamba2Mixer, name)} <= {
        name for name in names if f"self.{name} =" in source
    }


def test_fp8_linears_have_what_the_split_and_the_padding_read(core):
    """Where Transformer Engine is missing, Megatron does not define them."""
    linears = core / "extensions/transformer_engine.py"
    for name in ("TELinear", "TELayerNormColumnParallelLinear"):
        methods = {
            node.name for node in class_of(linears, name).body if hasattr(node, "name")
        }
        assert {"finish_init", "will_execute_quantized"} <= methods
        assert "self.te_quant_params" in linears.read_text()
    names = {ast.unparse(node) for node in ast.walk(tree_of(core / "fp8_utils.py"))}
    assert {
        "_fp8_inference_wrapped_modules.add(module)",
        "FP8GlobalStateManager",
    } <= names
    assert "module.forward = padded_forward" in names
