"""What the spec tests do inside a rank: build the models and hand back what can be compared."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_gdn.specs import (
    gated_delta_net_spec,
    gdn_hybrid_stack_spec_local,
    gpt_block_spec,
    hybrid_stack_spec,
)
from tests.parallel import make_config, parallel


def hybrid(pattern: str, config=None, spec=None) -> HybridModel:
    config = make_config(num_layers=len(pattern)) if config is None else config
    spec = hybrid_stack_spec("local") if spec is None else spec
    return HybridModel(config, spec, 16, 8, hybrid_layer_pattern=pattern)


def gradients_are_finite(model, **more) -> bool:
    """Of every parameter, in a step of eight tokens."""
    tokens = torch.arange(8)[None]
    model(tokens, tokens, None, labels=tokens, **more).sum().backward()
    return all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def hybrid_keys_and_options(pattern: str, **options):
    with parallel():
        model = hybrid(pattern, spec=hybrid_stack_spec("local", **options))
        keys = {entry.key for entry in _leaves(model.sharded_state_dict())}
        names = {name for name, _ in model.named_parameters()}
        return keys, names, str(model.decoder.layers[0].self_attention.cp_layout)


def kda_layers(pattern: str):
    with parallel():
        model = hybrid(pattern)
        mixers = [getattr(layer, "self_attention", None) for layer in model.decoder.layers]
        names = [type(mixer).__name__ for mixer in mixers if hasattr(mixer, "micro_batches")]
        keys = {entry.key for entry in _leaves(model.sharded_state_dict())}
        same = mixers[-1].layer_number == len(pattern)
        return names, keys, same, gradients_are_finite(model)


def letters_and_states(pattern: str):
    """What Megatron's dynamic context reads of a stack, and whether its states are a K layer's."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    with parallel():
        model = hybrid(pattern)
        stack, mixer = model.decoder, model.decoder.layers[0].self_attention
        shapes = stack.mamba_state_shapes_per_request()
        assert isinstance(stack, HybridStack)
        same = shapes and shapes == mixer.mamba_state_shapes_per_request()
        return list(stack.layer_type_list), same


def layers_of_a_head(pattern: str):
    """The mixers of a model's first head, and whether every parameter gets a finite gradient."""
    with parallel():
        model = hybrid(pattern, make_config(num_layers=pattern.index("/"), mtp_num_layers=1))
        layers = model.mtp.layers[0].mtp_model_layer.layers
        finite = gradients_are_finite(model, loss_mask=torch.ones(1, 8))
        return [type(layer.self_attention).__name__ for layer in layers], finite


def variant_refusal(pattern: str) -> str:
    with parallel():
        config = make_config(num_layers=len(pattern))
        config.experimental_attention_variant = "gdn2"
        with pytest.raises(ValueError) as error:
            hybrid(pattern, config)
        return str(error.value)


def experts_of_hybrid_layers(pattern: str, **changes) -> list[int]:
    with parallel():
        config = make_config(
            num_layers=len(pattern), add_bias_linear=False, moe_ffn_hidden_size=16, **changes
        )
        layers = hybrid(pattern, config, gdn_hybrid_stack_spec_local).decoder.layers
        names = ([name for name, _ in layer.named_parameters()] for layer in layers)
        return [sum(name.endswith("linear_fc1.weight") for name in of) for of in names]


def built_by_calling() -> str:
    """What a spec gives that is called as Megatron calls one: with a config."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    with parallel():
        stack = hybrid_stack_spec(
            make_config(num_layers=1),
            pre_process=True,
            layer_type_list=["G"],
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        return type(stack).__name__


def hybrid_refusal(pattern: str) -> str:
    with pytest.raises(NotImplementedError) as error:
        hybrid_keys_and_options(pattern)
    return str(error.value)


def gpt_mixers_and_loss(freq, **changes):
    """Class name of each layer's mixer, and a loss of the whole model."""
    with parallel():
        config = gpt_config(freq, **changes)
        block = gpt_block_spec(config)
        assert isinstance(block, TransformerBlockSubmodules)
        model = GPTModel(
            config, block, vocab_size=16, max_sequence_length=8, position_embedding_type="rope"
        )
        tokens = torch.arange(8)[None]
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        loss = model(tokens, tokens, mask, labels=(tokens + 1) % 16)
        loss.sum().backward()
        mixers = [type(layer.self_attention).__name__ for layer in model.decoder.layers]
        return mixers, bool(loss.isfinite().all()), tuple(loss.shape)


def gpt_mixers_of_variant(variant: str) -> list[type]:
    with parallel():
        config = gpt_config(4)
        config.experimental_attention_variant = variant
        layers = gpt_block_spec(config).layer_specs
        return [layer.submodules.self_attention.module for layer in layers]


def gpt_layers_per_stage(pipeline_ranks: int) -> list[int]:
    with parallel():
        config = gpt_config(4, num_layers=6, pipeline_model_parallel_size=pipeline_ranks)
        counts = []
        for rank in range(pipeline_ranks):
            assert parallel_state.get_pipeline_model_parallel_rank() == 0
            counts.append(len(gpt_block_spec(config, pp_rank=rank).layer_specs))
        return counts


def gpt_config(freq, num_layers=4, **changes):
    return make_config(
        num_layers=num_layers,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=freq,
        transformer_impl="local",
        pipeline_dtype=torch.float32,
        **changes,
    )


def mixer_spec_params(**options):
    return gated_delta_net_spec("local", **options).params


def _leaves(state):
    if isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list):
        for value in state:
            yield from _leaves(value)
    elif hasattr(state, "build"):  # a ShardedTensorFactory, split into the keys it writes
        yield from _leaves(state.build())
    else:
        yield state
