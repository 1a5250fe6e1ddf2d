"""The backend in Triton: kernels for NVIDIA GPUs, which Triton's interpreter can run on a CPU."""
