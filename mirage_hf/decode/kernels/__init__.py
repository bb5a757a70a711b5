"""Hand-written Triton kernels that begin and end a decoding step."""
