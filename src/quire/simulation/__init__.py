"""The real scheduler and memory on a virtual clock, against a runner that catches every misuse."""
