"""The equations of FLOPs hold to the product: torch counts what plain forms multiply."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_gdn.kda.rule import recurrent_kda
from megatron_gdn.models import ENTRIES, Entry, Model, Stack, find, flops_per_step
from megatron_gdn.ops import torch_chunk_gated_delta_rule
from megatron_gdn.ops.delta_rule.base import RuleInputs
from tests.hf.tiny_models import model_class
from tests.kda_mixers import parameters_of_kda
from tests.models.published import as_config, config_of
from tests.models.twins import delta_rule, kda_rule, mamba2_rule

TOKENS = 192
GDN = {
    "hidden_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "hidden_size": 24, "mamba_num_heads": 6, "mamba_num_groups": 2, "mamba_head_dim": 14,
    "mamba_state_dim": 10,
}  # fmt: skip


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


def test_the_delta_rule_in_chunks_takes_its_equation_forward_and_twice_that_back():
    torch.manual_seed(1)
    q, k = (F.normalize(draw(TOKENS, 2, 10), dim=-1) for _ in range(2))
    v, g, beta = draw(TOKENS, 6, 14), -draw(TOKENS, 6).exp(), draw(TOKENS, 6).sigmoid()
    S = draw(6, 10, 14)
    o, final = delta_rule(q, k, v, g, beta, S)
    batch = [x[None] for x in (q, k, v, g, beta)]
    options = {"initial_state": S[None], "output_final_state": True, "scale": 1.0}
    expected, state = torch_chunk_gated_delta_rule(*batch, **options)
    torch.testing.assert_close(o, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state[0], rtol=1e-4, atol=1e-4)

    inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta, S)]
    rule = Stack.of(as_config(GDN), "G", 1, True).flops([TOKENS]).rule
    assert forward_and_step(delta_rule, inputs) == (rule, 3 * rule)


def test_kda_in_chunks_takes_its_equation_forward_and_twice_that_back():
    torch.manual_seed(1)
    q, k = (F.normalize(draw(TOKENS, 2, 10), dim=-1) for _ in range(2))
    v, g, beta = draw(TOKENS, 6, 14), -0.1 * draw(TOKENS, 6, 10).exp(), draw(TOKENS, 6).sigmoid()
    S = draw(6, 10, 14)
    o, final = kda_rule(q, k, v, g, beta, S)
    expected, state = recurrent_kda(
        RuleInputs(*(x[None] for x in (q, k, v, g, beta))), None, S[None]
    )
    torch.testing.assert_close(o * 10**-0.5, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state[0], rtol=1e-4, atol=1e-4)

    inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta, S)]
    stack = Stack.of(as_config(GDN), "K", 1, True)
    rule = stack.flops([TOKENS]).rule
    assert forward_and_step(kda_rule, inputs) == (rule, 3 * rule)


def test_the_parameters_of_kda_are_the_layers(pools):
    (layer,) = Stack.of(as_config(GDN), "K", 1, True).layers
    norm_before = 24
    assert pools(1).run(parameters_of_kda, GDN) == [layer.weights + layer.vectors - norm_before]


def test_mamba2_in_chunks_takes_its_equation_forward_and_twice_that_back():
    torch.manual_seed(1)
    x, B, C, S = draw(TOKENS, 6, 14), draw(TOKENS, 2, 10), draw(TOKENS, 2, 10), draw(6, 10, 14)
    g = -draw(TOKENS, 6).exp()
    y, _ = mamba2_rule(x, B, C, g, S)
    state, expected = S, []
    for t in range(TOKENS):  # the recurrence
        b, c = (row[t].repeat_interleave(3, 0) for row in (B, C))
        state = g[t].exp()[:, None, None] * state + b[:, :, None] * x[t][:, None, :]
        expected.append((c[:, :, None] * state).sum(1))
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-4, atol=1e-4)

    inputs = [z.detach().requires_grad_() for z in (x, B, C, g, S)]
    rule = Stack.of(as_config(MAMBA), "M", 1, True).flops([TOKENS]).rule
    assert forward_and_step(mamba2_rule, inputs) == (rule, 3 * rule)


def tiny(name: str) -> Model:
    """A published model with small sizes, none of which divides another by chance."""
    entry = ENTRIES[name]
    small = {
        "hidden_size": 24, "vocab_size": 67, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 10, "intermediate_size": 22, "num_hidden_layers": 4, "ssm_state_size": 10,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
        "linear_value_head_dim": 14, "mamba_num_heads": 6, "mamba_head_dim": 14, "n_groups": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 18,
        "moe_shared_expert_intermediate_size": 18,
        "hybrid_override_pattern": "ME*E" if "30B" in name else "M-*-",
    }  # fmt: skip
    fields = entry.fields | {name: small[name] for name in small if name in entry.fields}
    return Model(f"small {name}", Entry(entry.architecture, fields, "made for the tests"))


@pytest.mark.parametrize("name", ["Qwen3.5-9B", "Qwen3-Next-80B-A3B"])
def test_the_products_of_transformers_model_are_those_of_the_equations(name):
    model, tokens = tiny(name), 48
    config = config_of(model.entry.architecture, model.entry.fields)
    config._attn_implementation = config._experts_implementation = "eager"
    built = model_class(model.entry.architecture)(config)
    row = torch.arange(tokens)[None] % 67
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        built(row)
    of_modules = {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
    kinds = {f"{type(built).__name__}.{path}": m for path, m in built.named_modules()}

    def of(*ends: str) -> dict[str, int]:
        found = (path for path, module in kinds.items() if type(module).__name__.endswith(ends))
        return {path: of_modules[path] for path in found}

    linears, attention = of("Linear", "TopKRouter", "Experts"), of("Attention")
    inside = sum(n for path, n in linears.items() if path.rpartition(".")[0] in attention)
    flops = model.stack.flops([tokens])
    assert sum(linears.values()) == flops.projections + flops.output
    # transformers multiplies the half that the causal mask throws away, too.
    assert sum(attention.values()) - inside == 2 * flops.attention


def test_documents_pay_for_the_squares_of_their_lengths():
    stack = find("Qwen3.5-35B-A3B").stack
    whole, packed = stack.flops([8192]), stack.flops([4096, 3096, 1000])
    assert packed.attention * 8192**2 == whole.attention * (4096**2 + 3096**2 + 1000**2)
    assert packed._replace(attention=0) == whole._replace(attention=0)
    assert flops_per_step(stack, [4096, 3096, 1000]) == 3 * sum(packed)


def test_a_pattern_with_layers_that_are_not_known_is_refused():
    with pytest.raises(ValueError, match=r"has \['D'\]; FLOPs are known of 'G', 'K', 'M'"):
        Stack.of(as_config(GDN), "GD", 1, True)
