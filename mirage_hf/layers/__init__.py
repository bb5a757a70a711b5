"""Run a decoder layer by kernels: single steps and prompts."""
