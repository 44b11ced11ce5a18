"""Operating system and network. S3 and Jackal are in `source` and `store`."""
