"""Stand-ins for what a device, a model and a disk do, on the virtual clock."""
