"""One operator a file: what it computes, its checks, its torch reference."""
