"""`kvferry top`: what the nodes and the turns of a cluster do, as it happens."""
