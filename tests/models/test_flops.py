"""The catalogue's numbers are the published models', and its FLOPs what torch
counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_gdn.hf import parse_hf_config
from megatron_gdn.models import ENTRIES, Model, Stack, find
from megatron_gdn.models.stack import CHUNK
from megatron_gdn.ops.rules.token_rule import recurrence
from tests.distributed.mixers import whole
from tests.hf.tiny_models import model_class
from tests.ranks import on_ranks

CONFIG_OF = {
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "NemotronHForCausalLM": "NemotronHConfig",
    "KimiLinearForCausalLM": "KimiLinearConfig",
}
# Of the vision encoder of Qwen3.5, 3.6 and 3.8 from 9B on; its output is as wide as the
# model.
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}


def config_of(architecture: str, fields: dict[str, Any]) -> Any:
    return getattr(transformers, CONFIG_OF[architecture])(**fields)


def vision_parameters(hidden_size: int) -> int:
    config = transformers.Qwen3_5Config(
        vision_config=VISION | {"out_hidden_size": hidden_size}
    )
    with torch.device("meta"):
        model = model_class("Qwen3_5VisionModel")(config.vision_config)
    return sum(parameter.numel() for parameter in model.parameters())


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(G), exp(G_C - G) and exp(G_i - G_j) of one chunk, for each head."""
    G = g.cumsum(-1)
    pairs = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
    return G.exp()[..., None], (G[:, -1:] - G).exp()[..., None], pairs


def delta_rule(q, k, v, g, beta, S):
    """q, k ``[T, G, K]``; v ``[T, H, V]``; g, beta ``[T, H]``; S ``[H, K, V]``."""
    R = v.shape[1] // k.shape[1]
    outputs = []

    def of_values(x: Tensor) -> Tensor:
        return x.repeat_interleave(R, 0)

    for start in range(0, len(k), CHUNK):
        part = slice(start, start + CHUNK)
        q_, k_, v_ = (x[part].transpose(0, 1) for x in (q, k, v))
        into, out_of, gamma = _decays(g[part].T)
        b = beta[part].T[..., None]
        L = b * of_values(k_ @ k_.mT) * gamma.tril(-1)
        written = b * (v_ - into * of_values(k_) @ S)
        x = torch.linalg.solve_triangular(
            L + torch.eye(CHUNK), written, upper=False, unitriangular=True
        )
        P = of_values(q_ @ k_.mT) * gamma
        outputs.append((into * of_values(q_)) @ S + P @ x)
        S = into[:, -1:] * S + (out_of * of_values(k_)).mT @ x
    return torch.cat(outputs, 1).transpose(0, 1), S


def kda_rule(q, k, v, g, beta, S):
    """As :func:`delta_rule` with g ``[T, H, K]``, slow: no sum over a chunk is below
    -60."""
    R = v.shape[1] // k.shape[1]
    outputs = []
    for start in range(0, len(k), CHUNK):
        part = slice(start, start + CHUNK)
        q_, k_ = (x[part].transpose(0, 1).repeat_interleave(R, 0) for x in (q, k))
        G, v_ = g[part].transpose(0, 1).cumsum(1), v[part].transpose(0, 1)
        b = beta[part].T[..., None]
        grown = k_ * (-G).exp()
        L = b * ((k_ * G.exp()) @ grown.mT).tril(-1)
        written = b * (v_ - (k_ * G.exp()) @ S)
        x = torch.linalg.solve_triangular(
            L + torch.eye(CHUNK), written, upper=False, unitriangular=True
        )
        P = ((q_ * G.exp()) @ grown.mT).tril()
        outputs.append((q_ * G.exp()) @ S + P @ x)
        S = G[:, -1].exp()[..., None] * S + (k_ * (G[:, -1:] - G).exp()).mT @ x
    return torch.cat(outputs, 1).transpose(0, 1), S


def mamba2_rule(
    x: Tensor, B: Tensor, C: Tensor, g: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """x ``[T, H, V]``; B, C ``[T, G, K]``; g ``[T, H]``; S ``[H, K, V]``."""
    R = x.shape[1] // B.shape[1]
    outputs = []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        x_, B_, C_ = (y[part].transpose(0, 1) for y in (x, B, C))
        into, out_of, gamma = _decays(g[part].T)
        P = (C_ @ B_.mT).repeat_interleave(R, 0) * gamma
        B_, C_ = (y.repeat_interleave(R, 0) for y in (B_, C_))
        outputs.append((into * C_) @ S + P @ x_)
        S = into[:, -1:] * S + (out_of * B_).mT @ x_
    return torch.cat(outputs, 1).transpose(0, 1), S


TOKENS = 192
GDN = {
    "hidden_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "hidden_size": 24,
    "mamba_num_heads": 6,
    "mamba_num_groups": 2,
    "mamba_head_dim": 14,
    "mamba_state_dim": 10,
}


def solve(A, B, *args, out_shape=None, **kwargs) -> int:
    """A solve counts as one product with a square matrix."""
    *batch, rows, columns = B
    return 2 * torch.Size(batch).numel() * rows * A[-1] * columns


def counted(run) -> int:
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: solve}
    ) as counter:
        run()
    return counter.get_total_flops()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def forward_and_step(twin, inputs) -> tuple[int, int]:
    def step():
        outputs = twin(*inputs)
        torch.autograd.backward(outputs, [torch.randn_like(x) for x in outputs])

    return counted(lambda: twin(*inputs)), counted(step)


def drawn_delta_rule(g: torch.Tensor) -> tuple:
    q, k = (F.normalize(draw(TOKENS, 2, 10), dim=-1) for _ in range(2))
    return q, k, draw(TOKENS, 6, 14), g, draw(TOKENS, 6).sigmoid(), draw(6, 10, 14)


def token_by_token(q, k, v, g, *beta_and_state):
    """Of a delta rule; of Mamba2, which erases nothing, without beta."""
    *beta, state = (x[None] for x in beta_and_state)
    o, state = recurrence(*(x[None] for x in (q, k, v, g)), *beta or [None], state)
    return o[0], state[0]


RULES = {
    "G": (delta_rule, token_by_token, lambda: drawn_delta_rule(-draw(TOKENS, 6).exp())),
    "K": (
        kda_rule,
        token_by_token,
        lambda: drawn_delta_rule(-0.1 * draw(TOKENS, 6, 10).exp()),
    ),
    "M": (
        mamba2_rule,
        lambda x, B, C, g, S: token_by_token(C, B, x, g, S),
        lambda: (
            draw(TOKENS, 6, 14),
            draw(TOKENS, 2, 10),
            draw(TOKENS, 2, 10),
            -draw(TOKENS, 6).exp(),
            draw(6, 10, 14),
        ),
    ),
}


@pytest.mark.parametrize("letter", RULES)
def test_a_rule_in_chunks_takes_its_equation_forward_and_twice_that_back(letter):
    torch.manual_seed(1)
    twin, exact, drawn = RULES[letter]
    inputs = [x.detach().requires_grad_() for x in drawn()]
    torch.testing.assert_close(
        tuple(twin(*inputs)), tuple(exact(*inputs)), rtol=1e-4, atol=1e-4
    )
    sizes = MAMBA if letter == "M" else GDN
    rule = Stack.of(SimpleNamespace(**sizes), letter, 1, True).flops([TOKENS]).rule
    assert forward_and_step(twin, inputs) == (rule, 3 * rule)


@on_ranks(tp=1)
def test_the_parameters_of_kda_are_the_layers():
    ranks = {"forget_rank": 6, "output_rank": 6}
    (layer,) = Stack.of(SimpleNamespace(**GDN), "K", 1, True, kda=ranks).layers
    norm_before = 24
    numbers = sum(parameter.numel() for parameter in whole("kda", GDN).parameters())
    assert numbers == layer.matrix_weights + layer.vector_weights - norm_before


def tiny(name: str, **changes: object) -> Model:
    """A published model with small sizes, none of which divides another by chance, and
    with these fields changed."""
    entry = ENTRIES[name]
    small = {
        "hidden_size": 24,
        "vocab_size": 67,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 22,
        "num_hidden_layers": 4,
        "ssm_state_size": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "mamba_num_heads": 6,
        "mamba_head_dim": 14,
        "n_groups": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 18,
        "moe_shared_expert_intermediate_size": 18,
        "hybrid_override_pattern": "ME*E" if "30B" in name else "M-*-",
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 14,
        "linear_num_heads": 6,
        "linear_head_dim": 10,
    }
    if "Kimi" in name:
        # the last layer has latent attention
        small |= {"num_key_value_heads": 6, "num_hidden_layers": 5}
    fields = entry.fields | {
        name: small[name] for name in small if name in entry.fields
    }
    fields |= changes
    return Model(f"small {name}", entry.architecture, fields, "made for the tests")


@pytest.mark.parametrize(
    "name", ["Qwen3.5-9B", "Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B"]
)
def test_the_products_of_transformers_model_are_those_of_the_equations(name):
    model = tiny(name)
    tokens = 48
    config = config_of(model.architecture, model.fields)
    config.pad_token_id = None
    config._attn_implementation = config._experts_implementation = "eager"
    built = model_class(model.architecture)(config)
    row = torch.arange(tokens)[None] % 67
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        built(row)
    of_modules = {
        path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()
    }
    kinds = {f"{type(built).__name__}.{path}": m for path, m in built.named_modules()}

    def of(*ends: str) -> dict[str, int]:
        found = (
            path
            for path, module in kinds.items()
            if type(module).__name__.endswith(ends)
        )
        return {path: of_modules[path] for path in found}

    linears = of("Linear", "TopKRouter", "TopkRouter", "Experts")
    attention = {
        path: n
        for path, n in of("Attention").items()
        if path not in of("DeltaAttention")
    }
    inside = sum(
        n for path, n in linears.items() if path.rpartition(".")[0] in attention
    )
    flops = model.stack.flops([tokens])
    assert sum(linears.values()) == flops.projections + flops.output
    # transformers multiplies the half that the causal mask throws away, too.
    assert sum(attention.values()) - inside == 2 * flops.attention


def test_documents_pay_for_the_squares_of_their_lengths():
    stack = find("Qwen3.5-35B-A3B").stack
    whole = stack.flops([8192])
    packed = stack.flops([4096, 3096, 1000])
    assert packed.attention * 8192**2 == whole.attention * (4096**2 + 3096**2 + 1000**2)
    assert packed._replace(attention=0) == whole._replace(attention=0)
    assert packed.step == 3 * sum(packed)


def test_a_pattern_with_layers_that_are_not_known_is_refused():
    with pytest.raises(
        ValueError, match=r"has \['D'\]; FLOPs are known for 'G', 'K', 'M'"
    ):
        Stack.of(SimpleNamespace(**GDN), "GD", 1, True)


READ = [
    name
    for name, entry in ENTRIES.items()
    if entry.architecture.startswith(("Qwen", "Kimi"))
]


# Quick tests build one model of each architecture.
_FIRST = {entry.architecture: name for name, entry in reversed(ENTRIES.items())}


@pytest.mark.parametrize(
    "name",
    [
        name if name in _FIRST.values() else pytest.param(name, marks=pytest.mark.slow)
        for name in ENTRIES
    ],
)
def test_a_model_has_as_many_parameters_as_the_one_that_transformers_builds(name):
    entry = ENTRIES[name]
    with torch.device("meta"):
        model = model_class(entry.architecture)(
            config_of(entry.architecture, entry.fields)
        )
    assert find(name).stack.parameters == sum(p.numel() for p in model.parameters())


# The numbers of parameters in the index of the published files. They hold the language
# model, one head of multi-token prediction (one attention layer with its MLP), and the
# vision encoder.
@pytest.mark.parametrize(
    ("name", "published", "sees"),
    [
        ("Qwen3.5-9B", 9_653_104_368, True),
        ("Qwen3.5-122B-A10B", 125_086_497_008, True),
        ("Qwen3.6-35B-A3B", 35_951_822_704, True),
        ("Qwen3.8-27B", 27_781_427_952, True),
        ("Qwen3.8-2.4T-A95B", 2_446_182_725_504, False),
    ],
)
def test_the_published_files_hold_as_many(name, published, sees):
    model = find(name)
    pattern = f"{model.pattern}/{model.pattern[-2:]}"
    vocab = model.fields["vocab_size"]
    settings = model.hf.megatron_settings("hybrid")
    stack = Stack.of(SimpleNamespace(**settings), pattern, vocab, model.hf.tied)
    vision = vision_parameters(stack.hidden_size) if sees else 0
    assert stack.parameters + vision == published


@pytest.mark.parametrize("name", READ)
def test_transformers_config_class_translates_to_the_same_settings(name):
    model = find(name)
    config = config_of(model.architecture, model.fields).to_dict()
    assert parse_hf_config(config | {"architectures": [model.architecture]}) == model.hf


def test_transformers_config_class_of_nemotron_has_the_same_layers_and_sizes():
    names = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    for name in (name for name in ENTRIES if name.startswith("Nemotron")):
        model = find(name)
        config = config_of(model.architecture, model.fields)
        assert (
            "".join(names[kind] for kind in config.layers_block_type) == model.pattern
        )
        assert config.conv_kernel == 4, "Megatron's Mamba2 layers have no other"
        assert {config.use_conv_bias, not config.use_bias, not config.mlp_bias} == {
            True
        }
        assert config.n_shared_experts == config.n_group == config.topk_group == 1
        for field in (
            name for name in model.fields if name != "hybrid_override_pattern"
        ):
            assert getattr(config, field) == model.fields[field], field


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    assert find("qwen3.5-35b-a3b").name == "Qwen3.5-35B-A3B"
    with pytest.raises(
        ValueError, match=r"unknown model 'Qwen9'; known: tiny, Qwen3-Next-80B"
    ):
        find("Qwen9")
