from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.transfer.owners import StartReader
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.compat import compat_hash, differences
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_wire.messages import Compatibility

compatibilities = st.builds(
    Compatibility,
    engine_version=st.sampled_from(["1", "11", ""]),
    model=st.sampled_from(["", "1", "m"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 3),
    block_size=st.integers(1, 3),
    layout=st.sampled_from(["a", "b"]),
)


@given(compatibilities, compatibilities)
def test_hashes_are_equal_exactly_when_all_fields_are(a: Compatibility, b: Compatibility) -> None:
    assert (compat_hash(a) == compat_hash(b)) == (a == b) == (differences(a, b) == "")


@given(compatibilities, compatibilities)
def test_differences_name_both_values(a: Compatibility, b: Compatibility) -> None:
    words = differences(a, b)
    for field in msgspec.structs.fields(Compatibility):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        assert (f"{field.name}: {ours} here, {theirs} there" in words) == (ours != theirs)


@pytest.mark.parametrize(("lease", "timeout"), [(30.0, 25.1), (30.0, 0.0), (6.0, 6.0), (6.0, -1.0)])
async def test_a_pull_that_could_outlast_its_lease_is_refused(
    lease: float, timeout: float, start_reader: StartReader
) -> None:
    reader = await start_reader("simulated")
    with pytest.raises(ValueError, match="timeoutSeconds"):
        TransferService(
            identity=Identity("e", Compatibility("", "", "", 1, 1, 1, 1, ""), "simulated", 0, 1, 1),
            transport=reader.transport,
            leases=LeaseTable(lease),
            peers=PeerClient(None),
            on_freed=lambda blocks: None,
            on_expired=lambda blocks: None,
            pull_timeout_seconds=timeout,
        )
