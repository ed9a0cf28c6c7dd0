"""Model files: finding, fetching and reading them. Needs no kernel, so the coordinator can use it too."""
