"""Where a drill takes place. Every target does what it can of the same disturbances, and says how it does them."""
