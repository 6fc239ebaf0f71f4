"""The CPU kernels: C++ in `csrc/`, reached through a plain C ABI; `library.py` is the door."""
