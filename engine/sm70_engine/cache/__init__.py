"""The compile cache: compiled code kept between starts, one folder a key, and what it did for this start."""
