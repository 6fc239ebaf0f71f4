"""The prefix cache's contents in other tiers, and moves between them and the pool"""
