"""Recognise the blocks of a model."""
