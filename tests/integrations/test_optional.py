"""Optional packages: a missing one is named with the command that installs it."""

from __future__ import annotations

import pytest

from dpoptim.integrations.optional import require


def test_require():
    assert require("math", "adding").hypot(3.0, 4.0) == 5.0
    message = "reading a .xyz file needs the package no_such_package; run: pip install no_such_package"
    with pytest.raises(ValueError, match=message):
        require("no_such_package", "reading a .xyz file")
