"""decide() in all weathers: what must hold after every step of tests/support/law_machine.py."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from support.law_machine import LawMachine


def test_what_must_hold_holds() -> None:
    run_state_machine_as_test(LawMachine, settings=settings(max_examples=300, stateful_step_count=12, deadline=None))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_it_holds_for_long() -> None:
    run_state_machine_as_test(LawMachine, settings=settings(max_examples=20_000, stateful_step_count=12, deadline=None))
