"""Fixture of all tests of the GPU path: the process counts as one that has not used CUDA."""

from __future__ import annotations

import pytest
from fake_cuda import fresh_process


@pytest.fixture(autouse=True)
def unused_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch)
