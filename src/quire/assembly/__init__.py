"""The composition root: builds engines and ranks, and is the main of their processes."""
