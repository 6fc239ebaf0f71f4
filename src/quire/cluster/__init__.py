"""Several engines of one model behind one front: placed, watched, and failed over."""
