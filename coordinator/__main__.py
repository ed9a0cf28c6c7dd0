"""``python -m kvferry.coordinator``: the ``coordinator`` command without the others."""

from __future__ import annotations

import sys

from kvferry.coordinator.cli import main

sys.exit(main())
