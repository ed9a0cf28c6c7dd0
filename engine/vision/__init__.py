"""What images are before the vision tower: pixels, patches, and where they stand. Whole numbers and tables only."""
