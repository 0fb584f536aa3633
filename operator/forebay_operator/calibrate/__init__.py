"""Measure running workers and write the performance model that replay, the law and simulated workers start from."""
