"""What routing decisions cost."""
