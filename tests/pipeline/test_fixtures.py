"""The fixtures of conftest.py detect tests that block an event loop or leave a thread."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

BLOCKING = """
import time
from conftest import BLOCKED_SECONDS
from spdl_media.pipeline import PipelineBuilder

async def block(item):
    time.sleep(1.2 * BLOCKED_SECONDS)
    return item

def test_blocks():
    assert list(PipelineBuilder().add_source([1]).pipe(block).add_sink().build()) == [1]
"""

LEAVING = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
"""


def test_tests_that_misbehave_fail(tmp_path: Path) -> None:
    fixtures = (HERE / "conftest.py").read_text()
    for name in ("BLOCKED_SECONDS", "GRACE_SECONDS"):
        fixtures, count = re.subn(rf"^{name} = .*", f"{name} = 0.2", fixtures, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "conftest.py").write_text(fixtures)
    (tmp_path / "test_it.py").write_text(BLOCKING + LEAVING)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # Options of this checkout are unknown there, and plugins take a second to load.
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parent.parent),
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )

    assert result.returncode == 1, result.stdout
    for test, message in (
        ("test_blocks", "the event loop was blocked"),
        ("test_leaves_a_thread", "threads are left: ['left']"),
    ):
        assert re.search(rf"^ERROR .*::{test} - ", result.stdout, re.MULTILINE)
        assert message in result.stdout
