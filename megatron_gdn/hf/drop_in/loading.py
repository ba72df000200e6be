"""Load a bf16 transformers model with ``A_log`` and ``dt_bias`` in fp32, as its file has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..fp32_contract import FP32_GDN_PARAM_NAMES


@contextmanager
def gates_in_fp32() -> Iterator[None]:
    """Within this, transformers' ``from_pretrained`` leaves ``A_log`` and ``dt_bias`` unrounded.

        with megatron_gdn.hf.gates_in_fp32():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        megatron_gdn.hf.patch(model)

    Without it ``dtype=torch.bfloat16`` rounds them before a patch can keep them. In other models
    it affects only parameters with these names.
    """
    from transformers import PreTrainedModel

    before = PreTrainedModel._keep_in_fp32_modules_strict
    PreTrainedModel._keep_in_fp32_modules_strict = {*(before or ()), *FP32_GDN_PARAM_NAMES}
    try:
        yield
    finally:
        PreTrainedModel._keep_in_fp32_modules_strict = before
