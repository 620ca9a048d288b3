"""What tests of refusals share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(error: Any, text: str) -> Iterator[None]:
    """Expect an error with this text that says how to mend it: after what came, or by all that there is to choose."""
    with pytest.raises(error, match=text) as raised:
        yield
    assert re.search(r"got .+: .+|must be one of .+, got |must be in ", str(raised.value), re.DOTALL), str(raised.value)
