"""Which Megatron tensor is which Hugging Face tensors: of a tensor, a layer, a model."""
