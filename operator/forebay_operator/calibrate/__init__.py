"""Measure running workers and write the performance model that replay and simulated workers start from."""
