"""Hand-written Triton kernels: what begins a decoding step, and what chooses its tokens."""
