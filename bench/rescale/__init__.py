"""Rescaling laws on real length traces, in virtual time. __main__.py says how to run it.

Nothing is imported here: the replay's modules may be compiled, and are imported only after that (bench.native).
"""
