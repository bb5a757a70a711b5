"""Judge µGraphs: prove that they compute their program, and check their rounding."""
