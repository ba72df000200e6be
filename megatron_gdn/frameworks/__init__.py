"""What lets a launch or framework that was written for Megatron's own layers build ours."""
