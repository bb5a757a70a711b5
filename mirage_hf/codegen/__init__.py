"""Generate kernels: plans of block graphs, Triton and CUDA C++ text, compilation, launches."""
