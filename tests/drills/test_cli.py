"""What a drill leaves in the folder for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_drill_that_never_began_leaves_no_folder_behind(tmp_path: Path) -> None:
    drill = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvferry.client.cli import main; main()",
            "drill",
            "demo",
            "--model",
            str(tmp_path / "nosuch"),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert drill.returncode == 3
    assert "there is no model" in drill.stderr
    assert "files and logs" not in drill.stderr
    assert list(tmp_path.iterdir()) == []
