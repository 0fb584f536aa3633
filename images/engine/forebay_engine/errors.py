"""Errors that a person running a worker can mend; shown as one line, exit code 78 (forebay_wire/exit_codes.py)."""


class ModelError(ValueError):
    """The model folder or its configuration can't be served; the text says what, where and how to mend it."""
