"""Shared by tests and benches: real worker and router processes, and a client that checks what it gets."""
