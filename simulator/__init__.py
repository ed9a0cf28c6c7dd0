"""Whole clusters on a virtual clock: the coordinator's own code, with simulated boards, network, store and clients."""
