"""What tests of the GPU path share: each begins in a process that has not used CUDA."""

from __future__ import annotations

import pytest

from spdl_media._devices.forks import HISTORY


@pytest.fixture(autouse=True)
def unused_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HISTORY, "used", False)
    monkeypatch.setattr(HISTORY, "lost", False)
