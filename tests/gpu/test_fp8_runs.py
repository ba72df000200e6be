"""On one GPU with Transformer Engine: FP8 runs that are saved, go on, are exported and
generate."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, fp8_utils
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context, is_float8tensor
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_gdn.hf import (
    build_model,
    compare_folders,
    export_folder,
    load_hf_weights,
    save_hf_weights,
)
from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from megatron_gdn.inference.generate import (
    evaluating,
    generate,
    next_logits,
    static_context,
)
from megatron_gdn.specs import hybrid_stack_spec
from tests.fp8_twin import recipe as quantization_recipe
from tests.gpu.test_fp8 import BF16, FP8, HIDDEN, RECIPES, SIZES, error
from tests.hf.model_laws import megatron_state
from tests.hf.tiny_models import as_published, build
from tests.parallel import hybrid_model, model_config
from tests.precision.exact_resume_laws import train_step
from tests.precision.training import FLOAT16, Training, save, sharded_state, wrap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformer_engine", "world")]

LENGTHS = (128,)
# Without it Transformer Engine (2.20) loads no checkpoint that holds delayed scaling's
# history.
SWITCH = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")


def model_of(recipe: str | None, seed: int = 5, **changes) -> HybridModel:
    """Its weights are the seed's, and its steps repeat: the rule is plain torch."""
    fp8_utils.FP8GlobalStateManager.reset()  # as in a process of its own
    settings = {
        "ffn_hidden_size": 512,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": False,
        "init_method_std": 0.06,
        "add_bias_linear": False,
        "deterministic_mode": True,
    }
    if recipe is not None:
        settings |= {"fp8": "hybrid", "fp8_recipe": Fp8Recipe[recipe]}
    torch.manual_seed(seed)
    # linears and embedding draw from a stream of their own
    model_parallel_cuda_manual_seed(seed)
    config = model_config("G-G-", **{**SIZES, **settings, **changes})
    spec = hybrid_stack_spec("te", backend="reference")
    return hybrid_model(
        config, "G-G-", spec, vocab_size=64, max_sequence_length=256
    ).cuda()


def training_of(recipe: str | None, seed: int = 5) -> Training:
    return wrap(FLOAT16, model_of(recipe, seed))


def steps(training: Training, numbers: range) -> list[float]:
    return [train_step(training, number, LENGTHS, packed=False) for number in numbers]


def load(training: Training, folder, without: str | None = None) -> None:
    """No key may be missing or left over; those that hold ``without`` are then
    dropped."""
    wanted = sharded_state(training, is_loading=True)
    state = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RAISE_ALL
    )
    model = {
        k: v for k, v in state["model"].items() if without is None or without not in k
    }
    training.model.load_state_dict(model, strict=without is None)
    training.optimizer.load_state_dict(state["optimizer"])


def weights_of(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


def differing(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[str]:
    """The names of weights that are not equal bit for bit."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, weight in expected.items()
        if not torch.equal(found[name], weight)
    ]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["to fp8", "from fp8"])
def test_a_checkpoint_moves_between_bf16_and_fp8(tmp_path, way, recipe):
    """Bit for bit and by the same keys, the optimizer's included; and the run goes
    on."""
    first, second = (None, recipe) if way == "to fp8" else (recipe, None)
    training = training_of(first)
    steps(training, range(2))
    save(training, str(tmp_path / "saved"))
    expected = weights_of(training)
    other = training_of(second, seed=99)
    load(other, tmp_path / "saved")
    assert not differing(weights_of(other), expected)
    assert torch.tensor(steps(other, range(2, 4))).isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(tmp_path, recipe):
    training = training_of(recipe)
    first = weights_of(training)
    whole = steps(training, range(6))
    training = training_of(recipe)
    assert not differing(weights_of(training), first), "another start"
    assert steps(training, range(3)) == whole[:3], "the run itself does not repeat"
    middle = weights_of(training)
    save(training, str(tmp_path / "saved"))
    assert not differing(weights_of(training), middle), "saving changed the run"
    resumed = training_of(recipe, seed=99)
    load(resumed, tmp_path / "saved")
    assert not differing(weights_of(resumed), middle), "other weights after the load"
    assert steps(resumed, range(3, 6)) == whole[3:], (
        "weights are equal: optimizer or FP8's history"
    )
    if recipe == "delayed":  # the history of amax counts
        forgetful = training_of(recipe, seed=99)
        load(forgetful, tmp_path / "saved", without="_extra_state")
        assert steps(forgetful, range(3, 6)) != whole[3:]


def test_transformer_engine_says_how_a_history_of_delayed_scaling_is_loaded(
    tmp_path, monkeypatch
):
    if importlib.util.find_spec("transformer_engine.pytorch._extra_state") is None:
        pytest.skip("an older Transformer Engine, which loads it")
    training = training_of("delayed")
    steps(training, range(1))
    save(training, str(tmp_path / "saved"))
    monkeypatch.delenv(SWITCH)
    for recipe in ("delayed", None):
        with pytest.raises(RuntimeError, match=f"set {SWITCH}=1"):
            load(training_of(recipe), tmp_path / "saved")


@pytest.mark.parametrize(
    "fp8_param", [False, True], ids=["bf16 weights", "fp8 weights"]
)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_fp8_model_exports_to_hugging_face(tmp_path, recipe, fp8_param):
    """The file's own bits; of weights stored in FP8 their values, from a checkpoint
    too."""
    like = tmp_path / "like"
    out = tmp_path / "out"
    like.mkdir()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    as_published(build("Qwen3_5ForCausalLM", **sizes), like, extra=False)
    fp8 = {"fp8": "hybrid", "fp8_recipe": Fp8Recipe[recipe], "fp8_param": fp8_param}
    model, _ = build_model(like, modules="te", **fp8)
    load_hf_weights(model, like)
    stored = {name for name, p in model.named_parameters() if is_float8tensor(p)}
    assert bool(stored) == fp8_param
    assert not any("in_proj" in name or "out_proj" in name for name in stored)
    save_hf_weights(model, out, like=like)
    changed = {difference.key for difference in compare_folders(like, out)}
    if not fp8_param:
        assert not changed
        return
    assert all("mlp." in key or "self_attn." in key for key in changed)
    fc2 = "decoder.layers.1.mlp.linear_fc2.weight"
    values = model.get_parameter(fc2).dequantize().cpu()
    key = "model.layers.0.mlp.down_proj.weight"
    exact = SafetensorsFolder(like).read(key)
    assert 0 < error(values, exact.double()) < FP8
    assert torch.equal(SafetensorsFolder(out).read(key), values)
    saved = tmp_path / "saved"
    saved.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(saved))
    export_folder(saved, tmp_path / "exported", like)
    assert torch.equal(SafetensorsFolder(tmp_path / "exported").read(key), values)
    assert torch.equal(megatron_state(model)[fc2].cpu(), values)
    assert torch.equal(model.get_parameter(fc2).get_high_precision_init_val(), exact)


def logits_by_steps(model, tokens: torch.Tensor) -> torch.Tensor:
    """A prompt of five, then a token at a time."""
    with torch.no_grad(), evaluating(model):
        context = static_context(model, *tokens.shape)
        pieces = (tokens[:, :5], *tokens[:, 5:].split(1, dim=1))
        return torch.cat(
            [next_logits(model, piece, context) for piece in pieces], dim=1
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_generating_leaves_a_run_as_it_was(recipe):
    """Before the first step and between steps. FP8 products would refuse the rows."""
    prompt = torch.arange(15, device="cuda").view(3, 5)
    whole = steps(training_of(recipe), range(4))
    training = training_of(recipe)
    losses = []
    for numbers in (range(2), range(2, 4)):
        assert generate(training.model, prompt, count=4).shape == (3, 9)
        losses += steps(training, numbers)
    assert losses == whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_generates_with_the_weights_that_it_has_now(recipe):
    """In bf16, and not with the FP8 copies of the last micro-batch."""
    training = training_of(recipe)
    steps(training, range(2))
    with torch.no_grad():
        for name, weight in training.model.named_parameters():
            if name.endswith(("_proj.weight", "_fc1.weight", "_fc2.weight")):
                weight.copy_(torch.randn_like(weight) * 0.06)
    weights = weights_of(training)
    tokens = torch.randint(0, 64, (3, 9), device="cuda")
    found = logits_by_steps(training.model, tokens)
    plain = model_of(None)
    plain.load_state_dict(weights, strict=False)
    assert error(found, logits_by_steps(plain, tokens).double()) < BF16


@pytest.mark.parametrize("kept", [True, False], ids=["kept out", "switched on"])
def test_a_quantization_recipe_decides_for_in_proj(kept):
    """In a whole model, which gives its linears their names."""
    if kept:
        model = model_of("tensorwise", quant_recipe=quantization_recipe("*.in_proj"))
    else:
        settings = {
            "fp8_quantization_recipe": "tensorwise",
            "override_nonquantized_autocast": True,
        }
        model = model_of(
            None, quant_recipe=quantization_recipe("*.in_proj", **settings)
        )
    layer = model.decoder.layers[0].self_attention
    linear = layer.in_proj
    first = layer.dims.layout.main_width
    x = torch.randn(128, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with get_fp8_context(model.config):
        rows, _ = linear(x)
    exact = (
        F.rms_norm(x.double(), (HIDDEN,), eps=linear.eps) @ linear.weight.double().t()
    )
    assert error(rows[..., first:], exact[..., first:]) < BF16
    of_main = error(rows[..., :first], exact[..., :first])
    assert of_main < BF16 if kept else BF16 < of_main < FP8
    tokens = torch.randint(0, 64, (2, 128), device="cuda")
    model(tokens, torch.arange(128, device="cuda").expand(2, -1), None).sum().backward()
    assert linear.weight.grad.isfinite().all()
