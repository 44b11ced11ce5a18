"""S3 and compatible servers: clients, listings, exact GETs, and S3's error codes."""
