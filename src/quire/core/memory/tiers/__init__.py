"""What of the prefix cache lies in other tiers, and moves between them and the pool"""
