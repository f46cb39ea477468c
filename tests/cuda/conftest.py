"""Fixture of tests of the GPU path: but for the mark ``cuda``, the process counts as one without CUDA."""

from __future__ import annotations

import pytest
from fake_cuda import fresh_process


@pytest.fixture(autouse=True)
def unused_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cuda") is None:
        fresh_process(monkeypatch)
