"""Tests that need hosts skip where there can be none, or fail where there must be some."""

import os

import pytest
from network import reason_against


def require_hosts() -> None:
    """Skip with the reason where no network can be made; with DDPDIAG_REQUIRE_HOSTS=1 that is a failure."""
    if reason := reason_against():
        if os.environ.get("DDPDIAG_REQUIRE_HOSTS") == "1":
            pytest.fail(f"DDPDIAG_REQUIRE_HOSTS=1, but {reason}")
        pytest.skip(reason)
