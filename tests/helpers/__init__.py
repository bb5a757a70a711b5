"""What tests share: programs, µGraphs, tiny models, and other ways to compute what the package computes."""
