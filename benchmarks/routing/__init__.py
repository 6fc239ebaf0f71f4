"""The cost of routing decisions."""
