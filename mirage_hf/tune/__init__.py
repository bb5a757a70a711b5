"""Estimate, measure and choose schedules."""
