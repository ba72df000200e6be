"""A policy-gradient step over groups of responses:
``python examples/grpo_on_trees.py``.

Every prompt has several responses with advantages. As trees, a prompt is computed once;
packed separately, once for each response. Losses and gradients are equal.
"""

import torch

from megatron_gdn.compat.observe import hide_import_notes

hide_import_notes()  # of packages that are absent: fifteen lines

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn import pack_groups
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.specs import hybrid_stack_spec

VOCABULARY = 128
PATTERN = "G-*-"
# what every Megatron model needs; without a GPU on the CPU
device = start_one_process()

config = TransformerConfig(
    num_layers=len(PATTERN),
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    normalization="RMSNorm",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
model = HybridModel(
    config,
    # fp64, to show how equal the two are
    hybrid_stack_spec("local", backend="reference"),
    vocab_size=VOCABULARY,
    max_sequence_length=256,
    hybrid_layer_pattern=PATTERN,
    position_embedding_type="rope",
).to(device, torch.float64)

# What a rollout leaves: groups of a prompt and its responses, lists of token ids;
# rewards; what the policy that sampled found of each token.
torch.manual_seed(0)
groups = [
    (
        torch.randint(VOCABULARY, (n,)).tolist(),
        [torch.randint(VOCABULARY, (m,)).tolist() for m in ms],
    )
    for n, ms in ((100, (20, 7, 31, 12)), (60, (9, 9, 25, 16)), (150, (5, 40, 11, 3)))
]
rewards = torch.rand(3, 4, dtype=torch.float64, device=device)
sampled = [
    [-5 + torch.randn(len(r), device=device).double() for r in rs] for _, rs in groups
]
advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)


def log_probs(tokens, position_ids, labels, params) -> torch.Tensor:
    """``[1, T]``: the policy's log-probability of each label."""
    logits = model(tokens, position_ids, None, packed_seq_params=params)
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None]).squeeze(-1)


def as_trees() -> tuple[int, list[list[torch.Tensor]]]:
    """The number of computed tokens, and the log-probabilities of each response's
    tokens."""
    packed = pack_groups(groups, most_tokens=300, device=device)
    found = [
        log_probs(x.tokens, x.position_ids, x.labels, x.packed_seq_params)
        for x in packed.micro_batches
    ]
    return sum(x.numel() for x in found), packed.unpack(found)


def separately() -> tuple[int, list[list[torch.Tensor]]]:
    """The same from sequences that all have a prompt of their own."""
    found = []
    for prompt, responses in groups:
        whole = [
            torch.tensor(prompt + response, device=device) for response in responses
        ]
        lengths = [len(x) - 1 for x in whole]
        offsets = torch.tensor([0] + lengths, device=device).cumsum(0).int()
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        tokens, labels = (
            torch.cat([x[part] for x in whole])[None]
            for part in (slice(None, -1), slice(1, None))
        )
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        rows = log_probs(tokens, positions, labels, params)[0].split(lengths)
        found.append([x[len(prompt) - 1 :] for x in rows])
    return sum(len(p) - 1 + len(r) for p, responses in groups for r in responses), found


def step(of_responses) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens, the loss of GRPO without its KL term, and the gradients of all
    parameters."""
    model.zero_grad()
    tokens, found = of_responses()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for group in zip(found, sampled, advantages, strict=True):
        for new, old, advantage in zip(*group, strict=True):
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - gain.mean() / advantages.numel()
    loss.backward()
    grads = {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return tokens, loss.detach(), grads


tokens, loss, gradients = step(as_trees)
other_tokens, other_loss, others = step(separately)
largest = max(grad.abs().max() for grad in others.values())
difference = max((gradients[name] - grad).abs().max() for name, grad in others.items())
print(f"as trees {tokens} tokens, packed separately {other_tokens}")
print(f"losses differ by {abs(loss - other_loss):.0e}")
print(f"{len(others)} gradients of at most {largest:.2f} differ by {difference:.0e}")

end_one_process()
