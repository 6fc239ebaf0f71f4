"""The composition root: builds engines and ranks from their options."""
