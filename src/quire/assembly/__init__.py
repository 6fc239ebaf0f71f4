"""The composition root: builds engines and ranks, and has the mains of their processes."""
