"""Graphs: tensor programs, block graphs, µGraphs, and their text and JSON forms."""
