"""Forebay's engine: one worker process per GPU group, able to run prefill and decode."""
