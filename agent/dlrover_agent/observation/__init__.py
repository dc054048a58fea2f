"""What the kernel, the GPUs and the workers of this node tell about themselves."""
