"""What tests show at the end: lines under a title."""

import pytest

SHOWN = pytest.StashKey[dict[str, list[str]]]()
