"""Run the one road from a program to its kernels: search, verify, tune, store."""
