"""Programs, µGraphs, tiny models and reference implementations that several tests share."""
