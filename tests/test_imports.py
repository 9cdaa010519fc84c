"""V1, V4: what importing the engine and the server brings with it."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_of_spec_is_imported_without_a_flag() -> None:
    """V1, V4: oracle: sys.modules of a fresh interpreter after importing the whole server."""
    code = "import sys, server.cli, engine.worker; sys.exit('spec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
