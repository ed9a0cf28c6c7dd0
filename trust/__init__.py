"""Who may speak to whom: certificates and the authority that signs them, roles per method, tokens of clients."""
