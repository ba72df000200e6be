"""Run on every rank: a model of Gated DeltaNet and attention on prompts with several responses."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_gdn import pack_tree
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import gpt_block_spec
from tests.distributed.gpt_laws import FULL_RECOMPUTE
from tests.distributed.layer_laws import thd
from tests.parallel import make_config, parallel

VOCABULARY = 32


def prompts_and_responses() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    torch.manual_seed(11)
    prompts = [torch.randint(VOCABULARY, (n,)) for n in (1, 9, 20)]
    responses = [[torch.randint(VOCABULARY, (n,)) for n in lengths]
                 for lengths in ((5, 2), (1, 0, 12, 7), (3,))]  # fmt: skip
    return prompts, responses


def build(cp: int, recompute: bool) -> GPTModel:
    config = make_config(
        num_layers=3,
        context_parallel_size=cp,
        ffn_hidden_size=32,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1, 0, 1],
        transformer_impl="local",
        gated_linear_unit=True,
        add_bias_linear=False,
        cp_comm_type="p2p",
        **(FULL_RECOMPUTE if recompute else {}),
    )
    torch.manual_seed(3)
    model = GPTModel(
        config,
        gpt_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.double()


def losses(model, tokens, position_ids, labels, params, held) -> torch.Tensor:
    """``[T]``, 0 at the tokens of other ranks; torch's, as Megatron's takes fp32 of the logits."""
    logits = model(tokens[:, held], position_ids[:, held], None, packed_seq_params=params)
    mine = F.cross_entropy(logits[0], labels[0, held], reduction="none")
    return mine.new_zeros(tokens.shape[1]).index_copy(0, held, mine)


def as_tree(cp: int = 1, recompute: bool = False) -> dict[str, torch.Tensor]:
    """The losses of all responses' tokens, and every parameter's gradient of a weighted sum."""
    with parallel(cp=cp):
        model, group = build(cp, recompute), parallel_state.get_context_parallel_group()
        packed = pack_tree(*prompts_and_responses(), multiple_of=2 * cp)
        slots = tuple(packed.packed_seq_params.cu_seqlens_q_padded.diff().tolist())
        held = local_indices(slots, cp, group.rank())
        found = losses(model, *packed[:3], packed.packed_seq_params, held)
        assert torch.equal(packed.loss_mask.sum(), torch.tensor(30.0))
        rows = [row for rows in packed.unpack(found[None]) for row in rows]
        return summed_over(group, model, rows)


def separately() -> dict[str, torch.Tensor]:
    """The same on one rank, with every response behind a prompt of its own."""
    with parallel():
        model = build(1, False)
        pairs = [(p, r) for p, each in zip(*prompts_and_responses(), strict=True) for r in each]
        whole = [torch.cat(pair) for pair in pairs]
        lengths = tuple(len(x) - 1 for x in whole)
        tokens, labels = (torch.cat([x[part] for x in whole])[None]
                          for part in (slice(None, -1), slice(1, None)))  # fmt: skip
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        every = torch.arange(tokens.shape[1])
        found = losses(model, tokens, positions, labels, thd(lengths), every).split(lengths)
        rows = [x[len(p) - 1 :] for x, (p, _) in zip(found, pairs, strict=True)]
        return summed_over(parallel_state.get_context_parallel_group(), model, rows)


def summed_over(group, model, rows) -> dict[str, torch.Tensor]:
    rows = torch.cat(rows)
    (rows * torch.arange(1, len(rows) + 1)).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found["losses"] = rows.detach()
    for value in found.values():
        dist.all_reduce(value, group=group)
    return found
