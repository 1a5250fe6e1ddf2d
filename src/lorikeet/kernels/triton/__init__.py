"""The Triton backend: kernels for NVIDIA GPUs, which Triton's interpreter can also run on a CPU."""
