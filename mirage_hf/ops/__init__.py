"""Ops: the table of all ops with their shape rules, torch oracles and scalar bodies."""
