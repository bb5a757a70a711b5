"""Search for µGraphs that compute a tensor program."""
