"""Plans beside what was measured: waits, rates, memory, the best configuration, block sizes."""
