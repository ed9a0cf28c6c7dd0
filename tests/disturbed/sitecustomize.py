"""Python runs this first wherever its folder is on the PYTHONPATH."""

import disturbances  # noqa: F401 - it acts when it is imported
