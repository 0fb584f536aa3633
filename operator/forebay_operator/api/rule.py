"""Cross-field rules: one CEL expression beside the validator that checks the same in Python.

The API server judges the CEL, `forebay up` and the operator the validator. A test gives both the same refused examples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of x-kubernetes-validations. `self` in the expression is the object that carries the rule."""

    cel: str
    message: str
    """What is wrong and the remedy, in one line. The API server puts the field's path before it."""

    def entry(self) -> dict[str, str]:
        return {"rule": self.cel, "message": self.message}
