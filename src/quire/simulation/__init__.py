"""The real scheduler and memory on a virtual clock, with a checking runner."""
